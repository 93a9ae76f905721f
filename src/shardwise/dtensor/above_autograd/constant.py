"""Gradients that do not change with the tensor they are of; see Note [Above autograd].

Torch's formulas for some of them read the tensor. So on one device such a gradient requires grad,
and what is differentiated again is zero; without that, backward() of it would be an error here.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.core.untraced import UntracedFunction


class Constant(UntracedFunction):
    """A gradient, as something that was computed from `x`, of its shape."""

    @staticmethod
    def forward(ctx: Any, grad: Any, x: Any) -> Any:
        return grad.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, torch.zeros_like(grad)


def read_from(grad: Any, x: Any) -> Any:
    """`grad`, which requires grad where `x` does; only where it is differentiated again."""
    if torch.is_grad_enabled() and x.requires_grad:
        return Constant.apply(grad, x)
    return grad
