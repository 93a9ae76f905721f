"""The lookup of a collection: one autograd function, and one op of a compiled graph."""

from __future__ import annotations

import itertools
import json
import operator
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch.dispatch import without_subclass_functions
from shardwise.comm.watch import because
from shardwise.core.untraced import UntracedFunction, differentiated_once, untraced
from shardwise.dispatch.variants import count_writes
from shardwise.effects import EffectOp
from shardwise.embedding.in_backward import InBackward
from shardwise.embedding.jagged import Jagged
from shardwise.embedding.stacks import Stacks, WriteCount
from shardwise.errors import ArgumentError, ShardwiseError, UnsupportedError
from shardwise.lookup.backends.backend import Backend, Lookups, Query, Rows, serving
from shardwise.lookup.engine import Engine
from shardwise.lookup.exchange import combined
from shardwise.lookup.ids import repeated
from shardwise.lookup.messages import NEEDS_BACKWARD, WEIGHTS_TRAIN, RankBatch, any_rank
from shardwise.lookup.prefetch import PrefetchedBatch
from shardwise.lookup.tiling import TableShard
from shardwise.ops.lookup.row_sparse import gather_rows
from shardwise.ops.lookup.row_sparse import make as make_row_sparse
from shardwise.simulation.local_tensor import collective_handlers
from shardwise.simulation.ranks import agreed, localize, one_tensor, part_per_rank
from shardwise.training.contract import Reduction
from shardwise.training.reducer import reduction_for

if TYPE_CHECKING:
    from shardwise.embedding.alone import OneRank
    from shardwise.embedding.collection import _Collection


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
    """What backward updates, and how often that had been updated before the lookup."""

    optimizer: InBackward
    num_steps: int
    #: All of them; they are views of the stacks.
    parameters: list[torch.Tensor]
    #: Which of their tables are updated; None for all.
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
    weights = batch.weights
    if (
        torch.is_grad_enabled()
        and not batch.is_alone
        and not any(map(_REQUIRES_GRAD, parameters))
        and (weights is None or not weights.requires_grad)
        and any_rank(batch.arrive(), NEEDS_BACKWARD)
    ):
        weights = _START  # for other ranks, whose gradients this one helps to make
    if engine.optimizer is None:
        return _Lookup.apply(engine, batch, joined, None, weights, None, *parameters)
    trained: list[bool] | None = []
    if torch.is_grad_enabled():
        with without_subclass_functions():  # twice as fast; there may be a thousand tables
            is_frozen = not all(map(_REQUIRES_GRAD, parameters))
            trained = list(map(_REQUIRES_GRAD, parameters)) if is_frozen else None
    updated = Updated(engine.optimizer, engine.optimizer.num_steps, parameters, trained)
    # The tables are not inputs of autograd then: `start` makes it call backward.
    start = _START if trained is None or True in trained else None
    return _Lookup.apply(engine, batch, joined, updated, weights, start)


def _backward(
    engine: CollectionEngine,
    steps: list[RankBatch],
    grads: tuple[torch.Tensor | None, ...],
    joined: bool,
) -> tuple[list[Lookups], list[dict[int, Rows]], torch.Tensor | None]:
    """Per rank present, the lookups of sharded stacks with their gradients, and the row gradients
    of replicated stacks, summed over ranks; then the gradient of the ids' weights."""
    stacks, grid = engine.stacks, engine.grid
    lookups, found = engine.gradients(stacks.weights, steps, grads, joined)
    copies = []
    for place, (step, mine) in enumerate(zip(steps, lookups, strict=True)):
        own = {k: mine.pop(k) for k in step.own_requests}
        copies.append(row_gradients(stacks, place, engine.backend, own))
    of_weights = None
    if found is not None and steps[0].bags.weights_train:
        of_weights = found[0] if grid is None else one_tensor(grid, found)
    return lookups, sum_of_copies(stacks, copies), of_weights


