"""How a view of a DTensor enters a compiled region.

torch.compile replays the view on a stand-in for the tensor that it was taken of. Numbers of the
view, such as where a slice starts, are symbols then that belong to no input, and a rule that asks
about one of them leaves a guard that torch cannot write down. A view of a DTensor knows its parts
and its layout: it is put together from stand-ins for those, as a tensor that is no view would be,
and said to be a view of the other.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch

from shardwise._torch.dispatch import TorchDispatchMode, return_and_correct_aliasing
from shardwise.core.layout import Layout
from shardwise.simulation.parts import from_parts, parts_of, roster_of

#: The last DTensor that was put together from parts: torch makes a stand-in for a view just before
#: it replays the view.
_last: weakref.ref[Any] | None = None


def remember(x: Any) -> None:
    global _last
    _last = weakref.ref(x)


class _Returned(TorchDispatchMode):
    """Any view of a tensor is this one, which is there already."""

    def __init__(self, result: torch.Tensor) -> None:
        super().__init__()
        self._result = result

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        # By its memory torch finds out which inputs overlap.
        return return_and_correct_aliasing(func, args, kwargs or {}, self._result)


def replayed(
    view: Any,
    base: torch.Tensor,
    stand_in: Callable[[torch.Tensor], torch.Tensor],
    wrap: Callable[[torch.Tensor, Layout], Any],
) -> torch.Tensor:
    """`view`, of stand-ins for its parts, as a view of `base`."""
    local = view._local
    parts = [stand_in(part) for part in parts_of(local)]
    result = wrap(from_parts(parts, roster_of(local)), _traced_layout(view, parts))
    with _Returned(result):
        return torch.ops.aten.alias.default(base)


def _traced_layout(view: Any, parts: list[torch.Tensor]) -> Layout:
    """The layout with the sizes that the compiler gave to the stand-in for `view`."""
    made = _last() if _last is not None else None
    if made is not None:
        theirs = parts_of(made._local)
        if len(theirs) == len(parts) and all(map(operator.is_, theirs, parts)):
            return made._layout
    return view._layout
