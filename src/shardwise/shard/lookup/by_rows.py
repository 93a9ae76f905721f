"""Lookups in a table that is cut by rows: a row is on one rank, and only that rank is asked for it.

Rows are asked for once, however often a rank names them. Bags are pooled where their rows are: a
rank answers a bag with one row at most, and the pieces are put together at home. Where gradients
are scaled by frequency that is impossible, and the rows come home.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.comm.id_exchange import by_owner
from shardwise.shard.lookup import bags
from shardwise.shard.lookup.bag_pieces import AddPieces, MaximumOfPieces, PoolPieces, StrongestRows
from shardwise.shard.lookup.local_batch import Exchange, OwnBatch
from shardwise.shard.lookup.lookup_args import BagBatch, Lookup, OwnBags
from shardwise.shard.lookup.pooling import (
    PoolByFrequency,
    RowPerId,
    RowsAsked,
    SpreadRows,
    renorm_rows,
)
from shardwise.shard.lookup.row_requests import RowReply, RowRequest, ask, checked
from shardwise.shard.lookup.stage import Flat
from shardwise.shard.tiling import row_owners
from shardwise.simulation.ranks import each_rank


def embedding(lookup: Lookup, ids: torch.Tensor) -> torch.Tensor:
    def request(mine: torch.Tensor) -> RowRequest:
        return _each_row_once(lookup, mine, bags.fault_of_ids(mine))

    reply, (inverse,) = ask(lookup, request, ids)
    _shorten(lookup, reply)
    local = RowsAsked(lookup.padding_idx, lookup.sparse)
    finish = SpreadRows(RowPerId(lookup.by_frequency))
    exchange = _exchange(lookup, reply, local=local, finish=finish)
    return OwnBatch.apply(lookup.weight, exchange, (reply.rows,), (inverse, ids))


def embedding_bag(lookup: Lookup, batch: BagBatch) -> torch.Tensor:
    if lookup.by_frequency:
        return _pooled_at_home(lookup, batch)

    def request(*mine: torch.Tensor) -> RowRequest:
        return _bags_in_pieces(lookup, batch.of_rank(mine))

    reply, own = ask(lookup, request, *batch.tensors)
    _shorten(lookup, reply)
    there = (reply.rows, reply.starts)
    if batch.mode == "max":
        local = StrongestRows(reply.longest if reply.trains else None)
        exchange = _exchange(lookup, reply, local=local, finish=MaximumOfPieces(reply.trains))
        own = (*own, reply.own_starts, reply.route.order)
        return OwnBatch.apply(lookup.weight, exchange, there, own)
    weights = [] if batch.weights is None else [Flat.apply(batch.weights, lookup.grid)]
    finish = AddPieces(mean=batch.mode == "mean")
    exchange = _exchange(
        lookup,
        reply,
        local=PoolPieces(lookup.sparse),
        finish=finish,
        travels=(True,) * len(weights),
    )
    return OwnBatch.apply(lookup.weight, exchange, there, own, *weights)


def _pooled_at_home(lookup: Lookup, batch: BagBatch) -> torch.Tensor:
    def request(*mine: torch.Tensor) -> RowRequest:
        own = batch.of_rank(mine)
        return _each_row_once(lookup, own.ids, own.fault, own.ids, own.lengths)

    reply, own = ask(lookup, request, *batch.tensors)
    _shorten(lookup, reply)
    weights = [] if batch.weights is None else [batch.weights]
    exchange = _exchange(
        lookup,
        reply,
        local=RowsAsked(None, lookup.sparse),
        finish=SpreadRows(PoolByFrequency(batch.mode, lookup.padding_idx)),
        travels=(False,) * len(weights),
    )
    return OwnBatch.apply(lookup.weight, exchange, (reply.rows,), own, *weights)


def _exchange(lookup: Lookup, reply: RowReply, travels: Any = (), **functions: Any) -> Exchange:
    return Exchange(
        lookup.what,
        lookup.weight._tiling,
        lookup.blocks,
        reply.route,
        travels=travels,
        sparse=lookup.sparse,
        grad_reduction=lookup.weight.grad_reduction,
        **functions,
    )


# -- what one rank asks for ----------------------------------------------------------------------


def _each_row_once(
    lookup: Lookup, given: torch.Tensor, fault: str | None, *keep: torch.Tensor
) -> RowRequest:
    """Every row is a piece; the place of each id among them is kept too."""
    owners = row_owners(lookup.weight._tiling)
    ids = checked(given, fault, lookup.num_rows)
    rows, inverse, counts = by_owner(owners.numbered(ids.usable), list(owners.bounds))
    first = torch.ones_like(rows, dtype=torch.bool)
    order = torch.arange(rows.numel(), device=rows.device)
    return RowRequest(ids, rows, first, order, counts, counts, (inverse, *keep))


def _bags_in_pieces(lookup: Lookup, own: OwnBags) -> RowRequest:
    """The rows of one bag that are with one owner are a piece.

    What is kept is the bag of each piece, and how many ids count in each bag.
    """
    owners = row_owners(lookup.weight._tiling)
    ids = checked(own.ids, own.fault, lookup.num_rows)
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
    """Shorten the rows that somebody looks up to `max_norm`, the padding row included."""
    if lookup.max_norm is None:
        return
    rows, padding = reply.rows, lookup.padding_idx
    if padding is not None and reply.padded:
        stretches, ranks = lookup.blocks.stretches, lookup.grid.ranks

        def with_padding(place: Any, rows: torch.Tensor) -> torch.Tensor:
            start, length = stretches[ranks[place[0]]]
            held = start <= padding < start + length
            return torch.cat([rows, rows.new_tensor([padding - start])]) if held else rows

        rows = each_rank(lookup.grid, with_padding, rows)
    renorm_rows(lookup.weight, rows, lookup.max_norm, lookup.norm_type)
