"""One step of a sharded collection: rows of the ids that came go back, gradients return.

Everything is done for each rank present in turn: one in a real process, all in a simulated world.
Without a mesh there is one rank, and nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from shardwise.comm.watch import because
from shardwise.core.mesh import Grid
from shardwise.embedding.backends.backend import Backend, Query, look_up_stacks
from shardwise.embedding.batch import FeatureBags
from shardwise.embedding.exchange.routing import FeatureRoute, Packed, Route, StackRequest
from shardwise.embedding.exchange.scratch import Scratch
from shardwise.lookup.exchange import finished, start_exchange

#: Numbers of rows that are looked up at a time: four megabytes.
CHUNK_NUMBERS = 1 << 20
#: Pieces of memory that are larger the C library gives back to the system as soon as they are free.
GIVEN_BACK_BYTES = 32 << 20


@dataclass(slots=True)
class RankStep:
    """One rank's side of a step."""

    rank: int
    bags: FeatureBags
    packed: Packed
    notes: torch.Tensor
    asked: dict[int, StackRequest]
    home: dict[int, StackRequest]

    def query(self, stack: int) -> Query:
        asked = self.asked[stack] if stack in self.asked else self.home[stack]
        return Query(asked.ids, asked.lengths, asked.weights, asked.runs)


def exchange_rows(
    route: Route,
    grid: Grid | None,
    visits: Sequence[RankStep],
    buffers: Sequence[torch.Tensor],
    *,
    back: bool,
    meanwhile: Callable[[], None],
) -> list[torch.Tensor]:
    """Send flat rows to those who asked; with `back`, gradients to those who answered.

    What is to be done `meanwhile` is done while they travel.
    """
    if grid is None or not route.travels:
        return list(buffers)
    given = [_num_given(route, visit) for visit in visits]
    wanted = [_num_wanted(route, visit) for visit in visits]
    sent, received = (wanted, given) if back else (given, wanted)
    with because("gradients of rows" if back else "rows of tables", implicit=False):
        exchange = start_exchange(grid, buffers, sent, received)
    meanwhile()
    return finished(grid, exchange)


def _num_given(route: Route, visit: RankStep) -> list[int]:
    """How many numbers this rank answers each rank with."""
    stacks = route.tiling.stacks[visit.rank]
    totals = [0] * route.num_ranks
    for stack, asked in visit.asked.items():
        for place, num in enumerate(asked.num_rows):
            totals[place] += num * stacks[stack].width
    return totals


def _num_wanted(route: Route, visit: RankStep) -> list[int]:
    """How many numbers each rank answers this one with."""
    return [
        sum(_rows_of(route, visit, rank, place) * leg.tile.width for place, leg in enumerate(legs))
        for rank, legs in enumerate(route.legs)
    ]


def _rows_of(route: Route, visit: RankStep, rank: int, place: int) -> int:
    """How many rows come back for a leg."""
    if route.pooled:
        return visit.bags.num_bags[route.legs[rank][place].feature]
    return visit.packed.ids_per_leg[rank][place]


def look_up(
    route: Route,
    visit: RankStep,
    weights: Sequence[torch.Tensor],
    dtype: torch.dtype,
    backend: Backend,
    scratch: Scratch,
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """The rows that a rank answers with, flat and by asking rank; and those it wanted itself.

    `dtype` is that of the tables: a rank that holds none sends an empty message of it.
    """
    home = _look_up(visit, visit.home, weights, backend)
    if len(visit.asked) == 1 and scratch.keep:
        k = next(iter(visit.asked))
        weight, query = weights[k], visit.query(k)
        if query.num_bags * weight.shape[1] * weight.element_size() > GIVEN_BACK_BYTES:
            return _look_up_into(scratch, weight, query, backend), home
    answers = _look_up(visit, visit.asked, weights, backend)
    if len(answers) == 1:
        return next(iter(answers.values())).view(-1), home
    pieces = []
    split = {k: rows.split(visit.asked[k].num_rows) for k, rows in answers.items()}
    for place in range(route.num_ranks):
        pieces += [split[k][place].reshape(-1) for k in answers]
    num = sum(piece.shape[0] for piece in pieces)
    flat = scratch.numbers(num, dtype, visit.bags.values.device)
    if pieces:
        torch.cat(pieces, out=flat)
    return flat, home


def _look_up_into(
    scratch: Scratch, weight: torch.Tensor, query: Query, backend: Backend
) -> torch.Tensor:
    """Some thousand bags at a time: small results take memory that the last ones left."""
    width = weight.shape[1]
    flat = scratch.numbers(query.num_bags * width, weight.dtype)
    first = start = 0
    for rows in flat.view(query.num_bags, width).split(max(1, CHUNK_NUMBERS // width)):
        bags = slice(first, first + rows.shape[0])
        lengths = None if query.lengths is None else query.lengths[bags]
        num = rows.shape[0] if lengths is None else int(lengths.sum())
        ids = slice(start, start + num)
        weights = None if query.weights is None else query.weights[ids]
        rows.copy_(backend.look_up(weight, Query(query.ids[ids], lengths, weights)))
        first, start = bags.stop, ids.stop
    return flat


def _look_up(
    visit: RankStep, stacks: Iterable[int], weights: Sequence[torch.Tensor], backend: Backend
) -> dict[int, torch.Tensor]:
    stacks = list(stacks)
    found = look_up_stacks(backend, [weights[k] for k in stacks], [visit.query(k) for k in stacks])
    return dict(zip(stacks, found, strict=True))


def gradients_per_stack(
    route: Route, visit: RankStep, received: torch.Tensor
) -> dict[int, torch.Tensor]:
    """The gradients of the rows that a rank answered with, by stack, from what came back flat."""
    stacks = route.tiling.stacks[visit.rank]
    if len(visit.asked) == 1:
        k = next(iter(visit.asked))
        return {k: received.view(-1, stacks[k].width)}
    pieces: dict[int, list[torch.Tensor]] = {k: [] for k in visit.asked}
    at = 0
    for place in range(route.num_ranks):
        for k, asked in visit.asked.items():
            num = asked.num_rows[place] * stacks[k].width
            pieces[k].append(received[at : at + num].view(-1, stacks[k].width))
            at += num
    return {k: torch.cat(parts) for k, parts in pieces.items()}


def leg_views(
    route: Route, visit: RankStep, flat: torch.Tensor
) -> Iterator[tuple[FeatureRoute, torch.Tensor, torch.Tensor | None]]:
    """The rows of each leg in a flat buffer, and where in the feature they go, if not in order."""
    at = 0
    for rank, legs in enumerate(route.legs):
        for place, leg in enumerate(legs):
            num = _rows_of(route, visit, rank, place)
            rows = flat[at : at + num * leg.tile.width].view(num, leg.tile.width)
            at += num * leg.tile.width
            positions = None if route.pooled else visit.packed.positions.get((rank, leg.feature))
            yield leg, rows, positions


def home_views(
    route: Route, visit: RankStep, rows: dict[int, torch.Tensor]
) -> Iterator[tuple[FeatureRoute, torch.Tensor]]:
    """The rows of each leg to a table that the rank holds a copy of."""
    at = dict.fromkeys(rows, 0)
    for leg in sorted(route.home[visit.rank], key=lambda leg: leg.tile.stack):
        k = leg.tile.stack
        num = (visit.bags.num_bags if route.pooled else _id_counts(visit.bags))[leg.feature]
        yield leg, rows[k][at[k] : at[k] + num]
        at[k] += num


def _id_counts(bags: FeatureBags) -> list[int]:
    return [end - start for start, end in zip(bags.ids_from, bags.ids_to, strict=True)]
