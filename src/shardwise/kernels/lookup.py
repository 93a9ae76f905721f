"""Lookup kernels: bags of rows, pooled, for all features in one launch.

Note [One bag, one warp]
A program of one warp serves one bag: it reads ROWS rows at a time, so that that many row reads are
in flight, and adds them in float32. Memory latency is hidden by many warps, not by wide programs.

Note [Long bags]
A bag longer than LONG would keep its warp busy long after all others are done. Such bags are left
out there, and their ids are cut at multiples of LONG into chunks that are pooled side by side; then
the chunks of each bag are added in order. At most one long bag starts in a chunk and at most one
ends there, so two partial results per chunk are enough, and the host need not know which bags are
long: the launches that serve them leave at once unless a flag says that there was one. The result
is the same from run to run.

Note [What backward needs]
In training, the lookup writes down for every id its key (see tables), where its bag's output row
lies, and by how much it was scaled. Backward sorts the keys and needs nothing else of the input.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from shardwise.kernels.tables import OutputRows, TableSet

SUM, MEAN, MAX = 0, 1, 2
MODES = {"sum": SUM, "mean": MEAN, "max": MAX}
#: Bags of more ids are split.
LONG = 2048


class Trace(NamedTuple):
    """What a lookup leaves for its backward; see Note [What backward needs]."""

    keys: torch.Tensor
    out_at: torch.Tensor
    scale: torch.Tensor | None
    #: For max: the position among the ids that each output element came from, or -1.
    argmax: torch.Tensor | None


@triton.jit
def load_rows(address, at, mask, dtype, DTYPES: tl.constexpr):
    """Elements `at` of a table at an address, as float32."""
    if DTYPES == 1:
        return tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask=mask, other=0.0)
    elif DTYPES == 2:
        found = tl.load(address.to(tl.pointer_type(tl.bfloat16)) + at, mask=mask, other=0.0)
        return found.to(tl.float32)
    elif DTYPES == 4:
        found = tl.load(address.to(tl.pointer_type(tl.float16)) + at, mask=mask, other=0.0)
        return found.to(tl.float32)
    else:
        wide = address.to(tl.pointer_type(tl.float32))
        brain = address.to(tl.pointer_type(tl.bfloat16))
        half = address.to(tl.pointer_type(tl.float16))
        found = tl.load(wide + at, mask=mask & (dtype == 0), other=0.0)
        found += tl.load(brain + at, mask=mask & (dtype == 1), other=0.0).to(tl.float32)
        return found + tl.load(half + at, mask=mask & (dtype == 2), other=0.0).to(tl.float32)


@triton.jit
def _larger(value, position, other_value, other_position):
    """The larger value and where it stands; of equal ones the first."""
    other = (other_value > value) | ((other_value == value) & (other_position < position))
    return tl.where(other, other_value, value), tl.where(other, other_position, position)


@triton.jit
def _pool(
    feature,  # this feature's line of TableSet.features
    out_row,  # where its output row lies, written down for backward
    start,
    end,
    bag_scale,
    ids,
    weights,
    keys,
    out_at,
    scale,
    flags,
    MODE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TRACE: tl.constexpr,
    MASKED: tl.constexpr,
    DTYPES: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """The rows of ids `start` to `end`, pooled: values and, for max, positions."""
    address, num_rows, dim = tl.load(feature), tl.load(feature + 1), tl.load(feature + 2)
    dtype, first_key, first_row = tl.load(feature + 3), tl.load(feature + 4), tl.load(feature + 5)
    d = tl.arange(0, DIM)
    inside = (d < dim)[None, :]
    many = tl.zeros([ROWS, DIM], tl.float32)
    best = tl.full([DIM], float("-inf"), tl.float32)
    best_at = tl.full([DIM], -1, tl.int32)
    for i in range(start, end, ROWS):
        at = i + tl.arange(0, ROWS)
        here = at < end
        row = tl.load(ids + at, mask=here, other=0).to(tl.int64) - first_row
        owned = here & (row >= 0) & (row < num_rows)
        if not MASKED:
            # A wrong id reads nothing; the flag fails an assertion on the device.
            tl.store(flags + at * 0, at * 0 + 1, mask=here & (owned == 0))
        rows = load_rows(
            address, row[:, None] * dim + d[None, :], owned[:, None] & inside, dtype, DTYPES
        )
        if WEIGHTED:
            factor = tl.load(weights + at, mask=here, other=0.0).to(tl.float32)
            rows *= factor[:, None]
        if TRACE:
            # Rows of other shards get a key beyond all others, and are left alone.
            key = tl.where(owned, row + first_key, tl.load(feature + 8))
            tl.store(keys + at, key.to(keys.dtype.element_ty), mask=here)
            tl.store(out_at + at, (out_row + at * 0).to(out_at.dtype.element_ty), mask=here)
            if WEIGHTED:
                tl.store(scale + at, factor, mask=here)
            elif MODE == 1:
                tl.store(scale + at, bag_scale + at * 0.0, mask=here)
        if MODE == 2:
            rows = tl.where(owned[:, None] & inside, rows, float("-inf"))
            position = tl.where(owned, at, 2147483647).to(tl.int32)
            position = position[:, None] + tl.zeros([ROWS, DIM], tl.int32)
            found, found_at = tl.reduce((rows, position), 0, _larger)
            better = found > best
            best_at = tl.where(better, found_at, best_at)
            best = tl.where(better, found, best)
        else:
            many += rows
    if MODE == 2:
        return best, best_at
    return tl.sum(many, 0), best_at


@triton.jit
def _write(
    values,
    positions,
    out,
    argmax,
    out_row,
    d,
    inside,
    bag_scale,
    MODE: tl.constexpr,
    TRACE: tl.constexpr,
):
    if MODE == 1:
        values *= bag_scale
    if MODE == 2:
        values = tl.where(positions >= 0, values, 0.0)
        if TRACE:
            tl.store(argmax + out_row + d, positions, mask=inside)
    tl.store(out + out_row + d, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def pool_bags(
    features,
    first_bag,
    offsets,
    ids,
    weights,
    out,
    argmax,
    keys,
    out_at,
    scale,
    flags,
    MODE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TRACE: tl.constexpr,
    MASKED: tl.constexpr,
    DTYPES: tl.constexpr,
    COLUMNS: tl.constexpr,
    LONG: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Bags of up to LONG ids: program (b, f) pools bag b of feature f."""
    number = tl.program_id(1)
    first = tl.load(first_bag + number)
    bag = first + tl.program_id(0)
    if bag < tl.load(first_bag + number + 1):
        start, end = tl.load(offsets + bag), tl.load(offsets + bag + 1)
        if end - start <= LONG:
            feature = features + number * COLUMNS
            out_row = tl.load(feature + 6) + (bag - first).to(tl.int64) * tl.load(feature + 7)
            bag_scale = 1.0 / tl.maximum(end - start, 1).to(tl.float32)
            values, positions = _pool(
                feature, out_row, start, end, bag_scale, ids, weights, keys, out_at, scale, flags,
                MODE, WEIGHTED, TRACE, MASKED, DTYPES, ROWS, DIM,
            )  # fmt: skip
            d = tl.arange(0, DIM)
            inside = d < tl.load(feature + 2)
            _write(values, positions, out, argmax, out_row, d, inside, bag_scale, MODE, TRACE)
        else:
            tl.store(flags + 1, 1)


