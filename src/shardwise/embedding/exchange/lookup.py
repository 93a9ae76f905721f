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
    Rows,
    mean_over_replicas,
    row_gradients,
    sum_of_copies,
    table_gradient,
    without_tables,
)
from shardwise.embedding.exchange.output import put_together, take_apart
from shardwise.embedding.exchange.prefetch import PrefetchedBatch, Queue
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
    #: What gradients are multiplied with: one over the number of ranks, or one.
    scale: float
    #: What is sent lies here, both ways; it has arrived before the next is written.
    scratch: Scratch
    #: Batches whose ids go out while rows or gradients travel.
    queue: Queue


@dataclass(frozen=True, slots=True)
class Updated:
    """Which tables backward updates, and their parameters, which are views of the stacks."""

    trained: list[bool]
    parameters: list[torch.Tensor]


def run_lookup(
    engine: Engine, ahead: PrefetchedBatch, parameters: list[torch.Tensor], *, joined: bool
) -> tuple[torch.Tensor, ...]:
    """One tensor per feature, or one of all features side by side."""
    if engine.optimizer is None:
        return _Lookup.apply(engine, ahead, joined, ahead.weights, *parameters)
    # The tables take no part in autograd then: something has to call backward.
    start = torch.zeros((), requires_grad=any(p.requires_grad for p in parameters))
    resting = [p.requires_grad for p in parameters]
    return _FusedLookup.apply(
        engine, ahead, joined, Updated(resting, parameters), ahead.weights, start
    )


def _forward(
    engine: Engine, ahead: PrefetchedBatch, joined: bool
) -> tuple[list[RankStep], tuple[Any, ...]]:
    route, grid = engine.route, engine.grid
    visits = ahead.arrive()
    answers, homes = [], []
    for visit, weights in zip(visits, engine.stacks.weights, strict=True):
        flat, home = look_up(
            route, visit, weights, engine.stacks.dtype, engine.backend, engine.scratch
        )
        answers.append(flat)
        homes.append(home)
    received = exchange_rows(
        route, grid, visits, answers, back=False, meanwhile=engine.queue.send_ids
    )
    outputs = [
        put_together(route, visit, flat, home, joined)
        for visit, flat, home in zip(visits, received, homes, strict=True)
    ]
    if grid is None:
        return visits, tuple(outputs[0])
    return visits, tuple(one_tensor(grid, column) for column in zip(*outputs, strict=True))


def _backward(
    engine: Engine, visits: list[RankStep], grads: tuple[torch.Tensor | None, ...], joined: bool
) -> tuple[list[dict[int, tuple[Query, torch.Tensor]]], list[dict[int, Rows]], torch.Tensor | None]:
    """Per rank present: what each sharded stack was asked and the gradients of its answers; the
    rows of copied stacks, summed over ranks; and the gradient of the ids' weights."""
    route, grid = engine.route, engine.grid
    per_rank: list[list[torch.Tensor | None]]
    if grid is None:
        per_rank = [list(grads)]
    else:
        empty: list[Any] = [None] * len(visits)
        columns = [empty if g is None else part_per_rank(grid, g) for g in grads]
        per_rank = [list(row) for row in zip(*columns, strict=True)]
    buffers, homes = [], []
    for visit, each in zip(visits, per_rank, strict=True):
        flat, home = take_apart(route, visit, each, engine.scale, joined, engine.scratch)
        buffers.append(flat)
        homes.append(home)
    received = exchange_rows(
        route, grid, visits, buffers, back=True, meanwhile=engine.queue.send_ids
    )
    asked: list[dict[int, tuple[Query, torch.Tensor]]] = []
    copies, at_homes = [], []
    for place, (visit, flat, home) in enumerate(zip(visits, received, homes, strict=True)):
        per_stack = gradients_per_stack(route, visit, flat) if visit.asked else {}
        asked.append({k: (visit.query(k), grad) for k, grad in per_stack.items()})
        at_home = {k: (visit.query(k), grad) for k, grad in home.items()}
        at_homes.append(at_home)
        copies.append(row_gradients(engine.stacks, place, engine.backend, at_home))
    of_weights = None
    if weights_train(visits):
        # Before any row changes. The loss is this rank's own: no mean over ranks.
        found = weight_gradients(
            route, grid, visits, engine.stacks.weights, asked, at_homes, engine.backend
        )
        if visits[0].bags.weights_train:
            found = [part / engine.scale for part in found]
            of_weights = found[0] if grid is None else one_tensor(grid, found)
    return asked, sum_of_copies(engine.stacks, copies), of_weights


