"""Lookups in a row-sharded table: a row has one owner, and only the owner is asked for it.

A rank asks for each different row once. Bags are pooled by the owners of their rows: each owner
sends at most one row per bag, and the requester combines them. Where gradients are scaled by
frequency, rows are sent instead, and the requester pools them.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.comm.id_exchange import by_owner
from shardwise.shard.lookup import bags
from shardwise.shard.lookup.bag_segments import AddSegments, MaxOfSegments, MaxSegments, SumSegments
from shardwise.shard.lookup.local_batch import Exchange, LocalBatch
from shardwise.shard.lookup.lookup_args import BagBatch, LocalBags, Lookup
from shardwise.shard.lookup.pooling import (
    PoolByFrequency,
    RequestedRows,
    RowPerId,
    SpreadRows,
    renorm_rows,
)
from shardwise.shard.lookup.row_requests import RowReply, RowRequest, check_ids, request_rows
from shardwise.shard.lookup.stage import Flat
from shardwise.shard.tiling import row_owners
from shardwise.simulation.ranks import each_rank


def embedding(lookup: Lookup, ids: torch.Tensor) -> torch.Tensor:
    def request(mine: torch.Tensor) -> RowRequest:
        return _each_row_once(lookup, mine, bags.ids_fault(mine))

    reply, (inverse,) = request_rows(lookup, request, ids)
    _shorten(lookup, reply)
    local = RequestedRows(lookup.padding_idx, lookup.sparse)
    finish = SpreadRows(RowPerId(lookup.by_frequency))
    exchange = _exchange(lookup, reply, local=local, finish=finish)
    return LocalBatch.apply(lookup.weight, exchange, (reply.rows,), (inverse, ids))


def embedding_bag(lookup: Lookup, batch: BagBatch) -> torch.Tensor:
    if lookup.by_frequency:
        return _pooled_by_requester(lookup, batch)

    def request(*mine: torch.Tensor) -> RowRequest:
        return _bag_segments(lookup, batch.of_rank(mine))

    reply, own = request_rows(lookup, request, *batch.tensors)
    _shorten(lookup, reply)
    there = (reply.rows, reply.starts)
    if batch.mode == "max":
        local = MaxSegments(reply.longest if reply.trains else None)
        exchange = _exchange(lookup, reply, local=local, finish=MaxOfSegments(reply.trains))
        own = (*own, reply.own_starts, reply.route.order)
        return LocalBatch.apply(lookup.weight, exchange, there, own)
    weights = [] if batch.weights is None else [Flat.apply(batch.weights, lookup.grid)]
    finish = AddSegments(mean=batch.mode == "mean")
    exchange = _exchange(
        lookup,
        reply,
        local=SumSegments(lookup.sparse),
        finish=finish,
        travels=(True,) * len(weights),
    )
    return LocalBatch.apply(lookup.weight, exchange, there, own, *weights)


def _pooled_by_requester(lookup: Lookup, batch: BagBatch) -> torch.Tensor:
    def request(*mine: torch.Tensor) -> RowRequest:
        own = batch.of_rank(mine)
        return _each_row_once(lookup, own.ids, own.fault, own.ids, own.lengths)

    reply, own = request_rows(lookup, request, *batch.tensors)
    _shorten(lookup, reply)
    weights = [] if batch.weights is None else [batch.weights]
    exchange = _exchange(
        lookup,
        reply,
        local=RequestedRows(None, lookup.sparse),
        finish=SpreadRows(PoolByFrequency(batch.mode, lookup.padding_idx)),
        travels=(False,) * len(weights),
    )
    return LocalBatch.apply(lookup.weight, exchange, (reply.rows,), own, *weights)


def _exchange(lookup: Lookup, reply: RowReply, travels: Any = (), **functions: Any) -> Exchange:
    return Exchange(
        lookup.what,
        lookup.weight._tiling,
        lookup.split,
        reply.route,
        travels=travels,
        sparse=lookup.sparse,
        grad_reduction=lookup.weight.grad_reduction,
        **functions,
    )


def _each_row_once(
    lookup: Lookup, given: torch.Tensor, fault: str | None, *keep: torch.Tensor
) -> RowRequest:
    """Every row is a segment; the index of each id among them is kept."""
    owners = row_owners(lookup.weight._tiling)
    ids = check_ids(given, fault, lookup.num_rows)
    rows, inverse, counts = by_owner(owners.numbered(ids.usable), list(owners.bounds))
    first = torch.ones_like(rows, dtype=torch.bool)
    order = torch.arange(rows.numel(), device=rows.device)
    return RowRequest(ids, rows, first, order, counts, counts, (inverse, *keep))


def _bag_segments(lookup: Lookup, own: LocalBags) -> RowRequest:
    """The rows of one bag with one owner are a segment.

    The bag of each segment is kept, and the number of ids that count in each bag.
    """
    owners = row_owners(lookup.weight._tiling)
    ids = check_ids(own.ids, own.fault, lookup.num_rows)
    wanted, padding = ids.usable, lookup.padding_idx
    lengths = own.lengths if wanted.numel() else torch.zeros_like(own.lengths)
    bag = torch.repeat_interleave(lengths)
    place = None
    if padding is not None:
        place = (wanted != padding).nonzero().squeeze(1)
        wanted, bag = wanted[place], bag[place]
        lengths = torch.bincount(bag, minlength=lengths.numel())
    rows = owners.numbered(wanted)
    owner = owners.owners(rows)
    order = torch.argsort(owner, stable=True)
    rows, bag, owner = rows[order], bag[order], owner[order]
    first = _changes(owner * lengths.numel() + bag)
    num_ranks = len(owners.bounds) - 1
    return RowRequest(
        ids,
        rows,
        first,
        order if place is None else place[order],
        torch.bincount(owner, minlength=num_ranks),
        torch.bincount(owner[first], minlength=num_ranks),
        keep=(bag[first], lengths),
        longest=int(lengths.max()) if lengths.numel() else 0,
        padded=wanted.numel() < ids.usable.numel(),
    )


def _changes(x: torch.Tensor) -> torch.Tensor:
    """Where a value differs from the one before it."""
    return torch.cat([x.new_ones(x[:1].shape, dtype=torch.bool), x[1:] != x[:-1]])


def _shorten(lookup: Lookup, reply: RowReply) -> None:
    """Scale the rows that any rank looks up to `max_norm`, the padding row included."""
    if lookup.max_norm is None:
        return
    rows, padding = reply.rows, lookup.padding_idx
    if padding is not None and reply.padded:
        intervals, ranks = lookup.split.intervals, lookup.grid.ranks

        def with_padding(place: Any, rows: torch.Tensor) -> torch.Tensor:
            start, length = intervals[ranks[place[0]]]
            owned = start <= padding < start + length
            return torch.cat([rows, rows.new_tensor([padding - start])]) if owned else rows

        rows = each_rank(lookup.grid, with_padding, rows)
    renorm_rows(lookup.weight, rows, lookup.max_norm, lookup.norm_type)
