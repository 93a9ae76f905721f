"""Readings of a result: whole, in other placements, as local tensors; with their gradients.

A reading is a path through one or two of the doors (`redistribute`, `full_tensor`, `to_local`), and
the gradient that comes back through them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.core.layout import Layout, canonical_order
from shardwise.core.placements import REPLICATE, SUM, Partial, Placement, Shard, short
from shardwise.dtensor.autograd import gradient_layout
from shardwise.dtensor.tensor import DTensor
from shardwise.simulation.parts import sized_copy
from shardwise.testing.op_sweep.compare import Different
from shardwise.testing.op_sweep.lay_out import laid_out
from shardwise.testing.op_sweep.pick import lots_of

#: How a tensor is handed over at the end: as it lies, whole, or each rank's part of it. With
#: `terms`, the gradients that ranks bring back for a replica add up to the gradient.
_ENDS = ("placed", "whole", "whole, terms", "local", "local, terms")


@dataclass(frozen=True)
class Reading:
    """Where a tensor is moved to, if anywhere, and how it is handed over there."""

    target: tuple[Placement, ...] | None
    order: tuple[int, ...] | None
    end: str

    def __str__(self) -> str:
        order = "" if self.order is None else f" in order {self.order}"
        moved = "" if self.target is None else f"moved to {short(self.target)}{order}, "
        return moved + {"placed": "read as it lies"}.get(self.end, f"read {self.end}")

    def read(
        self, x: DTensor, grad: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """What is read of `x`, the gradient of that, and a DTensor of the same values."""
        if self.target is not None:
            x = x.redistribute(placements=self.target, order=self.order)
            _check_order(x._layout, self.order)
        mesh, layout = x.device_mesh, x._layout
        whole: tuple[Placement, ...] = (REPLICATE,) * len(x.placements)
        if self.end == "placed":
            return x, None if grad is None else laid_out(grad, mesh, whole), x
        terms = self.end.endswith("terms")
        where = gradient_layout(layout).placements
        order: tuple[int, ...] | None = layout.order
        if self.end.startswith("whole"):
            layout, where, order = layout.with_placements(whole), whole, None
        if terms:
            where = tuple(SUM if p.is_replicate() else p for p in where)
        door = x.full_tensor if self.end.startswith("whole") else x.to_local
        read = door(grad_placements=where if terms else None)
        given = None
        if grad is not None:
            given = sized_copy(laid_out(grad, mesh, where, order)._local, True)
        return read, given, DTensor._wrap(_inside(read), layout)


def _check_order(found: Layout, asked: tuple[int, ...] | None) -> None:
    """Without an order the axes are in their own: placements alone then say who holds what."""
    if found.order != canonical_order(found.placements, asked):
        raise Different(f"moved to {found!r}, asked for order {asked}")


def _inside(read: torch.Tensor) -> torch.Tensor:
    return sized_copy(read.detach(), False)


def reading(layout: Layout, key: str) -> Reading:
    """A reading of a tensor that lies so, drawn by lot: the same for the same key."""
    lots = lots_of(key)
    # Programs read results as they come more often than not.
    if lots.random() < 0.5:
        return Reading(None, None, lots.choice(_ENDS[1:]))
    num_axes = layout.grid.num_axes
    choices: list[Placement] = [REPLICATE, *map(Shard, range(len(layout.shape)))]
    if layout.dtype.is_floating_point or layout.dtype.is_complex:
        # Terms along several axes have to be of one kind.
        real = layout.dtype.is_floating_point
        choices.append(lots.choice([SUM, SUM, Partial("avg"), Partial("max")]) if real else SUM)
    placements = [lots.choice(choices) for _ in range(num_axes)]
    order = tuple(lots.sample(range(num_axes), num_axes)) if lots.random() < 0.5 else None
    last = placements[-1]
    if isinstance(last, Shard) and order is None and not _is_cut_before(placements):
        parts = layout.grid.shape[-1]
        sizes = (*[0] * (parts - 1), layout.shape[last.dim])
        placements[-1] = lots.choice([last, Shard(last.dim, sizes)])
    return Reading(tuple(placements), order, lots.choice(_ENDS))


def _is_cut_before(placements: list[Placement]) -> bool:
    """Whether an axis before the last one shards its dim: no sizes are named inside of a shard."""
    *before, last = placements
    return isinstance(last, Shard) and any(p.is_shard(last.dim) for p in before)
