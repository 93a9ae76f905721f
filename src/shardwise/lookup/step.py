"""The exchanges of a step: rows and gradients of rows, and of the weights of ids.

Functions work for one rank, or for all ranks present: one in a real process, all in a simulated
world. Without a mesh there is one rank, and nothing is exchanged.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from shardwise._torch.functions import foreach_add
from shardwise.comm.watch import because
from shardwise.core.mesh import Grid
from shardwise.lookup.backends.backend import Backend, Lookups, Query, look_up_stacks
from shardwise.lookup.backends.torch_kernels import products_of_rows
from shardwise.lookup.exchange import FeatureBags, finished, start_exchange
from shardwise.lookup.messages import (
    NEEDS_BACKWARD,
    WEIGHTS_TRAIN,
    Incoming,
    Packed,
    StackRequest,
)
from shardwise.lookup.routing import LegBlock, Route, RowGroup
from shardwise.lookup.scratch import Lent

#: Elements of rows that are looked up at a time: 1 MB.
CHUNK_NUMBERS = 1 << 18
#: The C library returns larger allocations to the system as soon as they are free.
LARGE_BYTES = 8 << 20


class RankStep:
    """One rank's side of a step."""

    def __init__(
        self,
        route: Route,
        rank: int,
        packed: Packed,
        notes: torch.Tensor,
        requests: dict[int, StackRequest],
    ) -> None:
        self.rank, self.packed, self.notes = rank, packed, notes
        #: Per stack: what any rank requests, and this rank's own requests to replicated tables.
        self.requests = requests
        mine = Incoming(route, route.local_blocks[rank], packed.own_note(), packed.by_id)
        self.own_requests = mine.requests(packed.own)
        #: How many elements of rows come from each block.
        self.sizes = [packed.rows_of(block) * block.width for block in route.all_blocks]

    @property
    def bags(self) -> FeatureBags:
        return self.packed.bags

    def query(self, stack: int) -> Query:
        found = self.requests if stack in self.requests else self.own_requests
        return found[stack].query


def exchange_rows(
    route: Route,
    grid: Grid | None,
    steps: Sequence[RankStep],
    buffers: Sequence[torch.Tensor],
    *,
    back: bool,
    dtype: torch.dtype | None,
    meanwhile: Callable[[], None],
) -> list[torch.Tensor]:
    """Send flat rows to the requesting ranks; with `back`, gradients to the owners.

    They are sent in `dtype`, if given. `meanwhile` is called during the exchange.
    """
    if grid is None or not route.travels:
        return list(buffers)
    given = [_num_given(route, step) for step in steps]
    wanted = [_num_wanted(route, step) for step in steps]
    sent, received = (wanted, given) if back else (given, wanted)
    with because("gradients of rows" if back else "rows of tables", implicit=False):
        rounded = [buffer.to(dtype or buffer.dtype) for buffer in buffers]
        exchange = start_exchange(grid, rounded, sent, received)
    meanwhile()
    arrived = finished(grid, exchange)
    return [part.to(buffer.dtype) for part, buffer in zip(arrived, buffers, strict=True)]


def _num_given(route: Route, step: RankStep) -> list[int]:
    """How many elements of rows this rank sends to each rank."""
    stacks = route.tiling.stacks[step.rank]
    totals = np.zeros(route.num_ranks, dtype=np.int64)
    for stack, request in step.requests.items():
        totals += np.array(request.num_rows) * stacks[stack].width
    return totals.tolist()


def _num_wanted(route: Route, step: RankStep) -> list[int]:
    """How many elements of rows each rank sends to this one."""
    sizes = iter(step.sizes)
    return [sum(itertools.islice(sizes, len(blocks))) for blocks in route.blocks]


