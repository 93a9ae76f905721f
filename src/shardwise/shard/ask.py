"""Asking the owners of rows: each rank says what it wants of each other one.

First go counts, with what else all ranks must know before they go on; then the numbers of rows, to
their owners alone. The first number of a piece is sent as its complement, which is negative: so an
owner sees where pieces begin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm import collectives
from shardwise.comm.id_exchange import on_host
from shardwise.comm.watch import because
from shardwise.core.grid import Grid
from shardwise.shard.announce import check_range, raise_faults, range_of
from shardwise.shard.routes import ToOwners
from shardwise.shard.row_owners import row_owners, wire_dtype
from shardwise.shard.wanted import Lookup
from shardwise.simulation.parts import agreed
from shardwise.simulation.ranks import each_rank


@dataclass(frozen=True, slots=True)
class Ids:
    """One rank's ids, which are none where the batch has a fault or an id is no row."""

    usable: torch.Tensor
    fault: str | None
    low: int
    high: int


def checked(ids: torch.Tensor, fault: str | None, num_rows: int) -> Ids:
    low, high = range_of(ids, fault)
    bad = fault is not None or low < 0 or high >= num_rows
    nothing = torch.empty(0, dtype=torch.int64, device=ids.device)
    return Ids(nothing if bad else ids.reshape(-1).long(), fault, low, high)


@dataclass(frozen=True, slots=True)
class Wish:
    """What one rank wants: rows in pieces, of which each owner answers every one with a row."""

    ids: Ids
    #: The numbers of rows, by owner, and which of them begin a piece.
    rows: torch.Tensor
    first: torch.Tensor
    #: For each of them the entry of the batch that it stands for.
    order: torch.Tensor
    #: By owner: how many rows and how many pieces.
    num_rows: torch.Tensor
    num_pieces: torch.Tensor
    #: What stays with the rank.
    keep: tuple[torch.Tensor, ...]
    #: The most rows in a piece, at most; and whether an id was left out as it is padding.
    longest: int = 1
    padded: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """What each rank was asked for, and the way back."""

    route: ToOwners
    #: Rows of this rank's block, piece by piece, and where each piece begins.
    rows: torch.Tensor
    starts: torch.Tensor
    #: Where each piece begins that this rank asked for.
    own_starts: torch.Tensor
    #: What is true of some rank.
    longest: int
    padded: bool
    trains: bool


def ask(
    lookup: Lookup, wish: Callable[..., Wish], *tensors: torch.Tensor
) -> tuple[Asked, tuple[torch.Tensor, ...]]:
    """Ask for what `wish` makes of each rank's own tensors; also what it keeps."""
    grid = lookup.grid
    trains = torch.is_grad_enabled() and lookup.weight.requires_grad
    faults: dict[int, str] = {}

    def tell(place: Any, *mine: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = wish(*mine)
        if own.ids.fault is not None:
            faults[grid.ranks[place[0]]] = own.ids.fault
        starts = own.first.nonzero().squeeze(1)
        numbers = torch.where(own.first, ~own.rows, own.rows).to(wire_dtype(lookup.num_rows))
        return _label(own, trains), numbers, own.order, own.ids.usable, starts, *own.keep

    label, numbers, order, entries, own_starts, *keep = each_rank(grid, tell, *tensors)
    with because(lookup.what, implicit=False):
        arrived = collectives.all_to_all(label, grid, 0)
        longest, padded, training = _agreed(lookup, arrived, faults)
        (num_sent, num_wanted), (num_got, num_given) = _counts(grid, label), _counts(grid, arrived)
        counts = [on_host(grid, each) for each in (num_sent, num_got, num_wanted, num_given)]
        route = ToOwners(grid, order, entries, *counts)
        asked = collectives.all_to_all_uneven(numbers, route.num_sent, route.num_got, grid, 0)
    rows, starts = _decoded(lookup, asked)
    found = Asked(route, rows, starts, own_starts, longest, padded, training)
    return found, tuple(keep)


def _label(own: Wish, trains: bool) -> torch.Tensor:
    """What each other rank is told: two counts of its own, and what all are told."""
    ids = own.ids
    said = [ids.fault is not None, ids.low, ids.high, own.longest, own.padded, trains]
    counts = torch.stack([own.num_rows, own.num_pieces], 1)
    return torch.cat([counts, counts.new_tensor([said]).expand(len(counts), -1)], 1)


def _counts(grid: Grid, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The counts of rows and of pieces."""
    return each_rank(grid, lambda _, mine: mine[:, :2].unbind(1), labels, axes=())


def _agreed(lookup: Lookup, labels: Any, faults: dict[int, str]) -> tuple[int, bool, bool]:
    """What all ranks were told; raises where a batch of one of them does not fit."""
    said = agreed(each_rank(lookup.grid, lambda _, mine: mine[:, 2:], labels, axes=()))
    flags, lows, highs, longest, padded, trains = said.t().tolist()
    raise_faults(lookup.grid, lookup.what, flags, faults)
    check_range(lookup.grid, lookup.what, lookup.num_rows, lows, highs)
    return max(longest), any(padded), any(trains)


def _decoded(lookup: Lookup, asked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of each rank's block, and where pieces begin among them."""
    bounds = row_owners(lookup.weight._tiling).bounds

    def decode(place: Any, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = numbers < 0
        rows = torch.where(first, ~numbers, numbers).long() - bounds[place[0]]
        return rows, first.nonzero().squeeze(1)

    return each_rank(lookup.grid, decode, asked)
