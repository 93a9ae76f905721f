"""Ops that refuse values: an index out of range, a probability above one, a division by zero.

Where ranks hold different values, one of them may be refused alone, and the others would go on and
wait for it in the next collective. So the ranks tell each other (`comm.consent.raise_together`).
On CUDA torch refuses by assertions on the device, of which no other rank is told; compiled code
does not look at values either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.comm.consent import raise_together
from shardwise.comm.watch import because
from shardwise.core.layout import Layout
from shardwise.rules.ids import has_values
from shardwise.rules.loss import bce, nll
from shardwise.rules.parts import differing_axes
from shardwise.rules.twins import functional_twin

aten = torch.ops.aten

#: The numbers of the inputs whose values an op may refuse; a slice of them.
_LAST = slice(-1, None)
_SECOND = slice(1, 2)
_REFUSED: dict[Any, slice] = {
    aten.gather.default: _SECOND,
    aten.scatter.src: _SECOND,
    aten.scatter.value: _SECOND,
    aten.scatter.reduce: _SECOND,
    aten.scatter.value_reduce: _SECOND,
    aten.scatter_add.default: _SECOND,
    aten.scatter_reduce.two: _SECOND,
    aten.index_select.default: _SECOND,
    aten.index_add.default: _SECOND,
    aten.index_copy.default: _SECOND,
    aten.index_reduce.default: _SECOND,
    aten.index_fill.int_Scalar: _SECOND,
    aten.index_fill.int_Tensor: _SECOND,
    aten.take.default: _SECOND,
    aten.put.default: _SECOND,
    aten.index.Tensor: slice(1, None),
    aten.index_put.default: slice(1, -1),
    aten.max_unpool2d.default: _SECOND,
    aten.max_unpool3d.default: _SECOND,
    aten.nll_loss_forward.default: _SECOND,
    aten.multi_margin_loss.default: _SECOND,
    aten.multilabel_margin_loss_forward.default: _SECOND,
    nll: _SECOND,
    bce: slice(0, 2),
    aten.bernoulli.default: _LAST,
    aten.bernoulli.Tensor: _LAST,
    # Integers, by zero.
    aten.floor_divide.default: _SECOND,
    aten.div.Tensor_mode: _SECOND,
    aten.remainder.Tensor: _SECOND,
    aten.fmod.Tensor: _SECOND,
}
_DIVISIONS = (
    aten.floor_divide.default,
    aten.div.Tensor_mode,
    aten.remainder.Tensor,
    aten.fmod.Tensor,
)


def refused_alike(
    op: Any, inputs: Sequence[Layout], call: Callable[..., Any]
) -> Callable[..., Any]:
    """The local call of `op`, which raises on every rank where it raises on one."""
    if op not in _REFUSED and isinstance(op, torch._ops.OpOverload):
        op = functional_twin(op)
    if op not in _REFUSED:
        return call
    if op in _DIVISIONS and any(x.dtype.is_floating_point or x.dtype.is_complex for x in inputs):
        return call
    grid, axes = inputs[0].grid, differing_axes(inputs[_REFUSED[op]])
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