class _Lookup(UntracedFunction):
    """`apply(engine, batch, joined, updated, weights, start, *parameters)`.

    Backward returns the gradients of the parameters, or updates the tables of `updated`, of which
    no gradient is materialised.
    """

    @staticmethod
    def forward(
        ctx: Any,
        engine: CollectionEngine,
        batch: PrefetchedBatch,
        joined: bool,
        updated: Updated | None,
        weights: torch.Tensor | None,
        start: torch.Tensor | None,
        *parameters: torch.Tensor,
    ) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.engine, ctx.batch, ctx.joined, ctx.updated = engine, batch, joined, updated
        if updated is None:
            ctx.save_for_backward(weights, *parameters)  # so that autograd checks their versions
        #: What the kernels recorded for the update, if they can make it.
        ctx.trace = None
        if batch.is_alone:
            outputs, ctx.trace = batch.look_up(trace=ctx.needs_input_grad[5])
            return outputs
        found, grid = engine.rows(engine.stacks.weights, batch.arrive(), joined), engine.grid
        if grid is None:
            return tuple(found[0])
        return tuple(one_tensor(grid, column) for column in zip(*found, strict=True))

    @staticmethod
    @differentiated_once("an embedding collection")
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        engine: CollectionEngine = ctx.engine
        if ctx.updated is not None:
            return None, None, None, None, _update(ctx, ctx.updated, grads), None
        lookups, copies, of_weights = _backward(engine, ctx.batch.arrive(), grads, ctx.joined)
        rows = [
            {**row_gradients(engine.stacks, place, engine.backend, queries), **copies[place]}
            for place, queries in enumerate(lookups)
        ]
        found = [
            table_gradient(engine.stacks, table, rows, sparse=engine.sparse) if need else None
            for table, need in enumerate(ctx.needs_input_grad[6:])
        ]
        return (None, None, None, None, of_weights, None, *found)


def _update(
    ctx: Any, updated: Updated, grads: tuple[torch.Tensor | None, ...]
) -> torch.Tensor | None:
    """Update the tables in backward; the gradient of the weights of ids."""
    engine: CollectionEngine = ctx.engine
    optimizer, replicas = updated.optimizer, reduction_for(updated.parameters[0])
    averaged = replicas is not None and bool(replicas.means)
    plain = updated.trained is None and not averaged and not optimizer.is_holding
    is_used = any(grad is not None for grad in grads)
    if ctx.trace is not None and plain and is_used and not ctx.needs_input_grad[4]:
        ctx.batch.update(ctx.trace, grads)
        _count_writes(engine, updated.parameters)
        return None
    steps = ctx.batch.arrive()
    if updated.num_steps != optimizer.num_steps and any_rank(steps, WEIGHTS_TRAIN):
        raise ShardwiseError(
            "The gradient of the weights of ids needs the rows that were looked up, and backward "
            "of another lookup has updated the tables since. Run backward inside "
            "optimizer.hold(), then call optimizer.step()."
        )
    lookups, copies, of_weights = _backward(engine, steps, grads, ctx.joined)
    lookups = [
        {**mine, **{k: (Query(rows, None, None), sums) for k, (rows, sums) in copied.items()}}
        for mine, copied in zip(lookups, copies, strict=True)
    ]
    if updated.trained is not None:
        _leave_out(engine.stacks, updated.trained, lookups)
    if replicas is not None and averaged:
        lookups = mean_over_replicas(engine.stacks, engine.backend, replicas, lookups)
    optimizer.take(lookups, of_replicas=averaged)
    _count_writes(engine, updated.parameters)
    return of_weights


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


def _leave_out(stacks: Stacks, trained: list[bool], lookups: list[Lookups]) -> None:
    """Drop the lookups in tables that are not trained."""
    for rank, mine in zip(stacks.ranks, lookups, strict=True):
        for k, (query, grad) in mine.items():
            shards = stacks.tiling.stacks[rank][k].shards
            kept = [trained[table] for table, _ in shards]
            if not all(kept):
                bases = [shard.base for _, shard in shards]
                mine[k] = (of_some_tables(query, bases, kept), grad)


# -- gradients -----------------------------------------------------------------------------------
# From bag gradients to row gradients and the gradients of tables' parameters.


