"""Exchanges between ranks, for code that handles one rank at a time.

Such code keeps a list with one item per rank present: one item in a real process, one per rank in
a simulated world. Only the collective itself sees them as one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.comm import collectives
from shardwise.core.grid import Grid
from shardwise.errors import ArgumentError, WorldError
from shardwise.simulation.local_tensor import LocalTensor, from_ranks
from shardwise.simulation.rank_int import rank_int
from shardwise.simulation.ranks import my_coordinate

Counts = Sequence[int]


def ranks_present(grid: Grid) -> list[int]:
    """The places along the one axis of `grid` that this process stands for."""
    if grid.world.simulated:
        return list(range(len(grid.ranks)))
    return [my_coordinate(grid)[0]]


def part_per_rank(grid: Grid, x: torch.Tensor) -> list[torch.Tensor]:
    """What each rank present holds; a plain tensor is the same on every rank."""
    if isinstance(x, LocalTensor):
        if not grid.world.simulated:
            raise WorldError("A LocalTensor belongs to a simulated world, the mesh to a real one.")
        missing = sorted(set(grid.ranks) - set(x.ranks))
        if missing:
            raise ArgumentError(f"The LocalTensor has no value for ranks {missing} of {grid!r}.")
        return [x.on_rank(rank) for rank in grid.ranks]
    return [x] * len(ranks_present(grid))


def one_tensor(grid: Grid, parts: Sequence[torch.Tensor], *, sized: bool = True) -> torch.Tensor:
    """The tensor whose value on each rank present is the item of `parts`."""
    if not grid.world.simulated:
        return parts[0]
    return from_ranks(grid.world, grid.ranks, parts, sized)


def start_exchange(
    grid: Grid, parts: Sequence[torch.Tensor], sent: Sequence[Counts], received: Sequence[Counts]
) -> torch.Tensor:
    """Send `sent[i]` entries of dim 0 to place i. The exchange runs on until it is `finished`.

    All three are lists over the ranks present.
    """
    flat = one_tensor(grid, parts)
    return collectives.start_all_to_all_uneven(
        flat, _counts(grid, sent), _counts(grid, received), grid, 0
    )


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


def _counts(grid: Grid, per_rank: Sequence[Counts]) -> list[int]:
    if not grid.world.simulated:
        return list(per_rank[0])
    columns = zip(*per_rank, strict=True)
    return [rank_int(grid.world, grid.ranks, column) for column in columns]
