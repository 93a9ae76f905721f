"""EmbeddingBag, above autograd: see Note [Above autograd].

For bags of few ids in a row-wise table, each rank fetches the rows of its own ids and pools them.
Otherwise each rank pools the rows that it owns, and one row per bag of all ranks is
reduce-scattered. The cost model chooses, from sizes alone.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.comm.cost import collective_s
from shardwise.comm.watch import watch
from shardwise.core.layout import Layout
from shardwise.core.untraced import UntracedFunction, differentiated_once
from shardwise.dtensor.autograd import direct_apply, gradient_layout
from shardwise.dtensor.tensor import DTensor, run
from shardwise.errors import ArgumentError, MixedTensorsError
from shardwise.lookup.ids import has_values
from shardwise.ops.lookup.bag_grads import pooled_grad, sample_grad
from shardwise.ops.lookup.bag_rules import pooled
from shardwise.ops.lookup.bag_shape import MODE_MAX, MODE_MEAN, MODE_SUM
from shardwise.ops.lookup.largest_bags import largest, largest_grad
from shardwise.ops.lookup.row_sparse import RowSparse
from shardwise.ops.operands import all_distributed, are_distributed

_ID_BYTES = 8


def exchanges_rows(weight: Any, ids: Any) -> bool:
    """Whether to exchange the rows of `ids`, of shape (bags, ids in each)."""
    table, bags = weight._layout, ids._layout
    axes = table.axes_of(0)
    if len(axes) != 1 or not bags.placements[axes[0]].is_shard(0) or not has_values(ids._local):
        return False
    return _exchange_s(table, bags, axes[0]) < _gather_s(table, bags, axes[0])


def _gather_s(table: Layout, bags: Layout, axis: int) -> float:
    num_ranks = table.grid.shape[axis]
    num_bags, each = bags.shape
    return collective_s("all_gather", num_ranks, num_bags * each * _ID_BYTES) + collective_s(
        "reduce_scatter", num_ranks, num_bags * _row_bytes(table)
    )


def _exchange_s(table: Layout, bags: Layout, axis: int) -> float:
    num_ranks = table.grid.shape[axis]
    own_ids = bags.shape[0] * bags.shape[1] / num_ranks
    sent = (3 * _ID_BYTES * num_ranks, own_ids * _ID_BYTES, own_ids * _row_bytes(table))
    return sum(collective_s("all_to_all", num_ranks, num_bytes) for num_bytes in sent)


def _row_bytes(table: Layout) -> int:
    return table.shape[1] * table.dtype.itemsize


def pool_rows(
    weight: Any,
    ids: Any,
    weights: Any,
    mode: int,
    padding: int,
    by_freq: bool,
    sparse: bool,
) -> Any:
    """The sum or mean of each bag, from the rows of its ids."""
    rows = torch.embedding(weight, ids, padding, by_freq, sparse)
    real = ids != padding if padding >= 0 else None
    if weights is not None:
        rows = rows * weights.unsqueeze(-1)
    if real is not None:
        rows = torch.where(real.unsqueeze(-1), rows, 0)
    total = rows.sum(1)
    if mode != MODE_MEAN:
        return total
    if real is None:
        return total / max(ids.shape[1], 1)
    return total / real.sum(1, keepdim=True).clamp(min=1)


_EMBEDDING_BAG = torch.ops.aten.embedding_bag.padding_idx


class Pooled(UntracedFunction):
    """Sum and mean."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Any,
        ids: Any,
        offsets: Any,
        weights: Any,
        given: Any,
        mode: int,
        padding_idx: int,
        by_freq: bool,
        sparse: bool,
    ) -> Any:
        along = weight if weights is not None else None
        # The offsets as they were given too, so that backward refuses a write to them.
        ctx.save_for_backward(ids, offsets, weights, along, given)
        ctx.options = (gradient_layout(weight._layout), mode, padding_idx, by_freq, sparse)
        return run(pooled, weight, ids, offsets, weights, mode, padding_idx)

    @staticmethod
    @differentiated_once("an embedding bag")
    def backward(ctx: Any, grad: Any) -> Any:
        ids, offsets, weights, weight, _ = ctx.saved_tensors
        layout, mode, padding_idx, by_freq, sparse = ctx.options
        for_weight, _, _, for_weights = ctx.needs_input_grad[:4]
        found = along = None
        if for_weight:
            options = (layout.shape[0], mode, padding_idx, by_freq, sparse)
            found = run(pooled_grad, grad, ids, offsets, weights, *options, preferred=layout)
            found = RowSparse.of(*found) if sparse else found
        if for_weights:
            along = run(sample_grad, grad, weight, ids, offsets, padding_idx)
        return found, None, None, along, None, None, None, None, None


