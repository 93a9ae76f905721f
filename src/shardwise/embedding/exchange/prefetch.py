"""PrefetchedBatch: a batch whose ids are sent before they are needed.

Note [Two exchanges without waiting]
Receivers need to know how many ids arrive, so counts are exchanged first. `prefetch` only starts
that. The ids follow at a point that is the same on every rank and where ranks wait for each other
anyway: right after the collection started its next exchange of rows (forward) or gradients
(backward), at the latest when the batch is used. A rank joins that exchange after its `prefetch`:
waiting for its counts there takes no longer than waiting for its rows.

The main thread starts all collectives in program order, which is the same on every rank, whatever
other collectives run in between on the same group. So neither a second thread nor a second
communicator is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.comm.agreement import Fault, Faults, Meeting, joint_error
from shardwise.comm.watch import because
from shardwise.core.mesh import Grid
from shardwise.embedding.batch import FeatureBags, bags_of, unfit
from shardwise.embedding.exchange.routing import (
    Packed,
    Route,
    local_requests,
    message_sizes,
    pack,
    unpack,
)
from shardwise.embedding.exchange.step import RankStep
from shardwise.embedding.jagged import Jagged
from shardwise.errors import ArgumentError, ShardwiseError
from shardwise.lookup.exchange import finished, ranks_present, start_exchange
from shardwise.simulation.parts import is_per_rank, parts_of
from shardwise.simulation.ranks import one_tensor, part_per_rank


class PrefetchedBatch:
    """What `prefetch` returns; give it to the collection instead of the batch.

    An invalid batch on any rank raises on every rank when it is used.
    """

    def __init__(
        self,
        route: Route,
        grid: Grid | None,
        found: Sequence[FeatureBags | Fault],
        weights: torch.Tensor | None,
    ) -> None:
        self.route, self.grid = route, grid
        #: The batch's weights of ids, which get the gradient.
        self.weights = weights
        packed = [each if isinstance(each, Fault) else pack(route, each) for each in found]
        self._bags = [each for each in found if isinstance(each, FeatureBags)]
        self._packed = [each for each in packed if isinstance(each, Packed)]
        self._ranks = [0] if grid is None else ranks_present(grid)
        self._notes = [each.note for each in self._packed]
        self._error: Exception | None = None
        self._meeting: Meeting | None = None
        self._exchange: torch.Tensor | None = None
        self._steps: list[RankStep] | None = None
        if grid is not None and route.num_ranks > 1:
            self._faults = Faults(grid, "what is wrong with a batch")
            self._meeting = self._meet(grid, packed)
        else:
            wrong = [each for each in found if isinstance(each, Fault)]
            self._error = joint_error("", {0: wrong[0]}, 1) if wrong else None

    def _meet(self, grid: Grid, packed: Sequence[Packed | Fault]) -> Meeting:
        """Start the exchange of counts, with which each rank says whether its batch is valid."""
        nothing = torch.zeros(self.route.num_ranks, self.route.note_width, dtype=torch.int64)
        notes, statuses = [], []
        for rank, each in zip(self._ranks, packed, strict=True):
            fault = each if isinstance(each, Fault) else None
            notes.append(each.note if isinstance(each, Packed) else nothing)
            statuses.append(torch.tensor([self._faults.status((rank,), fault)]))
        with because("counts of a batch", implicit=False):
            return Meeting(grid, 0, one_tensor(grid, notes), one_tensor(grid, statuses))

    def send_ids(self) -> None:
        """Wait for the counts and start the exchange of ids. Later calls do nothing."""
        meeting, self._meeting = self._meeting, None
        if meeting is None or self.grid is None:
            return
        notes, statuses = meeting.finish()
        self._error = self._faults.error(statuses.flatten().tolist())
        if self._error is not None:
            return
        self._notes = part_per_rank(self.grid, notes)
        if self.route.travels:
            sizes = [
                message_sizes(self.route, rank, note)
                for rank, note in zip(self._ranks, self._notes, strict=True)
            ]
            messages, sent = [p.message for p in self._packed], [p.sent for p in self._packed]
            with because("ids of a batch", implicit=False):
                self._exchange = start_exchange(self.grid, messages, sent, sizes)

    def check(self) -> None:
        """Send the ids; raise if the batch is invalid on any rank."""
        self.send_ids()
        if self._error is not None:
            raise self._error

    def lengths_per_feature(self) -> list[torch.Tensor]:
        """The lengths of each feature's bags, as the batch has them."""
        columns = [
            [bags.lengths_of(feature) for bags in self._bags]
            for feature in range(self.route.num_features)
        ]
        if self.grid is None:
            return [column[0] for column in columns]
        return [one_tensor(self.grid, column) for column in columns]

    def arrive(self) -> list[RankStep]:
        """Wait for the ids that this rank has to look up."""
        self.check()
        if self._steps is None:
            self._steps = self._arrived()
        return self._steps

    def _arrived(self) -> list[RankStep]:
        messages = [p.message for p in self._packed]
        if self._exchange is not None:
            assert self.grid is not None, "an exchange without a mesh"
            messages, self._exchange = finished(self.grid, self._exchange), None
        steps = []
        for rank, bags, packed, notes, message in zip(
            self._ranks, self._bags, self._packed, self._notes, messages, strict=True
        ):
            requests = unpack(self.route, rank, message, notes) if self.route.legs[rank] else {}
            local = local_requests(self.route, rank, bags)
            packed.message = message[:0]  # it has been sent
            steps.append(RankStep(rank, bags, packed, notes, requests, local))
        return steps


