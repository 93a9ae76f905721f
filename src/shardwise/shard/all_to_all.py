"""An all-to-all between ranks that all know what each sends to each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.comm import collectives
from shardwise.core.grid import Grid
from shardwise.simulation.rank_int import rank_int


def exchanged(x: torch.Tensor, counts: Sequence[Sequence[int]], grid: Grid) -> torch.Tensor:
    """Send `counts[i][j]` entries of dim 0 from rank i of the group to rank j.

    What arrives is joined in the order of ranks. Nothing is sent where nobody has anything.
    """
    if not any(map(any, counts)):
        return x
    arriving = list(zip(*counts, strict=True))
    sent = [_here(grid, [row[j] for row in counts]) for j in range(len(counts))]
    got = [_here(grid, [row[i] for row in arriving]) for i in range(len(counts))]
    return collectives.all_to_all_uneven(x, sent, got, grid, 0)


def _here(grid: Grid, values: Sequence[int]) -> Any:
    """The value of this rank; in a simulated world, that of each."""
    if grid.coordinate is not None:
        return values[grid.coordinate[0]]
    return rank_int(grid.world, grid.ranks, values)
