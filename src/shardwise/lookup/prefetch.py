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

import numpy as np
import torch

from shardwise.comm.agreement import (
    Fault,
    Faults,
    Meeting,
    backward_error,
    freezing_error,
    joint_error,
)
from shardwise.comm.watch import because
from shardwise.core.mesh import Grid
from shardwise.errors import BatchError, ShardwiseError
from shardwise.lookup.bags import FeatureBags, PerFeature
from shardwise.lookup.exchange import (
    finished,
    places_together,
    ranks_present,
    start_exchange,
)
from shardwise.lookup.messages import (
    FROZEN,
    NEEDS_BACKWARD,
    NO_BACKWARD,
    RankBatch,
    groups_by_id,
)
from shardwise.lookup.routing import Route
from shardwise.simulation.ranks import one_tensor, part_per_rank, present


def unreadable(error: Exception) -> Fault:
    """An error of any kind that a batch led to: the other ranks wait for this one."""
    kind = type(error) if isinstance(error, ShardwiseError) else BatchError
    return Fault(f"the batch cannot be read: {type(error).__name__}: {error}", kind)


class PrefetchedBatch:
    """What `prefetch` returns; give it to the collection instead of the batch.

    An invalid batch on any rank raises on every rank when it is used.
    """

    #: Whether one rank serves it by fused kernels; see `alone`.
    is_alone = False

    def __init__(
        self,
        route: Route,
        grid: Grid | None,
        found: Sequence[FeatureBags | Fault],
        weights: torch.Tensor | None,
        lead: str = "",
    ) -> None:
        """`found` is the batch of each rank present, or what is wrong with it: an error message
        begins with `lead`. On a rank outside the mesh the batch is checked, and nothing is sent."""
        grid = None if grid is None or grid.outside else grid
        self.route, self.grid = route, grid
        #: The batch's weights of ids, which get the gradient.
        self.weights = weights
        ranks = [0] if grid is None else ranks_present(grid)
        made = list(map(self._packed, ranks, found))
        self._batches = [each for each in made if isinstance(each, RankBatch)]
        self._error: Exception | None = None
        self._meeting: Meeting | None = None
        self._exchange: torch.Tensor | None = None
        self._has_arrived = False
        if grid is not None and route.num_ranks > 1:
            self._lead = lead
            self._faults = Faults(grid, "what is wrong with a batch", lead)
            self._meeting = self._meet(grid, made)
            return
        for each in made:
            if isinstance(each, Fault):
                self._error = joint_error(lead, {0: each}, 1)
            else:
                each.expect(each.notes, each.by_id)

    def _packed(self, rank: int, bags: FeatureBags | Fault) -> RankBatch | Fault:
        try:
            return bags if isinstance(bags, Fault) else RankBatch(self.route, rank, bags)
        except Exception as error:
            return unreadable(error)

    def _meet(self, grid: Grid, made: Sequence[RankBatch | Fault]) -> Meeting:
        """Start the exchange of counts, with which each rank says whether its batch is valid."""
        nothing = np.zeros((self.route.num_ranks, self.route.note_width), dtype=np.int64)
        nobody = [0] * (1 + 2 * len(self.route.groups)) if self.route.groups else []
        notes, statuses = [], []
        for rank, each in zip(present(grid), made, strict=True):
            if isinstance(each, Fault):
                note, said = nothing, [self._faults.status(rank, each), *nobody]
            else:
                note, said = each.notes, [0, *each.told]
            notes.append(torch.from_numpy(note))
            statuses.append(torch.tensor(said))
        with because("counts of a batch", implicit=False):
            return Meeting(grid, 0, one_tensor(grid, notes), one_tensor(grid, statuses))

    def send_ids(self) -> None:
        """Wait for the counts and start the exchange of ids. Later calls do nothing."""
        meeting, self._meeting = self._meeting, None
        if meeting is None or self.grid is None:
            return
        notes, told = meeting.finish()
        # All ranks of a group were told the same.
        everyones = part_per_rank(self.grid, told)
        groups = [(everyones[places[0]], places) for places in places_together(self.grid)]
        statuses = [status for told, _ in groups for status in told[:, 0].tolist()]
        arrived = [note.numpy() for note in part_per_rank(self.grid, notes)]
        self._error = self._faults.error(statuses) or self._backward_error(arrived)
        if self._error is not None:
            return
        sizes: list[list[int]] = [[] for _ in arrived]
        for told, places in groups:
            by_id = groups_by_id(self.route, told[:, 1:].numpy())
            for place in places:
                sizes[place] = self._batches[place].expect(arrived[place], by_id)
        if self.route.travels:
            messages, sent = zip(*(batch.messages() for batch in self._batches), strict=True)
            with because("ids of a batch", implicit=False):
                self._exchange = start_exchange(self.grid, messages, sent, sizes)

    def _backward_error(self, arrived: Sequence[np.ndarray]) -> Exception | None:
        """What all ranks raise if some cannot take part in the backward of others, or freeze other
        copies of tables."""
        assert self.grid is not None, "a batch that is sent has a mesh"
        for flags, rank in zip(
            [notes[:, -1] for notes in arrived], present(self.grid), strict=True
        ):
            needs, lacks = flags & NEEDS_BACKWARD, flags & NO_BACKWARD
            frozen = flags // FROZEN
            if needs.any() and (lacks.any() or (frozen != frozen[0]).any()):
                (ranks,) = [each for each in self.grid.submeshes if rank in each]
                lead = self._lead or "A collection: "
                error = backward_error(lead, ranks, needs.tolist(), lacks.tolist())
                return error or freezing_error(lead, ranks, (frozen != frozen[0]).tolist())
        return None

    def check(self) -> None:
        """Send the ids; raise if the batch is invalid on any rank."""
        self.send_ids()
        if self._error is not None:
            raise self._error

    def look_up(self, *, trace: bool) -> Any:
        """By fused kernels, for a single rank."""
        raise NotImplementedError

    def lengths_per_feature(self) -> list[torch.Tensor]:
        """The lengths of each feature's bags, as the batch has them."""
        found = [PerFeature(batch.given).lengths for batch in self._batches]
        if self.grid is None:
            return list(found[0])
        return [one_tensor(self.grid, column) for column in zip(*found, strict=True)]

    def zeros(
        self, dtype: torch.dtype, device: torch.device, *, joined: bool, trained: bool
    ) -> tuple[torch.Tensor, ...]:
        """What stands for the rows of each feature on a rank outside the mesh.

        The shapes are those that other ranks get, so that the layers above run there too.
        """
        dims, (batch,) = self.route.dims, self._batches
        numbers = batch.num_rows.tolist()
        if joined:
            dims, numbers = [sum(dims)], numbers[:1]
        return tuple(
            torch.zeros(number, dim, dtype=dtype, device=device, requires_grad=trained)
            for number, dim in zip(numbers, dims, strict=True)
        )

    def arrive(self) -> list[RankBatch]:
        """Wait for the ids that this rank has to look up."""
        self.check()
        if not self._has_arrived:
            if self._exchange is None or self.grid is None:
                messages = [batch.messages()[0] for batch in self._batches]
            else:
                messages, self._exchange = finished(self.grid, self._exchange), None
            for batch, message in zip(self._batches, messages, strict=True):
                batch.receive(message)
            self._has_arrived = True
        return self._batches


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
