"""Make the trace of a lookup that was done without one, for an update."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shardwise.kernels.lookup import Trace, index_dtype
from shardwise.kernels.memory import num_pieces
from shardwise.kernels.tables import IdBags, TableSet

#: Ids that a program records at a time.
_BLOCK = 128


@triton.jit
def _note_bags(
    features,
    first_bag,
    offsets,
    ids,
    keys,
    out_at,
    MASKED: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (b, f) serves bag b of feature f; without offsets, BLOCK bags of one id each."""
    number = tl.program_id(1)
    feature = features + number * COLUMNS
    first = tl.load(first_bag + number).to(tl.int64)
    last = tl.load(first_bag + number + 1).to(tl.int64)
    first_key, out_start = tl.load(feature + 4), tl.load(feature + 6)
    stride = tl.load(feature + 7)
    start, end = first + tl.program_id(0).to(tl.int64) * BLOCK, last
    out_row = out_start
    if offsets is not None:
        bag = first + tl.program_id(0)
        there = bag < last
        start = tl.load(offsets + bag, mask=there, other=0).to(tl.int64)
        end = tl.load(offsets + bag + 1, mask=there, other=0).to(tl.int64)
        out_row = out_start + (bag - first) * stride
    else:
        end = tl.minimum(last, start + BLOCK)
    for i in range(start, end, BLOCK):
        at = i + tl.arange(0, BLOCK)
        here = at < end
        row = tl.load(ids + at, mask=here, other=0).to(tl.int64) - tl.load(feature + 5)
        key = row + first_key
        if MASKED:  # rows of other shards get a key beyond all others
            owned = (row >= 0) & (row < tl.load(feature + 1))
            key = tl.where(owned, key, tl.load(feature + 8))
        place = out_row + at * 0
        if offsets is None:
            place = out_start + (at - first) * stride
        tl.store(keys + at, key.to(keys.dtype.element_ty), mask=here)
        tl.store(out_at + at, place.to(out_at.dtype.element_ty), mask=here)


def noted(
    tables: TableSet,
    bags: IdBags,
    weights: torch.Tensor | None,
    *,
    all_in_bags: bool = True,
) -> Trace:
    """The trace of a sum.

    Unless `all_in_bags`, there may be ids after the last bag, which touch no row.
    """
    ids, offsets, first_bag, max_bags, rows = bags
    key_dtype = index_dtype(tables.num_keys + 1)
    keys = torch.empty(ids.numel(), dtype=key_dtype, device=tables.device)
    out_at = torch.empty_like(keys, dtype=index_dtype(rows.num_elements))
    if not all_in_bags:
        keys.fill_(tables.num_keys)
    features = tables.features(rows)
    num_programs = max_bags if offsets is not None else num_pieces(max_bags, _BLOCK)
    if num_programs:
        tables.launches.run(
            _note_bags,
            (num_programs, len(tables.feature_tables)),
            (features, first_bag, offsets, ids, keys, out_at),
            (),
            (tables.masked, features.shape[1], _BLOCK),
        )
    return Trace(keys, out_at, None if weights is None else weights.float(), None)
