"""The lookup of a collection as one autograd function: all tables, features and ranks present."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core.mesh import Grid
from shardwise.core.once import differentiated_once
from shardwise.core.untraced import UntracedFunction
from shardwise.dispatch.foreach import count_writes
from shardwise.embedding.backends.backend import Backend, Query
from shardwise.embedding.exchange.gradients import (
    Lookups,
    Rows,
    mean_over_replicas,
    row_gradients,
    sum_of_copies,
    table_gradient,
    without_tables,
)
from shardwise.embedding.exchange.output import assemble_output, flatten_gradients
from shardwise.embedding.exchange.prefetch import PrefetchedBatch, PrefetchQueue
from shardwise.embedding.exchange.routing import Route
from shardwise.embedding.exchange.scratch import Scratch
from shardwise.embedding.exchange.step import RankStep, exchange_rows, gradients_per_stack, look_up
from shardwise.embedding.exchange.weight_gradients import weight_gradients, weights_train
from shardwise.embedding.in_backward import InBackward
from shardwise.embedding.stacks import Stacks
from shardwise.simulation.ranks import one_tensor, part_per_rank
from shardwise.training.reducer import reduction_for


@dataclass(slots=True)
class Engine:
    """What a lookup works with."""

    route: Route
    grid: Grid | None
    stacks: Stacks
    backend: Backend
    optimizer: InBackward | None
    sparse: bool
    #: The factor of gradients: one over the number of ranks, or one.
    scale: float
    #: Send buffer of both directions; what was sent has arrived before the next write.
    scratch: Scratch
    #: Batches whose ids are sent while rows or gradients are exchanged.
    queue: PrefetchQueue


@dataclass(frozen=True, slots=True)
class Updated:
    """Which tables backward updates, and all parameters, which are views of the stacks."""

    trained: list[bool]
    parameters: list[torch.Tensor]


def run_lookup(
    engine: Engine, batch: PrefetchedBatch, parameters: list[torch.Tensor], *, joined: bool
) -> tuple[torch.Tensor, ...]:
    """One tensor per feature; with `joined`, one with all features side by side."""
    if engine.optimizer is None:
        return _Lookup.apply(engine, batch, joined, batch.weights, *parameters)
    # The tables are not inputs of autograd then: `start` makes it call backward.
    start = torch.zeros((), requires_grad=any(p.requires_grad for p in parameters))
    return _FusedLookup.apply(
        engine,
        batch,
        joined,
        Updated([p.requires_grad for p in parameters], parameters),
        batch.weights,
        start,
    )


def _forward(
    engine: Engine, batch: PrefetchedBatch, joined: bool
) -> tuple[list[RankStep], tuple[Any, ...]]:
    route, grid = engine.route, engine.grid
    steps = batch.arrive()
    answers, local_rows = [], []
    for step, weights in zip(steps, engine.stacks.weights, strict=True):
        flat, local = look_up(
            route, step, weights, engine.stacks.dtype, engine.backend, engine.scratch
        )
        answers.append(flat)
        local_rows.append(local)
    received = exchange_rows(
        route, grid, steps, answers, back=False, meanwhile=engine.queue.send_ids
    )
    outputs = [
        assemble_output(route, step, flat, local, joined)
        for step, flat, local in zip(steps, received, local_rows, strict=True)
    ]
    if grid is None:
        return steps, tuple(outputs[0])
    return steps, tuple(one_tensor(grid, column) for column in zip(*outputs, strict=True))


def _backward(
    engine: Engine, steps: list[RankStep], grads: tuple[torch.Tensor | None, ...], joined: bool
) -> tuple[list[Lookups], list[dict[int, Rows]], torch.Tensor | None]:
    """Per rank present, the lookups of sharded stacks with their gradients, and the row gradients
    of replicated stacks, summed over ranks; then the gradient of the ids' weights."""
    route, grid = engine.route, engine.grid
    per_rank: list[list[torch.Tensor | None]]
    if grid is None:
        per_rank = [list(grads)]
    else:
        empty: list[Any] = [None] * len(steps)
        columns = [empty if g is None else part_per_rank(grid, g) for g in grads]
        per_rank = [list(row) for row in zip(*columns, strict=True)]
    buffers, local_rows = [], []
    for step, each in zip(steps, per_rank, strict=True):
        flat, local = flatten_gradients(route, step, each, engine.scale, joined, engine.scratch)
        buffers.append(flat)
        local_rows.append(local)
    received = exchange_rows(
        route, grid, steps, buffers, back=True, meanwhile=engine.queue.send_ids
    )
    lookups: list[Lookups] = []
    copies, all_local = [], []
    for place, (step, flat, local) in enumerate(zip(steps, received, local_rows, strict=True)):
        per_stack = gradients_per_stack(route, step, flat) if step.requests else {}
        lookups.append({k: (step.query(k), grad) for k, grad in per_stack.items()})
        local_lookups = {k: (step.query(k), grad) for k, grad in local.items()}
        all_local.append(local_lookups)
        copies.append(row_gradients(engine.stacks, place, engine.backend, local_lookups))
    of_weights = None
    if weights_train(steps):
        # Before any row changes. The weights are this rank's own: no mean over ranks.
        found = weight_gradients(
            route, grid, steps, engine.stacks.weights, lookups, all_local, engine.backend
        )
        if steps[0].bags.weights_train:
            found = [part / engine.scale for part in found]
            of_weights = found[0] if grid is None else one_tensor(grid, found)
    return lookups, sum_of_copies(engine.stacks, copies), of_weights


