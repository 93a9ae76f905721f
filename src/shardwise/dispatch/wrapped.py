"""Wrapped: the base of DTensor, for code that the class itself needs; reductions of Partials."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.core.layout import Layout
from shardwise.core.placements import REPLICATE, Partial
from shardwise.redistribute.moves import Run
from shardwise.simulation.parts import count_write, one_part, parts_of


class Wrapped(torch.Tensor):
    """A global tensor as a local tensor and a layout."""

    __slots__ = ("_layout", "_local")
    _local: torch.Tensor
    _layout: Layout

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


def reduced_layout(layout: Layout) -> Layout:
    """Replicated where it was Partial."""
    return layout.with_placements(
        tuple(REPLICATE if isinstance(p, Partial) else p for p in layout.placements)
    )


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


def count_on_local(tensor: Any) -> None:
    """Count a write on the local tensor, and on that of the base of a view.

    torch counts it on the DTensor alone. A plain tensor from `to_local` shares the counter of the
    local tensor: so backward raises if it needs what was overwritten, as on one device.
    """
    for x in (tensor, tensor._base) if tensor._is_view() else (tensor,):
        if isinstance(x, Wrapped):
            count_write(x._local)


def _versions(tensor: Any) -> list[int]:
    """The version counters of the wrapper (for the DTensor and its views) and of the local tensor.

    Writes to another DTensor of the same memory, such as `x.data`, are counted by the mesh.
    """
    local, grid = tensor._local, tensor._layout.grid
    parts = (part._version for part in parts_of(local))
    return [tensor._version, grid.num_writes if grid.hides_writes else 0, *parts]
