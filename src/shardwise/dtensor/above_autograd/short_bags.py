"""Bags of few ids in a row-wise table: rows are exchanged, and pooled where the bags lie.

Where each rank pools what it owns, one row per bag of all ranks is reduce-scattered. Exchanging
sends the rows of a rank's own ids instead, which is less where bags have fewer ids than there are
ranks. The cost model chooses, from sizes alone.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.comm.cost import collective_s
from shardwise.core.layout import Layout
from shardwise.rules.bag_shape import MODE_MEAN
from shardwise.rules.ids import has_values

_ID_BYTES = 8


def exchanges_rows(weight: Any, ids: Any) -> bool:
    """Whether to exchange the rows of `ids`, which are (bags, ids in each)."""
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
    """The sum or mean of each bag, out of the rows of its ids."""
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
