"""Row requests: each rank asks the owners of rows for the rows that it looks up.

Counts are exchanged first, together with faults and flags that all ranks must know; then row
numbers are sent to their owners. Rows come in segments, and a segment is answered with one row. The
first row number of a segment is sent as its bitwise complement, which is negative: so an owner sees
where segments begin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm import collectives
from shardwise.comm.agreement import Faults, Meeting
from shardwise.comm.id_exchange import Counts, on_host
from shardwise.comm.watch import because
from shardwise.core.mesh import Grid
from shardwise.shard.lookup import bags
from shardwise.shard.lookup.lookup_args import Lookup
from shardwise.shard.lookup.routes import ToOwners
from shardwise.shard.tiling import row_owners, wire_dtype
from shardwise.simulation.ranks import each_rank


@dataclass(frozen=True, slots=True)
class CheckedIds:
    """One rank's ids; `usable` is empty where the batch has a fault or an id is out of range."""

    usable: torch.Tensor
    fault: str | None
    low: int
    high: int


def check_ids(ids: torch.Tensor, fault: str | None, num_rows: int) -> CheckedIds:
    low, high = bags.range_of(ids, fault)
    bad = fault is not None or low < 0 or high >= num_rows
    nothing = torch.empty(0, dtype=torch.int64, device=ids.device)
    return CheckedIds(nothing if bad else ids.reshape(-1).long(), fault, low, high)


@dataclass(frozen=True, slots=True)
class RowRequest:
    """The rows that one rank asks for, in segments."""

    ids: CheckedIds
    #: Row numbers, by owner, and which of them begin a segment.
    rows: torch.Tensor
    first: torch.Tensor
    #: For each of them, its index in the batch.
    order: torch.Tensor
    #: By owner: the number of rows and of segments.
    num_rows: torch.Tensor
    num_segments: torch.Tensor
    #: Tensors that the requester keeps.
    keep: tuple[torch.Tensor, ...]
    #: An upper bound of the rows in a segment; whether padding ids were left out.
    longest: int = 1
    padded: bool = False


@dataclass(frozen=True, slots=True)
class RowReply:
    """What each rank is asked for, and the route of the answer."""

    route: ToOwners
    #: Rows of this rank's shard, segment by segment, and where each segment begins.
    rows: torch.Tensor
    starts: torch.Tensor
    #: Where each segment begins that this rank asked for.
    own_starts: torch.Tensor
    #: Over all ranks: the longest segment, whether any rank left out padding, whether any trains.
    longest: int
    padded: bool
    trains: bool


def request_rows(
    lookup: Lookup, request: Callable[..., RowRequest], *tensors: torch.Tensor
) -> tuple[RowReply, tuple[torch.Tensor, ...]]:
    """Send the request that `request` makes of each rank's tensors; also returns what it keeps."""
    grid = lookup.grid
    trains = torch.is_grad_enabled() and lookup.weight.requires_grad
    faults = Faults(grid, lookup.what, f"{lookup.what}: ")

    def tell(place: Any, *mine: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = request(*mine)
        ids, counts = own.ids, torch.stack([own.num_rows, own.num_segments], 1)
        status = faults.status(place, ids.fault)
        told = counts.new_tensor([status, ids.low, ids.high, own.longest, own.padded, trains])
        starts = own.first.nonzero().squeeze(1)
        numbers = torch.where(own.first, ~own.rows, own.rows).to(wire_dtype(lookup.num_rows))
        return counts, told, numbers, own.order, ids.usable, starts, *own.keep

    counts, told, numbers, order, entries, own_starts, *keep = each_rank(grid, tell, *tensors)
    with because(lookup.what, implicit=False):
        arrived, said = Meeting(grid, 0, counts, told).finish()
        statuses, lows, highs, longest, padded, training = said.t().tolist()
        faults.check(statuses)
        lookup.check_range(lows, highs)
        # The numbers of rows and of segments, per owner and per requester.
        (sent, wanted), (got, given) = _columns(grid, counts), _columns(grid, arrived)
        route = ToOwners(grid, order, entries, sent, got, wanted, given)
        reply = collectives.all_to_all_uneven(numbers, route.num_sent, route.num_got, grid, 0)
    rows, starts = _decoded(lookup, reply)
    found = RowReply(route, rows, starts, own_starts, max(longest), any(padded), any(training))
    return found, tuple(keep)


def _columns(grid: Grid, counts: torch.Tensor) -> list[Counts]:
    columns = each_rank(grid, lambda _, mine: mine.unbind(1), counts, axes=())
    return [on_host(grid, column) for column in columns]


def _decoded(lookup: Lookup, reply: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of each rank's shard, and where segments begin among them."""
    bounds = row_owners(lookup.weight._tiling).bounds

    def decode(place: Any, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = numbers < 0
        rows = torch.where(first, ~numbers, numbers).long() - bounds[place[0]]
        return rows, first.nonzero().squeeze(1)

    return each_rank(lookup.grid, decode, reply)
