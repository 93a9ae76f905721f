"""Ops that refuse values: an index out of range, a probability above one, a division by zero.

Where ranks hold different values, one rank may raise alone, and the others would wait for it in the
next collective. So the ranks agree (`comm.agreement.raise_together`). Not on CUDA, where torch
asserts on the device, nor in compiled code, which does not read values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise._torch.schema import OpOverload
from shardwise.comm.agreement import raise_together
from shardwise.comm.watch import because
from shardwise.core.layout import Layout, differing_axes
from shardwise.dispatch.schema import functional_twin
from shardwise.lookup.ids import has_values

aten = torch.ops.aten

#: The inputs whose values an op may refuse, as a slice; `ops.catalog` fills it.
REFUSED: dict[Any, slice] = {}

#: Ops that refuse a division of integers by zero.
DIVISIONS = (
    aten.floor_divide.default,
    aten.div.Tensor_mode,
    aten.remainder.Tensor,
    aten.fmod.Tensor,
)


def refused_alike(
    op: Any, inputs: Sequence[Layout], call: Callable[..., Any]
) -> Callable[..., Any]:
    """The local call of `op`, which raises on every rank where it raises on one."""
    if op not in REFUSED and isinstance(op, OpOverload):
        op = functional_twin(op)
    if op not in REFUSED:
        return call
    if op in DIVISIONS and any(x.dtype.is_floating_point or x.dtype.is_complex for x in inputs):
        return call
    grid, axes = inputs[0].grid, differing_axes(inputs[REFUSED[op]])
    if not axes:
        return call  # all ranks see the same values

    def run(*operands: Any, **kwargs: Any) -> Any:
        tensor = next(x for x in _listed(operands) if isinstance(x, torch.Tensor))
        if not has_values(tensor) or not tensor.is_cpu or grid.device_type != "cpu":
            return call(*operands, **kwargs)
        with because(op, implicit=False):
            return raise_together(grid, axes, lambda: call(*operands, **kwargs))

    return run


def _listed(operands: Sequence[Any]) -> list[Any]:
    return [x for o in operands for x in (o if isinstance(o, (list, tuple)) else (o,))]
