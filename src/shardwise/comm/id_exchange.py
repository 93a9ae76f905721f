"""Ids are sent to the ranks that own their rows, and rows are sent back.

Each rank sends the sorted unique ids, grouped by owner, so every id is sent once. The owners reply
in the same order. Everything here runs on the tensors of all ranks present.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.comm import collectives
from shardwise.comm.agreement import Meeting
from shardwise.core.mesh import Coordinate, Grid
from shardwise.simulation.ranks import each_rank, numbers_per_rank, part_per_rank

#: Counts on the host: ints, or RankInts in a simulated world.
Counts = list[Any]


class Routing:
    """Which ids were requested from which rank along one axis of a mesh."""

    __slots__ = ("asked", "axis", "grid", "inverse", "num_given", "num_wanted")

    def __init__(
        self,
        grid: Grid,
        axis: int,
        inverse: torch.Tensor,
        asked: torch.Tensor,
        num_wanted: Counts,
        num_given: Counts,
    ) -> None:
        self.grid, self.axis = grid, axis
        #: For each of this rank's ids, its index among the unique ones.
        self.inverse = inverse
        #: The ids requested from this rank, by coordinate of the axis.
        self.asked = asked
        #: How many ids this rank requests from each coordinate, and each from this rank.
        self.num_wanted, self.num_given = num_wanted, num_given

    def answer(self, rows: torch.Tensor) -> torch.Tensor:
        """Send the rows of the requested ids; returns one row for each of this rank's ids."""
        arrived = collectives.all_to_all_uneven(
            rows, self.num_given, self.num_wanted, self.grid, self.axis
        )
        return each_rank(self.grid, _spread, arrived, self.inverse, axes=())

    def hand_in(self, values: torch.Tensor) -> torch.Tensor:
        """Send one row for each of this rank's ids to the owners, which get them as in `asked`.

        Rows of equal ids are summed before they are sent.
        """

        def merged(_: Coordinate, values: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
            return added_up(values, inverse)

        summed = each_rank(self.grid, merged, values, self.inverse, axes=())
        return collectives.all_to_all_uneven(
            summed, self.num_wanted, self.num_given, self.grid, self.axis
        )


def added_up(values: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """The sum of the rows with each index in `inverse`, which has no gaps."""
    num = int(inverse.max()) + 1 if inverse.numel() else 0
    return values.new_zeros((num, *values.shape[1:])).index_add_(0, inverse, values)


def _spread(_: Coordinate, rows: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    return rows.index_select(0, inverse)


def by_owner(
    ids: torch.Tensor, bounds: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sorted unique ids, each id's index among them, and the count of each owner.

    >>> wanted, inverse, counts = by_owner(torch.tensor([7, 2, 7, 3]), [0, 4, 4, 9])
    >>> wanted.tolist(), inverse.tolist(), counts.tolist()
    ([2, 3, 7], [2, 0, 2, 1], [2, 0, 1])
    """
    wanted, inverse = torch.unique(ids, return_inverse=True)
    edges = torch.searchsorted(wanted, torch.tensor(bounds, device=ids.device, dtype=ids.dtype))
    return wanted, inverse, edges.diff()


def route(
    grid: Grid,
    axis: int,
    ids: torch.Tensor,
    bounds: list[int],
    note: torch.Tensor,
    read: Callable[[torch.Tensor], None],
) -> Routing:
    """Request rows from their owners.

    `ids` is flat. `bounds` are the first id of each coordinate of the axis, and one past the last.
    `note` is a short integer tensor sent with the counts; `read` gets those of all coordinates
    before any id is sent, and may raise, on all ranks alike.
    """

    def sort(_: Coordinate, ids: torch.Tensor) -> Any:
        return by_owner(ids, bounds)

    wanted, inverse, counts = each_rank(grid, sort, ids, axes=())
    arrived, notes = Meeting(grid, axis, counts.unsqueeze(1), note).finish()
    read(notes)
    num_wanted, num_given = on_host(grid, counts), on_host(grid, arrived.squeeze(1))
    asked = collectives.all_to_all_uneven(wanted, num_wanted, num_given, grid, axis)
    return Routing(grid, axis, inverse, asked, num_wanted, num_given)


def on_host(grid: Grid, counts: torch.Tensor) -> Counts:
    """A short integer tensor as numbers; waits for the device."""
    return numbers_per_rank(grid, [part.tolist() for part in part_per_rank(grid, counts)])
