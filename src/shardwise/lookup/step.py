"""The exchanges of a step: rows and gradients of rows, and of the weights of ids.

Functions work for one rank, or for all ranks present: one in a real process, all in a simulated
world. Without a mesh there is one rank, and nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from shardwise._torch.functions import foreach_add
from shardwise.comm.watch import because
from shardwise.core.mesh import Grid
from shardwise.lookup.backends.backend import Backend, Lookups, Query, look_up_stacks, serving
from shardwise.lookup.backends.torch_kernels import products_of_rows
from shardwise.lookup.exchange import FeatureBags, finished, start_exchange
from shardwise.lookup.messages import (
    NEEDS_BACKWARD,
    WEIGHTS_TRAIN,
    Incoming,
    Packed,
    StackRequest,
)
from shardwise.lookup.routing import OutputPiece, Route, RowGroup
from shardwise.lookup.scratch import Lent

#: Elements of rows that are looked up at a time: 1 MB.
CHUNK_NUMBERS = 1 << 18
#: The C library returns larger allocations to the system as soon as they are free.
LARGE_BYTES = 8 << 20


class Counts(NamedTuple):
    """How many numbers a rank sends, and how many it gets: of rows, or one for each id."""

    #: To each requesting rank, by stack.
    given: dict[int, list[int]]
    #: From each block.
    wanted: list[int]


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
        self.route, self.rank, self.packed, self.notes = route, rank, packed, notes
        #: Per stack: what any rank requests, and this rank's own requests to replicated tables.
        self.requests = requests
        mine = Incoming(route, route.local_blocks[rank], packed.own_note(), packed.by_id)
        self.own_requests = mine.requests(packed.own)
        #: The rows of the output of each feature.
        self.num_rows = packed.num_bags if route.pooled else packed.num_ids
        widths = [stack.width for stack in route.tiling.stacks[rank]]
        self.of_rows = Counts(
            {k: [num * widths[k] for num in each.num_rows] for k, each in requests.items()},
            [packed.rows_of(block) * block.width for block in route.all_blocks],
        )

    def of_ids(self) -> Counts:
        """The numbers of an exchange of one for each id."""
        return Counts(
            {k: each.num_ids for k, each in self.requests.items()},
            [self.packed.ids_of(block) for block in self.route.all_blocks],
        )

    @property
    def bags(self) -> FeatureBags:
        return self.packed.bags

    def query(self, stack: int) -> Query:
        found = self.requests if stack in self.requests else self.own_requests
        return found[stack].query

    def by_piece(
        self, from_blocks: Sequence[torch.Tensor], own: dict[int, torch.Tensor]
    ) -> Iterator[tuple[OutputPiece, list[torch.Tensor]]]:
        """Each piece of the output, and what comes from its blocks; `own`: from own copies."""
        for piece in self.route.pieces:
            yield piece, [from_blocks[number] for number in piece.blocks]
        for block in self.route.local_blocks[self.rank]:
            yield block, [own[block.stack]]


def exchange(
    why: str,
    route: Route,
    grid: Grid | None,
    counts: Sequence[Counts],
    buffers: Sequence[torch.Tensor],
    *,
    back: bool = False,
    dtype: torch.dtype | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> list[torch.Tensor]:
    """Send flat answers to the requesting ranks; with `back`, gradients to the owners.

    They are sent in `dtype`, if given. `meanwhile` is called during the exchange.
    """
    if grid is None or not route.travels:
        return list(buffers)
    nobody = [0] * route.num_ranks
    given = [np.sum([nobody, *each.given.values()], 0).tolist() for each in counts]
    wanted = [route.sums_by_rank(each.wanted) for each in counts]
    sent, received = (wanted, given) if back else (given, wanted)
    with because(why, implicit=False):
        rounded = [buffer.to(dtype or buffer.dtype) for buffer in buffers]
        started = start_exchange(grid, rounded, sent, received)
    if meanwhile is not None:
        meanwhile()
    arrived = finished(grid, started)
    return [part.to(buffer.dtype) for part, buffer in zip(arrived, buffers, strict=True)]


def by_requester(counts: Counts, answers: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    """The parts of a message: the answers of all stacks to the first rank, then to the next."""
    split = [answers[k].reshape(-1).split(sizes) for k, sizes in counts.given.items()]
    return [part for to_rank in zip(*split, strict=True) for part in to_rank]


def by_stack(counts: Counts, message: torch.Tensor) -> dict[int, torch.Tensor]:
    """The inverse, for gradients."""
    given = counts.given
    if len(given) == 1:
        return dict.fromkeys(given, message)
    parts = message.split([num for to_rank in zip(*given.values(), strict=True) for num in to_rank])
    return {k: torch.cat(parts[first :: len(given)]) for first, k in enumerate(given)}


def look_up(
    step: RankStep, weights: Sequence[torch.Tensor], backend: Backend, scratch: Lent
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """The rows that a rank sends, flat and by requesting rank; and its own of replicated tables."""
    route, local = step.route, _look_up(step, step.own_requests, weights, backend)
    if len(step.requests) == 1 and route.travels and weights[0].is_cpu:
        k = next(iter(step.requests))
        weight, query = weights[k], step.query(k)
        if query.num_bags * weight.shape[1] * weight.element_size() > LARGE_BYTES:
            return _look_up_into(scratch, weight, query, backend), local
    answers = _look_up(step, step.requests, weights, backend)
    if len(answers) == 1:
        return next(iter(answers.values())).view(-1), local
    parts = by_requester(step.of_rows, answers)
    # A rank without tables sends an empty message of their dtype.
    num = sum(part.shape[0] for part in parts)
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
        part = Query(query.ids[ids], lengths, weights)
        rows.copy_(serving(backend, weight).look_up(weight, part))
        first, start = bags.stop, ids.stop
    return flat


def _look_up(
    step: RankStep, stacks: Iterable[int], weights: Sequence[torch.Tensor], backend: Backend
) -> dict[int, torch.Tensor]:
    stacks = list(stacks)
    found = look_up_stacks(backend, [weights[k] for k in stacks], [step.query(k) for k in stacks])
    return dict(zip(stacks, found, strict=True))


# -- weight gradients ----------------------------------------------------------------------------
# The gradient of the weights of ids: the dot product of each id's row and its bag's gradient.
#
# After the exchange of gradients, a row's owner has both. So owners compute one number per id and
# send it back to the rank that requested the id; owners of different columns send partial sums.


def weights_train(steps: Sequence[RankStep]) -> bool:
    """Whether the weights of any rank require grad: the same on every rank."""
    return _any_has(steps, WEIGHTS_TRAIN)


def needs_backward(steps: Sequence[RankStep]) -> bool:
    """Whether backward of any rank needs that of all: the same on every rank."""
    return _any_has(steps, NEEDS_BACKWARD)


def _any_has(steps: Sequence[RankStep], flag: int) -> bool:
    return any((step.notes[:, -1] & flag).any() for step in steps)


def weight_gradients(
    route: Route,
    grid: Grid | None,
    steps: Sequence[RankStep],
    tables: Sequence[Sequence[torch.Tensor]],
    lookups: Sequence[Lookups],
    backend: Backend,
) -> list[torch.Tensor]:
    """Per rank present, one number for each of its ids."""
    # For each id that was looked up, its row times its bag's gradient.
    along = [
        {k: _along(backend, mine[k], *lookup) for k, lookup in each.items()}
        for mine, each in zip(tables, lookups, strict=True)
    ]
    counts, answers = [step.of_ids() for step in steps], []
    for step, each, numbers in zip(steps, counts, along, strict=True):
        nothing = torch.empty(0, dtype=route.weight_dtype, device=step.bags.values.device)
        answers.append(torch.cat([nothing, *by_requester(each, numbers)]).to(route.weight_dtype))
    arrived = exchange("gradients of the weights of ids", route, grid, counts, answers)
    return [
        _put_back(step, flat.split(each.wanted), numbers)
        for step, flat, each, numbers in zip(steps, arrived, counts, along, strict=True)
    ]


def _along(backend: Backend, table: torch.Tensor, query: Query, grad: torch.Tensor) -> torch.Tensor:
    own = getattr(serving(backend, table), "weight_gradient", products_of_rows)
    return own(table, query, grad)


def _put_back(
    step: RankStep, from_blocks: Sequence[torch.Tensor], own: dict[int, torch.Tensor]
) -> torch.Tensor:
    bags, packed = step.bags, step.packed
    dtype = step.route.weight_dtype if bags.weights is None else bags.weights.dtype
    found = torch.zeros(bags.num_given, dtype=dtype, device=bags.values.device)
    targets = [found[a:b] for a, b in zip(bags.ids_from, bags.ids_to, strict=True)]
    for piece, parts in step.by_piece(from_blocks, own):
        numbers = torch.cat(parts).to(dtype)
        if isinstance(piece, RowGroup):
            numbers = packed.split[piece.group].in_batch(numbers)
        split = numbers.split(packed.num_ids[piece.features].tolist())
        foreach_add(list(piece.of_features(targets)), list(split))
    return found
