"""Exchanges between ranks.

Those of the engine are for code that handles one rank at a time. Such code has lists with one item
per rank present: one in a real process, all in a simulated world. Only the collective sees them as
one tensor. Those of DTensors' lookups (`Routing`) have a tensor of all ranks present, and any axis
of a mesh: each rank sends its different ids, grouped by owner, and owners reply in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm import collectives
from shardwise.comm.agreement import Meeting
from shardwise.core.mesh import Coordinate, Grid
from shardwise.lookup.ids import distinct, places_of_runs, segment_sums
from shardwise.lookup.scratch import LARGE_BYTES, Lent
from shardwise.simulation.ranks import (
    each_rank,
    numbers_per_rank,
    one_tensor,
    part_per_rank,
    present,
)

Counts = Sequence[int]
#: Counts on the host: ints, or RankInts in a simulated world.
HostCounts = list[Any]


def ranks_present(grid: Grid) -> list[int]:
    """The coordinates along the one axis of `grid` that are present in this process."""
    return [grid.coordinates[rank][0] for rank in present(grid)]


def places_together(grid: Grid) -> list[list[int]]:
    """Of the ranks present, the places of those that exchange with each other.

    One list in a process; one for each parallel submesh in a simulated world.
    """
    place_of = {rank: place for place, rank in enumerate(present(grid))}
    found = [[place_of[rank] for rank in each if rank in place_of] for each in grid.submeshes]
    return [places for places in found if places]


def start_exchange(
    grid: Grid,
    parts: Sequence[torch.Tensor],
    sent: Sequence[Counts],
    received: Sequence[Counts],
    memory: Lent | None = None,
) -> torch.Tensor:
    """Send `sent[i]` entries of dim 0 to coordinate i; get the result with `finished`.

    All three are lists over the ranks present. What a process gets is in `memory`, if it is large.
    """
    flat = one_tensor(grid, parts)
    if memory is not None and type(flat) is torch.Tensor and flat.is_cpu and flat.dim() == 1:
        num = sum(received[0])
        if num * flat.element_size() >= LARGE_BYTES:
            out = memory.numbers(num, flat.dtype)
            both = list(sent[0]), list(received[0])
            return collectives.start_all_to_all_into(out, flat, *both, grid, 0)
    num_sent, num_received = (numbers_per_rank(grid, each) for each in (sent, received))
    return collectives.start_all_to_all_uneven(flat, num_sent, num_received, grid, 0)


def finished(grid: Grid, exchange: torch.Tensor) -> list[torch.Tensor]:
    """What each rank present received."""
    return part_per_rank(grid, collectives.awaited(exchange))


def combined(grid: Grid, parts: Sequence[torch.Tensor], op: str = "sum") -> list[torch.Tensor]:
    """The sum over ranks, or what `op` says, of tensors of one shape."""
    return part_per_rank(grid, collectives.all_reduce(one_tensor(grid, parts), op, grid, 0))


# -- of DTensors -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Routing:
    """Which ids were requested from which rank along one axis of a mesh, each id once."""

    grid: Grid
    axis: int
    #: The places of equal ids among this rank's, and where each different id begins there.
    order: torch.Tensor
    starts: torch.Tensor
    #: The ids requested from this rank, by coordinate of the axis.
    asked: torch.Tensor
    #: How many ids this rank requests from each coordinate, and each from this rank.
    num_wanted: HostCounts
    num_given: HostCounts

    def answer(self, rows: torch.Tensor) -> torch.Tensor:
        """Send the rows of the requested ids; returns one row for each of this rank's ids."""
        arrived = collectives.all_to_all_uneven(
            rows, self.num_given, self.num_wanted, self.grid, self.axis
        )

        def spread(_: Coordinate, rows: torch.Tensor, *runs: torch.Tensor) -> torch.Tensor:
            return rows.index_select(0, places_of_runs(*runs))

        return each_rank(self.grid, spread, arrived, self.order, self.starts, axes=())

    def hand_in(self, values: torch.Tensor) -> torch.Tensor:
        """Send one row for each of this rank's ids to the owners, which get them as in `asked`.

        Rows of equal ids are summed before they are sent.
        """
        given = (values, self.order, self.starts)
        summed = each_rank(self.grid, lambda _, *parts: segment_sums(*parts), *given, axes=())
        return collectives.all_to_all_uneven(
            summed, self.num_wanted, self.num_given, self.grid, self.axis
        )


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
        found, order, starts = distinct(ids)
        edges = torch.searchsorted(found, found.new_tensor(bounds))
        return found, order, starts, edges.diff()

    wanted, order, starts, counts = each_rank(grid, sort, ids, axes=())
    arrived, notes = Meeting(grid, axis, counts.unsqueeze(1), note).finish()
    read(notes)
    num_wanted, num_given = on_host(grid, counts), on_host(grid, arrived.squeeze(1))
    asked = collectives.all_to_all_uneven(wanted, num_wanted, num_given, grid, axis)
    return Routing(grid, axis, order, starts, asked, num_wanted, num_given)


def on_host(grid: Grid, counts: torch.Tensor) -> HostCounts:
    """A short integer tensor as numbers; waits for the device."""
    return numbers_per_rank(grid, [part.tolist() for part in part_per_rank(grid, counts)])
