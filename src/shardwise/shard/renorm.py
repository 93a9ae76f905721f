"""Rows that a lookup shortens first: `max_norm`."""

from __future__ import annotations

import math
from typing import Any

import torch

from shardwise.comm import collectives
from shardwise.shard.tensor import ShardedTensor
from shardwise.simulation.ranks import each_rank


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
