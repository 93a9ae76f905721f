"""The lookup engine: ids go to the owners of rows, rows come back, then gradients go to the owners.

The front doors say which tables lie where (a `Route`), and hold the weights. They are collections
(`embedding`), sharded modules (`shard.lookup`) and DTensors (`ops.lookup`), of which the last use
the parts that need no table of their own: `ids`, `order` and `exchange`. Everything here handles
the ranks present, one after another: one in a real process, all in a simulated world.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shardwise.core.mesh import Grid
from shardwise.lookup.backends.backend import Backend, Lookups
from shardwise.lookup.output import assemble_output, flatten_gradients
from shardwise.lookup.prefetch import PrefetchQueue
from shardwise.lookup.routing import Route
from shardwise.lookup.scratch import Scratch
from shardwise.lookup.step import RankStep, exchange_rows, gradients_per_stack, look_up
from shardwise.lookup.weight_gradients import weight_gradients, weights_train
from shardwise.simulation.ranks import part_per_rank


class Held(Protocol):
    """`weights[i][k]` is stack k of the i-th rank present."""

    weights: list[list[torch.Tensor]]
    dtype: torch.dtype


@dataclass(slots=True, kw_only=True)
class Engine:
    """What a lookup works with."""

    route: Route
    grid: Grid | None
    backend: Backend
    #: The factor of gradients: one over the number of ranks, or one.
    scale: float
    #: Send buffer of both directions; what was sent has arrived before the next write.
    scratch: Scratch
    #: Batches whose ids are sent while rows or gradients are exchanged.
    queue: PrefetchQueue
    #: The dtype in which rows and gradients are sent; None: that of the tables.
    exchange_dtype: torch.dtype | None = None

    def rows(self, held: Held, steps: Sequence[RankStep], joined: bool) -> list[list[torch.Tensor]]:
        """Per rank present, one tensor per feature; with `joined`, one with all side by side."""
        answers, local_rows = [], []
        for step, weights in zip(steps, held.weights, strict=True):
            flat, local = look_up(self.route, step, weights, held.dtype, self.backend, self.scratch)
            answers.append(flat)
            local_rows.append(local)
        received = self._exchange(steps, answers, back=False)
        return [
            assemble_output(self.route, step, flat, local, joined)
            for step, flat, local in zip(steps, received, local_rows, strict=True)
        ]

    def gradients(
        self,
        held: Held,
        steps: Sequence[RankStep],
        grads: Sequence[torch.Tensor | None],
        joined: bool,
    ) -> tuple[list[Lookups], list[Lookups], list[torch.Tensor] | None]:
        """Per rank present, the lookups of sharded stacks with the gradients of their bags, those
        of replicated stacks, and the gradient of its weights of ids, if any rank's require grad.

        `grads` are those of the outputs.
        """
        route, grid = self.route, self.grid
        per_rank: list[list[torch.Tensor | None]] = [list(grads)]
        if grid is not None:
            empty: list[Any] = [None] * len(steps)
            columns = [empty if g is None else part_per_rank(grid, g) for g in grads]
            per_rank = [list(row) for row in zip(*columns, strict=True)]
        buffers, local_rows = [], []
        for step, each in zip(steps, per_rank, strict=True):
            flat, local = flatten_gradients(route, step, each, self.scale, joined, self.scratch)
            buffers.append(flat)
            local_rows.append(local)
        received = self._exchange(steps, buffers, back=True)
        lookups: list[Lookups] = []
        all_local: list[Lookups] = []
        for step, flat, local in zip(steps, received, local_rows, strict=True):
            per_stack = gradients_per_stack(route, step, flat) if step.requests else {}
            lookups.append({k: (step.query(k), grad) for k, grad in per_stack.items()})
            all_local.append({k: (step.query(k), grad) for k, grad in local.items()})
        of_weights = None
        if weights_train(steps):
            # Before any row changes. The weights are this rank's own: no mean over ranks.
            found = weight_gradients(
                route, grid, steps, held.weights, lookups, all_local, self.backend
            )
            of_weights = [part / self.scale for part in found]
        return lookups, all_local, of_weights

    def _exchange(
        self, steps: Sequence[RankStep], buffers: Sequence[torch.Tensor], *, back: bool
    ) -> list[torch.Tensor]:
        return exchange_rows(
            self.route,
            self.grid,
            steps,
            buffers,
            back=back,
            dtype=self.exchange_dtype,
            meanwhile=self.queue.send_ids,
        )