class _Lookup(UntracedFunction):
    """Gradients go to the tables' parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        engine: Engine,
        ahead: PrefetchedBatch,
        joined: bool,
        weights: torch.Tensor | None,
        *parameters: torch.Tensor,
    ) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.engine, ctx.joined = engine, joined
        ctx.save_for_backward(weights, *parameters)  # what the gradients depend on
        ctx.visits, outputs = _forward(engine, ahead, joined)
        return outputs

    @staticmethod
    @differentiated_once("an embedding collection")
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        engine: Engine = ctx.engine
        needed = ctx.needs_input_grad[4:]
        asked, copies, of_weights = _backward(engine, ctx.visits, grads, ctx.joined)
        rows = [
            {**row_gradients(engine.stacks, place, engine.backend, queries), **copies[place]}
            for place, queries in enumerate(asked)
        ]
        found = [
            table_gradient(engine.stacks, table, rows, sparse=engine.sparse) if need else None
            for table, need in enumerate(needed)
        ]
        return (None, None, None, of_weights, *found)


class _FusedLookup(UntracedFunction):
    """Backward updates the tables; no gradient of theirs is made."""

    @staticmethod
    def forward(
        ctx: Any,
        engine: Engine,
        ahead: PrefetchedBatch,
        joined: bool,
        updated: Updated,
        weights: torch.Tensor | None,
        start: torch.Tensor,
    ) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.engine, ctx.joined = engine, joined
        ctx.updated = updated
        ctx.visits, outputs = _forward(engine, ahead, joined)
        return outputs

    @staticmethod
    @differentiated_once("an embedding collection")
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        engine: Engine = ctx.engine
        asked, copies, of_weights = _backward(engine, ctx.visits, grads, ctx.joined)
        updated: Updated = ctx.updated
        if not all(updated.trained):
            _leave_out(engine.stacks, updated.trained, asked, copies)
        replicas = reduction_for(updated.parameters[0])
        if replicas is not None and replicas.means:
            asked, copies = mean_over_replicas(
                engine.stacks, engine.backend, replicas, asked, copies
            )
        assert engine.optimizer is not None, "fused lookups have an optimizer"
        engine.optimizer.take(asked, copies)
        # The stacks were written to, below the parameters: their views have to know.
        count_writes(updated.parameters)
        return None, None, None, None, of_weights, None


def _leave_out(
    stacks: Stacks,
    trained: list[bool],
    asked: list[dict[int, tuple[Query, torch.Tensor]]],
    copies: list[dict[int, Rows]],
) -> None:
    """Drop what concerns tables that rest."""
    for place, rank in enumerate(stacks.ranks):
        for k, stack in enumerate(stacks.tiling.stacks[rank]):
            resting = [tile for table, tile in stack.tiles if not trained[table]]
            if not resting:
                continue
            if k in asked[place]:
                query, grad = asked[place][k]
                asked[place][k] = (without_tables(query, resting), grad)
            if k in copies[place]:
                rows, values = copies[place][k]
                kept = without_tables(Query(rows, None, None), resting)
                assert kept.lengths is not None, "without_tables gives lengths"
                copies[place][k] = (kept.ids, values[kept.lengths.bool()])
