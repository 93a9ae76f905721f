"""Factors that the terms of a sum must not meet one by one.

An infinity times a sum is infinite. Times its terms it is not: one of them may be zero or of the
other sign, and then there is no number. Plans ignore the values of floats, so what runs looks at
them; only where a Partial passes an op beside a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise._torch.schema import OpOverload
from shardwise.comm.watch import because, watch
from shardwise.core.layout import Layout
from shardwise.dtensor.reduced import is_partial, reduced_layout
from shardwise.dtensor.strict import forbid_move
from shardwise.redistribute.execute import prepare
from shardwise.redistribute.moves import Run
from shardwise.redistribute.search import find_steps
from shardwise.redistribute.steps import Step
from shardwise.rules.catalog import written_inputs
from shardwise.rules.propagate import CallPlan
from shardwise.rules.twins import functional_twin

aten = torch.ops.aten
_DIVISIONS = frozenset({aten.div.Tensor, aten.div.Scalar})


def bounded(
    call: Callable[..., Any], plan: CallPlan, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[..., Any]:
    """`call`, which reduces its operands first where a number among them is not finite."""
    if not isinstance(plan.op, OpOverload) or plan.local is not None:
        return call
    if len(plan.outputs) != 1 or not is_partial(plan.outputs[0]):
        return call
    fits = _fits(plan.op, plan.outputs[0].dtype)
    if fits is None or any(isinstance(arg, (list, tuple)) and _has_layouts(arg) for arg in args):
        return call
    positions = [i for i, arg in enumerate(args) if _is_watched(arg, fits)]
    names = [name for name, arg in kwargs.items() if _is_watched(arg, fits)]
    if not positions and not names:
        return call
    reduced: list[Callable[..., Any]] = []

    def run(*operands: Any, **options: Any) -> Any:
        for i in positions:
            if not fits(operands[i]):
                break
        else:
            if not names or all(fits(options[name]) for name in names):
                return call(*operands, **options)
        if not reduced:
            reduced.append(_reducing(call, plan, args))
        return reduced[0](*operands, **options)

    return run


def _fits(op: Any, dtype: torch.dtype) -> Callable[[Any], bool] | None:
    """Whether a number may meet terms of this dtype; None where every one may."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return None
    # Kernels compute with narrow types in single precision.
    wide = dtype in (torch.float64, torch.complex128)
    limits = torch.finfo(torch.float64 if wide else torch.float32)
    largest, smallest = limits.max, limits.smallest_normal
    if op in _DIVISIONS or functional_twin(op) in _DIVISIONS:
        return lambda number: abs(number) >= smallest
    return lambda number: abs(number) <= largest


def _has_layouts(items: Sequence[Any]) -> bool:
    return any(isinstance(item, Layout) for item in items)


def _is_watched(arg: Any, fits: Callable[[Any], bool]) -> bool:
    """Whether a hit may bring another number, or this one, which the plan knows, does not fit."""
    return isinstance(arg, (float, complex)) or (isinstance(arg, int) and not fits(arg))


def _reducing(call: Callable[..., Any], plan: CallPlan, args: Sequence[Any]) -> Callable[..., Any]:
    """`call` on the whole of what is Partial; the result is made into terms again."""
    tensors = [i for i, arg in enumerate(args) if isinstance(arg, (Layout, torch.Tensor))]
    moves: list[tuple[int, Sequence[Step], Layout, Run]] = []
    for position, layout in zip(tensors, plan.inputs, strict=True):
        if is_partial(layout):
            target = reduced_layout(layout)
            steps = find_steps(layout, target)
            moves.append((position, steps, target, prepare(steps)))
    out = plan.outputs[0]
    as_terms = prepare(find_steps(reduced_layout(out), out))
    written = written_inputs(plan.op)

    def run(*operands: Any, **options: Any) -> Any:
        whole = list(operands)
        for position, steps, target, reduce in moves:
            if watch.strict:
                forbid_move(plan.op, position, steps, target)
            with because(plan.op, implicit=True):
                whole[position] = reduce(operands[position])
        terms = as_terms(call(*whole, **options))
        return operands[written[0]].copy_(terms) if written else terms

    return run