class PrefetchQueue:
    """Batches whose counts are being exchanged and whose ids were not sent, in program order."""

    def __init__(self) -> None:
        self._batches: list[PrefetchedBatch] = []

    def add(self, batch: PrefetchedBatch) -> None:
        if batch.route.travels:
            self._batches.append(batch)

    def send_ids(self) -> None:
        """Send the ids of all batches; see Note [Two exchanges without waiting]."""
        batches, self._batches = self._batches, []
        for batch in batches:
            batch.send_ids()

    def __deepcopy__(self, memo: dict[int, Any]) -> PrefetchQueue:
        return PrefetchQueue()  # a batch belongs to the collection that prefetched it


def prefetch_batch(
    route: Route, grid: Grid | None, batch: Any, trouble: str | None, *, side_by_side: bool
) -> PrefetchedBatch:
    """Check a batch on every rank, and start the exchange of counts.

    `trouble` is what is wrong with the collection itself on this rank; all ranks will raise it.
    """
    try:
        jagged = Jagged.of(batch)
    except ArgumentError as error:
        return _invalid_batch(route, grid, unfit(str(error).rstrip(".")))
    if trouble is not None:
        return _invalid_batch(route, grid, Fault(f"{trouble}.", ShardwiseError))
    if grid is None and _differs_between_ranks(jagged):
        return _invalid_batch(route, grid, unfit(_ONE_BATCH))
    weights = jagged._weights
    train = weights is not None and weights.requires_grad and torch.is_grad_enabled()
    found = [
        bags_of(route.tiling.tables, each, weights_train=train, side_by_side=side_by_side)
        for each in _jagged_per_rank(grid, jagged)
    ]
    return PrefetchedBatch(route, grid, found, weights)


_ONE_BATCH = (
    "the batch differs between the ranks of a simulated world, but the collection is not sharded "
    "and takes one batch. Call shard(mesh, plan) first; the plan 'data_parallel' gives every rank "
    "all tables"
)


def _differs_between_ranks(batch: Jagged) -> bool:
    given = (batch.values, batch.lengths, batch._weights)
    return any(len(parts_of(each)) > 1 for each in given)


def _invalid_batch(route: Route, grid: Grid | None, fault: Fault) -> PrefetchedBatch:
    present = [0] if grid is None else ranks_present(grid)
    return PrefetchedBatch(route, grid, [fault] * len(present), None)


def _jagged_per_rank(grid: Grid | None, batch: Jagged) -> list[Jagged]:
    weights = None if batch._weights is None else batch._weights.detach()
    batch = batch.with_weights(weights)
    names = ("values", "lengths", "weights", "batch_sizes", "first")
    alike = not any(is_per_rank(getattr(batch, name)) for name in names)
    if grid is None or batch.problem is not None or alike:
        return [batch] * (1 if grid is None else len(ranks_present(grid)))
    columns: dict[str, Any] = {}
    for name in names:
        tensor = getattr(batch, name)
        parts = part_per_rank(grid, tensor) if tensor is not None else [None] * len(grid.ranks)
        columns[name] = parts
    found = []
    for place in range(len(grid.ranks)):
        one = Jagged(batch.features, columns["values"][place], lengths=columns["lengths"][place])
        one.weights = columns["weights"][place]
        one.batch_sizes = columns["batch_sizes"][place]
        one.first = columns["first"][place]
        found.append(one)
    return found
