"""Triton's interpreter finds the functions of its language once, not in each call within a kernel.

It replaces them for every call, and searches all names of the language for them: a sixth of the
time that an interpreted kernel takes.
"""

import inspect
from functools import cache

from devices import INTERPRETED

if INTERPRETED:
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @cache
    def _builtins(part):
        return [name for name, member in inspect.getmembers(part) if is_builtin(member)]

    def _patch_builtin(part, builder, scope):
        for name in _builtins(part):
            member = getattr(part, name)
            if is_builtin(member):
                interpreter._patch_attr(part, name, member, builder, scope)

    interpreter._patch_builtin = _patch_builtin
