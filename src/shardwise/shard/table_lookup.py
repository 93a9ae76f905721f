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
from shardwise.core.mesh import Coordinate, Grid
from shardwise.core.untraced import UntracedFunction, differentiated_once
from shardwise.core.world import world_caches
from shardwise.effects import EffectOp
from shardwise.errors import BatchError, IdRangeError, UnsupportedError
from shardwise.lookup.backends.backend import Lookups, serving
from shardwise.lookup.backends.registry import make_backend
from shardwise.lookup.bags import bags_of_one
from shardwise.lookup.engine import Engine, Weights
from shardwise.lookup.exchange import combined, ranks_present
from shardwise.lookup.ids import dtype_fault, offsets_fault, promoted
from shardwise.lookup.messages import NEEDS_BACKWARD, RankBatch, any_rank
from shardwise.lookup.prefetch import PrefetchedBatch
from shardwise.lookup.routing import Route
from shardwise.lookup.scratch import Lent
from shardwise.lookup.tiling import Table, TableSplit
from shardwise.lookup.tiling import make_tiling as make_table_tiling
from shardwise.ops.lookup.rank_bags import times
from shardwise.ops.lookup.row_sparse import make as make_row_sparse
from shardwise.shard.spec import decode_spec, encode_spec
from shardwise.shard.tensor import ShardedTensor
from shardwise.shard.tiling import DimSplit, Tiling, local_of_shards, make_tiling, shards_of
from shardwise.simulation.ranks import (
    on_plain_ranks,
    one_tensor,
    part_per_rank,
)

_BACKEND = make_backend("auto")
#: The memory of messages, of all tables.
_SCRATCH, _RECEIVED = Lent(), Lent()
_START = torch.zeros((), device="cpu", requires_grad=True)


@functools.lru_cache(maxsize=512)
def _engine(tiling: Tiling, pooling: str | None, dtype: torch.dtype, mean: bool) -> Engine:
    """The engine of a table; `pooling` is None for a row per id."""
    assert tiling.split is not None, "a table that is looked up has one shard per rank"
    (num_rows, num_columns), ranks = tiling.shape, tiling.grid.ranks
    table = Table("weight", num_rows, num_columns, pooling=pooling or "sum")
    starts, sizes = zip(*(tiling.split.intervals[rank] for rank in ranks), strict=True)
    split = TableSplit("column_wise" if tiling.split.dim else "row_wise", sizes, starts)
    where = make_table_tiling([table], [split], len(ranks))
    return Engine(
        route=Route(where, pooled=pooling is not None, dtype=dtype),
        grid=tiling.grid,
        backend=_BACKEND,
        scratch=_SCRATCH,
        received=_RECEIVED,
        scale=1 / len(ranks) if mean else 1.0,
    )


world_caches.append(_engine.cache_clear)


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

    def shards(self) -> list[torch.Tensor]:
        """The table's on the ranks present."""
        return part_per_rank(self.grid, shards_of(self.weight._tiling, self.weight._local))

    def per_rank(
        self, read: Callable[..., LocalBags | str], *given: torch.Tensor | None
    ) -> list[LocalBags | Fault]:
        """What `read` makes of what each rank present is given, or what is wrong with it."""
        columns = [part_per_rank(self.grid, x) for x in given]  # type: ignore[arg-type]
        found: list[LocalBags | Fault] = []
        for at, *mine in zip(ranks_present(self.grid), *columns, strict=True):
            bags = read(*mine)
            found.append(Fault(bags, BatchError) if isinstance(bags, str) else bags)
            if isinstance(bags, str) or not bags.ids.numel():
                continue
            low, high = torch.stack(torch.aminmax(bags.ids)).tolist()
            if low < 0 or high >= self.num_rows:
                found[-1] = Fault(
                    f"index out of range in a table of {self.num_rows} rows: the ids of rank "
                    f"{self.grid.ranks[at]} run from {low} to {high}.",
                    IdRangeError,
                )
        return found

    def options(self) -> dict[str, Any]:
        """The options under the names of torch's functions, as constants."""
        return {
            "padding_idx": None if self.padding_idx is None else int(self.padding_idx),
            "max_norm": None if self.max_norm is None else float(self.max_norm),
            "norm_type": float(self.norm_type),
            "scale_grad_by_freq": self.by_frequency,
            "sparse": bool(self.sparse),
        }


def split_of(weight: ShardedTensor, what: str) -> DimSplit:
    """How a weight is split; raises where a local batch cannot use it."""
    tiling = weight._tiling
    if tiling.split is None or len(tiling.shape) != 2:
        raise UnsupportedError(
            f"{what} needs a weight of two dims, split along one of them with one shard per rank; "
            f"found shape {tiling.shape} and {tiling.spec}. Use reshard(spec) first."
        )
    return tiling.split


