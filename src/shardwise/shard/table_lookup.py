"""Lookups of each rank's local ids in a sharded table, by the lookup engine.

To the engine a sharded table is a collection of one table with one feature. Bags are pooled by the
owners of rows, or by the requester where it has to see the rows: for a maximum, for gradients that
are scaled by frequency, and for padding ids whose rows are shortened to `max_norm` all the same.

Each rank has its own loss. Its batch gets the gradient of that loss; the table gets that of the
mean of the losses, or of their sum, as the tensor's `grad_reduction` says.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm.agreement import Fault
from shardwise.comm.watch import because
from shardwise.core.untraced import UntracedFunction, differentiated_once
from shardwise.core.world import world_caches
from shardwise.lookup.backends.registry import make_backend
from shardwise.lookup.engine import Engine
from shardwise.lookup.exchange import FeatureBags, bags_of_one, combined, ranks_present
from shardwise.lookup.ids import dtype_fault
from shardwise.lookup.prefetch import PrefetchedBatch, PrefetchQueue
from shardwise.lookup.routing import Route
from shardwise.lookup.scratch import Scratch
from shardwise.lookup.step import RankStep
from shardwise.lookup.tiling import Table, tiling_of_one
from shardwise.ops.lookup.row_sparse import make as make_row_sparse
from shardwise.shard.local_batch import (
    BagBatch,
    LocalBags,
    Lookup,
    Stage,
    pool,
    range_of,
    scaled_by_frequency,
)
from shardwise.shard.tensor import ShardedTensor
from shardwise.shard.tiling import Tiling, local_of_shards, shards_of
from shardwise.simulation.ranks import one_for_all, one_tensor, part_per_rank

_BACKEND = make_backend("auto")


@functools.lru_cache(maxsize=512)
def _engine(tiling: Tiling, pooling: str | None, weight_dtype: torch.dtype, mean: bool) -> Engine:
    """The engine of a table; `pooling` is None for a row per id."""
    assert tiling.split is not None, "a table that is looked up has one shard per rank"
    (num_rows, num_columns), ranks = tiling.shape, tiling.grid.ranks
    table = Table("weight", num_rows, num_columns, pooling=pooling or "sum")
    intervals = [tiling.split.intervals[rank] for rank in ranks]
    where = tiling_of_one(table, tiling.split.dim, intervals)
    return Engine(
        route=Route(where, pooled=pooling is not None, weight_dtype=weight_dtype),
        grid=tiling.grid,
        backend=_BACKEND,
        scale=1 / len(ranks) if mean else 1.0,
        scratch=Scratch(keep=False),
        queue=PrefetchQueue(),
    )


world_caches.append(_engine.cache_clear)


@dataclass(slots=True)
class Shards:
    """The shards of a table on the ranks present, as the engine takes them."""

    weights: list[list[torch.Tensor]]
    dtype: torch.dtype


@dataclass(slots=True)
class TableLookup:
    """One call, but for its tensors."""

    lookup: Lookup
    engine: Engine
    batch: PrefetchedBatch
    #: Per rank present: the result from what the engine found, and from the samples' weights.
    finish: Sequence[Callable[..., torch.Tensor]] | None = None
    #: Per rank present: where the samples are whose weights were sent; None for all.
    kept: list[torch.Tensor | None] | None = None

    def shards(self) -> Shards:
        weight = self.lookup.weight
        held = part_per_rank(self.lookup.grid, shards_of(weight._tiling, weight._local))
        return Shards([[shard] for shard in held], weight.dtype)


def embedding(lookup: Lookup, ids: torch.Tensor) -> torch.Tensor:
    """A row for each of a rank's ids."""
    per_rank = part_per_rank(lookup.grid, ids)
    found = [_checked(lookup, n, mine, dtype_fault(mine, "ids")) for n, mine in enumerate(per_rank)]
    finish = [functools.partial(_shaped, lookup, mine) for mine in per_rank]
    return _run(lookup, None, found, finish)


def embedding_bag(lookup: Lookup, batch: BagBatch) -> torch.Tensor:
    """A row for each of a rank's bags."""
    grid = lookup.grid
    columns = [part_per_rank(grid, x) for x in batch.tensors]
    own = [batch.of_rank(mine) for mine in zip(*columns, strict=True)]
    padded = lookup.padding_idx is not None
    if batch.mode == "max" or lookup.by_frequency or (padded and lookup.max_norm is not None):
        found = [_checked(lookup, n, each.ids, each.fault) for n, each in enumerate(own)]
        finish = [functools.partial(_pooled, lookup, batch.mode, each) for each in own]
        return _run(lookup, None, found, finish, batch.weights)
    kept = [_counted(lookup, each) for each in own]
    train = getattr(batch.weights, "requires_grad", False) and torch.is_grad_enabled()
    weights = [None] * len(own) if batch.weights is None else columns[-1]
    found = []
    for n, (each, keep, samples) in enumerate(zip(own, kept, weights, strict=True)):
        flat = None if samples is None or each.fault else samples.detach().reshape(-1)
        found.append(_checked(lookup, n, each.ids, each.fault, each.lengths, flat, keep, train))
    return _run(lookup, batch.mode, found, None, batch.weights, kept)


