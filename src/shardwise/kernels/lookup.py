"""Lookups: bags of rows, pooled, or the row of every id; their traces; gradients of weights.

Note [What backward needs]
In training, the lookup records for every id its key (see `tables`), the position of its bag's
output row, and its scale. Backward sorts the keys and needs nothing else of the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from shardwise.kernels.launch import (
    assert_owned,
    last_at_most,
    load_rows,
    num_pieces,
    rows_in_flight,
)
from shardwise.kernels.pool_bags import pool_bags, pool_short_bags, pool_wide_bags
from shardwise.kernels.tables import IdBags, OutputRows, TableSet

if TYPE_CHECKING:
    from shardwise.kernels.tables import Record


SUM, MEAN, MAX = 0, 1, 2
MODES = {"sum": SUM, "mean": MEAN, "max": MAX}
#: Up to this many ids, one launch is enough; see Note [Long bags].
SMALL = 2**20
#: Bags of more ids are split: in small batches, and in large ones. A warp takes about as long for a
#: chunk of n ids as to add the partial results of a bag of n² ids.
LONG_IN_SMALL = 256
LONG = 512
#: Up to so many columns, a program of a large batch serves bags side by side; up to the second
#: number in turn, with so few registers that a multiprocessor holds as many programs as it can.
NARROW, WIDEST = 64, 512
FULL_OCCUPANCY = 64
#: Which programs a launch has.
_BAGS, _CHUNKS, _BOTH = 1, 2, 3
#: The number of programs for the chunks of a large batch.
_CHUNK_PROGRAMS = 4096


class Trace(NamedTuple):
    """The data that a lookup records for backward; see Note [What backward needs]."""

    keys: torch.Tensor
    out_at: torch.Tensor
    scale: torch.Tensor | None
    #: For max: the position among the ids that each output element came from, or -1.
    argmax: torch.Tensor | None


def pooled_lookup(
    tables: TableSet,
    bags: IdBags,
    mode: str = "sum",
    weights: torch.Tensor | None = None,
    trace: bool = False,
    dtype: torch.dtype = torch.float32,
    record: Record | None = None,
    all_in_bags: bool = True,
) -> tuple[torch.Tensor, Trace | None]:
    """The pooled rows of every bag, as one flat buffer laid out as `bags.rows` says.

    An id out of range fails on the device, unless a `record` says whether the batch is valid (see
    Note [Records] in `tables`). Unless `all_in_bags`, there may be ids after the last bag.
    """
    ids, offsets, first_bag, max_bags, rows = bags
    assert offsets is not None, "bags that are pooled have offsets"
    num_features, num_bags, num_ids = first_bag.numel() - 1, offsets.numel() - 1, ids.numel()
    out = torch.empty(rows.num_elements, dtype=dtype, device=tables.device)
    known = None
    if trace:
        known = _trace(tables, num_ids, rows, mode, weights is not None)
        if not all_in_bags:
            known.keys.fill_(tables.num_keys)
    if not max_bags or not num_features:
        return out, known
    keys, out_at, scale, argmax = known if known is not None else (None, None, None, None)
    numbers, seen, ticket = record if record is not None else (None, None, 0)
    features = tables.features(rows)
    dim = tables.padded_dim
    small = num_ids <= SMALL
    long = min(LONG, LONG_IN_SMALL) if small else LONG
    num_chunks = num_pieces(num_ids, long) if num_ids > long else 0
    arrived, partial, partial_at = _parts(tables, num_chunks, mode)
    index = tl.int32 if num_ids < 2**31 - long else tl.int64
    flags = None if small and tables.device.type == "cuda" else tables.flags

    def launch(part: int, grid: tuple[int, int]) -> None:
        tables.launches.run(
            pool_bags,
            grid,
            (features, first_bag, offsets, ids, weights, out, argmax, partial, partial_at, arrived,
             keys, out_at, scale, flags, numbers, seen if part != _CHUNKS else None),
            (num_features, num_bags, num_ids, num_chunks, ticket),
            (part, MODES[mode], weights is not None, trace, tables.masked, tables.dtypes,
             features.shape[1], index, long, rows_in_flight(dim), dim),
            debug=part != _BAGS and not tables.masked and record is None,
        )  # fmt: skip

    num_columns = num_pieces(num_chunks, num_features)
    if small:
        launch(_BOTH, (num_columns + max_bags, num_features))
    elif mode != "max" and dim <= WIDEST:
        bags_at_once, rows_at_once = _short_shape(num_ids, num_bags, dim)
        narrow = dim <= NARROW
        # An id beyond the table is only found by the check, and wraps around here.
        fits = record is not None and not tables.masked and tables.num_keys < 2**31
        indices = (index,) if narrow else (index, tl.int32 if fits else tl.int64)
        tables.launches.run(
            pool_short_bags if narrow else pool_wide_bags,
            (num_pieces(max_bags, bags_at_once), num_features),
            (features, first_bag, offsets, ids, weights, out, keys, out_at, scale, flags,
             numbers, seen),
            (num_ids, ticket),
            (MODES[mode], weights is not None, trace, tables.masked, record is not None,
             tables.dtypes, features.shape[1], *indices, long, bags_at_once, rows_at_once, dim),
            max_registers=None if narrow else FULL_OCCUPANCY,
        )  # fmt: skip
    else:
        launch(_BAGS, (max_bags, num_features))
    if not small:
        most = num_pieces(_CHUNK_PROGRAMS, num_features)
        launch(_CHUNKS, (max(1, min(num_columns, most)), num_features))
    if not tables.masked and record is None:
        _check(flags)
    return out, known


def row_lookup(
    tables: TableSet,
    ids: torch.Tensor,
    first_id: torch.Tensor,
    max_ids: int,
    rows: OutputRows,
    trace: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, Trace | None]:
    """The row of every id; feature f has ids `first_id[f]` to `first_id[f + 1]`."""
    out = torch.empty(rows.num_elements, dtype=dtype, device=tables.device)
    known = _trace(tables, ids.numel(), rows, "sum", False) if trace else None
    keys, out_at = known[:2] if known is not None else (None, None)
    features = tables.features(rows)
    dim = tables.padded_dim
    in_flight = rows_in_flight(dim)
    flags = None if tables.device.type == "cuda" else tables.flags
    if max_ids:
        tables.launches.run(
            copy_rows,
            (num_pieces(max_ids, in_flight), first_id.numel() - 1),
            (features, first_id, ids, out, keys, out_at, flags),
            (),
            (trace, tables.masked, tables.dtypes, features.shape[1], in_flight, dim),
            debug=not tables.masked,
        )
        if not tables.masked:
            _check(flags)
    return out, known


def _short_shape(num_ids: int, num_bags: int, dim: int) -> tuple[int, int]:
    """How many bags a program serves, and how many rows of one it loads at a time."""
    usual = 1 << (max(1, num_ids // num_bags) - 1).bit_length()
    if dim <= NARROW:
        return 8, min(4, usual)
    # In turn, bags of one or two ids hide each other's latency; long ones of wide rows need not.
    return 4 if usual <= 4 or dim <= 2 * NARROW else 1, min(4, 1024 // dim, usual)


def _parts(tables: TableSet, num_chunks: int, mode: str) -> Sequence[torch.Tensor | None]:
    """Scratch for the partial results of long bags: counters, values, and for max positions."""
    if not num_chunks:
        return None, None, None
    is_max = mode == "max"
    arrived, partial, partial_at = tables.scratch.parts(
        num_chunks, num_chunks * 2 * tables.padded_dim, is_max
    )
    return arrived, partial, partial_at if is_max else None


def _trace(tables: TableSet, num_ids: int, rows: OutputRows, mode: str, weighted: bool) -> Trace:
    device = tables.device
    keys = torch.empty(num_ids, dtype=index_dtype(tables.num_keys + 1), device=device)
    out_at = torch.empty(num_ids, dtype=index_dtype(rows.num_elements), device=device)
    scale = argmax = None
    if weighted or mode == "mean":
        scale = torch.empty(num_ids, device=device)
    if mode == "max":
        argmax = torch.empty(rows.num_elements, dtype=torch.int32, device=device)
    return Trace(keys, out_at, scale, argmax)


def index_dtype(count: int) -> torch.dtype:
    """The integer dtype for numbers below `count`."""
    return torch.int32 if count < 2**31 else torch.int64


def _check(flags: torch.Tensor | None) -> None:
    """Raise if interpreted kernels met a wrong id, as they fail on the device."""
    if flags is not None and not flags.is_cuda and flags[0]:
        raise IndexError("an embedding id is out of the range of its table")


@triton.jit
def copy_rows(
    features,
    first_id,
    ids,
    out,
    keys,
    out_at,
    flags,
    TRACE: tl.constexpr,
    MASKED: tl.constexpr,
    DTYPES: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Copy the row of every id: program (i, f) copies ROWS rows of feature f."""
    number = tl.program_id(1)
    feature = features + number * COLUMNS
    first, end = tl.load(first_id + number), tl.load(first_id + number + 1)
    at = first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = at < end
    address, num_rows, dim = tl.load(feature), tl.load(feature + 1), tl.load(feature + 2)
    dtype = tl.load(feature + 3)
    row = tl.load(ids + at, mask=here, other=0).to(tl.int64) - tl.load(feature + 5)
    owned = here & (row >= 0) & (row < num_rows)
    if not MASKED:
        assert_owned(owned, here, flags)
    d = tl.arange(0, DIM)
    inside = (d < dim)[None, :]
    place = row[:, None] * dim + d[None, :]
    rows = load_rows(address, place, owned[:, None] & inside, dtype, DTYPES)
    out_row = tl.load(feature + 6) + (at - first).to(tl.int64) * tl.load(feature + 7)
    target = out + out_row[:, None] + d[None, :]
    tl.store(target, rows.to(out.dtype.element_ty), mask=here[:, None] & inside)
    if TRACE:
        key = tl.where(owned, row + tl.load(feature + 4), tl.load(feature + 8))
        tl.store(keys + at, key.to(keys.dtype.element_ty), mask=here)
        tl.store(out_at + at, out_row.to(out_at.dtype.element_ty), mask=here)