def embedding(lookup: Lookup, ids: torch.Tensor) -> torch.Tensor:
    """A row for each of a rank's ids."""
    rows = _run(lookup, None, lookup.per_rank(_single_ids, ids))

    def shaped(_: Coordinate, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if lookup.by_frequency:
            rows = scaled_by_frequency(rows, ids.reshape(-1))
        return rows.view(*ids.shape, rows.shape[-1])

    return on_plain_ranks(lookup.grid, shaped, rows, ids)


def embedding_bag(
    lookup: Lookup,
    mode: str,
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    include_last_offset: bool,
) -> torch.Tensor:
    """A row for each of a rank's bags, in any form that `F.embedding_bag` takes."""
    read = functools.partial(_bags, lookup.weight.dtype, include_last_offset)
    own = kept = lookup.per_rank(read, ids, offsets, weights)
    padding = lookup.padding_idx
    if padding is not None:
        kept = [x if isinstance(x, Fault) else x.without(padding) for x in own]
    shortened = padding is not None and lookup.max_norm is not None
    if not (mode == "max" or lookup.by_frequency or shortened):
        return _run(lookup, mode, kept, weights)
    rows = _run(lookup, None, own, weights)
    left: Any = iter(zip(own, kept, strict=True))  # without faults, which raise

    def pooled(_: Coordinate, rows: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        mine, counting = next(left)
        if lookup.by_frequency:
            rows = scaled_by_frequency(rows, mine.ids)
        if not rows.numel():  # a part of the graph too: other ranks wait for its backward
            return rows.new_zeros(mine.lengths.numel(), rows.shape[1]) + rows.sum()
        flat = counting.flat(*weights) if weights else None
        places = counting.kept
        if places is None:
            places = torch.arange(rows.shape[0], device=rows.device)
        starts = counting.lengths.cumsum(0) - counting.lengths
        return F.embedding_bag(places, rows, starts, mode=mode, per_sample_weights=flat)

    return on_plain_ranks(lookup.grid, pooled, rows, *([] if weights is None else [weights]))


def scaled_by_frequency(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The rows; their gradient is divided by the id's frequency in this rank's batch."""
    if not ids.numel() or not rows.requires_grad:
        return rows
    factor = 1 / times(ids).to(rows.dtype).unsqueeze(1)
    rows = rows.view_as(rows)
    rows.register_hook(lambda grad: grad * factor)
    return rows


def _run(
    lookup: Lookup,
    pooling: str | None,
    own: Sequence[LocalBags | Fault],
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the engine finds: pooled bags, or with `pooling=None` a row per id."""
    weight, grid = lookup.weight, lookup.grid
    engine = _engine(weight._tiling, pooling, weight.dtype, weight.grad_reduction == "mean")
    train, weights_train = (
        torch.is_grad_enabled() and getattr(x, "requires_grad", False) for x in (weight, weights)
    )
    per_id = None if pooling is None else weights
    given: list[Any] = part_per_rank(grid, per_id)  # type: ignore[arg-type]
    found = [
        each
        if isinstance(each, Fault)
        else bags_of_one(
            each.ids,
            torch.ones_like(each.ids) if pooling is None else each.lengths,
            None if weights is None else each.flat(weights).detach(),
            weights_train=weights_train and pooling is not None,
            needs_backward=train or weights_train,
            no_backward=not torch.is_grad_enabled(),
        )
        for each, weights in zip(own, given, strict=True)
    ]
    batch = PrefetchedBatch(engine.route, grid, found, None, f"{lookup.what}: ")
    with because(lookup.what, implicit=False):
        arrived = batch.arrive()
        if lookup.max_norm is not None:
            _shorten(lookup, arrived, lookup.max_norm)
        # Every rank takes part in the exchange of gradients, or none does.
        is_differentiated = torch.is_grad_enabled() and any_rank(arrived, NEEDS_BACKWARD)
        start = _START if is_differentiated else None
        samples = None
        left: Any = iter(own)
        if per_id is not None:
            samples = on_plain_ranks(grid, lambda _, mine: next(left).flat(mine), per_id)
        return _TableLookup.apply(lookup, engine, arrived, weight, samples, start)


class _TableLookup(UntracedFunction):
    """The exchange of rows, and of gradients backward.

    `start`, where it is given, has autograd call backward, whatever else requires grad.
    """

    @staticmethod
    def forward(
        ctx: Any,
        lookup: Lookup,
        engine: Engine,
        batches: Sequence[RankBatch],
        weight: ShardedTensor,
        samples: torch.Tensor | None,
        start: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.lookup, ctx.engine, ctx.batches = lookup, engine, batches
        ctx.weights = [[shard] for shard in lookup.shards()]
        if ctx.needs_input_grad[4]:  # each one's gradient depends on the other
            ctx.save_for_backward(weight, samples)
        found = engine.rows(ctx.weights, batches, False)
        return one_tensor(lookup.grid, [rows for (rows,) in found])

    @staticmethod
    @differentiated_once("a sharded module")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        lookup: Lookup = ctx.lookup
        with because(lookup.what, implicit=False):
            lookups, found = ctx.engine.gradients(ctx.weights, ctx.batches, [grad], False)
        of_weight = of_samples = None
        if found is not None and ctx.needs_input_grad[4]:
            of_samples = one_tensor(lookup.grid, found)
        if ctx.needs_input_grad[3]:
            of_weight = _weight_gradient(lookup, ctx.engine, ctx.weights, lookups)
        return None, None, None, of_weight, of_samples, None


def _weight_gradient(
    lookup: Lookup, engine: Engine, weights: Weights, lookups: list[Lookups]
) -> torch.Tensor:
    tiling, grid, padding = lookup.weight._tiling, lookup.grid, lookup.padding_idx
    numbers, values = [], []
    for at, (shard,), queries in zip(ranks_present(grid), weights, lookups, strict=True):
        rows, grads = torch.empty(0, dtype=torch.int64, device=shard.device), shard[:0]
        if queries:
            backend = serving(engine.backend, shard)
            rows, grads = backend.row_gradient(shard, *queries[0])
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
        for (shard,), rows, grads in zip(weights, numbers, values, strict=True)
    ]
    local = local_of_shards(tiling, one_tensor(grid, dense, sized=False))
    return ShardedTensor.over(local, tiling, like=lookup.weight)


# -- max_norm ------------------------------------------------------------------------------------


@torch.no_grad()
def _shorten(lookup: Lookup, batches: Sequence[RankBatch], max_norm: float) -> None:
    """Scale each row that any rank looks up to `max_norm`, in place."""
    norm_type = lookup.norm_type
    infinite, by_columns = math.isinf(norm_type), bool(lookup.split.dim)
    shards, rows, parts = lookup.shards(), [], []
    for batch, shard in zip(batches, shards, strict=True):
        asked = [request.query.ids for request in batch.requests.values()]
        rows.append(torch.cat([shard.new_empty(0, dtype=torch.int64), *asked]).unique())
        held = shard.index_select(0, rows[-1]).abs()
        parts.append(held.amax(1) if infinite and held.numel() else (held**norm_type).sum(1))
    if by_columns:
        # All ranks with columns have the same rows; a rank without any has to learn how many.
        counts = [names.new_tensor([names.shape[0]]) for names in rows]
        num_rows = int(combined(lookup.grid, counts, "max")[0])
        parts = [part if part.shape[0] else part.new_zeros(num_rows) for part in parts]
        parts = combined(lookup.grid, parts, "max" if infinite else "sum")
    for names, shard, total in zip(rows, shards, parts, strict=True):
        if names.numel():
            norms = total if infinite else total ** (1 / norm_type)
            factor = torch.where(norms > max_norm, max_norm / (norms + 1e-7), 1.0).to(shard.dtype)
            shard[names] = shard[names] * factor.unsqueeze(1)


# -- local batches -------------------------------------------------------------------------------
# Bags in any form of `embedding_bag` become flat ids and a length per bag.


@dataclass(frozen=True, slots=True)
class LocalBags:
    """One rank's flat ids, and the length of each bag, if there are bags."""

    ids: torch.Tensor
    lengths: torch.Tensor
    #: Where these ids were among those given; None for all.
    kept: torch.Tensor | None = None

    def flat(self, weights: torch.Tensor) -> torch.Tensor:
        """Of weights as they were given, those of these ids."""
        flat = weights.reshape(-1)
        return flat if self.kept is None else flat.index_select(0, self.kept)

    def without(self, padding_idx: int) -> LocalBags:
        """The ids that count."""
        keep = (self.ids != padding_idx).nonzero().squeeze(1)
        bag = torch.repeat_interleave(self.lengths).index_select(0, keep)
        lengths = torch.bincount(bag, minlength=self.lengths.numel())
        return LocalBags(self.ids.index_select(0, keep), lengths, keep)


_NOTHING = torch.empty(0, dtype=torch.int64, device="cpu")


def _single_ids(ids: Any) -> LocalBags | str:
    """Ids without bags, or what is wrong with them."""
    return dtype_fault(ids, "ids") or LocalBags(ids.detach().reshape(-1).long(), _NOTHING)


def _bags(
    dtype: torch.dtype, include_last_offset: bool, ids: Any, offsets: Any, weights: Any
) -> LocalBags | str:
    """The bags of a rank, for a table of `dtype`; or what is wrong with them."""
    if isinstance(ids, torch.Tensor) and isinstance(offsets, torch.Tensor):
        ids, offsets = promoted(ids, offsets)
    if (fault := dtype_fault(ids, "ids")) is not None:
        return fault
    if weights is not None and not isinstance(weights, torch.Tensor):
        return f"per_sample_weights are a tensor, found {type(weights).__name__}."
    if weights is not None and weights.shape != ids.shape:
        return f"per_sample_weights have shape {tuple(weights.shape)}, the ids {tuple(ids.shape)}."
    if weights is not None and weights.dtype != dtype:
        return f"per_sample_weights have dtype {weights.dtype}, the table {dtype}."
    flat = ids.detach().reshape(-1).long()
    if ids.dim() == 2:
        if offsets is not None:
            return "ids of two dims are one bag per row: no offsets."
        num_bags, each = ids.shape
        return LocalBags(flat, torch.full((num_bags,), each, dtype=torch.int64, device=ids.device))
    if ids.dim() != 1:
        return f"ids have one dim, with offsets, or two; found shape {tuple(ids.shape)}."
    if offsets is None:
        return "ids of one dim need offsets, of one dim too."
    if (fault := dtype_fault(offsets, "offsets")) is not None:
        return fault
    if offsets.dim() != 1:
        return f"offsets have one dim, found shape {tuple(offsets.shape)}."
    num_ids = ids.numel()
    if not offsets.numel() and include_last_offset:
        return "with include_last_offset there is at least one offset."
    if not offsets.numel() and num_ids:
        return f"there are {num_ids} ids but no bags."
    if (fault := offsets_fault(offsets, num_ids)) is not None:
        return fault
    ends = offsets.long()
    if not include_last_offset:
        ends = torch.cat([ends, ends.new_tensor([num_ids])])
    elif int(ends[-1]) != num_ids:
        return f"the last offset is the number of ids, {num_ids}; found {int(ends[-1])}."
    return LocalBags(flat, ends.diff())


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
    #: The dtype that autocast has linear layers cast to, where it is enabled.
    autocast_dtype: torch.dtype | None


def declare(
    name: str, eager: Callable[..., torch.Tensor], fake: Callable[..., torch.Tensor]
) -> EffectOp:
    """The op of a graph that runs `eager(weight=..., **tensors, **options)`.

    `fake(call, **inputs)` is an empty tensor like one rank's result; `weight` is its local tensor.
    """

    def run(call: LayerCall, weight: torch.Tensor, **tensors: torch.Tensor) -> list[torch.Tensor]:
        kind, dtype = call.tiling.grid.device_type, call.autocast_dtype
        with torch.autocast(kind, dtype, enabled=dtype is not None):
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
    tiling, kind = weight._tiling, weight._tiling.grid.device_type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    call = {
        "spec": encode_spec(tiling.spec),
        "shape": tiling.shape,
        "grad_reduction": weight.grad_reduction,
        "options": options,
        "autocast_dtype": dtype and str(dtype).removeprefix("torch."),
    }
    (out,) = op(
        op.encode(tiling.grid, call),
        {"weight": weight, **given},
        row_sparse=bool(options.get("sparse")),
        writes=options.get("max_norm") is not None,
    )
    return out


def _decode(call: Any, grid: Grid | None) -> LayerCall:
    assert grid is not None, "a tiling has the ranks of a group"
    tiling = make_tiling(decode_spec(call["spec"]), tuple(call["shape"]), grid)
    dtype = call["autocast_dtype"] and getattr(torch, call["autocast_dtype"])
    return LayerCall(tiling, call["grad_reduction"], call["options"], dtype)


def _enter(call: LayerCall, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    grid = call.tiling.grid
    local = one_tensor(grid, part_per_rank(grid, inputs["weight"]), sized=False)
    return inputs | {"weight": ShardedTensor.over(local, call.tiling, like=call)}


def _gradient(call: LayerCall, weight: Any, *held: torch.Tensor) -> torch.Tensor:
    layout = call.tiling.layout(weight.dtype)
    if len(held) == 2:
        return make_row_sparse(layout, *held)
    return ShardedTensor.over(held[0], call.tiling, layout, like=weight)
