"""Foreach ops in one local call, where each tensor meets only tensors with its layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise._torch.autograd import count_versions
from shardwise._torch.dispatch import OpOverload
from shardwise.core.layout import Layout
from shardwise.core.placements import Partial
from shardwise.dispatch.plan import Entry, wraps_all
from shardwise.dispatch.propagate import CallPlan
from shardwise.dispatch.wrapped import Wrapped, count_on_lent

aten = torch.ops.aten

#: Optimizer steps on whole lists of parameters, gradients and states; see dtensor.fused_step.
FUSED_STEPS = frozenset(
    getattr(packet, overload)
    for packet in (aten._fused_adam_, aten._fused_adamw_, aten._fused_sgd_, aten._fused_adagrad_)
    for overload in packet.overloads()
)
#: The op of a GradScaler: what is found in one rank's shards counts for all ranks.
UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default
#: The foreach ops that are not elementwise.
_REDUCTIONS = ("norm", "max", "powsum")


def foreach_entry(op: Any, args: Sequence[Any]) -> Entry | None:
    """The entry of a foreach op that needs nothing moved; None for any other call.

    `args` has layouts in place of tensors. On shards of the same shape, none Partial, the op itself
    on the lists of local tensors is correct.
    """
    if not is_foreach(op) or any(op._schema.name.endswith(name) for name in _REDUCTIONS):
        return None
    lists = [arg for arg in args if isinstance(arg, list) and _all_layouts(arg)]
    if not lists or any(isinstance(arg, Layout) for arg in args):
        return None
    first = lists[0]
    if any(len(layout.grid.world.present) > 1 for layout in first):
        return None  # simulated ranks share some of the tensors and not others: one by one
    for other in lists[1:]:
        if len(other) != len(first) or not all(map(_alike, first, other)):
            return None
    if any(isinstance(p, Partial) for layout in first for p in layout.placements):
        return None
    if any(layout.snapshot or layout.expanded for layout in first):
        return None  # a write would be lost, or reach other entries; a result is not expanded
    plan = CallPlan(op, None, tuple(x for each in lists for x in each), tuple(first), None, ())
    entry = Entry(plan)
    entry.call = getattr(torch, op._schema.name.removeprefix("aten::"), op)
    entry.finish = _written if op._schema.is_mutable else wraps_all(first)
    return entry


def is_foreach(op: Any) -> bool:
    """Whether the op applies a single-tensor op to each of a list."""
    return isinstance(op, OpOverload) and op._schema.name.startswith("aten::_foreach_")


def takes_lists(op: Any) -> bool:
    """Whether the op takes lists whose tensors meet only those at the same index."""
    return is_foreach(op) or op in FUSED_STEPS or op is UNSCALE


def _all_layouts(items: Sequence[Any]) -> bool:
    return bool(items) and all(isinstance(item, Layout) for item in items)


def _alike(a: Layout, b: Layout) -> bool:
    return (
        a.grid is b.grid
        and a.placements == b.placements
        and a.order == b.order
        and a.shape == b.shape
        and a.dtype == b.dtype
        and a.dtype.is_floating_point
    )


def _written(result: Any, args: Any, wrap: Any) -> None:
    count_writes(args[0])


def count_writes(tensors: Sequence[torch.Tensor]) -> None:
    """Count a write to each: torch does so only for the plain tensors that a foreach op reaches."""
    for tensor in tensors:
        if isinstance(tensor, Wrapped):
            grid = tensor._layout.grid
            grid.num_writes += 1
            if grid.lends:
                count_on_lent(tensor)
    if not torch.is_inference_mode_enabled():
        count_versions(tensors)
