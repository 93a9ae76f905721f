"""Lookups of local ids in a sharded table; local batches, as linear layers take them too.

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
from torch.nn import functional as F

from shardwise.comm.agreement import Fault
from shardwise.comm.watch import because
from shardwise.core.mesh import Grid
from shardwise.core.untraced import UntracedFunction, differentiated_once
from shardwise.core.world import world_caches
from shardwise.effects import EffectOp
from shardwise.errors import UnsupportedError
from shardwise.lookup.backends.registry import make_backend
from shardwise.lookup.engine import Engine
from shardwise.lookup.exchange import FeatureBags, bags_of_one, combined, ranks_present
from shardwise.lookup.ids import dtype_fault, offsets_fault, promoted
from shardwise.lookup.prefetch import PrefetchedBatch, PrefetchQueue
from shardwise.lookup.routing import Route
from shardwise.lookup.scratch import Scratch
from shardwise.lookup.step import RankStep, weights_train
from shardwise.lookup.tiling import Table, tiling_of_one
from shardwise.ops.lookup.row_sparse import make as make_row_sparse
from shardwise.shard.spec import (
    DimSplit,
    Tiling,
    decode_spec,
    encode_spec,
    local_of_shards,
    make_tiling,
    shards_of,
)
from shardwise.shard.tensor import ShardedTensor
from shardwise.simulation.ranks import (
    each_rank,
    is_per_rank,
    one_tensor,
    part_per_rank,
    plain_if_equal,
    sized,
)

_BACKEND = make_backend("auto")
_START = torch.zeros((), device="cpu", requires_grad=True)


@functools.lru_cache(maxsize=512)
def _engine(tiling: Tiling, pooling: str | None, dtype: torch.dtype, mean: bool) -> Engine:
    """The engine of a table; `pooling` is None for a row per id."""
    assert tiling.split is not None, "a table that is looked up has one shard per rank"
    (num_rows, num_columns), ranks = tiling.shape, tiling.grid.ranks
    table = Table("weight", num_rows, num_columns, pooling=pooling or "sum")
    intervals = [tiling.split.intervals[rank] for rank in ranks]
    where = tiling_of_one(table, tiling.split.dim, intervals)
    return Engine(
        route=Route(where, pooled=pooling is not None, dtype=dtype),
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
    engine = _engine(weight._tiling, pooling, weight.dtype, weight.grad_reduction == "mean")
    batch = PrefetchedBatch(engine.route, grid, found, samples, f"{lookup.what}: ")
    call = TableLookup(lookup, engine, batch, finish, kept)
    with because(lookup.what, implicit=False):
        steps = batch.arrive()
        if lookup.max_norm is not None:
            _shorten(call, steps, lookup.max_norm)
        # Backward of other ranks needs this one's, for the gradients of their weights.
        start = _START if torch.is_grad_enabled() and weights_train(steps) else None
        return _TableLookup.apply(weight, call, samples, start)


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
    """`apply(weight, call, samples, start)`: the exchange of rows, and of gradients backward.

    `start`, where it is given, has autograd call backward, whatever else requires grad.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: ShardedTensor,
        call: TableLookup,
        samples: torch.Tensor | None,
        start: torch.Tensor | None,
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
        of_samples = like(of_samples, ctx.samples) if ctx.needs_input_grad[2] else None
        of_weight = _weight_gradient(ctx, lookups) if ctx.needs_input_grad[0] else None
        return of_weight, None, of_samples, None


def like(grad: torch.Tensor | None, x: torch.Tensor | None) -> torch.Tensor | None:
    """A gradient per rank, or one for all if `x` is one tensor."""
    if grad is None or x is None:
        return None
    return sized(grad) if is_per_rank(x) else plain_if_equal(sized(grad))


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


# -- local batches -------------------------------------------------------------------------------
# Bags in any form of `embedding_bag` become flat ids and a length per bag.


