"""Which boxes of a tensor a run of its values covers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from shardwise.core.box import Box


def slabs(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The values `start` to `stop` of a row-major tensor, as few boxes in order.

    >>> for slab in slabs((4, 10), 7, 32):
    ...     print(*slab)
    (0, 7) (1, 3)
    (1, 0) (2, 10)
    (3, 0) (1, 2)
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:  # inside one row
        yield from _in_row(shape, first - 1, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * inner)
    if first < last:
        yield Box.whole(shape).along(0, first, last - first)
    yield from _in_row(shape, last, last * inner, stop)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    base = row * math.prod(shape[1:])
    for slab in slabs(shape[1:], start - base, stop - base):
        yield Box((row, *slab.offsets), (1, *slab.sizes))
