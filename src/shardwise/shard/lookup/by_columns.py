"""Lookups in a column-sharded table: every rank has some columns of every row.

All ids are gathered on every rank; columns of rows or of pooled bags are sent back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.comm.agreement import gather_numbers
from shardwise.comm.watch import because
from shardwise.shard.lookup import bags
from shardwise.shard.lookup.local_batch import Exchange, LocalBatch
from shardwise.shard.lookup.lookup_args import BagBatch, Lookup
from shardwise.shard.lookup.pooling import (
    ColumnsOf,
    PoolByFrequency,
    PooledColumns,
    RowPerId,
    identity,
    renorm_columns,
)
from shardwise.shard.lookup.routes import ToEveryone, all_gather_uneven
from shardwise.shard.lookup.stage import Flat
from shardwise.simulation.ranks import each_rank, localize


def embedding(lookup: Lookup, ids: torch.Tensor) -> torch.Tensor:
    def describe(mine: torch.Tensor) -> tuple[Sequence[int], str | None]:
        fault = bags.ids_fault(mine)
        return [mine.numel(), *bags.range_of(mine, fault)], fault

    counted = gather_numbers(lookup.grid, lookup.what, describe, ids)
    num_ids, lows, highs = zip(*counted, strict=True)
    lookup.check_range(lows, highs)
    flat = each_rank(lookup.grid, lambda _, mine: mine.reshape(-1).long(), ids)
    everyones = _gathered(lookup, flat, num_ids)

    exchange = _exchange(
        lookup,
        num_ids,
        num_ids,
        local=ColumnsOf(lookup.padding_idx, lookup.sparse),
        finish=RowPerId(lookup.by_frequency),
        travels=(),
    )
    return LocalBatch.apply(lookup.weight, exchange, (everyones,), (ids,))


def embedding_bag(lookup: Lookup, batch: BagBatch) -> torch.Tensor:
    grid, tensors = lookup.grid, batch.tensors

    def describe(*mine: torch.Tensor) -> tuple[Sequence[int], str | None]:
        own = batch.of_rank(mine)
        span = bags.range_of(own.ids, own.fault)
        return [own.ids.numel(), own.lengths.numel(), *span], own.fault

    def flatten(_: Any, *mine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = batch.of_rank(mine)
        return own.ids, own.lengths

    counted = gather_numbers(grid, lookup.what, describe, *tensors)
    num_ids, num_bags, lows, highs = zip(*counted, strict=True)
    lookup.check_range(lows, highs)
    ids, lengths = each_rank(grid, flatten, *tensors)
    everyones = _gathered(lookup, ids, num_ids)
    weights = () if batch.weights is None else (batch.weights,)
    if lookup.by_frequency:
        # Gradients are divided row by row, before they are sent: the requester has to pool.
        exchange = _exchange(
            lookup,
            num_ids,
            num_ids,
            local=ColumnsOf(None, lookup.sparse),
            finish=PoolByFrequency(batch.mode, lookup.padding_idx),
            travels=(False,) * len(weights),
        )
        return LocalBatch.apply(lookup.weight, exchange, (everyones,), (ids, lengths), *weights)
    with because(lookup.what, implicit=False):
        all_lengths = all_gather_uneven(localize(grid, lengths), num_bags, grid)
    exchange = _exchange(
        lookup,
        num_ids,
        num_bags,
        local=PooledColumns(batch.mode, lookup.padding_idx, lookup.sparse),
        finish=identity,
        travels=(True,) * len(weights),
    )
    flat = [Flat.apply(w, grid) for w in weights]
    return LocalBatch.apply(lookup.weight, exchange, (everyones, all_lengths), (), *flat)


def _exchange(
    lookup: Lookup, num_brought: tuple[int, ...], num_rows: tuple[int, ...], **functions: Any
) -> Exchange:
    tiling = lookup.weight._tiling
    route = ToEveryone(
        tiling.grid,
        lookup.split,
        joined=True,
        num_columns=tiling.shape[1],
        num_brought=num_brought,
        num_rows=num_rows,
    )
    return Exchange(
        lookup.what,
        tiling,
        lookup.split,
        route,
        sparse=lookup.sparse,
        grad_reduction=lookup.weight.grad_reduction,
        **functions,
    )


def _gathered(lookup: Lookup, flat: torch.Tensor, num_ids: tuple[int, ...]) -> torch.Tensor:
    """All ranks' ids; their rows are scaled to `max_norm`."""
    grid = lookup.grid
    with because(lookup.what, implicit=False):
        everyones = all_gather_uneven(localize(grid, flat), num_ids, grid)
        if lookup.max_norm is not None:
            renorm_columns(lookup.weight, everyones, lookup.max_norm, lookup.norm_type)
    return everyones
