"""FlatPacking: where parameters lie in one flat buffer, so that equal chunks of it hold whole rows.

Note [Flat buffers]
A group gathers one buffer: the ranks' chunks, all of one length, one after another. A parameter is
a view of it while gathered, so it is contiguous there, and a rank's shard of it is what its chunk
overlaps. Shards are rows of one dim (`Shard(dim, sizes)`), so a chunk may end inside a parameter
only between two rows: padding goes between parameters, and the length of a chunk is chosen so that
there is little of it. Parameters with long rows come first; short rows then fit anywhere. The dim
is 0, but that of a stack of a few matrices is another: their rows are too long.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

#: The share of a buffer that may be padding before row lengths get buffers of their own, and the
#: number of elements below which sending padding is cheaper than another collective.
MOST_PADDING, FEW = 0.01, 1 << 16
#: With fewer rows per rank than this, what is missing to the next multiple of ranks counts.
FEW_ROWS = 8


@dataclass(frozen=True, slots=True)
class FlatPacking:
    """The offset of each item, by its number, and the length of a chunk."""

    offsets: dict[int, int]
    length: int


def split_dim(shape: Sequence[int], parts: int) -> int:
    """The dim along which a parameter is split.

    >>> split_dim((4096, 4096), parts=64), split_dim((8, 28672, 4096), parts=64)
    (0, 1)
    """
    numel, missing = math.prod(shape), -shape[0] % parts
    few = shape[0] < FEW_ROWS * parts
    if few and missing * (numel // shape[0]) > max(FEW, numel * MOST_PADDING):
        return min(range(len(shape)), key=lambda dim: (-shape[dim] % parts) / shape[dim])
    return 0


def pack(items: Sequence[tuple[int, int]], parts: int) -> list[FlatPacking]:
    """Buffers for items of `(num_rows, row_length)`; most often one. See Note [Flat buffers].

    >>> pack([(4, 3), (6, 1)], parts=2)
    [FlatPacking(offsets={0: 0, 1: 12}, length=9)]
    """
    together = _packed(list(range(len(items))), items, parts)
    rows = {row for _, row in items}
    total = sum(num * row for num, row in items)
    if len(rows) == 1 or together.length * parts <= total * (1 + MOST_PADDING):
        return [together]
    apart = [
        _packed([i for i, item in enumerate(items) if item[1] == row], items, parts)
        for row in sorted(rows, reverse=True)
    ]
    saved = (together.length - sum(packing.length for packing in apart)) * parts
    return apart if saved > max(FEW, total * MOST_PADDING) else [together]


def _packed(numbers: list[int], items: Sequence[tuple[int, int]], parts: int) -> FlatPacking:
    order = sorted(numbers, key=lambda i: -items[i][1])
    least = -(-sum(items[i][0] * items[i][1] for i in order) // parts)
    # What is longer than a chunk crosses two ends of chunks: both have to be between its rows.
    unit = math.lcm(*(items[i][1] for i in order if items[i][0] * items[i][1] > least))
    length = -(-least // unit) * unit
    for tries in itertools.count():
        offsets = _placed(order, items, parts, length)
        if offsets is not None:
            return FlatPacking(offsets, length)
        length += unit << (tries // 32)
    raise AssertionError("one chunk that holds everything always fits")


def _placed(
    order: list[int], items: Sequence[tuple[int, int]], parts: int, length: int
) -> dict[int, int] | None:
    offsets, at, left = {}, 0, list(order)
    while left:
        i = left[0]
        num, row = items[i]
        padding, end_of_chunk = 0, (at // length + 1) * length
        if at + num * row > end_of_chunk:
            padding = (end_of_chunk - at) % row
            start = at + padding
            second_end = start + length if start % length == 0 else end_of_chunk + length
            if start + num * row > second_end and length % row:
                return None
        if padding:
            filler = _filler(left, items, padding, end_of_chunk - at, row, length)
            if filler is not None:
                i, padding = filler, 0
        offsets[i] = at + padding
        at = offsets[i] + items[i][0] * items[i][1]
        left.remove(i)
    return offsets if at <= parts * length else None


def _filler(
    left: list[int],
    items: Sequence[tuple[int, int]],
    padding: int,
    room: int,
    row: int,
    length: int,
) -> int | None:
    """An item for the place of padding: one that fits, or one of short rows that ends later.

    `room` is what is left of the chunk. Biases fit anywhere.
    """
    for j in left:
        if items[j][0] * items[j][1] <= padding:
            return j
    for j in left:
        size = items[j][0] * items[j][1]
        if items[j][1] < row and room % items[j][1] == 0 and room < size <= room + length:
            return j
    return None


def rows_per_chunk(offset: int, num_rows: int, row: int, length: int, parts: int) -> list[int]:
    """How many rows of an item lie in each chunk.

    >>> rows_per_chunk(offset=12, num_rows=6, row=1, length=9, parts=2)
    [0, 6]
    """
    end = offset + num_rows * row
    return [
        max(0, min(end, (c + 1) * length) - max(offset, c * length)) // row for c in range(parts)
    ]