def _counted(lookup: Lookup, own: LocalBags) -> torch.Tensor | None:
    """Where the ids are that count; None if all do."""
    if lookup.padding_idx is None:
        return None
    return (own.ids != lookup.padding_idx).nonzero().squeeze(1)


def _checked(
    lookup: Lookup,
    place: int,
    given: torch.Tensor,
    fault: str | None,
    lengths: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    train: bool = False,
) -> FeatureBags | Fault:
    """One rank's batch, without lengths a row per id; or what is wrong with it."""
    if fault is not None:
        return Fault(fault)
    low, high = range_of(given, fault)
    if low < 0 or high >= lookup.num_rows:
        rank = lookup.grid.ranks[ranks_present(lookup.grid)[place]]
        return Fault(
            f"index out of range in a table of {lookup.num_rows} rows: the ids of rank {rank} run "
            f"from {low} to {high}.",
            IndexError,
        )
    ids = given.detach().reshape(-1).long()
    if lengths is None:
        return bags_of_one(ids, torch.ones_like(ids), None, train=False)
    if keep is not None:
        bag = torch.repeat_interleave(lengths).index_select(0, keep)
        lengths = torch.bincount(bag, minlength=lengths.numel())
        ids = ids.index_select(0, keep)
        weights = None if weights is None else weights.index_select(0, keep)
    return bags_of_one(ids, lengths, weights, train=train)


def _run(
    lookup: Lookup,
    pooling: str | None,
    found: list[FeatureBags | Fault],
    finish: Sequence[Callable[..., torch.Tensor]] | None,
    samples: torch.Tensor | None = None,
    kept: list[torch.Tensor | None] | None = None,
) -> torch.Tensor:
    weight, grid = lookup.weight, lookup.grid
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    engine = _engine(weight._tiling, pooling, wide, weight.grad_reduction == "mean")
    batch = PrefetchedBatch(engine.route, grid, found, samples, f"{lookup.what}: ")
    call = TableLookup(lookup, engine, batch, finish, kept)
    with because(lookup.what, implicit=False):
        steps = batch.arrive()
        if lookup.max_norm is not None:
            _shorten(call, steps, lookup.max_norm)
        return _TableLookup.apply(weight, call, samples)


# -- on the requester ----------------------------------------------------------------------------


