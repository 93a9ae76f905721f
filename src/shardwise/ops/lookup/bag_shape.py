"""The shape of bags: where they start and end, and how their ids may be sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from shardwise.core.layout import Layout
from shardwise.core.mesh import Coordinate
from shardwise.core.placements import REPLICATE, Placement
from shardwise.dispatch.rule import Call
from shardwise.lookup.ids import local_rows

MODE_SUM, MODE_MEAN, MODE_MAX = 0, 1, 2

Optional = torch.Tensor | None


class Bags(NamedTuple):
    """The ids of one rank's bags, of shape (bags, ids in each), or flat with offsets.

    Offsets include the end of the last bag; later ids are in no bag. Ids equal to `padding_idx` do
    not count; it is -1 for none.
    """

    ids: torch.Tensor
    offsets: Optional
    weights: Optional
    padding_idx: int

    @property
    def num_bags(self) -> Any:
        return self.ids.shape[0] if self.offsets is None else self.offsets.shape[0] - 1

    @property
    def bounds(self) -> torch.Tensor:
        """Where each bag starts among the flat ids, and where the last one ends."""
        if self.offsets is not None:
            return self.offsets
        num_bags, length = self.ids.shape
        return torch.arange(num_bags + 1, device=self.ids.device) * length

    @property
    def places(self) -> torch.Tensor:
        """The position of each of the flat ids."""
        return torch.arange(self.ids.numel(), device=self.ids.device)

    def bag_of(self, places: torch.Tensor) -> torch.Tensor:
        """The bag of each position; the number of bags for those after the last."""
        if self.offsets is None:
            return places // self.ids.shape[1]
        return torch.searchsorted(self.offsets, places, right=True) - 1

    def sizes(self) -> torch.Tensor:
        """The number of ids of each bag that count, at least 1, as a column."""
        edges = self.bounds
        if self.padding_idx >= 0:
            real = self.ids.reshape(-1) != self.padding_idx
            edges = torch.nn.functional.pad(real.cumsum(0), (1, 0))[edges]
        return edges.diff().clamp(min=1).unsqueeze(-1)

    def skipped(self, foreign: torch.Tensor) -> torch.Tensor:
        """Which ids do not count: those of other ranks, and padding."""
        return foreign | (self.ids == self.padding_idx) if self.padding_idx >= 0 else foreign

    def rows(self, table: Layout, coordinate: Coordinate) -> tuple[torch.Tensor, torch.Tensor]:
        """The local row of each id, and which do not count here (their row is arbitrary)."""
        row, foreign = local_rows(table, coordinate, self.ids)
        return row, self.skipped(foreign)


def packed(*tensors: Optional) -> list[torch.Tensor]:
    return [t for t in tensors if t is not None]


def unpacked(parts: Sequence[torch.Tensor], offsets: Any, weights: Any, padding_idx: int) -> Bags:
    """The bags of the tensors that are not None, in the order of `packed`."""
    rest = iter(parts)
    return Bags(
        next(rest),
        None if offsets is None else next(rest),
        None if weights is None else next(rest),
        padding_idx,
    )


def batch_placements(
    call: Call, first: Sequence[Placement], placement: Placement
) -> tuple[Placement, ...]:
    """Placements of an op's inputs: `first`, then `placement` for ids and their weights."""
    rest = len(call.inputs) - len(first)
    if rest == 3:
        return (*first, placement, REPLICATE, placement)
    has_offsets = call.args[len(first) + 1] is not None
    return (*first, placement, *((REPLICATE if has_offsets else placement,) * (rest - 1)))


def bag_splits(call: Call, number: int) -> list[tuple[int, ...] | None]:
    """How the bags may be sharded: not at all with offsets."""
    return call.splits([(number, 0)]) if call.inputs[number].ndim == 2 else []


def inside_splits(call: Call, number: int) -> list[tuple[int, ...] | None]:
    """How the ids may be sharded inside bags, for sums."""
    return call.splits([(number, 1)]) if call.inputs[number].ndim == 2 else []


def linear_inputs(call: Call) -> tuple[tuple[int, ...], ...]:
    """Groups of inputs in which the op is linear: the first, and the weights of the samples."""
    has_weights = call.args[3] is not None
    return ((0,), (len(call.inputs) - 1,)) if has_weights else ((0,),)