@triton.jit
def _last_at_most(values, count, wanted):
    """The last of `count` rising values that is at most `wanted`."""
    low, high = 0 * count, count
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(values + middle) <= wanted:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def pool_chunks(
    features,
    first_bag,
    offsets,
    ids,
    weights,
    partial,
    partial_at,
    keys,
    out_at,
    scale,
    flags,
    num_features,
    num_bags,
    num_ids,
    MODE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TRACE: tl.constexpr,
    MASKED: tl.constexpr,
    DTYPES: tl.constexpr,
    COLUMNS: tl.constexpr,
    LONG: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Pool what chunk c holds of long bags: of the one that holds its first id, and of its last."""
    chunk = tl.program_id(0)
    low = chunk * LONG
    high = tl.minimum(low + LONG, num_ids)
    d = tl.arange(0, DIM)
    for slot in range(2 * tl.load(flags + 1)):
        bag = _last_at_most(offsets, num_bags + 1, tl.where(slot == 0, low, high - 1))
        start, end = tl.load(offsets + bag), tl.load(offsets + bag + 1)
        # A bag that holds both the first and the last id counts once, as the first's.
        counted = (slot == 0) | (start > low)
        if (end - start > LONG) & counted:
            number = _last_at_most(first_bag, num_features + 1, bag)
            feature = features + number * COLUMNS
            nth = (bag - tl.load(first_bag + number)).to(tl.int64)
            out_row = tl.load(feature + 6) + nth * tl.load(feature + 7)
            bag_scale = 1.0 / (end - start).to(tl.float32)
            values, positions = _pool(
                feature, out_row, tl.maximum(start, low), tl.minimum(end, high), bag_scale, ids,
                weights, keys, out_at, scale, flags,
                MODE, WEIGHTED, TRACE, MASKED, DTYPES, ROWS, DIM,
            )  # fmt: skip
            at = (chunk * 2 + slot).to(tl.int64) * DIM
            tl.store(partial + at + d, values)
            if MODE == 2:
                tl.store(partial_at + at + d, positions)


@triton.jit
def join_chunks(
    features,
    first_bag,
    offsets,
    partial,
    partial_at,
    out,
    argmax,
    flags,
    num_features,
    num_bags,
    num_ids,
    MODE: tl.constexpr,
    TRACE: tl.constexpr,
    COLUMNS: tl.constexpr,
    LONG: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Finish the long bag that starts in chunk c, if there is one."""
    if tl.load(flags + 1) != 0:
        chunk = tl.program_id(0)
        low = chunk * LONG
        high = tl.minimum(low + LONG, num_ids)
        bag = _last_at_most(offsets, num_bags + 1, high - 1)
        start, end = tl.load(offsets + bag), tl.load(offsets + bag + 1)
        if (end - start > LONG) & (start >= low):
            number = _last_at_most(first_bag, num_features + 1, bag)
            feature = features + number * COLUMNS
            d = tl.arange(0, DIM)
            # Its first chunk's part is in the second slot, unless it starts with the chunk.
            first = chunk * 2 + (start > low).to(tl.int32)
            last_chunk = (end - 1) // LONG
            many = tl.zeros([ROWS, DIM], tl.float32)
            best = tl.full([DIM], float("-inf"), tl.float32)
            best_at = tl.full([DIM], -1, tl.int32)
            for i in range(chunk, last_chunk + 1, ROWS):
                c = i + tl.arange(0, ROWS)
                at = tl.where(c == chunk, first, c * 2).to(tl.int64)[:, None] * DIM + d[None, :]
                here = (c <= last_chunk)[:, None]
                if MODE == 2:
                    found = tl.load(partial + at, mask=here, other=float("-inf"))
                    where = tl.load(partial_at + at, mask=here, other=2147483647)
                    found, where = tl.reduce((found, where), 0, _larger)
                    better = found > best
                    best_at = tl.where(better, where, best_at)
                    best = tl.where(better, found, best)
                else:
                    many += tl.load(partial + at, mask=here, other=0.0)
            values = best
            if MODE != 2:
                values = tl.sum(many, 0)
            nth = (bag - tl.load(first_bag + number)).to(tl.int64)
            out_row = tl.load(feature + 6) + nth * tl.load(feature + 7)
            bag_scale = 1.0 / (end - start).to(tl.float32)
            inside = d < tl.load(feature + 2)
            _write(values, best_at, out, argmax, out_row, d, inside, bag_scale, MODE, TRACE)


@triton.jit
def weight_grads(
    features,
    first_bag,
    offsets,
    ids,
    grad,
    out,
    MASKED: tl.constexpr,
    DTYPES: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """The gradient of each per-sample weight: its row times its bag's gradient."""
    number = tl.program_id(1)
    first = tl.load(first_bag + number)
    bag = first + tl.program_id(0)
    if bag < tl.load(first_bag + number + 1):
        feature = features + number * COLUMNS
        address, num_rows, dim = tl.load(feature), tl.load(feature + 1), tl.load(feature + 2)
        dtype, first_row = tl.load(feature + 3), tl.load(feature + 5)
        out_row = tl.load(feature + 6) + (bag - first).to(tl.int64) * tl.load(feature + 7)
        d = tl.arange(0, DIM)
        inside = d < dim
        bag_grad = tl.load(grad + out_row + d, mask=inside, other=0.0).to(tl.float32)
        end = tl.load(offsets + bag + 1)
        for i in range(tl.load(offsets + bag), end, ROWS):
            at = i + tl.arange(0, ROWS)
            here = at < end
            row = tl.load(ids + at, mask=here, other=0).to(tl.int64) - first_row
            owned = here & (row >= 0) & (row < num_rows)
            rows = load_rows(
                address,
                row[:, None] * dim + d[None, :],
                owned[:, None] & inside[None, :],
                dtype,
                DTYPES,
            )
            tl.store(
                out + at, tl.sum(rows * bag_grad[None, :], 1).to(out.dtype.element_ty), mask=here
            )


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
    """Unpooled: program (i, f) copies ROWS rows of feature f."""
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
        tl.store(flags + at * 0, at * 0 + 1, mask=here & (owned == 0))
    d = tl.arange(0, DIM)
    inside = (d < dim)[None, :]
    rows = load_rows(
        address, row[:, None] * dim + d[None, :], owned[:, None] & inside, dtype, DTYPES
    )
    out_row = tl.load(feature + 6) + (at - first).to(tl.int64) * tl.load(feature + 7)
    tl.store(
        out + out_row[:, None] + d[None, :],
        rows.to(out.dtype.element_ty),
        mask=here[:, None] & inside,
    )
    if TRACE:
        key = tl.where(owned, row + tl.load(feature + 4), tl.load(feature + 8))
        tl.store(keys + at, key.to(keys.dtype.element_ty), mask=here)
        tl.store(out_at + at, out_row.to(out_at.dtype.element_ty), mask=here)


def _next_power(number: int) -> int:
    return max(4, triton.next_power_of_2(number))


def _rows_in_flight(dim: int) -> int:
    return max(1, min(16, 512 // dim))


def pooled_lookup(
    tables: TableSet,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    first_bag: torch.Tensor,
    max_bags: int,
    rows: OutputRows,
    mode: str = "sum",
    weights: torch.Tensor | None = None,
    trace: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, Trace | None]:
    """The pooled rows of every bag of every feature, as one flat buffer laid out as `rows` says.

    Bags are counted through the features: feature f has bags `first_bag[f]` to `first_bag[f + 1]`,
    at most `max_bags`, and bag b the ids `offsets[b]` to `offsets[b + 1]`.
    """
    device = tables.device
    num_features, num_bags, num_ids = first_bag.numel() - 1, offsets.numel() - 1, ids.numel()
    out = torch.empty(rows.num_elements, dtype=dtype, device=device)
    known = _trace(tables, num_ids, rows, mode, weights is not None, device) if trace else None
    keys, out_at, scale, argmax = known if known is not None else (None, None, None, None)
    features = tables.features(rows)
    dim = _next_power(tables.max_dim)
    options = {
        "MODE": MODES[mode],
        "WEIGHTED": weights is not None,
        "TRACE": trace,
        "MASKED": tables.masked,
        "DTYPES": tables.dtypes,
        "COLUMNS": features.shape[1],
        "LONG": LONG,
        "DIM": dim,
    }
    read = (features, first_bag, offsets, ids, weights)
    written = (keys, out_at, scale, tables.flags)
    in_flight = _rows_in_flight(dim)
    if max_bags and num_features:
        pool_bags[(max_bags, num_features)](
            *read, out, argmax, *written, **options, ROWS=in_flight, num_warps=1
        )
    if num_ids > LONG:
        num_chunks = triton.cdiv(num_ids, LONG)
        partial = torch.empty(num_chunks, 2, dim, device=device)
        partial_at = torch.empty_like(partial, dtype=torch.int32) if mode == "max" else None
        counts = (num_features, num_bags, num_ids)
        pool_chunks[(num_chunks,)](
            *read, partial, partial_at, *written, *counts, **options, ROWS=in_flight, num_warps=4
        )
        for name in ("WEIGHTED", "MASKED", "DTYPES"):
            del options[name]
        join_chunks[(num_chunks,)](
            *read[:3], partial, partial_at, out, argmax, tables.flags, *counts, **options,
            ROWS=in_flight, num_warps=4,
        )  # fmt: skip
    if not tables.masked:
        _check(tables.flags)
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
    device = tables.device
    out = torch.empty(rows.num_elements, dtype=dtype, device=device)
    known = _trace(tables, ids.numel(), rows, "sum", False, device) if trace else None
    keys, out_at = known[:2] if known is not None else (None, None)
    features = tables.features(rows)
    dim = _next_power(tables.max_dim)
    in_flight = _rows_in_flight(dim)
    if max_ids:
        copy_rows[(triton.cdiv(max_ids, in_flight), first_id.numel() - 1)](
            features, first_id, ids, out, keys, out_at, tables.flags, TRACE=trace,
            MASKED=tables.masked, DTYPES=tables.dtypes, COLUMNS=features.shape[1],
            ROWS=in_flight, DIM=dim, num_warps=1,
        )  # fmt: skip
    if not tables.masked:
        _check(tables.flags)
    return out, known


def per_sample_weight_grads(
    tables: TableSet,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    first_bag: torch.Tensor,
    max_bags: int,
    rows: OutputRows,
    grad: torch.Tensor,
) -> torch.Tensor:
    """The gradient of a weighted sum for its weights."""
    out = torch.empty(ids.numel(), dtype=torch.float32, device=tables.device)
    features = tables.features(rows)
    dim = _next_power(tables.max_dim)
    if max_bags and first_bag.numel() > 1:
        weight_grads[(max_bags, first_bag.numel() - 1)](
            features, first_bag, offsets, ids, grad, out, MASKED=tables.masked,
            DTYPES=tables.dtypes, COLUMNS=features.shape[1], ROWS=_rows_in_flight(dim), DIM=dim,
            num_warps=1,
        )  # fmt: skip
    return out


def _trace(
    tables: TableSet,
    num_ids: int,
    rows: OutputRows,
    mode: str,
    weighted: bool,
    device: torch.device,
) -> Trace:
    keys = torch.empty(num_ids, dtype=_index_dtype(tables.num_keys + 1), device=device)
    out_at = torch.empty(num_ids, dtype=_index_dtype(rows.num_elements), device=device)
    scale = argmax = None
    if weighted or mode == "mean":
        scale = torch.empty(num_ids, device=device)
    if mode == "max":
        argmax = torch.empty(rows.num_elements, dtype=torch.int32, device=device)
    return Trace(keys, out_at, scale, argmax)


def _index_dtype(count: int) -> torch.dtype:
    return torch.int32 if count < 2**31 else torch.int64


def _check(flags: torch.Tensor) -> None:
    """Fail, on the device as torch's lookups do, where an id was out of range."""
    if flags.is_cuda:
        torch._assert_async(flags[0] == 0, "an embedding id is out of the range of its table")
    elif flags[0]:
        raise IndexError("an embedding id is out of the range of its table")
