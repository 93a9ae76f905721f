"""Whether a module reads one of its attributes in its own code, or only holds it.

Read from the names in the bytecode of `forward` and of the methods that it names. What cannot be
read counts as use. A function outside the class that is handed the module is not followed.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

from torch import nn


def may_read(module: nn.Module, name: str) -> bool:
    """Whether `module(...)` may read `module.<name>` itself."""
    own = [kind for kind in type(module).__mro__ if kind not in nn.Module.__mro__]
    pending: list[Any] = [module.__dict__.get("forward")]
    pending += [kind.__dict__.get("forward") for kind in own]
    pending = [function for function in pending if function is not None]
    if not pending:
        return True  # others work with what it holds
    seen: set[str] = {"forward"}
    while pending:
        code = _code(pending.pop())
        if code is None:
            return True
        names = set(_names(code))
        if name in names:
            return True
        for called in names - seen:
            seen.add(called)
            found = [kind.__dict__[called] for kind in own if called in kind.__dict__]
            pending += [each for each in found if _is_code(each)]
    return False


def _is_code(value: Any) -> bool:
    return callable(value) or isinstance(value, (property, staticmethod, classmethod))


def _code(function: Any) -> types.CodeType | None:
    if isinstance(function, property):
        function = function.fget
    if isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(getattr(function, "__func__", function))
    return getattr(function, "__code__", None)


def _names(code: types.CodeType) -> Iterator[str]:
    """The attributes and strings in a function, and in those that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _names(constant)
