"""The hot path of a DTensor's call, with a record of each hit.

A function around `DTensor.__torch_dispatch__` would walk the arguments a second time and look up
a second key, which takes as long as the rest of `agree`. So the path is here once more, as in Note
[The hot path], with what a record needs: which tensors the arguments are, and the numbers that are
not part of the plan's key. `tests/debug/test_agree.py` compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch.dispatch import ABOVE_AUTOGRAD, make_wrapper
from shardwise.core.untraced import untraced
from shardwise.dispatch.out_args import TensorByKeyword
from shardwise.dtensor import tensor
from shardwise.dtensor.plan_call import FALSE, TRUE, add_argument
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import MixedTensorsError

if TYPE_CHECKING:
    from shardwise.debug.journal import agree

_strided = torch.strided
_INTS = {int, bool}


def recorded_call(mode: agree, others: Callable[..., Any]) -> Callable[..., Any]:
    """For DTensor.__torch_dispatch__; `others` records and runs a call that is not a plain hit."""
    base, named, known, described = mode._base, mode._named_from, mode._known, mode._described
    detach = torch.ops.aten.detach.default

    @untraced
    def record_and_run(
        cls: type,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        preferred: Any = None,
    ) -> Any:
        number, begin = mode._number, mode._begin
        which: list[Any] = [None]
        key: list[Any] = [id(func), preferred]
        operands: list[Any] = []
        try:
            for arg in args:
                kind = type(arg)
                if kind is DTensor:
                    born = arg._born
                    if born >= begin:
                        which.append(number - born)
                    elif born >= base:
                        which.append(base - born)
                    elif born <= named:
                        which.append(born)
                    else:
                        return others(cls, func, types, args, kwargs, preferred)
                    key.append(arg._layout)
                    operands.append(arg._local)
                elif kind is int or arg is None:
                    key.append(arg)
                    operands.append(arg)
                elif kind is float:
                    which.append(arg)
                    key.append(float)
                    operands.append(arg)
                elif kind is bool:
                    key.append(TRUE if arg else FALSE)
                    operands.append(arg)
                else:
                    if kind is not list or not _INTS.issuperset(map(type, arg)):
                        which.append(described(arg))
                    add_argument(func, arg, key, operands)
            if kwargs:
                for name, value in kwargs.items():
                    which.append(described(value))
                    key.append(name)
                    add_argument(func, value, key, None)
            entry = tensor._entries.get(tuple(key))
        except (AttributeError, TypeError, TensorByKeyword, MixedTensorsError):
            entry = None
        if entry is None:
            return others(cls, func, types, args, kwargs, preferred)
        if func is detach:  # autograd calls it for every gradient
            number = args[0]._born
        else:
            which[0] = entry
            found = tuple(which)
            mode._journal.append(known.get(found) or mode._record(func, args, kwargs, found))
            mode._number = number + 1
        mode._within = mode._implied
        try:
            entry.hits += 1
            if entry.move is not None:
                entry.move(operands, args)
            local = entry.call(*operands, **kwargs) if kwargs else entry.call(*operands)
            layout = entry.out
            if layout is None:
                out = entry.finish(local, args, DTensor._wrap)  # type: ignore[misc]
                return mode._born_now(out, args, number)
        finally:
            mode._within = False
        out = make_wrapper(
            DTensor,
            layout.shape,
            layout.stride,
            None,
            None,
            layout.dtype,
            _strided,
            local.device,
            False,
            False,
            None,
            False,
            False,
            ABOVE_AUTOGRAD,
        )
        out._local = local
        out._layout = layout
        out._born = number
        return out

    return record_and_run
