"""An all-to-all in which every pair of ranks exchanges as much as it likes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.comm.collectives import finished, group_name
from shardwise.comm.rank_int import rank_int
from shardwise.core.grid import Grid

_all_to_all_single = torch.ops._c10d_functional.all_to_all_single.default._op


def all_to_all_uneven(
    x: torch.Tensor, counts: Sequence[Sequence[int]], grid: Grid, axis: int
) -> torch.Tensor:
    """Send `counts[i][j]` entries of dim 0 from coordinate i of the axis to coordinate j.

    Every rank knows all counts. What arrives is joined in the order of the axis.
    """
    arriving = list(zip(*counts, strict=True))
    sent = [_here(grid, axis, [row[j] for row in counts]) for j in range(len(counts))]
    got = [_here(grid, axis, [row[i] for row in arriving]) for i in range(len(counts))]
    return finished(_all_to_all_single(x.contiguous(), got, sent, group_name(grid, axis)))


def _here(grid: Grid, axis: int, values: Sequence[int]) -> Any:
    """The value of this rank's coordinate; in a simulated world, that of each rank."""
    if grid.coordinate is not None:
        return values[grid.coordinate[axis]]
    each = [values[grid.coordinates[rank][axis]] for rank in grid.ranks]
    return rank_int(grid.world, grid.ranks, each)