def _shaped(lookup: Lookup, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """One row for each id of a batch of any shape."""
    if lookup.by_frequency:
        rows = scaled_by_frequency(rows, ids.reshape(-1))
    return rows.view(*ids.shape, rows.shape[-1])


def _pooled(
    lookup: Lookup,
    mode: str,
    own: LocalBags,
    rows: torch.Tensor,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows to bags."""
    if lookup.by_frequency:
        rows = scaled_by_frequency(rows, own.ids)
    flat = None if weights is None else weights.reshape(-1)
    return pool(rows, own.ids, own.lengths, mode, flat, lookup.padding_idx)


class _TableLookup(UntracedFunction):
    """`apply(weight, call, samples)`: the exchange of rows, and of gradients backward."""

    @staticmethod
    def forward(
        ctx: Any, weight: ShardedTensor, call: TableLookup, samples: torch.Tensor | None
    ) -> torch.Tensor:
        grid, ranks = call.lookup.grid, call.lookup.grid.ranks
        ctx.call, ctx.samples = call, samples
        ctx.shards = call.shards()
        found = [rows for (rows,) in call.engine.rows(ctx.shards, call.batch.arrive(), False)]
        if call.finish is None:
            return one_tensor(grid, found)
        needs = ctx.needs_input_grad[0] or ctx.needs_input_grad[2]
        staying = [] if samples is None else [ctx.needs_input_grad[2]]
        ctx.stage = Stage((needs, *staying))
        given = [()] * len(found) if samples is None else zip(part_per_rank(grid, samples))
        present = [ranks[at] for at in ranks_present(grid)]
        outs = []
        for rank, rows, finish, own in zip(present, found, call.finish, given, strict=True):
            (out,) = ctx.stage.run(rank, lambda *x, f=finish: (f(*x),), [rows, *own])
            outs.append(out)
        return one_tensor(grid, outs)

    @staticmethod
    @differentiated_once("a sharded module")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        call: TableLookup = ctx.call
        lookup, grid = call.lookup, call.lookup.grid
        of_samples: Any = None
        if call.finish is not None:
            grad, *stayed = ctx.stage.backward(grid, grad)
            of_samples = stayed[0] if stayed else None
        with because(lookup.what, implicit=False):
            lookups, _, found = call.engine.gradients(
                ctx.shards, call.batch.arrive(), [grad], False
            )
        if found is not None and ctx.samples is not None:
            of_samples = one_tensor(grid, _put_back(ctx, found))
        if not ctx.needs_input_grad[2]:
            of_samples = None
        elif of_samples is not None and type(ctx.samples) is torch.Tensor:
            of_samples = one_for_all(of_samples)
        of_weight = _weight_gradient(ctx, lookups) if ctx.needs_input_grad[0] else None
        return of_weight, None, of_samples


def _put_back(ctx: Any, found: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of samples' weights, in the samples' shape."""
    call: TableLookup = ctx.call
    assert call.kept is not None, "weights are sent with pooled bags"
    samples = part_per_rank(call.lookup.grid, ctx.samples)
    grads = []
    for mine, keep, own in zip(found, call.kept, samples, strict=True):
        if keep is not None:
            mine = mine.new_zeros(own.numel()).index_copy_(0, keep, mine)
        grads.append(mine.view(own.shape).to(own.dtype))
    return grads


def _weight_gradient(ctx: Any, lookups: list[Any]) -> torch.Tensor:
    lookup: Lookup = ctx.call.lookup
    tiling, grid, padding = lookup.weight._tiling, lookup.grid, lookup.padding_idx
    numbers, values = [], []
    for at, (shard,), queries in zip(ranks_present(grid), ctx.shards.weights, lookups, strict=True):
        rows, grads = torch.empty(0, dtype=torch.int64, device=shard.device), shard[:0]
        if queries:
            rows, grads = ctx.call.engine.backend.row_gradient(shard, *queries[0])
        if padding is not None:  # it has no gradient
            start = 0 if lookup.split.dim else lookup.split.intervals[grid.ranks[at]][0]
            keep = (rows != padding - start).nonzero().squeeze(1)
            rows, grads = rows.index_select(0, keep), grads.index_select(0, keep)
        numbers.append(rows)
        values.append(grads)
    if lookup.sparse:
        layout = tiling.layout(lookup.weight.dtype)
        rows = one_tensor(grid, numbers, sized=False)
        return make_row_sparse(layout, rows, one_tensor(grid, values, sized=False), coalesced=True)
    dense = [
        torch.zeros_like(shard).index_copy_(0, rows, grads)
        for (shard,), rows, grads in zip(ctx.shards.weights, numbers, values, strict=True)
    ]
    local = local_of_shards(tiling, one_tensor(grid, dense, sized=False))
    return ShardedTensor.over(local, tiling, like=lookup.weight)


# -- max_norm ------------------------------------------------------------------------------------


@torch.no_grad()
def _shorten(call: TableLookup, steps: list[RankStep], max_norm: float) -> None:
    """Scale each row that any rank looks up to `max_norm`, in place."""
    lookup, norm_type = call.lookup, call.lookup.norm_type
    asked = [step.requests[0].ids.long() if step.requests else None for step in steps]
    shards = [shard for (shard,) in call.shards().weights]
    if not lookup.split.dim:
        for ids, shard in zip(asked, shards, strict=True):
            if ids is not None and ids.numel():
                torch.embedding_renorm_(shard, ids, max_norm, norm_type)
        return
    # Each rank has some columns of a row, so norms take an all-reduce. All ranks with columns have
    # the same rows; a rank without any has to learn how many.
    infinite = math.isinf(norm_type)
    rows = [
        shard.new_empty(0, dtype=torch.int64) if ids is None else ids.unique()
        for ids, shard in zip(asked, shards, strict=True)
    ]
    counts = [names.new_tensor([names.shape[0]]) for names in rows]
    num_rows = int(combined(lookup.grid, counts, "max")[0])
    parts = []
    for names, shard in zip(rows, shards, strict=True):
        held = shard.index_select(0, names).abs()
        part = held.new_zeros(num_rows)
        if held.numel():
            part = held.amax(1) if infinite else (held**norm_type).sum(1)
        parts.append(part)
    totals = combined(lookup.grid, parts, "max" if infinite else "sum")
    for names, shard, total in zip(rows, shards, totals, strict=True):
        if names.numel():
            norms = total if infinite else total ** (1 / norm_type)
            factor = torch.where(norms > max_norm, max_norm / (norms + 1e-7), 1.0).to(shard.dtype)
            shard[names] = shard[names] * factor.unsqueeze(1)
