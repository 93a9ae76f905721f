"""Embedding and EmbeddingBag, above autograd: see Note [Above autograd].

Where one axis shards both the table's rows and the ids, ids move and the table does not. There are
two ways, and the cost model chooses. *Exchange*: ids are sent to the ranks that own their rows and
rows are sent back, each distinct id once; the gradient takes the same route back. *Gather*: ids are
all-gathered, each rank looks up those that it owns, and rows are reduce-scattered. The first sends
least; the second has fewer collectives, and sizes that do not depend on the ids, as compiled code
needs.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwise.comm.collectives import collective_s
from shardwise.comm.watch import because, watch
from shardwise.core.layout import Layout
from shardwise.core.mesh import Coordinate
from shardwise.core.placements import SUM, Placement, Shard
from shardwise.core.sizes import lengths
from shardwise.core.untraced import SkipsNone, UntracedFunction, differentiated_once
from shardwise.core.world import world_caches
from shardwise.dispatch.propagate import forbid_sent
from shardwise.dispatch.rule import Call, Choice, CollectiveCost, LocalCall, Rule, Table, table
from shardwise.dtensor.autograd import (
    bare_apply,
    direct_apply,
    gradient_layout,
    gradient_layout_of,
    placed_like,
    redistribute,
)
from shardwise.dtensor.snapshots import current
from shardwise.dtensor.tensor import DTensor, run
from shardwise.errors import ArgumentError, BatchError, MixedTensorsError, UnsupportedError
from shardwise.lookup.exchange import Routing, route
from shardwise.lookup.ids import (
    dtype_fault,
    has_values,
    id_range,
    promoted,
    raise_out_of_range,
    sharded_axes,
)
from shardwise.ops.lookup import rank_bags, rules
from shardwise.ops.lookup.rank_bags import MODE_MAX, MODE_MEAN, MODE_SUM
from shardwise.ops.lookup.row_sparse import make as make_row_sparse
from shardwise.ops.operands import all_distributed, are_distributed
from shardwise.redistribute.steps import local_bytes
from shardwise.simulation.ranks import each_rank

aten = torch.ops.aten
_table_lookup = aten.embedding.default
_table_grad = aten.embedding_dense_backward.default
_ID_BYTES = 8


# -- forward ---------------------------------------------------------------------------------


def _exchange_axis(table: Layout, ids: Layout) -> int | None:
    """The axis that alone shards the rows, if it shards the ids as well."""
    axes = table.axes_of(0)
    return axes[0] if len(axes) == 1 and ids.placements[axes[0]].is_shard() else None


def _exchange_costs(num_ids: int, row_bytes: int, num_ranks: int) -> tuple[CollectiveCost, ...]:
    """The collectives of an exchange along an axis: of counts, ids and rows."""
    num_here = num_ids / num_ranks
    sent = (3 * _ID_BYTES * num_ranks, num_here * _ID_BYTES, num_here * row_bytes)
    return tuple(CollectiveCost("all_to_all", num_bytes) for num_bytes in sent)


@functools.lru_cache(maxsize=4096)
def _exchanges(table: Layout, ids: Layout, num_dims: int) -> bool:
    """Whether to exchange ids, if that can be: it is cheaper than to gather them.

    Each index of their first dims, so many, has a result: each id, or each bag.
    """
    axis = _exchange_axis(table, ids)
    if axis is None or ids.placements[axis].dim >= num_dims:  # type: ignore[attr-defined]
        return False
    num_ids, num_results = math.prod(ids.shape), math.prod(ids.shape[:num_dims])
    num_ranks, row_bytes = table.grid.shape[axis], table.shape[1] * table.dtype.itemsize
    gathering = (
        CollectiveCost("all_gather", num_ids * _ID_BYTES),
        CollectiveCost("reduce_scatter", num_results * row_bytes),
    )
    gather_s, exchange_s = (
        sum(collective_s(each.kind, num_ranks, each.num_bytes) for each in way)
        for way in (gathering, _exchange_costs(num_ids, row_bytes, num_ranks))
    )
    return exchange_s < gather_s


world_caches.append(_exchanges.cache_clear)


def routed_lookup(weight: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, None]:
    """A lookup of ids that are exchanged; it also returns their routing."""
    return torch.embedding(weight, ids), None


def _exchanged(
    layouts: Sequence[Layout],
) -> Callable[..., tuple[torch.Tensor, Routing | None]]:
    table, ids_layout = layouts[:2]
    axis = _exchange_axis(table, ids_layout)
    if axis is None:
        look_up = rules.lookup(layouts)
        return lambda weight, ids: (look_up(weight, ids), None)
    grid, num_rows, shard = table.grid, table.shape[0], table.placements[axis]
    assert isinstance(shard, Shard), "ids are exchanged along an axis that shards rows"
    num_owned = lengths(num_rows, grid.shape[axis], shard.sizes)
    edges = list(itertools.accumulate(num_owned, initial=0))
    others = tuple(a for a in sharded_axes(ids_layout) if a != axis)

    def rows(coordinate: Coordinate, weight: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
        return weight.index_select(0, asked - table.box(coordinate)[0][0])

    def run(weight: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, Routing]:
        routing = route(
            grid,
            axis,
            each_rank(grid, lambda _, ids: ids.reshape(-1), ids, axes=()),
            edges,
            # Of this rank along the axis. On CUDA too: the counts must be read anyway.
            id_range(ids, ids_layout, others),
            lambda ranges: raise_out_of_range(ranges, num_rows),
        )
        answers = routing.answer(each_rank(grid, rows, weight, routing.asked, axes=(axis,)))
        shaped = each_rank(
            grid, lambda _, rows, ids: rows.view(*ids.shape, rows.shape[-1]), answers, ids, axes=()
        )
        return shaped, routing

    return run


def _routed_choices(call: Call) -> Iterator[Choice]:
    """Operands: the table and the ids."""
    weight, ids = call.inputs
    row_bytes = weight.shape[1] * weight.dtype.itemsize
    sent = _exchange_costs(math.prod(ids.shape), row_bytes, max(call.axis_size, 1))
    local = LocalCall(_exchanged, collective=True)
    of_rows = rules.mask_partial(call)
    for choice in rules.lookup_choices(call, rules.ROWS, local, of_rows, together=sent):
        # Along the axis on which ids are exchanged alone.
        yield replace(choice, alone=((0, 0),)) if choice.sent else choice


# -- backward --------------------------------------------------------------------------------


def _owed(own: Placement, of_rows: Placement, last: int) -> Placement:
    """How the gradient of a table lies along an axis, given the table and the rows looked up."""
    if own.is_shard() or not isinstance(of_rows, Shard):
        return own
    # A table that is replicated: some of its columns were looked up, or some of the ids.
    return Shard(1, of_rows.sizes) if of_rows.dim == last else SUM


def _returned(
    grad: Any, route: tuple[Layout, Routing], layout: Layout, padding_idx: int, sparse: bool
) -> Any:
    """The gradient of a table in this layout: each row's is sent to its owner, as its id was.

    `route` is the layout of the rows that were looked up, and the way that their ids took.
    """
    looked_up, routing = route
    if watch.strict:
        sent = CollectiveCost("all_to_all", local_bytes(grad._layout))
        forbid_sent(_table_grad, (grad._layout,), ((routing.axis, sent),))
    grad = redistribute(grad, placed_like(looked_up, grad._layout))
    pairs = zip(layout.placements, looked_up.placements, strict=True)
    placements = tuple(_owed(*pair, looked_up.ndim - 1) for pair in pairs)
    layout = layout.with_placements(placements, layout.order)

    with because(_table_grad, implicit=True):
        flat = each_rank(
            layout.grid, lambda _, rows: rows.reshape(-1, rows.shape[-1]), grad._local, axes=()
        )
        arrived = routing.hand_in(flat)
    batch, num_rows = (arrived, routing.asked), layout.shape[0]
    if sparse:
        bags = (*batch, None, None, padding_idx)
        return rules.sparse_rows_grad((layout,))(*bags, num_rows, MODE_SUM, False)
    return DTensor._wrap(rules.table_grad((layout,))(*batch, num_rows, padding_idx, False), layout)


class EmbeddingLookup(UntracedFunction):
    @staticmethod
    def forward(ctx: Any, weight: Any, ids: Any, options: tuple[int, bool, bool]) -> Any:
        ctx.materialize_grads = False  # as in SkipsNone, without its call
        rows, routing = _look_up(weight, ids)
        ctx.save_for_backward(ids)
        route = None if routing is None else (rows._layout, routing)
        layout = weight._layout
        ctx.plan = (gradient_layout_of[layout.symbolic](layout), options, route)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return None, None, None
        (ids,) = ctx.saved_tensors
        layout, (padding_idx, by_freq, sparse), route = ctx.plan
        num_rows = layout.shape[0]
        if torch.is_grad_enabled() and not sparse:  # double backward
            found = LookupGrad.apply(grad, ids, layout, padding_idx, by_freq)
        elif route is not None and not by_freq:
            found = _returned(grad, route, layout, padding_idx, sparse)
        elif sparse:
            bags = (grad, ids, None, None, padding_idx)
            found = run(rules.sparse_grad, *bags, num_rows, MODE_SUM, by_freq, preferred=layout)
        else:
            found = run(_table_grad, grad, ids, num_rows, padding_idx, by_freq, preferred=layout)
        return make_row_sparse(*found[0]) if sparse else found, None, None


def _look_up(weight: Any, ids: Any) -> tuple[Any, Any]:
    """The rows, and the routing if ids were exchanged: never in a graph, whose sizes are known."""
    table, layout = weight._layout, ids._layout
    known = not (table.symbolic or layout.symbolic)
    if known and _exchanges(table, layout, len(layout.shape)) and has_values(ids._local):
        return run(routed_lookup, weight, ids)
    return run(_table_lookup, weight, ids), None


class LookupGrad(SkipsNone):
    """The gradient of a table, differentiable for the gradient of the rows."""

    @staticmethod
    def forward(
        ctx: Any, grad: Any, ids: Any, layout: Layout, padding_idx: int, by_freq: bool
    ) -> Any:
        ctx.save_for_backward(ids)
        ctx.options = (padding_idx, by_freq)
        return run(_table_grad, grad, ids, layout.shape[0], padding_idx, by_freq, preferred=layout)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (ids,) = ctx.saved_tensors
        padding_idx, by_freq = ctx.options
        if by_freq:
            raise UnsupportedError(
                "The second derivative of an embedding with scale_grad_by_freq is not supported."
            )
        rows = embedding(grad, ids)
        if padding_idx >= 0:
            rows = rows * (ids != padding_idx).unsqueeze(-1)
        return rows, None, None, None, None


_apply_lookup = bare_apply(EmbeddingLookup)


def embedding(
    weight: Any,
    ids: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if type(weight) is not DTensor or type(ids) is not DTensor:
        weight, ids = all_distributed(_table_lookup, (weight, ids))
    if weight.requires_grad and torch.is_grad_enabled():
        if weight._layout.snapshot or ids._layout.snapshot:
            current(weight)
            current(ids)
        return _apply_lookup(weight, ids, (int(padding_idx), scale_grad_by_freq, sparse))
    return _look_up(weight, ids)[0]


RULES: Table = table(((routed_lookup,), Rule(_routed_choices, rules.ROWS)))


# -- bags ----------------------------------------------------------------------------------------
# For bags of few ids in a row-wise table, each rank fetches the rows of its own ids and pools them.
# Otherwise each rank pools the rows that it owns, and one row per bag of all ranks is
# reduce-scattered. The cost model chooses, from sizes alone.


#: The mode, the padding index or -1, and whether gradients are scaled by frequency, and sparse.
_Options = tuple[int, int, bool, bool]


def _pool_rows(weight: Any, ids: Any, weights: Any, options: _Options) -> Any:
    """The sum or mean of each bag, from the rows of its ids."""
    mode, padding, *of_gradient = options
    rows = torch.embedding(weight, ids, padding, *of_gradient)
    real = ids != padding if padding >= 0 else None
    if weights is not None:
        rows = rows * weights.unsqueeze(-1)
    if real is not None:
        rows = torch.where(real.unsqueeze(-1), rows, 0)
    if mode != MODE_MEAN:
        return rows.sum(1)
    num = max(ids.shape[1], 1) if real is None else real.sum(1, keepdim=True).clamp(min=1)
    return rows.sum(1) / num


_EMBEDDING_BAG = torch.ops.aten.embedding_bag.padding_idx


class Pooled(SkipsNone):
    """Bags, and what backward reads: of sums and means the batch, of a maximum the winners."""

    @staticmethod
    def forward(
        ctx: Any, weight: Any, ids: Any, offsets: Any, weights: Any, given: Any, options: _Options
    ) -> Any:
        found, won = _pool(weight, ids, offsets, weights, options)
        # Only the gradient of `weights` reads the table: else a step may write to it first.
        along = weight if ctx.needs_input_grad[3] else None
        # The offsets as they were given too, so that backward refuses a write to them, and to the
        # ids of a maximum.
        ctx.save_for_backward(ids, offsets, weights, along, won, given)
        ctx.plan = (gradient_layout(weight._layout), options)
        return found

    @staticmethod
    @differentiated_once("an embedding bag")
    def backward(ctx: Any, grad: Any) -> Any:
        ids, offsets, weights, weight, won, _ = ctx.saved_tensors
        layout, (mode, padding_idx, by_freq, sparse) = ctx.plan
        for_weight, _, _, for_weights = ctx.needs_input_grad[:4]
        batch, found, along = (ids, offsets, weights, padding_idx), None, None
        if for_weight and won is not None:
            found = run(rules.largest_grad, grad, won, layout.shape[0], preferred=layout)
        elif for_weight:
            op = rules.sparse_grad if sparse else rank_bags.pooled_grad
            found = run(op, grad, *batch, layout.shape[0], mode, by_freq, preferred=layout)
            found = make_row_sparse(*found[0]) if sparse else found
        if for_weights:
            along = run(rank_bags.sample_grad, grad, ids, offsets, None, padding_idx, weight)
        return found, None, None, along, None, None


def _pool(weight: Any, ids: Any, offsets: Any, weights: Any, options: _Options) -> tuple[Any, Any]:
    """The bags, and of a maximum the ids that won."""
    mode, padding, *_ = options
    if mode == MODE_MAX:
        return run(rules.largest, weight, ids, offsets, padding)
    return run(rank_bags.pooled, weight, ids, offsets, weights, padding, mode), None


_apply_pooled = direct_apply(Pooled)


def embedding_bag(
    weight: Any,
    ids: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = MODE_SUM,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """The bags, and three empty tensors in place of those that torch saves for backward."""
    if not are_distributed(weight, ids, per_sample_weights):
        known = offsets if isinstance(offsets, DTensor) else None  # plain: see _bagged
        args = (weight, ids, known, None, None, None, per_sample_weights)
        weight, ids, *_, per_sample_weights = all_distributed(_EMBEDDING_BAG, args)
    if per_sample_weights is not None and mode != MODE_SUM:
        raise ArgumentError(
            f"embedding_bag takes per_sample_weights with mode='sum' only, found mode {mode}."
        )
    if per_sample_weights is not None and per_sample_weights.dtype != weight.dtype:
        raise RuntimeError(
            f"embedding_bag expects per_sample_weights to have the same type as the table, "
            f"{weight.dtype}, found {per_sample_weights.dtype}."
        )
    ids, offsets = promoted(ids, offsets)
    if (fault := dtype_fault(ids, "ids")) is not None:
        raise BatchError(f"embedding_bag: {fault}")
    given = offsets if isinstance(offsets, DTensor) else None
    ids, offsets, weights = _bagged(ids, offsets, per_sample_weights, include_last_offset)
    options = (mode, _padding(padding_idx, weight), bool(scale_grad_by_freq), bool(sparse))
    square = offsets is None and has_values(ids._local)
    trained = weight.requires_grad or (weights is not None and weights.requires_grad)
    if square and mode != MODE_MAX and _exchanges(weight._layout, ids._layout, 1):
        bags = _pool_rows(weight, ids, weights, options)
    elif trained and torch.is_grad_enabled():
        bags = _apply_pooled(weight, ids, offsets, weights, given, options)
    else:
        bags, _ = _pool(weight, ids, offsets, weights, options)
    return bags, *(torch.empty(0, dtype=torch.long) for _ in range(3))


def _padding(padding_idx: int | None, weight: Any) -> int:
    num_rows = weight.shape[0]
    if padding_idx is not None and not -num_rows <= padding_idx < num_rows:
        raise ArgumentError(
            f"padding_idx={padding_idx} is not a row of a table of {num_rows} rows."
        )
    return -1 if padding_idx is None else padding_idx % num_rows


def _bagged(ids: Any, offsets: Any, weights: Any, include_last: bool) -> tuple[Any, Any, Any]:
    """Ids as (bags, ids in each), or flat with offsets that end with the number of ids.

    For ids of two dims `torch.nn.functional` makes plain, equally spaced offsets and flattens the
    ids: these get their two dims back. Other plain offsets could differ between ranks.
    """
    if watch.replicate_plain:
        _, offsets = all_distributed(_EMBEDDING_BAG, (ids, offsets))
    if isinstance(offsets, DTensor):
        if not include_last:  # the end of the last bag
            offsets = torch.nn.functional.pad(offsets, (0, 1), value=ids.shape[0])
        return ids, offsets, weights
    num_bags, num_ids = offsets.shape[0], ids.shape[0]
    if include_last or not _equally_long(offsets, num_bags, num_ids):
        raise MixedTensorsError(
            f"aten.embedding_bag.padding_idx: offsets is a plain tensor of shape "
            f"{tuple(offsets.shape)}, the ids a DTensor. Wrap it: DTensor.from_local(offsets, "
            "mesh, [Replicate()]). Offsets count from the first id of the whole tensor of ids."
        )
    none = type(num_bags) is int and num_bags == 0
    shape = (num_bags, 1 if none else num_ids // num_bags)
    return ids.view(shape), None, None if weights is None else weights.view(shape)


def _equally_long(offsets: Any, num_bags: Any, num_ids: Any) -> bool:
    if {type(num_bags), type(num_ids)} != {int} or not has_values(offsets):
        return True  # in a traced graph, plain offsets come from ids of two dims
    step, left = divmod(num_ids, num_bags) if num_bags else (0, num_ids)
    if left or offsets.is_cuda:  # reading the values would synchronise
        return not left
    return torch.equal(offsets, torch.arange(num_bags, dtype=offsets.dtype) * step)


KERNELS: tuple[tuple[str, Any], ...] = (
    ("embedding", embedding),
    ("embedding_bag", embedding_bag),
    ("embedding_bag.padding_idx", embedding_bag),
)
