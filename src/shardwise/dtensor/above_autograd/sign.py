"""`sgn`, above autograd: see Note [Above autograd].

Torch's formula for the gradient of real numbers makes a plain tensor of zeros, which lies nowhere.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.core.untraced import UntracedFunction
from shardwise.dtensor.autograd import direct_apply
from shardwise.dtensor.tensor import run

aten = torch.ops.aten


class Unit(UntracedFunction):
    """The complex number of size 1 in the same direction; zero for zero."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return run(aten.sgn.default, x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        unit, size = torch.sgn(x), x.abs()
        zero = size == 0
        along = unit * (grad * unit.conj()).real  # what changes the size, and not the direction
        return ((grad - along) / size.masked_fill(zero, 1)).masked_fill(zero, 0)


_apply_unit = direct_apply(Unit)


def sgn(x: Any) -> Any:
    if not x.is_complex():
        return torch.sign(x)
    if torch.is_grad_enabled() and x.requires_grad:
        return _apply_unit(x)
    return run(aten.sgn.default, x)


def sgn_(x: Any) -> Any:
    return x.copy_(sgn(x.clone())) if x.is_complex() else x.sign_()


KERNELS = (("sgn", sgn), ("sgn_", sgn_))
