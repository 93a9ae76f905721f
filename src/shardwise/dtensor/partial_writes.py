"""Writes to tensors that are Partial.

A write must leave the tensor where it lies. An op that is linear in it works on the terms; any
other works on the reduced value, which then becomes the one term that is not zero. Either way the
tensor keeps knowing its reduction: clipping gradients and then stepping reduces them once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwise._torch.schema import OpOverload
from shardwise.core.layout import Layout
from shardwise.dtensor.entries import Entry
from shardwise.dtensor.planning import check_written_once, make_entry, mover, tensor_paths
from shardwise.dtensor.reduced import is_partial, recall, reduced_layout, remember
from shardwise.errors import UnsupportedError
from shardwise.redistribute.execute import prepare
from shardwise.redistribute.search import find_steps
from shardwise.rules.catalog import written_inputs

aten = torch.ops.aten


def entry_of_call(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], wish: Layout | None = None
) -> Entry:
    """`make_entry`, with writes to Partial tensors."""
    written = written_inputs(op)
    target = args[written[0]] if len(written) == 1 and written[0] < len(args) else None
    if not isinstance(target, Layout) or not is_partial(target):
        return make_entry(op, args, kwargs, wish)
    try:
        entry = make_entry(op, args, kwargs, wish)
    except UnsupportedError:
        if target.snapshot:  # a write to a copy is lost, however it is done
            raise
        return _through_reduction(op, args, kwargs, written[0])
    # What is drawn into the terms is not drawn again into the reduction, which is forgotten.
    draws = isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags
    if not kwargs and not draws and entry.finish is not None:
        entry.finish = _reduction_follows(op, written[0])
    return entry


def _reduction_follows(op: Any, position: int) -> Callable[..., Any]:
    """The op has written to the terms; it does the same to the reduction that is remembered."""

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
    """The entries of `local` without those that an expanded dim repeats: one write for each."""
    for dim in layout.expanded:
        local = aten.slice.Tensor(local, dim, 0, 1)
    return local
