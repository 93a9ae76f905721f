"""The lookup engine: ids go to the owners of rows, rows come back, then gradients go to the owners.

The front doors say which tables lie where (a `Route`), and hold the weights. They are collections
(`embedding`), sharded modules (`shard`) and DTensors (`ops.lookup`), of which the last use
the parts that need no table of their own: `ids` and `exchange`. Everything here handles
the ranks present, one after another: one in a real process, all in a simulated world. Without a
mesh there is one rank, and nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from shardwise._torch.functions import foreach_add
from shardwise.comm.watch import because
from shardwise.core.mesh import Grid
from shardwise.lookup.backends.backend import Backend, Lookups, Query, look_up_stacks, serving
from shardwise.lookup.backends.torch_kernels import products_of_rows
from shardwise.lookup.bags import PerFeature
from shardwise.lookup.exchange import finished, start_exchange
from shardwise.lookup.messages import WEIGHTS_TRAIN, Counts, RankBatch, any_rank
from shardwise.lookup.output import assemble_output, flatten_gradients
from shardwise.lookup.prefetch import PrefetchQueue
from shardwise.lookup.routing import Route, RowGroup
from shardwise.lookup.scratch import LARGE_BYTES, Lent
from shardwise.simulation.ranks import part_per_rank

#: `weights[i][k]` is stack k of the i-th rank present.
Weights = Sequence[Sequence[torch.Tensor]]

#: Elements of rows that are looked up at a time: 1 MB.
CHUNK_NUMBERS = 1 << 18


@dataclass(slots=True, kw_only=True)
class Engine:
    """What a lookup works with."""

    route: Route
    grid: Grid | None
    backend: Backend
    #: The factor of gradients: one over the number of ranks, or one.
    scale: float
    #: Batches whose ids are sent while rows or gradients are exchanged.
    queue: PrefetchQueue = field(default_factory=PrefetchQueue)
    #: The send buffer of both directions.
    scratch: Lent = field(default_factory=Lent)
    #: Memory for what arrives, in both directions.
    received: Lent = field(default_factory=Lent)
    #: The dtype in which rows and gradients are sent; None: that of the tables.
    exchange_dtype: torch.dtype | None = None

    def rows(
        self, weights: Weights, batches: Sequence[RankBatch], joined: bool
    ) -> list[list[torch.Tensor]]:
        """Per rank present, one tensor per feature; with `joined`, one with all side by side."""
        answers, own = [], []
        for batch, mine in zip(batches, weights, strict=True):
            # Of replicated tables, a rank looks up its own copy.
            own.append(self._look_up(batch, batch.own_requests, mine))
            answers.append(self._answer(batch, mine))
        counts = [batch.of_rows for batch in batches]
        received = self._exchange("rows of tables", counts, answers, dtype=self.exchange_dtype)
        each = zip(batches, received, own, strict=True)
        return [assemble_output(*rank, joined) for rank in each]

    def gradients(
        self,
        weights: Weights,
        batches: Sequence[RankBatch],
        grads: Sequence[torch.Tensor | None],
        joined: bool,
    ) -> tuple[list[Lookups], list[torch.Tensor] | None]:
        """Per rank present, the lookups in its stacks with the gradients of their bags, and the
        gradient of its weights of ids, if any rank's require grad.

        `grads` are those of the outputs. Lookups in replicated stacks are its own alone.
        """
        per_rank: list[list[torch.Tensor | None]] = [list(grads)]
        if self.grid is not None:
            empty: list[Any] = [None] * len(batches)
            columns = [empty if g is None else part_per_rank(self.grid, g) for g in grads]
            per_rank = [list(row) for row in zip(*columns, strict=True)]
        buffers, own = [], []
        for batch, each in zip(batches, per_rank, strict=True):
            flat, mine = flatten_gradients(batch, each, self.scale, joined, self.scratch)
            buffers.append(flat)
            own.append(mine)
        counts, dtype = [batch.of_rows for batch in batches], self.exchange_dtype
        received = self._exchange("gradients of rows", counts, buffers, back=True, dtype=dtype)
        lookups: list[Lookups] = []
        for batch, flat, mine in zip(batches, received, own, strict=True):
            stacks = self.route.tiling.stacks[batch.rank]
            found = batch.of_rows.by_stack(flat) | mine
            lookups.append(
                {k: (batch.query(k), rows.view(-1, stacks[k].width)) for k, rows in found.items()}
            )
        if not any_rank(batches, WEIGHTS_TRAIN):
            return lookups, None
        # Before any row changes. The weights are this rank's own: no mean over ranks.
        of_weights = self._weight_gradients(weights, batches, lookups)
        return lookups, [part / self.scale for part in of_weights]

    def _exchange(
        self,
        why: str,
        counts: Sequence[Counts],
        buffers: Sequence[torch.Tensor],
        *,
        back: bool = False,
        dtype: torch.dtype | None = None,
    ) -> list[torch.Tensor]:
        """Send flat answers to the requesting ranks; with `back`, gradients to the owners.

        They are sent in `dtype`, if given. Meanwhile the ids of the next batches are sent.
        """
        if self.grid is None or not self.route.travels:
            return list(buffers)
        nobody = [0] * self.route.num_ranks
        given = [np.sum([nobody, *each.given.values()], 0).tolist() for each in counts]
        wanted = [self.route.sums_by_rank(each.wanted) for each in counts]
        sent, received = (wanted, given) if back else (given, wanted)
        with because(why, implicit=False):
            rounded = [buffer.to(dtype or buffer.dtype) for buffer in buffers]
            started = start_exchange(self.grid, rounded, sent, received, self.received)
        self.queue.send_ids()
        arrived = finished(self.grid, started)
        return [part.to(buffer.dtype) for part, buffer in zip(arrived, buffers, strict=True)]

    # -- rows ------------------------------------------------------------------------------------

    def _answer(self, batch: RankBatch, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """The rows that a rank sends, flat and by requesting rank."""
        if len(batch.requests) == 1 and self.route.travels and weights[0].is_cpu:
            k = next(iter(batch.requests))
            weight, query = weights[k], batch.query(k)
            if query.num_bags * weight.shape[1] * weight.element_size() > LARGE_BYTES:
                return self._look_up_chunks(weight, query)
        answers = self._look_up(batch, batch.requests, weights)
        if len(answers) == 1:
            return next(iter(answers.values())).view(-1)
        parts = batch.of_rows.by_requester(answers)
        # A rank without tables sends an empty message of their dtype.
        num, device = sum(part.shape[0] for part in parts), batch.bags.values.device
        flat = self.scratch.numbers(num, self.route.dtype, device)
        return torch.cat(parts, out=flat) if parts else flat

    def _look_up(
        self, batch: RankBatch, stacks: Iterable[int], weights: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        stacks = list(stacks)
        queries = [batch.query(k) for k in stacks]
        found = look_up_stacks(self.backend, [weights[k] for k in stacks], queries)
        return dict(zip(stacks, found, strict=True))

    def _look_up_chunks(self, weight: torch.Tensor, query: Query) -> torch.Tensor:
        """Some thousand bags at a time, so that small results reuse the memory of the last ones."""
        width = weight.shape[1]
        flat = self.scratch.numbers(query.num_bags * width, weight.dtype)
        first = start = 0
        for rows in flat.view(query.num_bags, width).split(max(1, CHUNK_NUMBERS // width)):
            bags = slice(first, first + rows.shape[0])
            lengths = None if query.lengths is None else query.lengths[bags]
            num = rows.shape[0] if lengths is None else int(lengths.sum())
            ids = slice(start, start + num)
            weights = None if query.weights is None else query.weights[ids]
            part = Query(query.ids[ids], lengths, weights)
            rows.copy_(serving(self.backend, weight).look_up(weight, part))
            first, start = bags.stop, ids.stop
        return flat

    # -- weight gradients ------------------------------------------------------------------------
    # The gradient of the weights of ids: the dot product of each id's row and its bag's gradient.
    #
    # After the exchange of gradients, a row's owner has both. So owners compute one number per id
    # and send it back to the rank that requested the id; owners of different columns send partial
    # sums.

    def _weight_gradients(
        self, weights: Weights, batches: Sequence[RankBatch], lookups: Sequence[Lookups]
    ) -> list[torch.Tensor]:
        """Per rank present, one number for each of its ids."""
        found, counts, answers = [], [batch.of_ids() for batch in batches], []
        for batch, mine, each, count in zip(batches, weights, lookups, counts, strict=True):
            numbers = {k: self._along(mine[k], *lookup) for k, lookup in each.items()}
            device, dtype = batch.bags.values.device, self.route.weight_dtype
            nothing = torch.empty(0, dtype=dtype, device=device)
            answers.append(torch.cat([nothing, *count.by_requester(numbers)]).to(dtype))
            found.append(numbers)
        arrived = self._exchange("gradients of the weights of ids", counts, answers)
        return [
            _put_back(batch, flat.split(count.wanted), numbers)
            for batch, flat, count, numbers in zip(batches, arrived, counts, found, strict=True)
        ]

    def _along(self, table: torch.Tensor, query: Query, grad: torch.Tensor) -> torch.Tensor:
        """For each id that was looked up, its row times its bag's gradient."""
        backend = serving(self.backend, table)
        return getattr(backend, "weight_gradient", products_of_rows)(table, query, grad)


def _put_back(
    batch: RankBatch, from_blocks: Sequence[torch.Tensor], own: dict[int, torch.Tensor]
) -> torch.Tensor:
    bags = batch.bags
    dtype = batch.route.weight_dtype if bags.weights is None else bags.weights.dtype
    found = torch.zeros(bags.num_given, dtype=dtype, device=bags.values.device)
    targets = PerFeature(bags).of_ids(found[: bags.values.shape[0]])
    for piece, parts in batch.by_piece(from_blocks, own):
        numbers = torch.cat(parts).to(dtype)
        if isinstance(piece, RowGroup):
            numbers = batch.split[piece.group].in_batch(numbers)
        split = numbers.split(batch.num_ids[piece.features].tolist())
        foreach_add(list(piece.of_features(targets)), list(split))
    return found
