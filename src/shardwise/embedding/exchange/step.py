"""The exchanges of a step: owners look up the ids they got, send rows back, and get gradients.

Functions work for one rank, or for all ranks present: one in a real process, all in a simulated
world. Without a mesh there is one rank, and nothing is exchanged.
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

#: Elements of rows that are looked up at a time: 4 MB.
CHUNK_NUMBERS = 1 << 20
#: The C library returns larger allocations to the system as soon as they are free.
LARGE_BYTES = 32 << 20


@dataclass(slots=True)
class RankStep:
    """One rank's side of a step."""

    rank: int
    bags: FeatureBags
    packed: Packed
    notes: torch.Tensor
    #: Per stack: what any rank requests, and this rank's own requests to replicated tables.
    requests: dict[int, StackRequest]
    local_requests: dict[int, StackRequest]

    def query(self, stack: int) -> Query:
        one = self.requests[stack] if stack in self.requests else self.local_requests[stack]
        return Query(one.ids, one.lengths, one.weights, one.runs)


def exchange_rows(
    route: Route,
    grid: Grid | None,
    steps: Sequence[RankStep],
    buffers: Sequence[torch.Tensor],
    *,
    back: bool,
    meanwhile: Callable[[], None],
) -> list[torch.Tensor]:
    """Send flat rows to the requesting ranks; with `back`, gradients to the owners.

    `meanwhile` is called during the exchange.
    """
    if grid is None or not route.travels:
        return list(buffers)
    given = [_num_given(route, step) for step in steps]
    wanted = [_num_wanted(route, step) for step in steps]
    sent, received = (wanted, given) if back else (given, wanted)
    with because("gradients of rows" if back else "rows of tables", implicit=False):
        exchange = start_exchange(grid, buffers, sent, received)
    meanwhile()
    return finished(grid, exchange)


def _num_given(route: Route, step: RankStep) -> list[int]:
    """How many elements of rows this rank sends to each rank."""
    stacks = route.tiling.stacks[step.rank]
    totals = [0] * route.num_ranks
    for stack, request in step.requests.items():
        for place, num in enumerate(request.num_rows):
            totals[place] += num * stacks[stack].width
    return totals


def _num_wanted(route: Route, step: RankStep) -> list[int]:
    """How many elements of rows each rank sends to this one."""
    return [
        sum(_rows_of(route, step, rank, place) * leg.shard.width for place, leg in enumerate(legs))
        for rank, legs in enumerate(route.legs)
    ]


def _rows_of(route: Route, step: RankStep, rank: int, place: int) -> int:
    """How many rows come back for a leg."""
    if route.pooled:
        return step.bags.num_bags[route.legs[rank][place].feature]
    return step.packed.ids_per_leg[rank][place]


def look_up(
    route: Route,
    step: RankStep,
    weights: Sequence[torch.Tensor],
    dtype: torch.dtype,
    backend: Backend,
    scratch: Scratch,
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """The rows that a rank sends, flat and by requesting rank; and its own of replicated tables.

    `dtype` is that of the tables: a rank without tables sends an empty message of it.
    """
    local = _look_up(step, step.local_requests, weights, backend)
    if len(step.requests) == 1 and scratch.keep:
        k = next(iter(step.requests))
        weight, query = weights[k], step.query(k)
        if query.num_bags * weight.shape[1] * weight.element_size() > LARGE_BYTES:
            return _look_up_into(scratch, weight, query, backend), local
    answers = _look_up(step, step.requests, weights, backend)
    if len(answers) == 1:
        return next(iter(answers.values())).view(-1), local
    parts = []
    split = {k: rows.split(step.requests[k].num_rows) for k, rows in answers.items()}
    for place in range(route.num_ranks):
        parts += [split[k][place].reshape(-1) for k in answers]
    num = sum(part.shape[0] for part in parts)
    flat = scratch.numbers(num, dtype, step.bags.values.device)
    if parts:
        torch.cat(parts, out=flat)
    return flat, local


def _look_up_into(
    scratch: Scratch, weight: torch.Tensor, query: Query, backend: Backend
) -> torch.Tensor:
    """Some thousand bags at a time, so that small results reuse the memory of the last ones."""
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
    step: RankStep, stacks: Iterable[int], weights: Sequence[torch.Tensor], backend: Backend
) -> dict[int, torch.Tensor]:
    stacks = list(stacks)
    found = look_up_stacks(backend, [weights[k] for k in stacks], [step.query(k) for k in stacks])
    return dict(zip(stacks, found, strict=True))


def gradients_per_stack(
    route: Route, step: RankStep, received: torch.Tensor
) -> dict[int, torch.Tensor]:
    """The gradients of the rows that a rank sent, by stack, from the flat message."""
    stacks = route.tiling.stacks[step.rank]
    if len(step.requests) == 1:
        k = next(iter(step.requests))
        return {k: received.view(-1, stacks[k].width)}
    parts: dict[int, list[torch.Tensor]] = {k: [] for k in step.requests}
    at = 0
    for place in range(route.num_ranks):
        for k, request in step.requests.items():
            num = request.num_rows[place] * stacks[k].width
            parts[k].append(received[at : at + num].view(-1, stacks[k].width))
            at += num
    return {k: torch.cat(each) for k, each in parts.items()}


def leg_views(
    route: Route, step: RankStep, flat: torch.Tensor
) -> Iterator[tuple[FeatureRoute, torch.Tensor, torch.Tensor | None]]:
    """Per leg, its rows in a flat buffer and their positions in the feature (None: in order)."""
    at = 0
    for rank, legs in enumerate(route.legs):
        for place, leg in enumerate(legs):
            num = _rows_of(route, step, rank, place)
            rows = flat[at : at + num * leg.shard.width].view(num, leg.shard.width)
            at += num * leg.shard.width
            positions = None if route.pooled else step.packed.positions.get((rank, leg.feature))
            yield leg, rows, positions


def local_views(
    route: Route, step: RankStep, rows: dict[int, torch.Tensor]
) -> Iterator[tuple[FeatureRoute, torch.Tensor]]:
    """Per leg to a replicated table, its rows."""
    at = dict.fromkeys(rows, 0)
    for leg in sorted(route.local[step.rank], key=lambda leg: leg.shard.stack):
        k = leg.shard.stack
        num = (step.bags.num_bags if route.pooled else _id_counts(step.bags))[leg.feature]
        yield leg, rows[k][at[k] : at[k] + num]
        at[k] += num


def _id_counts(bags: FeatureBags) -> list[int]:
    return [end - start for start, end in zip(bags.ids_from, bags.ids_to, strict=True)]
