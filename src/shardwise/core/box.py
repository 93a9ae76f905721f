"""Box: a rectangle of a tensor's indices, and the algebra of boxes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from shardwise.core.sizes import Size


class Box(NamedTuple):
    """The offset and the size of a rectangle of indices along each dim.

    Sizes may be symbolic in the box of a layout; then only the two fields can be used.
    """

    offsets: tuple[Size, ...]
    sizes: tuple[Size, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """All of a tensor."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def volume(self) -> int:
        return math.prod(self.sizes)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """`(start, stop)` along each dim."""
        return tuple((o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of this box in the whole tensor."""
        return tuple(slice(*span) for span in self.spans)

    def intersect(self, other: Box) -> Box | None:
        """The intersection of two boxes; None where it is empty.

        >>> Box((0, 0), (4, 4)).intersect(Box((3, 2), (4, 4)))
        Box(offsets=(3, 2), sizes=(1, 2))
        """
        offsets, sizes = [], []
        for a, n, b, m in zip(*self, *other, strict=True):
            start = a if a > b else b
            size = min(a + n, b + m) - start
            if size <= 0:
                return None
            offsets.append(start)
            sizes.append(size)
        return Box(tuple(offsets), tuple(sizes))

    def contains(self, other: Box) -> bool:
        pairs = zip(self.spans, other.spans, strict=True)
        return all(a <= b and end <= stop for (a, stop), (b, end) in pairs)

    def within(self, outer: Box) -> Box:
        """This box with offsets relative to `outer`."""
        starts = zip(self.offsets, outer.offsets, strict=True)
        return Box(tuple(a - b for a, b in starts), self.sizes)

    def along(self, dim: int, start: int, size: int) -> Box:
        """This box narrowed along one dim; `start` is relative to the box.

        >>> Box((3, 2), (4, 4)).along(1, 1, 2)
        Box(offsets=(3, 3), sizes=(4, 2))
        """
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim] += start
        sizes[dim] = size
        return Box(tuple(offsets), tuple(sizes))

    def position_in(self, outer: Box) -> int:
        """The index of this box's first element in the row-major memory of `outer`.

        >>> Box((1, 1), (2, 2)).position_in(Box.whole((4, 4)))
        5
        """
        position = 0
        for mine, theirs, size in zip(self.offsets, *outer, strict=True):
            position = position * size + mine - theirs
        return position


def overlapping(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """The indices of two boxes that overlap; None where no two do.

    >>> overlapping([Box((2,), (3,)), Box((0,), (2,)), Box((4,), (1,))])
    (0, 2)
    """
    # A sweep along dim 0: a box is compared only with those that reach past its start.
    filled = [number for number, box in enumerate(boxes) if box.volume]
    reaching: list[int] = []
    for number in sorted(filled, key=lambda i: boxes[i].offsets):
        box = boxes[number]
        if box.sizes:
            reaching = [
                i for i in reaching if boxes[i].offsets[0] + boxes[i].sizes[0] > box.offsets[0]
            ]
        for other in reaching:
            if boxes[other].intersect(box) is not None:
                return other, number
        reaching.append(number)
    return None


def why_not_tiled(boxes: Sequence[Box], shape: Sequence[int]) -> str | None:
    """Why the boxes do not cover a tensor of `shape` exactly once; None when they do.

    >>> why_not_tiled([Box((0,), (2,)), Box((2,), (3,))], (5,))
    >>> why_not_tiled([Box((0,), (2,)), Box((1,), (4,))], (5,))
    'boxes at (0,) and (1,) overlap'
    """
    whole = Box.whole(shape)
    filled = [box for box in boxes if box.volume]
    for box in filled:
        if not whole.contains(box):
            return f"the box at {box.offsets} of shape {box.sizes} goes beyond {whole.sizes}"
    missing = whole.volume - sum(box.volume for box in filled)
    if missing > 0:
        return f"{missing} of {whole.volume} elements are in no box"
    pair = overlapping(filled)
    if pair is not None:
        return f"boxes at {filled[pair[0]].offsets} and {filled[pair[1]].offsets} overlap"
    return None  # as many elements as the tensor has, none twice, none outside
