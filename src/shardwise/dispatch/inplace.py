"""In-place ops: writes to Partial tensors, and to memory that the op also reads.

A write must not change the layout. An op that is linear in a Partial tensor works on the terms; any
other works on the reduced value, which becomes the one term that is not zero. Either way the
reduction stays cached: clipping gradients and then stepping reduces them once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwise._torch.schema import OpOverload
from shardwise.core.layout import Layout
from shardwise.dispatch.catalog import written_inputs
from shardwise.dispatch.plan import check_written_once, make_entry, mover, tensor_paths
from shardwise.dispatch.plan_cache import Entry
from shardwise.dispatch.wrapped import Wrapped, is_partial, recall, reduced_layout, remember
from shardwise.errors import UnsupportedError
from shardwise.redistribute.execute import prepare
from shardwise.redistribute.search import find_steps
from shardwise.simulation.parts import parts_of

aten = torch.ops.aten


def entry_of_call(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], preferred: Layout | None = None
) -> Entry:
    """`make_entry`, with writes to Partial tensors."""
    written = written_inputs(op)
    target = args[written[0]] if len(written) == 1 and written[0] < len(args) else None
    if not isinstance(target, Layout) or not is_partial(target):
        return make_entry(op, args, kwargs, preferred)
    try:
        entry = make_entry(op, args, kwargs, preferred)
    except UnsupportedError:
        if target.snapshot:  # a write to a copy is lost, however it is done
            raise
        return _through_reduction(op, args, kwargs, written[0])
    # A draw into the terms cannot be repeated for the cached reduction, which is dropped.
    draws = isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags
    if not kwargs and not draws and entry.finish is not None:
        entry.finish = _reduction_follows(op, written[0])
    return entry


def _reduction_follows(op: Any, position: int) -> Callable[..., Any]:
    """A `finish` that applies the op to the cached reduction as well."""

    def finish(result: Any, args: Sequence[Any], wrap: Callable[..., Any]) -> Any:
        tensor = args[position]
        tensor._layout.grid.num_writes += 1
        known = recall(tensor)
        if known is not None:
            reduced = wrap(known[0].clone(), known[1])
            op(*args[:position], reduced, *args[position + 1 :])
            remember(tensor, reduced._local, known[1], writing=True)
        return tensor

    return finish


def _through_reduction(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], position: int
) -> Entry:
    terms: Layout = args[position]
    check_written_once(op, terms)
    whole = reduced_layout(terms)
    inner = make_entry(op, [*args[:position], whole, *args[position + 1 :]], kwargs)
    paths = list(tensor_paths(args))
    number = paths.index((position,))
    steps = list(inner.plan.steps or ((),) * len(paths))
    steps[number] = find_steps(terms, whole)
    plan = replace(inner.plan, steps=tuple(steps), outputs=(terms,))
    move, back = mover(paths, plan), prepare(find_steps(whole, terms))
    entry = Entry(plan)

    def reduce_and_copy(operands: list[Any], tensors: Sequence[Any]) -> None:
        move(operands, tensors)
        operands[position] = operands[position].clone()

    def finish(result: torch.Tensor, tensors: Sequence[Any], wrap: Any) -> Any:
        tensor = tensors[position]
        tensor._layout.grid.num_writes += 1
        _distinct(tensor._local, terms).copy_(_distinct(back(result), terms))
        remember(tensor, result, whole, writing=True)
        return tensor

    entry.move, entry.call, entry.finish = reduce_and_copy, inner.call, finish
    return entry


def _distinct(local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """`local` without the repetitions of expanded dims: each entry is written once."""
    for dim in layout.expanded:
        local = aten.slice.Tensor(local, dim, 0, 1)
    return local


# -- overlapping memory ----------------------------------------------------------------------
#
# One device refuses to write to memory that the op reads in another order. Torch's kernels compare
# memory, which does not work where an operand was redistributed: it is a copy. So a call that
# writes and moves compares the tensors themselves.


def watch_overlaps(op: Any, entry: Entry) -> None:
    """Have a planned call that writes and moves refuse operands that overlap its target."""
    if entry.move is not None and compares_memory(op):
        entry.move = _checked_first(op, entry.move)


def compares_memory(op: Any) -> bool:
    """Whether one device refuses operands of this op that overlap the tensor it writes to."""
    if not isinstance(op, OpOverload) or list(written_inputs(op)) != [0]:
        return False
    return op is aten.copy_.default or torch.Tag.pointwise in op.tags


def check_overlaps(op: Any, args: Sequence[Any]) -> None:
    """Raise if an operand is part of the first one's memory, or all of it in another order.

    Two views of parts of one tensor are not compared: their offsets are not known.
    """
    target = args[0]
    if not isinstance(target, Wrapped):  # many at once, under vmap
        return
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
    if one._layout.symbolic or other._layout.symbolic:
        return False
    if not (one.numel() and other.numel() and _is_dense(one) and _is_dense(other)):
        return False
    if one.numel() == other.numel() and one.stride() == other.stride():
        return False
    whole = one if one._base is None else one._base
    if whole is not (other if other._base is None else other._base):
        # To torch, what detach() returns is not a view, but its shards are.
        return any(map(_start_alike, parts_of(one._local), parts_of(other._local)))
    if whole._layout.symbolic or not _is_dense(whole):
        return False
    return whole.numel() in (one.numel(), other.numel())


def _start_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    if type(one) is not torch.Tensor or type(other) is not torch.Tensor or not one.numel():
        return False
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    return one.storage_offset() == other.storage_offset()


def _is_dense(x: Any) -> bool:
    """Whether the entries fill their memory, in any order of dims."""
    expected = 1
    places = zip(x.stride(), x.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in places if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True