def range_of(ids: torch.Tensor, fault: str | None) -> tuple[int, int]:
    """The lowest and the highest id of a batch without a fault."""
    if fault is not None or not ids.numel():
        return 0, -1
    low, high = torch.stack(torch.aminmax(ids)).tolist()
    return low, high


def batch_fault(
    ids: Any, offsets: Any, weights: Any, include_last_offset: bool, dtype: torch.dtype
) -> str | None:
    """What is wrong with a batch of bags of a table of `dtype`, if anything."""
    if (fault := dtype_fault(ids, "ids")) is not None:
        return fault
    if weights is not None and not isinstance(weights, torch.Tensor):
        return f"per_sample_weights are a tensor, found {type(weights).__name__}."
    if weights is not None and weights.shape != ids.shape:
        return f"per_sample_weights have shape {tuple(weights.shape)}, the ids {tuple(ids.shape)}."
    if weights is not None and weights.dtype != dtype:
        return f"per_sample_weights have dtype {weights.dtype}, the table {dtype}."
    if ids.dim() == 2:
        return None if offsets is None else "ids of two dims are one bag per row: no offsets."
    if ids.dim() != 1:
        return f"ids have one dim, with offsets, or two; found shape {tuple(ids.shape)}."
    if offsets is None:
        return "ids of one dim need offsets, of one dim too."
    if (fault := dtype_fault(offsets, "offsets")) is not None:
        return fault
    if offsets.dim() != 1:
        return f"offsets have one dim, found shape {tuple(offsets.shape)}."
    return _offsets_fault(offsets, ids.numel(), include_last_offset)


def _offsets_fault(offsets: torch.Tensor, num_ids: int, include_last_offset: bool) -> str | None:
    if not offsets.numel():
        if include_last_offset:
            return "with include_last_offset there is at least one offset."
        return f"there are {num_ids} ids but no bags." if num_ids else None
    fault = offsets_fault(offsets, num_ids)
    if fault is None and include_last_offset and int(offsets[-1]) != num_ids:
        return f"the last offset is the number of ids, {num_ids}; found {int(offsets[-1])}."
    return fault


def lengths_of(
    ids: torch.Tensor, offsets: torch.Tensor | None, include_last_offset: bool
) -> torch.Tensor:
    """How many ids each bag has. The batch has no fault."""
    if ids.dim() == 2:
        return torch.full((ids.shape[0],), ids.shape[1], dtype=torch.int64, device=ids.device)
    assert offsets is not None, "ids of one dim come with offsets"
    ends = offsets.long()
    if not include_last_offset:
        ends = torch.cat([ends, ends.new_tensor([ids.numel()])])
    return ends.diff()


def pool(
    rows: torch.Tensor,
    ids: torch.Tensor,
    lengths: torch.Tensor,
    mode: str,
    weights: torch.Tensor | None,
    padding_idx: int | None,
) -> torch.Tensor:
    """The pooled bags out of one row per id; the padding id's rows do not count."""
    starts = lengths.cumsum(0) - lengths
    place = torch.arange(ids.numel(), device=ids.device)
    padding = None
    if padding_idx is not None:
        # One more row stands for every padding id.
        padding = ids.numel()
        place = place.masked_fill(ids == padding_idx, padding)
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    if not rows.numel():
        return rows.new_zeros(lengths.numel(), rows.shape[1])
    return F.embedding_bag(
        place, rows, starts, mode=mode, per_sample_weights=weights, padding_idx=padding
    )


