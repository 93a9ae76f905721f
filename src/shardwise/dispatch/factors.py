"""Factors of Partial tensors: a call with one that is not finite reduces the terms first.

Note [Factors of a Partial]
Infinity times a sum is infinite, but the sum of infinity times each term may be NaN: a term may be
zero, or have the other sign. Division by zero has the same problem. Plans ignore values, so a call
that passes a Partial on reads the other operands when it runs: all numbers, and tensors on the CPU.
On a GPU reading would wait for the device, and in a graph there is nothing to read: there such an
entry is NaN.

The ranks decide alike without communicating: along an axis that is reduced, all of them hold the
same factors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwise._torch.dispatch import OpOverload
from shardwise.comm.watch import because, watch
from shardwise.core.layout import Layout
from shardwise.core.placements import Partial, Replicate
from shardwise.dispatch.catalog import (
    Path,
    at_path,
    functional_twin,
    tensor_paths,
    written_inputs,
)
from shardwise.dispatch.propagate import CallPlan, forbid_move
from shardwise.dispatch.wrapped import is_partial
from shardwise.lookup.ids import has_values
from shardwise.redistribute.execute import Run, prepare
from shardwise.redistribute.steps import Step, find_steps
from shardwise.simulation.ranks import parts_of

aten = torch.ops.aten
_DIVISIONS = frozenset({aten.div.Tensor, aten.div.Scalar})


class _Bounds:
    """The range of numbers that may be applied to each term of a sum of this dtype."""

    def __init__(self, op: Any, dtype: torch.dtype) -> None:
        self.divides = op in _DIVISIONS or (
            isinstance(op, OpOverload) and functional_twin(op) in _DIVISIONS
        )
        # Kernels compute with narrow types in single precision.
        wide = dtype in (torch.float64, torch.complex128)
        limits = torch.finfo(torch.float64 if wide else torch.float32)
        self.largest, self.smallest = limits.max, limits.smallest_normal

    def allows(self, number: Any) -> bool:
        if self.divides:
            return abs(number) >= self.smallest
        return abs(number) <= self.largest

    def allows_all(self, x: torch.Tensor) -> bool:
        """Whether the bounds allow all entries of `x`, if it has values to read."""
        if type(x) is not torch.Tensor:
            return not has_values(x) or all(map(self.allows_all, parts_of(x)))
        if not x.is_cpu:
            return True
        if not x.dim():
            return self.allows(x.item())
        if self.divides:
            # Most divisors are positive, and reading them is faster than dividing.
            if not x.numel() or (not x.is_complex() and x.amin().item() >= self.smallest):
                return True
            x = x.reciprocal()
        total = x.sum().item()
        # A finite sum has finite terms. Not the other way round.
        return total - total == 0 or bool(x.isfinite().all())

    def may_exceed(self, layout: Layout) -> bool:
        """Whether a factor of this layout may hold a number that is out of bounds."""
        return self.divides or layout.dtype.is_floating_point or layout.dtype.is_complex


def bounded(
    call_local: Callable[[CallPlan], Callable[..., Any]],
    plan: CallPlan,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Callable[..., Any]:
    """A plan's local call, which reduces Partial operands first if a factor is out of bounds."""
    call = call_local(plan)
    added, linear = _partial_axes(plan)
    if not added:
        return call
    bounds = _Bounds(plan.op, plan.outputs[0].dtype)
    paths = list(tensor_paths(args))
    factors = [
        path
        for path, layout in zip(paths, plan.inputs, strict=True)
        if linear and _is_factor(layout, plan) and bounds.may_exceed(layout)
    ]
    # A number that a local function takes may be anything: the order of a norm, for one.
    multiplies = isinstance(plan.op, OpOverload) and plan.local is None
    positions = [i for i, arg in enumerate(args) if multiplies and _is_number(arg, bounds)]
    names = [name for name, arg in kwargs.items() if multiplies and _is_number(arg, bounds)]
    if not (factors or positions or names):
        return call
    reduced = functools.lru_cache(functools.partial(_reducing, call_local, plan, paths, linear))

    def run(*operands: Any, **options: Any) -> Any:
        for i in positions:
            if not bounds.allows(operands[i]):
                return reduced(added)(*operands, **options)
        for name in names:
            if not bounds.allows(options[name]):
                return reduced(added)(*operands, **options)
        for path in factors:
            if not bounds.allows_all(at_path(operands, path)):
                return reduced(linear)(*operands, **options)
        return call(*operands, **options)

    return run


def _partial_axes(plan: CallPlan) -> tuple[frozenset[int], frozenset[int]]:
    """The axes along which the op passes terms of a sum on, and those where it does only that.

    Along the others, shards are multiplied and the terms are added to the products: there the
    factors differ from rank to rank.
    """
    if len(plan.outputs) != 1 or not is_partial(plan.outputs[0]):
        return frozenset(), frozenset()
    dtype = plan.outputs[0].dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return frozenset(), frozenset()
    along = [
        [x.placements[axis] for x in plan.inputs] for axis in range(plan.inputs[0].grid.num_axes)
    ]
    added = {a for a, placed in enumerate(along) if any(isinstance(p, Partial) for p in placed)}
    linear = {a for a in added if not any(p.is_shard() for p in along[a])}
    return frozenset(added), frozenset(linear)


def _is_factor(layout: Layout, plan: CallPlan) -> bool:
    if plan.local is not None and plan.local.collective:
        # It runs collectives along other axes too, and the ranks of those decide alike.
        return all(isinstance(p, Replicate) for p in layout.placements)
    return not is_partial(layout)


def _is_number(arg: Any, bounds: _Bounds) -> bool:
    """Whether a number is not in the cache key, or is in it and out of bounds."""
    return isinstance(arg, (float, complex)) or (isinstance(arg, int) and not bounds.allows(arg))


def _reducing(
    call_local: Callable[[CallPlan], Callable[..., Any]],
    plan: CallPlan,
    paths: Sequence[Path],
    linear: frozenset[int],
    axes: frozenset[int],
) -> Callable[..., Any]:
    """The call on operands that are reduced along `axes`; its result becomes Partial again.

    Where the axes are not `linear`, every rank adds the whole to its product. It was multiplied by
    a number that is not finite, so it does not matter how often.
    """
    inputs = tuple(layout.reduced(axes) for layout in plan.inputs)
    out = plan.outputs[0]
    once = replace(plan, inputs=inputs, outputs=(out.reduced(linear),))
    call = call_local(once)
    moves: list[tuple[Path, Sequence[Step], Layout, Run]] = []
    for path, layout, target in zip(paths, plan.inputs, inputs, strict=True):
        if target is not layout:
            steps = find_steps(layout, target)
            moves.append((path, steps, target, prepare(steps)))
    as_terms = prepare(find_steps(once.outputs[0], out))
    written = isinstance(plan.op, OpOverload) and written_inputs(plan.op)

    def run(*operands: Any, **options: Any) -> Any:
        whole: list[Any] = [list(x) if isinstance(x, (list, tuple)) else x for x in operands]
        for path, steps, target, reduce in moves:
            if watch.strict:
                forbid_move(plan.op, path[0], steps, target)
            place = whole if len(path) == 1 else whole[path[0]]
            with because(plan.op, implicit=True):
                place[path[-1]] = reduce(place[path[-1]])
        terms = as_terms(call(*whole, **options))
        return operands[written[0]].copy_(terms) if written else terms

    return run
