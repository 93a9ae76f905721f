"""The lookup of a collection as one autograd function: all tables, features and ranks present."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch.dispatch import without_subclass_functions
from shardwise.core.untraced import UntracedFunction, differentiated_once
from shardwise.dispatch.foreach import count_writes
from shardwise.embedding.gradients import (
    mean_over_replicas,
    row_gradients,
    sum_of_copies,
    table_gradient,
    without_tables,
)
from shardwise.embedding.in_backward import InBackward
from shardwise.embedding.stacks import Stacks
from shardwise.embedding.watched import WriteCount
from shardwise.lookup.backends.backend import Lookups, Query, Rows
from shardwise.lookup.engine import Engine
from shardwise.lookup.prefetch import PrefetchedBatch
from shardwise.lookup.step import RankStep
from shardwise.simulation.ranks import one_tensor
from shardwise.training.reducer import reduction_for

if TYPE_CHECKING:
    from shardwise.embedding.alone import OneRank
    from shardwise.kernels.lookup import Trace


@dataclass(slots=True, kw_only=True)
class CollectionEngine(Engine):
    """The engine of a collection, with its stacks and what backward does to them."""

    stacks: Stacks
    optimizer: InBackward | None
    sparse: bool
    writes: WriteCount
    #: Serves a single rank by fused kernels alone, where those can.
    alone: OneRank | None = None


@dataclass(frozen=True, slots=True)
class Updated:
    """All parameters, which are views of the stacks, and which tables backward updates."""

    parameters: list[torch.Tensor]
    #: None for all of them.
    trained: list[bool] | None


_START = torch.zeros((), device="cpu", requires_grad=True)
_REQUIRES_GRAD = operator.attrgetter("requires_grad")


def run_lookup(
    engine: CollectionEngine,
    batch: PrefetchedBatch,
    parameters: list[torch.Tensor],
    *,
    joined: bool,
) -> tuple[torch.Tensor, ...]:
    """One tensor per feature; with `joined`, one with all features side by side."""
    if engine.optimizer is None:
        return _Lookup.apply(engine, batch, joined, batch.weights, *parameters)
    trained: list[bool] | None = []
    if torch.is_grad_enabled():
        with without_subclass_functions():  # twice as fast; there may be a thousand tables
            is_frozen = not all(map(_REQUIRES_GRAD, parameters))
            trained = list(map(_REQUIRES_GRAD, parameters)) if is_frozen else None
    updated = Updated(parameters, trained)
    # The tables are not inputs of autograd then: `start` makes it call backward.
    start = _START if trained is None or True in trained else None
    return _FusedLookup.apply(engine, batch, joined, updated, batch.weights, start)


def _forward(
    engine: CollectionEngine, batch: PrefetchedBatch, joined: bool, *, trace: bool
) -> tuple[Trace | None, tuple[Any, ...]]:
    """What the kernels recorded for the update, if they can make it, and the outputs."""
    if batch.is_alone:
        outputs, found = batch.look_up(trace=trace)
        return found, outputs
    grid, outputs_of = engine.grid, engine.rows(engine.stacks, batch.arrive(), joined)
    if grid is None:
        return None, tuple(outputs_of[0])
    return None, tuple(one_tensor(grid, column) for column in zip(*outputs_of, strict=True))


def _backward(
    engine: CollectionEngine,
    steps: list[RankStep],
    grads: tuple[torch.Tensor | None, ...],
    joined: bool,
) -> tuple[list[Lookups], list[dict[int, Rows]], torch.Tensor | None]:
    """Per rank present, the lookups of sharded stacks with their gradients, and the row gradients
    of replicated stacks, summed over ranks; then the gradient of the ids' weights."""
    stacks, grid = engine.stacks, engine.grid
    lookups, local, found = engine.gradients(stacks, steps, grads, joined)
    copies = [row_gradients(stacks, n, engine.backend, each) for n, each in enumerate(local)]
    of_weights = None
    if found is not None and steps[0].bags.weights_train:
        of_weights = found[0] if grid is None else one_tensor(grid, found)
    return lookups, sum_of_copies(stacks, copies), of_weights


class _Lookup(UntracedFunction):
    """A lookup whose backward returns the gradients of the tables' parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        engine: CollectionEngine,
        batch: PrefetchedBatch,
        joined: bool,
        weights: torch.Tensor | None,
        *parameters: torch.Tensor,
    ) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.engine, ctx.joined = engine, joined
        ctx.save_for_backward(weights, *parameters)  # so that autograd checks their versions
        ctx.batch = batch
        return _forward(engine, batch, joined, trace=False)[1]

    @staticmethod
    @differentiated_once("an embedding collection")
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        engine: CollectionEngine = ctx.engine
        needed = ctx.needs_input_grad[4:]
        lookups, copies, of_weights = _backward(engine, ctx.batch.arrive(), grads, ctx.joined)
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
        engine: CollectionEngine,
        batch: PrefetchedBatch,
        joined: bool,
        updated: Updated,
        weights: torch.Tensor | None,
        start: torch.Tensor | None,
    ) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.engine, ctx.joined = engine, joined
        ctx.updated, ctx.batch = updated, batch
        ctx.trace, outputs = _forward(engine, batch, joined, trace=ctx.needs_input_grad[5])
        return outputs

    @staticmethod
    @differentiated_once("an embedding collection")
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        engine: CollectionEngine = ctx.engine
        updated: Updated = ctx.updated
        replicas = reduction_for(updated.parameters[0])
        averaged = replicas is not None and bool(replicas.means)
        assert engine.optimizer is not None, "fused lookups have an optimizer"
        plain = updated.trained is None and not averaged and not engine.optimizer.is_holding
        if ctx.trace is not None and plain and not ctx.needs_input_grad[4]:
            ctx.batch.update(ctx.trace, grads)
            _count_writes(engine, updated.parameters)
            return None, None, None, None, None, None
        lookups, copies, of_weights = _backward(engine, ctx.batch.arrive(), grads, ctx.joined)
        if updated.trained is not None:
            _leave_out(engine.stacks, updated.trained, lookups, copies)
        if replicas is not None and averaged:
            lookups, copies = mean_over_replicas(
                engine.stacks, engine.backend, replicas, lookups, copies
            )
        engine.optimizer.take(lookups, copies)
        _count_writes(engine, updated.parameters)
        return None, None, None, None, of_weights, None


def _count_writes(engine: CollectionEngine, parameters: list[torch.Tensor]) -> None:
    """The stacks were written to directly: count it as a write to the parameters."""
    grid = engine.grid
    if grid is not None and grid.lends:
        count_writes(parameters)
        return
    if grid is not None:
        grid.num_writes += 1
    if torch.is_inference_mode_enabled():
        return
    if grid is None:
        torch.autograd.graph.increment_version(parameters)
    else:
        engine.writes.add()


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
