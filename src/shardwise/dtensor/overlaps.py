"""Writes to a tensor that read the same memory in another order: refused, as on one device.

Torch's kernels compare memory, and find nothing where an operand has moved: what arrives is a copy.
So a call that writes and moves compares the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise._torch.schema import OpOverload
from shardwise.dtensor.entries import Entry
from shardwise.dtensor.wrapped import Wrapped
from shardwise.errors import UnsupportedError
from shardwise.rules.catalog import written_inputs

aten = torch.ops.aten


def watch_overlaps(op: Any, entry: Entry) -> None:
    """Let a planned call that writes and moves refuse operands that overlap what it writes to."""
    if entry.move is not None and compares_memory(op):
        entry.move = _checked_first(op, entry.move)


def compares_memory(op: Any) -> bool:
    """Whether one device refuses this op operands that overlap the tensor it writes to."""
    if not isinstance(op, OpOverload) or list(written_inputs(op)) != [0]:
        return False
    return op is aten.copy_.default or torch.Tag.pointwise in op.tags


def check_overlaps(op: Any, args: Sequence[Any]) -> None:
    """Raise where an operand is part of the first one's memory, or all of it in another order.

    Two parts of one tensor are not compared: where they begin is not known.
    """
    target = args[0]
    for other in args[1:]:
        if isinstance(other, Wrapped) and other is not target and _overlap(target, other):
            raise UnsupportedError(
                f"{op} would write to memory that it reads in another order: both operands are "
                f"views of one tensor, {target._layout!r} and {other._layout!r}. Clone one first."
            )


def _checked_first(
    op: Any, move: Callable[[list[Any], Sequence[Any]], None]
) -> Callable[[list[Any], Sequence[Any]], None]:
    def moved(operands: list[Any], args: Sequence[Any]) -> None:
        check_overlaps(op, args)
        move(operands, args)

    return moved


def _overlap(one: Any, other: Any) -> bool:
    whole = one if one._base is None else one._base
    if whole is not (other if other._base is None else other._base):
        return False
    if one._layout.symbolic or other._layout.symbolic or whole._layout.symbolic:
        return False
    if not (one.numel() and other.numel() and _is_dense(one) and _is_dense(other)):
        return False
    num = whole.numel() if _is_dense(whole) else -1
    if one.numel() != num and other.numel() != num:
        return False
    return one.numel() != other.numel() or one.stride() != other.stride()


def _is_dense(x: Any) -> bool:
    """Whether the entries fill their memory, in whatever order of dims."""
    expected = 1
    places = zip(x.stride(), x.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in places if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True