def row_gradients(
    stacks: Stacks, place: int, backend: Backend, lookups: Lookups
) -> dict[int, Rows]:
    """Per stack of one rank, the rows with a gradient."""
    weights = stacks.weights[place]
    return {
        k: serving(backend, weights[k]).row_gradient(weights[k], *lookup)
        for k, lookup in lookups.items()
    }


def sum_of_copies(stacks: Stacks, rows: Sequence[dict[int, Rows]]) -> list[dict[int, Rows]]:
    """The gradients of replicated tables, summed over ranks in one all-reduce.

    They are sent dense, with an extra column that says which rows any rank looked up.
    """
    if stacks.grid is None or not any(rows):
        return list(rows)
    parts: list[list[torch.Tensor]] = []
    for weights, per_stack in zip(stacks.weights, rows, strict=True):
        parts.append([])
        for k, (numbers, values) in per_stack.items():
            height, width = weights[k].shape
            marked = torch.cat([values, values.new_ones(values.shape[0], 1)], 1)
            dense = weights[k].new_zeros(height, width + 1).index_copy_(0, numbers, marked)
            parts[-1].append(dense.view(-1))
    with because("gradients of copied tables", implicit=False):
        totals = combined(stacks.grid, list(map(torch.cat, parts)))
    found: list[dict[int, Rows]] = []
    for place, (per_stack, total) in enumerate(zip(rows, totals, strict=True)):
        found.append({})
        flats = total.split([part.shape[0] for part in parts[place]])
        for k, flat in zip(per_stack, flats, strict=True):
            dense = flat.view(stacks.weights[place][k].shape[0], -1)
            numbers = dense[:, -1].nonzero().view(-1)
            found[-1][k] = numbers, dense.index_select(0, numbers)[:, :-1].contiguous()
    return found


def mean_over_replicas(
    stacks: Stacks, backend: Backend, replicas: Reduction, lookups: Sequence[Lookups]
) -> list[Lookups]:
    """The lookups of a backward pass, averaged over data axes outside the collection's mesh.

    Every replica gets the rows of all, in one order, so all make the same update.
    """
    grid, device = stacks.grid, stacks.device
    rows = [row_gradients(stacks, place, backend, each) for place, each in enumerate(lookups)]
    found: list[Lookups] = [{} for _ in rows]
    # A rank with fewer stacks takes part with empty ones, so that all communicate alike.
    no_rows = torch.empty(0, dtype=torch.int64, device=device)
    nothing = no_rows, torch.empty(0, 0, dtype=stacks.dtype, device=device)
    for k in range(max(map(len, stacks.tiling.stacks))):
        columns = zip(*(each.get(k, nothing) for each in rows), strict=True)
        numbers, values = (
            column[0] if grid is None else one_tensor(grid, column, sized=False)
            for column in columns
        )
        with because("gradients of replicated tables", implicit=False):
            for mesh, axis in replicas.means:
                both = localize(mesh, numbers), localize(mesh, values)
                numbers, values = gather_rows(*both, mesh, axis)
        every = [[agreed(x)] if grid is None else part_per_rank(grid, x) for x in (numbers, values)]
        for mine, rank, number, value in zip(found, stacks.ranks, *every, strict=True):
            if k < len(stacks.tiling.stacks[rank]):
                mine[k] = Query(number, None, None), value * replicas.share
    return found


def table_gradient(
    stacks: Stacks, table: int, rows: Sequence[dict[int, Rows]], *, sparse: bool
) -> torch.Tensor:
    """The gradient of a table's parameter, from the row gradients of its stacks."""
    found: list[Rows] = []
    for place, rank in enumerate(stacks.ranks):
        shard, first = stacks.tiling.shard_on(table, rank), stacks.first_copy[place]
        if shard is None:
            nothing = stacks.nothing_of(table)
            found.append((torch.empty(0, dtype=torch.int64, device=nothing.device), nothing[:0]))
        elif first < place and stacks.tiling.splits[table].replicated:
            found.append(found[first])  # the same on every rank, and stored once
        else:
            found.append(_between(rows[place][shard.stack], shard))
    if stacks.grid is not None:
        numbers, values = (
            one_tensor(stacks.grid, column, sized=False) for column in zip(*found, strict=True)
        )
        gradient = make_row_sparse(stacks.layout(table), numbers, values, coalesced=True)
        return gradient if sparse else gradient.terms()
    (numbers, values), one = found[0], stacks.tiling.tables[table]
    shape = (one.num_embeddings, one.embedding_dim)
    if not sparse:
        return values.new_zeros(shape).index_add_(0, numbers, values)
    return torch.sparse_coo_tensor(
        numbers.unsqueeze(0), values, shape, check_invariants=False, is_coalesced=True
    )


