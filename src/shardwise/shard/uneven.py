"""Collectives of batches of different size: padded to the largest on the wire only."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.comm import collectives
from shardwise.core.grid import Grid
from shardwise.simulation.ranks import each_rank


def all_gather_uneven(x: torch.Tensor, counts: tuple[int, ...], grid: Grid) -> torch.Tensor:
    """The ranks' rows, joined in their order; rank i of the group has `counts[i]` of them."""
    longest = max(counts)
    if longest == 0:
        return x
    if min(counts) == longest:
        return collectives.all_gather(x, grid, 0)
    padded = each_rank(grid, lambda _, mine: _padded(mine, longest), x)
    gathered = collectives.all_gather(padded, grid, 0)

    def compact(_: Any, rows: torch.Tensor) -> torch.Tensor:
        parts = rows.split(longest)
        return torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])

    return each_rank(grid, compact, gathered, axes=())


def reduce_scatter_uneven(x: torch.Tensor, counts: tuple[int, ...], grid: Grid) -> torch.Tensor:
    """The sum of the ranks' rows, of which rank i of the group gets its `counts[i]`."""
    longest = max(counts)
    if longest == 0:
        return x
    if min(counts) == longest:
        return collectives.reduce_scatter(x, "sum", grid, 0)

    def spread(_: Any, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([_padded(part, longest) for part in rows.split(list(counts))])

    reduced = collectives.reduce_scatter(each_rank(grid, spread, x), "sum", grid, 0)
    return each_rank(grid, lambda place, rows: rows[: counts[place[0]]], reduced)


def _padded(x: torch.Tensor, length: int) -> torch.Tensor:
    if x.shape[0] == length:
        return x.contiguous()
    out = x.new_zeros((length, *x.shape[1:]))
    out[: x.shape[0]] = x
    return out