class _Lookup(UntracedFunction):
    """A lookup whose backward returns the gradients of the tables' parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        engine: Engine,
        batch: PrefetchedBatch,
        joined: bool,
        weights: torch.Tensor | None,
        *parameters: torch.Tensor,
    ) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.engine, ctx.joined = engine, joined
        ctx.save_for_backward(weights, *parameters)  # so that autograd checks their versions
        ctx.steps, outputs = _forward(engine, batch, joined)
        return outputs

    @staticmethod
    @differentiated_once("an embedding collection")
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        engine: Engine = ctx.engine
        needed = ctx.needs_input_grad[4:]
        lookups, copies, of_weights = _backward(engine, ctx.steps, grads, ctx.joined)
        rows = [
            {**row_gradients(engine.stacks, place, engine.backend, queries), **copies[place]}
            for place, queries in enumerate(lookups)
        ]
        found = [
            table_gradient(engine.stacks, table, rows, sparse=engine.sparse) if need else None
            for table, need in enumerate(needed)
        ]
        return (None, None, None, of_weights, *found)


class _FusedLookup(UntracedFunction):
    """A lookup whose backward updates the tables; no table gradient is materialised."""

    @staticmethod
    def forward(
        ctx: Any,
        engine: Engine,
        batch: PrefetchedBatch,
        joined: bool,
        updated: Updated,
        weights: torch.Tensor | None,
        start: torch.Tensor,
    ) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.engine, ctx.joined = engine, joined
        ctx.updated = updated
        ctx.steps, outputs = _forward(engine, batch, joined)
        return outputs

    @staticmethod
    @differentiated_once("an embedding collection")
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        engine: Engine = ctx.engine
        lookups, copies, of_weights = _backward(engine, ctx.steps, grads, ctx.joined)
        updated: Updated = ctx.updated
        if not all(updated.trained):
            _leave_out(engine.stacks, updated.trained, lookups, copies)
        replicas = reduction_for(updated.parameters[0])
        if replicas is not None and replicas.means:
            lookups, copies = mean_over_replicas(
                engine.stacks, engine.backend, replicas, lookups, copies
            )
        assert engine.optimizer is not None, "fused lookups have an optimizer"
        engine.optimizer.take(lookups, copies)
        # The stacks were written to directly: count it as a write to the parameters.
        count_writes(updated.parameters)
        return None, None, None, None, of_weights, None


def _leave_out(
    stacks: Stacks,
    trained: list[bool],
    lookups: list[Lookups],
    copies: list[dict[int, Rows]],
) -> None:
    """Drop the lookups and rows of tables that are not trained."""
    for place, rank in enumerate(stacks.ranks):
        for k, stack in enumerate(stacks.tiling.stacks[rank]):
            frozen = [shard for table, shard in stack.shards if not trained[table]]
            if not frozen:
                continue
            if k in lookups[place]:
                query, grad = lookups[place][k]
                lookups[place][k] = (without_tables(query, frozen), grad)
            if k in copies[place]:
                rows, values = copies[place][k]
                kept = without_tables(Query(rows, None, None), frozen)
                assert kept.lengths is not None, "without_tables gives lengths"
                copies[place][k] = (kept.ids, values[kept.lengths.bool()])