class Largest(UntracedFunction):
    @staticmethod
    def forward(ctx: Any, weight: Any, ids: Any, offsets: Any, given: Any, padding: int) -> Any:
        values, won = run(largest, weight, ids, offsets, padding)
        # Backward reads `won` alone; as on one device it refuses a write to the others.
        ctx.save_for_backward(won, ids, given)
        ctx.layout = gradient_layout(weight._layout)
        return values

    @staticmethod
    @differentiated_once("an embedding bag")
    def backward(ctx: Any, grad: Any) -> Any:
        won = ctx.saved_tensors[0]
        found = run(largest_grad, grad, won, ctx.layout.shape[0], preferred=ctx.layout)
        return found, None, None, None, None


_apply_pooled = direct_apply(Pooled)
_apply_largest = direct_apply(Largest)


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
    given = offsets if isinstance(offsets, DTensor) else None
    ids, offsets, weights = _bagged(ids, offsets, per_sample_weights, include_last_offset)
    padding = _padding(padding_idx, weight)
    if mode == MODE_MAX:
        needs = torch.is_grad_enabled() and weight.requires_grad
        bags = (
            _apply_largest(weight, ids, offsets, given, padding)
            if needs
            else run(largest, weight, ids, offsets, padding)[0]
        )
    else:
        options = (mode, padding, scale_grad_by_freq, sparse)
        bags = _pool(weight, ids, offsets, weights, given, *options)
    return bags, *(torch.empty(0, dtype=torch.long) for _ in range(3))


def _pool(
    weight: Any,
    ids: Any,
    offsets: Any,
    weights: Any,
    given: Any,
    mode: int,
    padding: int,
    by_freq: bool,
    sparse: bool,
) -> Any:
    if offsets is None and exchanges_rows(weight, ids):
        return pool_rows(weight, ids, weights, mode, padding, bool(by_freq), bool(sparse))
    needs = weight.requires_grad or (weights is not None and weights.requires_grad)
    if torch.is_grad_enabled() and needs:
        options = (mode, padding, bool(by_freq), bool(sparse))
        return _apply_pooled(weight, ids, offsets, weights, given, *options)
    return run(pooled, weight, ids, offsets, weights, mode, padding)


def _padding(padding_idx: int | None, weight: Any) -> int:
    if padding_idx is None:
        return -1
    num_rows = weight.shape[0]
    if not -num_rows <= padding_idx < num_rows:
        raise ArgumentError(
            f"padding_idx={padding_idx} is not a row of a table of {num_rows} rows."
        )
    return padding_idx % num_rows


def _bagged(ids: Any, offsets: Any, weights: Any, include_last: bool) -> tuple[Any, Any, Any]:
    """Ids as (bags, ids in each), or flat with offsets that end with the number of ids.

    For ids of two dims `torch.nn.functional` makes plain, equally spaced offsets and flattens the
    ids: these get their two dims back. Other plain offsets could differ between ranks.
    """
    if watch.replicate_plain:
        _, offsets = all_distributed(_EMBEDDING_BAG, (ids, offsets))
    if isinstance(offsets, DTensor):
        return ids, offsets if include_last else _closed(offsets, ids.shape[0]), weights
    num_bags, num_ids = offsets.shape[0], ids.shape[0]
    if include_last or not _equally_long(offsets, num_bags, num_ids):
        raise MixedTensorsError(
            f"aten.embedding_bag.padding_idx: offsets is a plain tensor of shape "
            f"{tuple(offsets.shape)}, the ids a DTensor. Wrap it: DTensor.from_local(offsets, "
            "mesh, [Replicate()]). Offsets count from the first id of the whole tensor of ids."
        )
    none = _is_known(num_bags) and num_bags == 0
    shape = (num_bags, 1 if none else num_ids // num_bags)
    return ids.view(shape), None, None if weights is None else weights.view(shape)


def _is_known(size: Any) -> bool:
    return type(size) is int


def _equally_long(offsets: Any, num_bags: Any, num_ids: Any) -> bool:
    if not _is_known(num_bags) or not _is_known(num_ids) or not has_values(offsets):
        return True  # in a traced graph, plain offsets come from ids of two dims
    if not num_bags:
        return num_ids == 0
    if num_ids % num_bags:
        return False
    if offsets.is_cuda:  # reading the values would synchronise
        return True
    step = num_ids // num_bags
    return torch.equal(offsets, torch.arange(num_bags, dtype=offsets.dtype) * step)


def _closed(offsets: Any, num_ids: Any) -> Any:
    """The offsets, and the end of the last bag."""
    return torch.nn.functional.pad(offsets, (0, 1), value=num_ids)


KERNELS: tuple[tuple[str, Any], ...] = (
    ("embedding_bag", embedding_bag),
    ("embedding_bag.padding_idx", embedding_bag),
)
