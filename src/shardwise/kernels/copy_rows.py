"""The kernel that copies the row of every id, for all features in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from shardwise.kernels.memory import assert_owned, load_rows


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
