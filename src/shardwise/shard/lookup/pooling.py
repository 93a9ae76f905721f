"""Local functions of a lookup: on the rank that holds the shard, and on the requester.

All but `max_norm` runs on one rank's plain tensors, under torch's autograd.
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
from shardwise.shard.tiling import Interval
from shardwise.simulation.ranks import each_rank

# -- on the rank that holds the shard ------------------------------------------------------------


class RequestedRows:
    """The rows that a rank is asked for."""

    def __init__(self, padding_idx: int | None, sparse: bool) -> None:
        self.padding_idx, self.sparse = padding_idx, sparse

    def __call__(
        self, interval: Interval, shard: torch.Tensor, rows: torch.Tensor, *_: torch.Tensor
    ) -> tuple[torch.Tensor]:
        if not rows.numel():
            return (shard.new_zeros(0, shard.shape[1]),)
        start, num_rows = interval
        padding = None
        if self.padding_idx is not None and start <= self.padding_idx < start + num_rows:
            padding = self.padding_idx - start
        return (F.embedding(rows, shard, padding, sparse=self.sparse),)


class ColumnsOf:
    """This rank's columns of the row of each id."""

    def __init__(self, padding_idx: int | None, sparse: bool) -> None:
        self.padding_idx, self.sparse = padding_idx, sparse

    def __call__(self, _: Interval, shard: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor]:
        if not shard.numel():
            return (shard.new_zeros(ids.numel(), shard.shape[1]),)
        return (F.embedding(ids, shard, self.padding_idx, sparse=self.sparse),)


class PooledColumns:
    """This rank's columns of each pooled bag."""

    def __init__(self, mode: str, padding_idx: int | None, sparse: bool) -> None:
        self.mode, self.padding_idx, self.sparse = mode, padding_idx, sparse

    def __call__(
        self,
        _: Interval,
        shard: torch.Tensor,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor]:
        options = self.mode, weights, self.padding_idx, self.sparse
        return (bags.lookup(shard, ids, bags.starts(lengths), *options),)


# -- on the requester ----------------------------------------------------------------------------


def identity(rows: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
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
    """`finish` on one row per id, out of one row per different id."""

    def __init__(self, finish: Callable[..., torch.Tensor]) -> None:
        self.finish = finish

    def __call__(
        self, rows: torch.Tensor, inverse: torch.Tensor, *rest: torch.Tensor
    ) -> torch.Tensor:
        return self.finish(rows.index_select(0, inverse), *rest)


class PoolByFrequency:
    """Rows to bags; a row's gradient is divided by its frequency in this rank's batch."""

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
    """The rows; their gradient is divided by the id's frequency in this rank's batch."""
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


# -- max_norm ------------------------------------------------------------------------------------


@torch.no_grad()
def renorm_rows(
    weight: ShardedTensor, rows: torch.Tensor, max_norm: float, norm_type: float
) -> None:
    """Scale these rows of each rank's shard to `max_norm`, in place."""
    tiling = weight._tiling

    def shorten(place: Any, local: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if rows.numel():
            shard = tiling.shard(tiling.grid.ranks[place[0]], local)
            torch.embedding_renorm_(shard, rows, max_norm, norm_type)
        return local

    each_rank(tiling.grid, shorten, weight._local, rows)


@torch.no_grad()
def renorm_columns(
    weight: ShardedTensor, everyones: torch.Tensor, max_norm: float, norm_type: float
) -> None:
    """Scale each row that any rank looks up to `max_norm`, in place.

    Each rank has some columns of a row, so norms take an all-reduce.
    """
    tiling = weight._tiling
    grid = tiling.grid

    def part(place: Any, local: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows = tiling.shard(grid.ranks[place[0]], local)[ids.unique()].abs()
        if math.isinf(norm_type):
            return rows.amax(1) if rows.shape[1] else rows.new_zeros(rows.shape[0])
        return (rows**norm_type).sum(1)

    parts = each_rank(grid, part, weight._local, everyones)
    infinite = math.isinf(norm_type)
    joint = collectives.all_reduce(parts, "max" if infinite else "sum", grid, 0)

    def shorten(
        place: Any, local: torch.Tensor, ids: torch.Tensor, total: torch.Tensor
    ) -> torch.Tensor:
        shard = tiling.shard(grid.ranks[place[0]], local)
        norms = total if infinite else total ** (1 / norm_type)
        factor = torch.where(norms > max_norm, max_norm / (norms + 1e-7), 1.0).to(shard.dtype)
        names = ids.unique()
        shard[names] = shard[names] * factor.unsqueeze(1)
        return local

    each_rank(grid, shorten, weight._local, everyones, joint)