def look_up(
    route: Route,
    step: RankStep,
    weights: Sequence[torch.Tensor],
    backend: Backend,
    scratch: Lent,
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """The rows that a rank sends, flat and by requesting rank; and its own of replicated tables."""
    local = _look_up(step, step.own_requests, weights, backend)
    if len(step.requests) == 1 and route.travels and weights[0].is_cpu:
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
    # A rank without tables sends an empty message of their dtype.
    flat = scratch.numbers(num, route.dtype, step.bags.values.device)
    if parts:
        torch.cat(parts, out=flat)
    return flat, local


def _look_up_into(
    scratch: Lent, weight: torch.Tensor, query: Query, backend: Backend
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
    requests, stacks = step.requests, route.tiling.stacks[step.rank]
    if len(requests) == 1:
        (k,) = requests
        return {k: received.view(-1, stacks[k].width)}
    sizes = [
        request.num_rows[place] * stacks[k].width
        for place in range(route.num_ranks)
        for k, request in requests.items()
    ]
    pieces, num = received.split(sizes), len(requests)
    return {
        k: torch.cat(pieces[first::num]).view(-1, stacks[k].width)
        for first, k in enumerate(requests)
    }


def by_piece(
    route: Route,
    step: RankStep,
    from_blocks: Sequence[torch.Tensor],
    own: dict[int, torch.Tensor],
) -> Iterator[tuple[LegBlock | RowGroup, list[torch.Tensor]]]:
    """Each piece of the output, and what comes from its blocks; `own` is that of own copies."""
    for piece in route.pieces:
        yield piece, [from_blocks[number] for number in piece.blocks]
    for block in route.local_blocks[step.rank]:
        yield block, [own[block.stack]]


# -- weight gradients ----------------------------------------------------------------------------
# The gradient of the weights of ids: the dot product of each id's row and its bag's gradient.
#
# After the exchange of gradients, a row's owner has both. So owners compute one number per id and
# send it back to the rank that requested the id; owners of different columns send partial sums.
# Ranks whose weights do not require grad get none.


def weights_train(steps: Sequence[RankStep]) -> bool:
    """Whether the weights of any rank require grad: the same on every rank."""
    return _any_has(steps, WEIGHTS_TRAIN)


def needs_backward(steps: Sequence[RankStep]) -> bool:
    """Whether backward of any rank needs that of all: the same on every rank."""
    return _any_has(steps, NEEDS_BACKWARD)


def _any_has(steps: Sequence[RankStep], flag: int) -> bool:
    return any((step.notes[:, -1] & flag).any() for step in steps)


def _wanted_by(step: RankStep, place: int) -> bool:
    return bool(step.notes[place, -1] & WEIGHTS_TRAIN)


def weight_gradients(
    route: Route,
    grid: Grid | None,
    steps: Sequence[RankStep],
    tables: Sequence[Sequence[torch.Tensor]],
    lookups: Sequence[Lookups],
    local_lookups: Sequence[Lookups],
    backend: Backend,
) -> list[torch.Tensor]:
    """Per rank present, one number for each of its ids."""
    answers, local_rows = [], []
    for place, step in enumerate(steps):
        answers.append(_answers(route, step, _along(tables[place], lookups[place], backend)))
        local_rows.append(_along(tables[place], local_lookups[place], backend))
    if grid is not None and route.travels:
        sent = [_num_answered(step, route.num_ranks) for step in steps]
        wanted = [_num_answers(route, step) for step in steps]
        with because("gradients of the weights of ids", implicit=False):
            answers = finished(grid, start_exchange(grid, answers, sent, wanted))
    return [
        _put_back(route, step, flat, local)
        for step, flat, local in zip(steps, answers, local_rows, strict=True)
    ]


def _along(
    tables: Sequence[torch.Tensor], lookups: Lookups, backend: Backend
) -> dict[int, torch.Tensor]:
    """Per stack, one number for each id: its row times its bag's gradient."""
    own = getattr(backend, "weight_gradient", products_of_rows)
    return {k: own(tables[k], query, grad) for k, (query, grad) in lookups.items()}


def _num_answered(step: RankStep, num_ranks: int) -> list[int]:
    """How many numbers this rank sends to each rank."""
    return [
        sum(request.num_ids[place] for request in step.requests.values())
        if _wanted_by(step, place)
        else 0
        for place in range(num_ranks)
    ]


def _num_answers(route: Route, step: RankStep) -> list[int]:
    """How many numbers each rank sends to this one."""
    if not step.bags.weights_train:
        return [0] * route.num_ranks
    return [sum(step.packed.ids_of(block) for block in blocks) for blocks in route.blocks]


def _answers(route: Route, step: RankStep, along: dict[int, torch.Tensor]) -> torch.Tensor:
    """By requesting rank, then by stack, as the ids came."""
    parts = {k: found.split(step.requests[k].num_ids) for k, found in along.items()}
    chosen = [
        of_stack[place]
        for place in range(route.num_ranks)
        if _wanted_by(step, place)
        for of_stack in parts.values()
    ]
    if not chosen:
        return torch.empty(0, dtype=route.weight_dtype, device=step.bags.values.device)
    return torch.cat(chosen).to(route.weight_dtype)


def _put_back(
    route: Route, step: RankStep, flat: torch.Tensor, local: dict[int, torch.Tensor]
) -> torch.Tensor:
    bags = step.bags
    dtype = flat.dtype if bags.weights is None else bags.weights.dtype
    found = torch.zeros(bags.num_given, dtype=dtype, device=flat.device)
    if not bags.weights_train:
        return found  # only others wanted theirs
    packed = step.packed
    targets = [found[a:b] for a, b in zip(bags.ids_from, bags.ids_to, strict=True)]
    from_blocks = flat.to(dtype).split([packed.ids_of(block) for block in route.all_blocks])
    for piece, parts in by_piece(route, step, from_blocks, local):
        numbers = torch.cat(parts).to(dtype)
        if isinstance(piece, RowGroup):
            numbers = packed.split[piece.group].in_batch(numbers)
        split = numbers.split(packed.num_ids[piece.features].tolist())
        foreach_add(list(piece.of_features(targets)), list(split))
    return found
