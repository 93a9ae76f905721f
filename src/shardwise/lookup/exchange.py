"""Exchanges between ranks, for code that handles one rank at a time.

Such code has lists with one item per rank present: one in a real process, all in a simulated world.
Only the collective sees them as one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.comm import collectives
from shardwise.core.mesh import Grid
from shardwise.simulation.ranks import numbers_per_rank, one_tensor, part_per_rank, present

Counts = Sequence[int]


def ranks_present(grid: Grid) -> list[int]:
    """The coordinates along the one axis of `grid` that are present in this process."""
    return [grid.coordinates[rank][0] for rank in present(grid)]


def start_exchange(
    grid: Grid, parts: Sequence[torch.Tensor], sent: Sequence[Counts], received: Sequence[Counts]
) -> torch.Tensor:
    """Send `sent[i]` entries of dim 0 to coordinate i; get the result with `finished`.

    All three are lists over the ranks present.
    """
    flat = one_tensor(grid, parts)
    num_sent, num_received = (numbers_per_rank(grid, each) for each in (sent, received))
    return collectives.start_all_to_all_uneven(flat, num_sent, num_received, grid, 0)


def finished(grid: Grid, exchange: torch.Tensor) -> list[torch.Tensor]:
    """What each rank present received."""
    return part_per_rank(grid, collectives.finished(exchange))


def summed(grid: Grid, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The sum over ranks of tensors of one shape."""
    return part_per_rank(grid, collectives.all_reduce(one_tensor(grid, parts), "sum", grid, 0))