# -- notes ---------------------------------------------------------------------------------------
# Make the trace of a lookup that was done without one, for an update.


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


# -- sample grads --------------------------------------------------------------------------------
# The gradient of per-sample weights: each id's row times its bag's gradient.
#
# A program takes SPAN ids, whatever their bags: several programs share a long bag.


SPAN = 128


@triton.jit
def _holder(edges, count, known, wanted):
    """The last of `count` edges that is at most `wanted`: mostly the one after `known`."""
    found = tl.minimum(known + 1, count - 1)
    if (tl.load(edges + found) > wanted) | (tl.load(edges + found + 1) <= wanted):
        found = last_at_most(edges, count, wanted)
    return found


@triton.jit(do_not_specialize=["num_features", "num_bags", "num_ids"])
def _weight_grads(
    features,
    first_bag,
    offsets,
    ids,
    grad,
    out,
    num_features,
    num_bags,
    num_ids,
    DTYPES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Program i serves the ids from i SPAN on, bag by bag."""
    begin = tl.program_id(0).to(tl.int64) * SPAN
    last = tl.minimum(begin + SPAN, num_ids).to(tl.int64)
    d = tl.arange(0, DIM)
    bag = last_at_most(offsets, num_bags, begin) - 1
    number = last_at_most(first_bag, num_features, bag + 1)
    while begin < last:
        bag = _holder(offsets, num_bags, bag, begin)
        start = tl.load(offsets + bag).to(tl.int64)
        end = tl.minimum(tl.load(offsets + bag + 1).to(tl.int64), last)
        number = _holder(first_bag, num_features, number - 1, bag)
        feature = features + number * COLUMNS
        address, num_rows, dim = tl.load(feature), tl.load(feature + 1), tl.load(feature + 2)
        dtype, first_row = tl.load(feature + 3), tl.load(feature + 5)
        nth = (bag - tl.load(first_bag + number)).to(tl.int64)
        out_row = tl.load(feature + 6) + nth * tl.load(feature + 7)
        inside = d < dim
        bag_grad = tl.load(grad + out_row + d, mask=inside, other=0.0).to(tl.float32)
        for i in range(begin, end, ROWS):
            at = i + tl.arange(0, ROWS)
            here = at < end
            row = tl.load(ids + at, mask=here, other=0).to(tl.int64) - first_row
            owned = here & (row >= 0) & (row < num_rows)
            place = row[:, None] * dim + d[None, :]
            rows = load_rows(address, place, owned[:, None] & inside[None, :], dtype, DTYPES)
            found = tl.sum(rows * bag_grad[None, :], 1)
            tl.store(out + at, found.to(out.dtype.element_ty), mask=here)
        # Ids after the last bag, or before the first, are in no bag.
        begin = tl.where((start <= begin) & (begin < end), end, last)


def per_sample_weight_grads(tables: TableSet, bags: IdBags, grad: torch.Tensor) -> torch.Tensor:
    """The gradient of a weighted sum for its weights; 0 for ids that stand after the last bag."""
    ids, offsets, first_bag, max_bags, rows = bags
    assert offsets is not None, "bags that are pooled have offsets"
    num_ids, dim = ids.numel(), tables.padded_dim
    out = torch.zeros(num_ids, dtype=torch.float32, device=tables.device)
    features = tables.features(rows)
    if max_bags and num_ids:
        tables.launches.run(
            _weight_grads,
            (num_pieces(num_ids, SPAN), 1),
            (features, first_bag, offsets, ids, grad, out),
            (first_bag.numel() - 1, offsets.numel() - 1, num_ids),
            (tables.dtypes, features.shape[1], SPAN, rows_in_flight(dim), dim),
        )
    return out
