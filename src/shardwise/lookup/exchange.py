"""Exchanges between ranks, for code that handles one rank at a time.

Such code keeps a list with one item per rank present: one item in a real process, one per rank in
a simulated world. Only the collective itself sees them as one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.comm import collectives
from shardwise.core.mesh import Grid
from shardwise.simulation.ranks import numbers_per_rank, one_tensor, part_per_rank, present

Counts = Sequence[int]


def ranks_present(grid: Grid) -> list[int]:
    """The places along the one axis of `grid` that this process stands for."""
    return [grid.coordinates[rank][0] for rank in present(grid)]


def start_exchange(
    grid: Grid, parts: Sequence[torch.Tensor], sent: Sequence[Counts], received: Sequence[Counts]
) -> torch.Tensor:
    """Send `sent[i]` entries of dim 0 to place i. The exchange runs on until it is `finished`.

    All three are lists over the ranks present.
    """
    flat = one_tensor(grid, parts)
    num_sent, num_received = (numbers_per_rank(grid, each) for each in (sent, received))
    return collectives.start_all_to_all_uneven(flat, num_sent, num_received, grid, 0)


def finished(grid: Grid, exchange: torch.Tensor) -> list[torch.Tensor]:
    """What each rank present received."""
    return part_per_rank(grid, collectives.finished(exchange))


def start_swap(grid: Grid, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Row i of each rank's matrix goes to place i, and comes to stand at the sender's place.

    The exchange runs on until it is `finished`.
    """
    return collectives.start_all_to_all(one_tensor(grid, parts), grid, 0)


def summed(grid: Grid, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The sum over ranks of tensors of one shape."""
    return part_per_rank(grid, collectives.all_reduce(one_tensor(grid, parts), "sum", grid, 0))
