"""`normal` with a tensor of means or deviations, above autograd: see Note [Above autograd].

Torch's formula for the gradient makes a plain tensor of zeros, which lies nowhere.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.core.untraced import UntracedFunction
from shardwise.dtensor.autograd import direct_apply
from shardwise.dtensor.tensor import DTensor

aten = torch.ops.aten


class Drawn(UntracedFunction):
    """Normal values: nothing that is differentiated depends on the mean and the deviation."""

    @staticmethod
    def forward(ctx: Any, op: Any, mean: Any, std: Any, options: dict[str, Any]) -> Any:
        ctx.shapes = [x.shape if isinstance(x, torch.Tensor) else None for x in (mean, std)]
        return _draw(op, mean, std, options)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        zeros = torch.zeros_like(grad)
        for_both = (None if shape is None else zeros.sum_to_size(shape) for shape in ctx.shapes)
        return None, *for_both, None


_apply_drawn = direct_apply(Drawn)


def _draw(op: Any, mean: Any, std: Any, options: dict[str, Any]) -> Any:
    return DTensor.__torch_dispatch__(op, None, (mean, std), options)


def _kernel(op: Any) -> Any:
    def normal(mean: Any, std: Any = 1.0, **options: Any) -> Any:
        if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in (mean, std)):
            return _apply_drawn(op, mean, std, options)
        return _draw(op, mean, std, options)

    return normal


KERNELS = tuple(
    (f"normal.{overload}", _kernel(getattr(aten.normal, overload)))
    for overload in ("Tensor_float", "float_Tensor", "Tensor_Tensor")
)
