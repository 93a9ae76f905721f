"""Which blocks of a tensor a run of its values covers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slab:
    """A block of a dense row-major tensor whose values follow each other from `start` on."""

    start: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


def slabs(shape: Sequence[int], start: int, stop: int) -> Iterator[Slab]:
    """The values `start` to `stop` of a row-major tensor, as few blocks in order.

    >>> for slab in slabs((4, 10), 7, 32):
    ...     print(slab.start, slab.offset, slab.shape)
    7 (0, 7) (1, 3)
    10 (1, 0) (2, 10)
    30 (3, 0) (1, 2)
    """
    if start >= stop:
        return
    if not shape:
        yield Slab(start, (), ())
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:  # inside one row
        yield from _in_row(shape, first - 1, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * inner)
    if first < last:
        offset = (first, *[0] * (len(shape) - 1))
        yield Slab(first * inner, offset, (last - first, *shape[1:]))
    yield from _in_row(shape, last, last * inner, stop)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Slab]:
    base = row * math.prod(shape[1:])
    for slab in slabs(shape[1:], start - base, stop - base):
        yield Slab(slab.start + base, (row, *slab.offset), (1, *slab.shape))


def overlap(
    offset: Sequence[int], shape: Sequence[int], other: Sequence[int], other_shape: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where two blocks meet: as slices of the first and of the second, or None.

    >>> overlap((2,), (4,), (4,), (9,))
    ((slice(2, 4, None),), (slice(0, 2, None),))
    """
    first, second = [], []
    for a, n, b, m in zip(offset, shape, other, other_shape, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        first.append(slice(low - a, high - a))
        second.append(slice(low - b, high - b))
    return tuple(first), tuple(second)