def scaled_by_frequency(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The rows; their gradient is divided by the id's frequency in this rank's batch."""
    if not ids.numel():
        return rows
    _, which, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    return ScaleRows.apply(rows, 1 / counts[which].to(rows.dtype).unsqueeze(1))


class ScaleRows(UntracedFunction):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(factor)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (factor,) = ctx.saved_tensors
        return grad * factor, None


def split_of(weight: ShardedTensor, what: str) -> DimSplit:
    """How a weight is split; raises where a local batch cannot use it."""
    tiling = weight._tiling
    if tiling.split is None or len(tiling.shape) != 2:
        raise UnsupportedError(
            f"{what} needs a weight of two dims, split along one of them with one shard per rank; "
            f"found shape {tiling.shape} and {tiling.spec}. Use reshard(spec) first."
        )
    return tiling.split


@dataclass(frozen=True, slots=True)
class Lookup:
    """A table and the options of a lookup, checked."""

    what: str
    weight: ShardedTensor
    split: DimSplit
    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    #: Whether a row's gradient is divided by its frequency in the rank's batch.
    by_frequency: bool
    #: Whether the table's gradient holds only the rows that were looked up.
    sparse: bool

    @property
    def grid(self) -> Grid:
        return self.weight._tiling.grid

    @property
    def num_rows(self) -> int:
        return self.weight._tiling.shape[0]

    def options(self) -> dict[str, Any]:
        """The options under the names of torch's functions, as constants."""
        return {
            "padding_idx": None if self.padding_idx is None else int(self.padding_idx),
            "max_norm": None if self.max_norm is None else float(self.max_norm),
            "norm_type": float(self.norm_type),
            "scale_grad_by_freq": self.by_frequency,
            "sparse": bool(self.sparse),
        }


@dataclass(frozen=True, slots=True)
class LocalBags:
    """One rank's bags as flat ids and a length per bag; both empty where there is a fault."""

    ids: torch.Tensor
    lengths: torch.Tensor
    fault: str | None


@dataclass(frozen=True, slots=True)
class BagBatch:
    """The bags of all ranks present, in any form that `F.embedding_bag` takes."""

    ids: torch.Tensor
    offsets: torch.Tensor | None
    weights: torch.Tensor | None
    include_last_offset: bool
    mode: str
    #: That of the table.
    dtype: torch.dtype

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that differ between ranks; `of_rank` takes one rank's."""
        return [self.ids, *(x for x in (self.offsets, self.weights) if x is not None)]

    def of_rank(self, mine: Sequence[torch.Tensor]) -> LocalBags:
        left = iter(mine)
        ids = next(left)
        offsets = None if self.offsets is None else next(left)
        weights = None if self.weights is None else next(left)
        if isinstance(ids, torch.Tensor) and isinstance(offsets, torch.Tensor):
            ids, offsets = promoted(ids, offsets)
        fault = batch_fault(ids, offsets, weights, self.include_last_offset, self.dtype)
        if fault is not None:
            nothing = torch.empty(0, dtype=torch.int64)
            return LocalBags(nothing, nothing, fault)
        lengths = lengths_of(ids, offsets, self.include_last_offset)
        return LocalBags(ids.reshape(-1).long(), lengths, None)


# -- stage ---------------------------------------------------------------------------------------
# Local computation between two collectives, with its gradient.


class Stage:
    """A function that each rank runs locally, under torch's autograd.

    It returns a tensor that has a gradient, and perhaps more that have none.
    """

    def __init__(self, needs: Sequence[bool]) -> None:
        self.needs = needs
        self.graphs: dict[int, tuple[list[torch.Tensor], torch.Tensor]] = {}

    def run(
        self, rank: int, fn: Callable[..., tuple[torch.Tensor, ...]], leaves: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        own = [x.detach().requires_grad_(n) for x, n in zip(leaves, self.needs, strict=True)]
        with torch.set_grad_enabled(any(self.needs)):
            result, *more = fn(*own)
        self.graphs[rank] = (own, result)
        return result.detach(), *more

    def backward(self, grid: Grid, grad: torch.Tensor) -> list[torch.Tensor]:
        """The gradient of every leaf; zeros where none is needed or there is none."""

        def here(place: Any, mine: torch.Tensor) -> list[torch.Tensor]:
            leaves, result = self.graphs[grid.ranks[place[0]]]
            wanted = [x for x, need in zip(leaves, self.needs, strict=True) if need]
            found: Any = [None] * len(wanted)
            if result.requires_grad:
                found = torch.autograd.grad(
                    result, wanted, mine, allow_unused=True, retain_graph=True
                )
            grads = iter(found)
            given = [next(grads) if need else None for need in self.needs]
            return [
                torch.zeros_like(x) if g is None else g for x, g in zip(leaves, given, strict=True)
            ]

        return list(each_rank(grid, here, grad))


# -- compile -------------------------------------------------------------------------------------
# Lookups and linear layers with local batches, in compiled code.
#
# Note [Sharded modules in compiled code]
# The sizes of other ranks' batches are data-dependent. Those of the results are not: a lookup has a
# row for each of this rank's ids, a gradient the shape of this rank's shard. (The length of a
# sparse gradient is data-dependent; nothing in the graph depends on it.) So each lookup or linear
# layer is one op of a graph, as in Note [Effect ops]; batches may differ in size between ranks.


WHAT = "a sharded module"
#: The advice of errors about export.
INSTEAD = ", or export a module on DTensors (distribute_module)"


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One lookup or linear layer in a graph, but for its tensors."""

    tiling: Tiling
    grad_reduction: str
    options: dict[str, Any]
    #: The name of the dtype that linear layers are cast to, if any.
    autocast_dtype: str | None

    def autocast(self) -> Any:
        """The autocast state of the call."""
        kind, dtype = self.tiling.grid.device_type, self.autocast_dtype
        if dtype is None:
            return torch.autocast(kind, enabled=False)
        return torch.autocast(kind, dtype=getattr(torch, dtype))


def declare(
    name: str, eager: Callable[..., torch.Tensor], fake: Callable[..., torch.Tensor]
) -> EffectOp:
    """The op of a graph that runs `eager(weight=..., **tensors, **options)`.

    `fake(call, **inputs)` is an empty tensor like one rank's result; `weight` is its local tensor.
    """

    def run(call: LayerCall, weight: torch.Tensor, **tensors: torch.Tensor) -> list[torch.Tensor]:
        with call.autocast():
            return [eager(weight=weight, **tensors, **call.options)]

    def shapes(
        call: LayerCall, _: Any, ranks: Sequence[dict[str, Any]]
    ) -> list[list[torch.Tensor]]:
        return [[fake(call, **inputs)] for inputs in ranks]

    return EffectOp(name, WHAT, run, shapes, INSTEAD, _decode, enter=_enter, gradient=_gradient)


def traced(
    op: EffectOp,
    weight: ShardedTensor,
    options: dict[str, Any],
    **given: torch.Tensor | None,
) -> torch.Tensor:
    """The eager function as one op of a graph."""
    tiling = weight._tiling
    call = {
        "spec": encode_spec(tiling.spec),
        "shape": tiling.shape,
        "grad_reduction": weight.grad_reduction,
        "options": options,
        "autocast_dtype": _autocast_dtype(tiling.grid.device_type),
    }
    (out,) = op(
        tiling.grid,
        call,
        {"weight": weight, **given},
        row_sparse=bool(options.get("sparse")),
        writes=options.get("max_norm") is not None,
    )
    return out


def _autocast_dtype(device_type: str) -> str | None:
    if not torch.is_autocast_enabled(device_type):
        return None
    return str(torch.get_autocast_dtype(device_type)).removeprefix("torch.")


def _decode(call: Any, grid: Grid | None) -> LayerCall:
    assert grid is not None, "a tiling has the ranks of a group"
    tiling = make_tiling(decode_spec(call["spec"]), tuple(call["shape"]), grid)
    return LayerCall(tiling, call["grad_reduction"], call["options"], call["autocast_dtype"])


def _enter(call: LayerCall, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    grid = call.tiling.grid
    local = one_tensor(grid, part_per_rank(grid, inputs["weight"]), sized=False)
    weight = ShardedTensor.over(local, call.tiling)
    weight.grad_reduction = call.grad_reduction
    return inputs | {"weight": weight}


def _gradient(call: LayerCall, weight: Any, *held: torch.Tensor) -> torch.Tensor:
    layout = call.tiling.layout(weight.dtype)
    if len(held) == 2:
        return make_row_sparse(layout, *held)
    return ShardedTensor.over(held[0], call.tiling, layout, like=weight)