def _between(rows: Rows, shard: TableShard) -> Rows:
    numbers, values = rows
    edges = torch.tensor([shard.base, shard.base + shard.num_rows], device=numbers.device)
    start, end = torch.searchsorted(numbers, edges).tolist()
    return numbers[start:end] - shard.base, values[start:end]


def of_some_tables(query: Query, bases: Sequence[int], kept: Sequence[bool]) -> Query:
    """A query without the ids of tables that are not kept, whose bags become empty.

    `bases` are the first rows of the stack's tables.
    """
    ids, device = query.ids, query.ids.device
    # Without waiting for the device.
    edges = torch.tensor(bases[1:], dtype=ids.dtype).to(device, non_blocking=True)
    of_tables = torch.tensor(kept).to(device, non_blocking=True)
    keep = of_tables.index_select(0, torch.bucketize(ids, edges, right=True))
    lengths = query.lengths
    if lengths is None:
        lengths = keep.to(query.ids.dtype)
    else:
        bags = repeated(lengths, query.ids.shape[0])
        lengths = torch.bincount(bags[keep], minlength=lengths.shape[0]).to(lengths.dtype)
    weights = None if query.weights is None else query.weights[keep]
    return Query(query.ids[keep], lengths, weights, query.runs)


# -- in compiled code ----------------------------------------------------------------------------
# Note [Collections in compiled code]
# The output's size does not depend on the ids: a row for each bag. So a graph holds the lookup of
# all tables as one op, as in Note [Effect ops].
#
# The tables are not inputs of the graph. The op finds the collection by the number in a small
# tensor, its handle. The handle requires grad, so torch calls backward, which does what eager code
# does: it updates rows, or adds to the `.grad` of the parameters, sparse or not. So compiled code
# depends neither on the tables' layout, nor on which are trained, nor on gradients that are held.


_library = torch.library.Library("shardwise", "FRAGMENT")
_library.define(
    "collection(Tensor handle, str form, str[] features, str? problem, SymInt[] sizes, "
    "str[] names, Tensor[] tensors) -> Tensor[]"
)

#: Collections by number.
_collections: weakref.WeakValueDictionary[int, _Collection] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def enroll(collection: _Collection) -> torch.Tensor:
    """A handle: the tensor that stands for the collection in a graph."""
    number = next(_numbers)
    _collections[number] = collection
    # With one dim: torch.compile specializes on a tensor without dims.
    return torch.tensor([number], dtype=torch.float64, device="cpu", requires_grad=True)


def form_of(stacks: Stacks, dims: Sequence[int]) -> str:
    """What a graph knows of results that have `dims` columns."""
    dtype = str(stacks.dtype).removeprefix("torch.")
    options = {"dims": dims, "dtype": dtype, "device": stacks.device.type}
    return _LOOK_UP.encode(stacks.grid, options)


# -- traced by torch.compile: nothing here reads a value -----------------------------------------


def jagged_in_graph(batch: Any) -> Jagged:
    """`Jagged.of`; an invalid batch raises later, on all ranks together."""
    try:
        return Jagged.of(batch)
    except ArgumentError as error:
        nothing = torch.empty(0, dtype=torch.int64)
        jagged = Jagged((), nothing, lengths=nothing)
        (jagged.problem,) = error.args  # older versions of torch do not trace `str`
        return jagged


