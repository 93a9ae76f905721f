"""Boxes: blocks of a tensor, where two of them meet, and whether some of them fill it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor: where it begins, and how far it goes."""

    offset: Sizes
    shape: Sizes

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def meet(self, other: Box) -> Box | None:
        """The part that both have, or None.

        >>> Box((0, 0), (4, 4)).meet(Box((3, 2), (4, 4)))
        Box(offset=(3, 2), shape=(1, 2))
        """
        offset = tuple(map(max, self.offset, other.offset))
        mine = (o + s for o, s in zip(self.offset, self.shape, strict=True))
        theirs = (o + s for o, s in zip(other.offset, other.shape, strict=True))
        shape = tuple(min(a, b) - o for a, b, o in zip(mine, theirs, offset, strict=True))
        return None if any(s <= 0 for s in shape) else Box(offset, shape)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The index of this box in a tensor that holds `outer`."""
        starts = (a - b for a, b in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(o, o + s) for o, s in zip(starts, self.shape, strict=True))

    def start_in(self, outer: Box) -> int:
        """The first element of this box in the row-major memory of `outer`.

        >>> Box((1, 1), (2, 2)).start_in(Box((0, 0), (4, 4)))
        5
        """
        start = 0
        for mine, other, size in zip(self.offset, outer.offset, outer.shape, strict=True):
            start = start * size + mine - other
        return start


def fills(boxes: Sequence[Box], shape: Sizes) -> str | None:
    """Why the boxes do not fill a tensor of `shape` exactly once; None when they do.

    >>> fills([Box((0,), (2,)), Box((2,), (3,))], (5,))
    >>> fills([Box((0,), (2,)), Box((1,), (4,))], (5,))
    'pieces at (0,) and (1,) overlap'
    """
    full = [box for box in boxes if box.numel]
    for box in full:
        ends = [o + s for o, s in zip(box.offset, box.shape, strict=True)]
        if any(end > size for end, size in zip(ends, shape, strict=True)):
            return f"the piece at {box.offset} of shape {box.shape} goes beyond {shape}"
    missing = math.prod(shape) - sum(box.numel for box in full)
    if missing > 0:
        return f"{missing} of {math.prod(shape)} elements are in no piece"
    pair = _overlapping(full)
    if pair is not None:
        return f"pieces at {pair[0].offset} and {pair[1].offset} overlap"
    return None  # as many elements as the tensor has, none twice, none outside


def _overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that meet. Boxes are swept along dim 0, so only neighbours are compared."""
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda b: b.offset):
        if not box.shape:
            return (boxes[0], boxes[1]) if len(boxes) > 1 else None
        open_boxes = [o for o in open_boxes if o.offset[0] + o.shape[0] > box.offset[0]]
        for other in open_boxes:
            if other.meet(box) is not None:
                return other, box
        open_boxes.append(box)
    return None
