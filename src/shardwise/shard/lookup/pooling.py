"""What a rank computes for those who ask, and what it does with the rows that came home.

Everything here runs on one rank's plain tensors, under torch's own autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.comm import collectives
from shardwise.core.untraced import UntracedFunction
from shardwise.shard.lookup import bags
from shardwise.shard.tensor import ShardedTensor
from shardwise.shard.tiling import Stretch
from shardwise.simulation.ranks import each_rank

# -- what one rank computes for those who ask ----------------------------------------------------


class RowsAsked:
    """The rows that a rank is asked for."""

    def __init__(self, padding_idx: int | None, sparse: bool) -> None:
        self.padding_idx, self.sparse = padding_idx, sparse

    def __call__(
        self, stretch: Stretch, block: torch.Tensor, rows: torch.Tensor, *_: torch.Tensor
    ) -> tuple[torch.Tensor]:
        if not rows.numel():
            return (block.new_zeros(0, block.shape[1]),)
        start, num_rows = stretch
        padding = None
        if self.padding_idx is not None and start <= self.padding_idx < start + num_rows:
            padding = self.padding_idx - start
        return (F.embedding(rows, block, padding, sparse=self.sparse),)


class ColumnsOf:
    """This rank's columns of the row of each id."""

    def __init__(self, padding_idx: int | None, sparse: bool) -> None:
        self.padding_idx, self.sparse = padding_idx, sparse

    def __call__(self, _: Stretch, block: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor]:
        if not block.numel():
            return (block.new_zeros(ids.numel(), block.shape[1]),)
        return (F.embedding(ids, block, self.padding_idx, sparse=self.sparse),)


class PooledColumns:
    """This rank's columns of each pooled bag."""

    def __init__(self, mode: str, padding_idx: int | None, sparse: bool) -> None:
        self.mode, self.padding_idx, self.sparse = mode, padding_idx, sparse

    def __call__(
        self,
        _: Stretch,
        block: torch.Tensor,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor]:
        options = self.mode, weights, self.padding_idx, self.sparse
        return (bags.lookup(block, ids, bags.starts(lengths), *options),)


# -- what a rank does with what came home --------------------------------------------------------


def same(rows: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return rows.view_as(rows)


class RowPerId:
    """One row for each id of a batch of any shape."""

    def __init__(self, by_frequency: bool) -> None:
        self.by_frequency = by_frequency

    def __call__(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if self.by_frequency:
            rows = scaled_by_frequency(rows, ids.reshape(-1))
        return rows.view(*ids.shape, rows.shape[-1])


class SpreadRows:
    """The same, out of one row for each different id."""

    def __init__(self, finish: Callable[..., torch.Tensor]) -> None:
        self.finish = finish

    def __call__(
        self, rows: torch.Tensor, inverse: torch.Tensor, *rest: torch.Tensor
    ) -> torch.Tensor:
        return self.finish(rows.index_select(0, inverse), *rest)


class PoolByFrequency:
    """Rows to bags; gradients divided by how often this rank's batch names their row."""

    def __init__(self, mode: str, padding_idx: int | None) -> None:
        self.mode, self.padding_idx = mode, padding_idx

    def __call__(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        flat = None if weights is None else weights.reshape(-1)
        rows = scaled_by_frequency(rows, ids)
        return bags.pool(rows, ids, lengths, self.mode, flat, self.padding_idx)


def scaled_by_frequency(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The rows; their gradient divided by how often this rank's batch names the id."""
    if not ids.numel():
        return rows
    _, which, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    return ScaleRows.apply(rows, 1 / counts[which].to(rows.dtype).unsqueeze(1))


class ScaleRows(UntracedFunction):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(factor)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (factor,) = ctx.saved_tensors
        return grad * factor, None


# Rows that a lookup shortens first: `max_norm`.


@torch.no_grad()
def renorm_rows(
    weight: ShardedTensor, rows: torch.Tensor, max_norm: float, norm_type: float
) -> None:
    """Shorten these rows of each rank's block to `max_norm`, in place."""
    tiling = weight._tiling

    def shorten(place: Any, held: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if rows.numel():
            block = tiling.block(tiling.grid.ranks[place[0]], held)
            torch.embedding_renorm_(block, rows, max_norm, norm_type)
        return held

    each_rank(tiling.grid, shorten, weight._local, rows)


@torch.no_grad()
def renorm_columns(
    weight: ShardedTensor, everyones: torch.Tensor, max_norm: float, norm_type: float
) -> None:
    """Shorten each row that somebody looks up to `max_norm`, in place.

    No rank knows a row's norm: they add up their parts of it first.
    """
    tiling = weight._tiling
    grid = tiling.grid

    def part(place: Any, held: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows = tiling.block(grid.ranks[place[0]], held)[ids.unique()].abs()
        if math.isinf(norm_type):
            return rows.amax(1) if rows.shape[1] else rows.new_zeros(rows.shape[0])
        return (rows**norm_type).sum(1)

    parts = each_rank(grid, part, weight._local, everyones)
    infinite = math.isinf(norm_type)
    joint = collectives.all_reduce(parts, "max" if infinite else "sum", grid, 0)

    def shorten(
        place: Any, held: torch.Tensor, ids: torch.Tensor, total: torch.Tensor
    ) -> torch.Tensor:
        block = tiling.block(grid.ranks[place[0]], held)
        norms = total if infinite else total ** (1 / norm_type)
        factor = torch.where(norms > max_norm, max_norm / (norms + 1e-7), 1.0).to(block.dtype)
        names = ids.unique()
        block[names] = block[names] * factor.unsqueeze(1)
        return held

    each_rank(grid, shorten, weight._local, everyones, joint)
