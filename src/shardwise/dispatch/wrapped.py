"""Wrapped: the base class of DTensor, for code that DTensor itself imports; cached reductions."""

from __future__ import annotations

from typing import Any

import torch

from shardwise._torch.autograd import count_versions
from shardwise.core.layout import Layout
from shardwise.core.mesh import Grid
from shardwise.core.placements import Partial
from shardwise.redistribute.execute import Run
from shardwise.simulation.ranks import ALIKE, LENT, count_write, lent, one_part, parts_of

#: The attribute of a snapshot with its source, and its number among the view's results.
SOURCE = "_source"


class Wrapped(torch.Tensor):
    """A global tensor as a local tensor and a layout."""

    __slots__ = ("_born", "_layout", "_local")
    _local: torch.Tensor
    _layout: Layout
    #: The number of the call that made it; only `debug.agree` sets it.
    _born: int

    @staticmethod
    def _wrap(local: torch.Tensor, layout: Layout, requires_grad: bool = False) -> Any:
        """A tensor of this local tensor and layout, unchecked."""
        raise NotImplementedError

    @staticmethod
    def _wrap_view(local: torch.Tensor, layout: Layout) -> Any:
        """As `_wrap`, inside an autograd function of a leaf, whose memory must not be written.

        Autograd refuses a write to a view that such a function returns, as to a view of a leaf.
        """
        raise NotImplementedError


def as_layouts(value: Any) -> Any:
    """`value` with the layout of each tensor in its place."""
    if isinstance(value, Wrapped):
        return value._layout
    if isinstance(value, (list, tuple)):
        return [as_layouts(v) for v in value]
    return value


# Note [Reduced once]
# A replicated parameter's gradient may be Partial, and is read several times: by a norm, by the
# ops of an optimizer. A tensor without history is reduced once and keeps the result until it is
# written to. Traced tensors are not cached.


def is_partial(layout: Layout) -> bool:
    return any(isinstance(p, Partial) for p in layout.placements)


def reduced_once(tensor: Any, local: torch.Tensor, reduce: Run, target: Layout) -> torch.Tensor:
    """The reduction of `tensor`, whose local tensor is `local`, in the layout `target`."""
    part = one_part(local)
    if tensor.requires_grad or type(part) is not torch.Tensor or part.is_inference():
        return reduce(local)
    known = recall(tensor)
    if known is not None and known[1] is target:
        return known[0]
    reduced = reduce(local)
    remember(tensor, reduced, target)
    return reduced


def recall(tensor: Any) -> tuple[torch.Tensor, Layout] | None:
    """The cached reduction of `tensor` and its layout, unless it was written to since."""
    known = tensor.__dict__.get("_reduced")
    if known is None or known[2] is not tensor._local or known[3] != _versions(tensor):
        return None
    return known[0], known[1]


def remember(tensor: Any, reduced: torch.Tensor, layout: Layout, *, writing: bool = False) -> None:
    """Cache `reduced`. With `writing`, a write will still count once on the wrapper."""
    if tensor.is_inference():
        return
    versions = _versions(tensor)
    versions[0] += writing
    tensor.__dict__["_reduced"] = (reduced, layout, tensor._local, versions)


# Note [Lent memory]
# A write to a DTensor bumps the version counter that it shares with its views and `detach()`. A
# plain tensor that `to_local` lent has another counter. Once something was lent on the mesh, writes
# bump that too, so backward raises if it needs overwritten values, as on one device.


def lend(tensor: Any) -> torch.Tensor:
    """An alias of the local tensor, for use outside the DTensor."""
    local = tensor._local
    if type(local) is torch.Tensor and (LENT in local.__dict__ or begin_lending(tensor)):
        return local.detach()  # nearly always
    base = tensor._base
    tensor._layout.grid.lends = True
    return lent(local, base._local if isinstance(base, Wrapped) else local)


def begin_lending(tensor: Any) -> bool:
    """Make writes to `tensor` count on the local tensor, whose aliases share its counter.

    False for a view whose base holds another local tensor: writes count on that one.
    """
    local, base = tensor._local, tensor._base
    if base is not None and getattr(base, "_local", None) is not local:
        return False
    tensor._layout.grid.lends = True
    local.__dict__[LENT] = [] if local.is_inference() else ALIKE
    return True


def note_write(grid: Grid, tensor: Any) -> None:
    """Count a write to `tensor` on its mesh, and on what was lent of it."""
    grid.num_writes += 1
    if grid.lends:
        count_on_lent(tensor)


def count_on_lent(tensor: Any) -> None:
    """Count a write to `tensor` on the aliases of its memory that were lent."""
    try:
        local = tensor._local
    except AttributeError:  # some ops write to plain tensors too
        return
    aliases = local.__dict__.get(LENT)
    if aliases is None:
        base = tensor._base
        if base is None or not isinstance(base, Wrapped):
            return
        local = base._local
        aliases = local.__dict__.get(LENT)
        if aliases is None:
            return
    if aliases is ALIKE:
        count_versions((local,))
    else:
        count_write(local)


def _versions(tensor: Any) -> list[int]:
    """The version counters of the wrapper (for the DTensor and its views) and of the local tensor.

    Writes to another DTensor of the same memory, such as `x.data`, are counted by the mesh.
    """
    local, grid = tensor._local, tensor._layout.grid
    parts = (part._version for part in parts_of(local))
    return [tensor._version, grid.num_writes if grid.hides_writes else 0, *parts]
