"""The memory order that torch gives the result of a pointwise op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.core.layout import Shape, contiguous_stride, dense_stride

_CHANNELS_LAST = (0, 2, 3, 1)


def iterated_stride(shape: Shape, operands: Sequence[Any]) -> Shape:
    """The strides of a new result of this shape, to which the operands are broadcast.

    Kernels go through memory in the order of the first operand that tells two dims apart. The
    operands have a `shape` and a `stride`, such as layouts.

    >>> from types import SimpleNamespace as Meta
    >>> row, turned = Meta(shape=(4,), stride=(1,)), Meta(shape=(2, 3, 1), stride=(1, 2, 1))
    >>> iterated_stride((2, 3, 4), [row, turned])
    (4, 8, 1)
    """
    given = [(tuple(x.shape), tuple(x.stride)) for x in operands]
    alike = all(size == shape for size, _ in given)
    if alike and (found := _common_stride(shape, [stride for _, stride in given])) is not None:
        return found
    return dense_stride(shape, _outermost_first(shape, [_broadcast(shape, *x) for x in given]))


def _common_stride(shape: Shape, strides: Sequence[Shape]) -> Shape | None:
    """The strides where all operands have the same ones; those of dims of size 1 do not matter."""
    row_major = contiguous_stride(shape)
    if 0 in shape or all(same_stride(shape, stride, row_major) for stride in strides):
        return row_major
    if len(shape) == len(_CHANNELS_LAST):
        channels_last = dense_stride(shape, _CHANNELS_LAST)
        if all(same_stride(shape, stride, channels_last) for stride in strides):
            return channels_last
    outermost_first = sorted(range(len(shape)), key=lambda d: -strides[0][d])
    first = dense_stride(shape, outermost_first)
    alike = all(stride == strides[0] for stride in strides)
    return strides[0] if alike and same_stride(shape, strides[0], first) else None


def same_stride(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two strides are the same for a tensor of this shape: dims of size 1 have none."""
    return all(a == b or size == 1 for size, a, b in zip(shape, one, other, strict=True))


def _broadcast(shape: Shape, given: Shape, stride: Shape) -> Shape:
    """The strides of an operand seen as a tensor of `shape`: 0 along dims that it repeats."""
    missing = len(shape) - len(given)
    repeats = [size != whole for size, whole in zip(given, shape[missing:], strict=True)]
    steps = [0 if repeated else step for repeated, step in zip(repeats, stride, strict=True)]
    return (*[0] * missing, *steps)


def _outermost_first(shape: Shape, strides: Sequence[Shape]) -> list[int]:
    """The dims in the order that the operands have in memory, row-major where none tells.

    Sorted by insertion, as torch does: dims that no operand can compare make the order depend on
    the way of sorting.
    """
    innermost_first = list(reversed(range(len(shape))))
    for last in range(1, len(shape)):
        moving = last
        for place in reversed(range(last)):
            order = _compared(shape, strides, innermost_first[place], innermost_first[moving])
            if order < 0:
                break
            if order > 0:
                dims = innermost_first[place], innermost_first[moving]
                innermost_first[moving], innermost_first[place] = dims
                moving = place
    return innermost_first[::-1]


def _compared(shape: Shape, strides: Sequence[Shape], one: int, other: int) -> int:
    """Negative where dim `one` is inside `other`, positive where it is outside, 0 for unknown."""
    for stride in strides:
        if not stride[one] or not stride[other]:
            continue
        if stride[one] != stride[other]:
            return -1 if stride[one] < stride[other] else 1
        if shape[one] > shape[other]:
            return 1
    return 0