def num_bags_in_graph(
    batch: Jagged, features: Sequence[str], *, equal: bool = False
) -> Sequence[int]:
    """How many bags each of `features` has; with `equal`, all have the same number."""
    if batch.problem is not None:
        return [0] * len(features)
    if equal or batch.sizes is None:
        return [batch.lengths.shape[0] // max(1, len(batch.features))] * len(features)
    if not batch.sizes:
        raise UnsupportedError(
            "batch_sizes in compiled code: a graph has to know how many bags each feature has, and "
            "these are a tensor that was made inside it, or differ between ranks. Give a list."
        )
    sizes = dict(zip(batch.features, batch.sizes, strict=False))
    return [sizes.get(feature, 0) for feature in features]


def lengths_in_graph(batch: Jagged, features: Sequence[str]) -> list[torch.Tensor]:
    """The lengths of each feature's bags."""
    found, start = {}, 0
    for feature, num in zip(batch.features, num_bags_in_graph(batch, batch.features), strict=True):
        found[feature] = batch.lengths[start : start + num]
        start += num
    return [found.get(feature, batch.lengths[:0]) for feature in features]


def look_up_in_graph(
    handle: torch.Tensor, form: str, batch: Jagged, sizes: Sequence[int]
) -> list[torch.Tensor]:
    """The outputs of a collection; output i has `sizes[i]` rows. No sizes: they are unknown."""
    values, lengths = batch.values_in_graph(), batch.lengths
    if batch.problem is not None:  # the tensors may be of any dtype or shape
        values = lengths = torch.empty(0, dtype=torch.int64)
    given = {"values": values, "lengths": lengths, "first": batch.first}
    given |= {"batch_sizes": batch.batch_sizes, "weights": batch.weights_in_graph()}
    there = {name: x for name, x in given.items() if x is not None}
    return torch.ops.shardwise.collection(
        handle, form, batch.features, batch.problem, sizes, list(there), list(there.values())
    )


@untraced
def _traced(
    handle: torch.Tensor,
    form: str,
    features: Sequence[str],
    problem: str | None,
    sizes: Sequence[int],
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    more = {"features": features, "problem": problem}
    inputs = {"handle": handle, **dict(zip(names, tensors, strict=True))}
    if type(handle) is torch.Tensor and not torch.compiler.is_exporting():  # eager
        return list(_look_up(more, **inputs))
    return list(_LOOK_UP(form, inputs, more=json.dumps(more), sizes=sizes))


_library.impl("collection", _traced, "CompositeImplicitAutograd")
# Without autograd, a LocalTensor gets the call first.
collective_handlers[torch.ops.shardwise.collection.default] = lambda func, args, kwargs: _traced(
    *args, **kwargs
)


# -- the op --------------------------------------------------------------------------------------


def _look_up(
    known: Any, handle: torch.Tensor, first: torch.Tensor | None = None, **tensors: Any
) -> tuple[torch.Tensor, ...]:
    batch = Jagged(known["features"], **tensors)
    batch.first, batch.problem = first, known["problem"]
    return _collections[int(handle)]._run(batch)[1]


def _run(known: Any, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    outputs, grid = _look_up(known, **inputs), known["grid"]
    for out in outputs if grid is not None else ():
        shapes = [tuple(part.shape) for part in part_per_rank(grid, out)]
        if any(shape != shapes[0] for shape in shapes):
            raise UnsupportedError(
                "In a simulated world one graph cannot have a size per rank, and ranks get results "
                f"of shapes {shapes}. Give batches of one size, or leave the collection uncompiled."
            )
    return outputs


def _shapes(
    known: Any, sizes: Sequence[Any], ranks: Sequence[dict[str, torch.Tensor]]
) -> list[list[torch.Tensor]]:
    options: Any = {"dtype": getattr(torch, known["dtype"]), "device": known["device"]}
    nums = sizes or [torch.library.get_ctx().new_dynamic_size() for _ in known["dims"]]
    shapes = list(zip(nums, known["dims"], strict=True))
    return [[torch.empty(shape, **options) for shape in shapes] for _ in ranks]


_LOOK_UP = EffectOp(
    "collection",
    "a collection",
    _run,
    _shapes,
    decode=lambda options, grid: options | {"grid": grid},
    handle="handle",
)
