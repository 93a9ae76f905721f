"""Shared by the kernels: load and store rows of any dtype, bisect sorted values, check ids."""

from __future__ import annotations

import triton
import triton.language as tl


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
        # Tables of several dtypes: one branch for all of a table's rows.
        if dtype == 0:
            found = tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask=mask, other=0.0)
        elif dtype == 1:
            brain = tl.load(address.to(tl.pointer_type(tl.bfloat16)) + at, mask=mask, other=0.0)
            found = brain.to(tl.float32)
        else:
            half = tl.load(address.to(tl.pointer_type(tl.float16)) + at, mask=mask, other=0.0)
            found = half.to(tl.float32)
        return found


@triton.jit
def store_rows(address, at, values, mask, dtype, DTYPES: tl.constexpr):
    """Write float32 values to elements `at` of a table at an address."""
    if DTYPES == 1:
        tl.store(address.to(tl.pointer_type(tl.float32)) + at, values, mask=mask)
    elif DTYPES == 2:
        tl.store(address.to(tl.pointer_type(tl.bfloat16)) + at, values.to(tl.bfloat16), mask=mask)
    elif DTYPES == 4:
        tl.store(address.to(tl.pointer_type(tl.float16)) + at, values.to(tl.float16), mask=mask)
    else:
        if dtype == 0:
            tl.store(address.to(tl.pointer_type(tl.float32)) + at, values, mask=mask)
        elif dtype == 1:
            brain = values.to(tl.bfloat16)
            tl.store(address.to(tl.pointer_type(tl.bfloat16)) + at, brain, mask=mask)
        else:
            half = values.to(tl.float16)
            tl.store(address.to(tl.pointer_type(tl.float16)) + at, half, mask=mask)


@triton.jit
def last_at_most(values, count, wanted):
    """The position of the last of `count` ascending values that is at most `wanted`."""
    low, high = 0 * count, count
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(values + middle) <= wanted:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def assert_owned(owned, here, flags):
    """A wrong id loads nothing; it fails a device assertion, or sets a flag."""
    tl.device_assert(owned | (here == 0), "an embedding id is out of the range of its table")
    if flags is not None:
        wrong = (here & (owned == 0)).to(tl.int32)
        tl.store(flags + wrong * 0, wrong, mask=wrong > 0)


def padded_dim(dim: int) -> int:
    """The width of a kernel's blocks for tables of up to `dim` columns: a power of two."""
    return max(4, 1 << (dim - 1).bit_length())


def num_pieces(count: int, size: int) -> int:
    """`count / size`, rounded up. Triton's cdiv takes ten times as long on the host."""
    return -(-count // size)


def rows_in_flight(dim: int) -> int:
    """How many rows of `dim` columns a warp reads at a time."""
    return max(1, min(16, 512 // dim))
