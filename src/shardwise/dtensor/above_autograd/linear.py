"""Linear layers, above autograd: see Note [Above autograd].

Torch would merge the dims of a batch for a product of matrices, and forget how the weight lies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from shardwise.core.layout import Layout
from shardwise.core.untraced import UntracedFunction
from shardwise.dtensor.above_autograd.operands import all_distributed, are_distributed, merged
from shardwise.dtensor.autograd import bare_apply, gradient_layout_of
from shardwise.dtensor.snapshots import current
from shardwise.dtensor.tensor import DTensor, run
from shardwise.rules.matmul import (
    conjugate,
    linear_bias_grad,
    linear_input_grad,
    linear_weight_grad,
)

aten = torch.ops.aten


class Linear(UntracedFunction):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any) -> Any:
        # Each only for the gradient of the other: a frozen layer keeps no activations.
        for_x, for_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if for_weight else None, weight if for_x else None)
        if not for_x:
            ctx.weight_layout = weight._layout
        return _linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        again = torch.is_grad_enabled()  # double backward
        if for_x:
            if again and (grad.requires_grad or weight.requires_grad):
                grad_x = F.linear(grad, conjugate(weight.t()))
            else:
                grad_x = run(linear_input_grad, grad, weight)
        if for_weight:
            layout = weight._layout if for_x else ctx.weight_layout
            wish = gradient_layout_of[layout.symbolic](layout)
            if again and (grad.requires_grad or x.requires_grad):
                grad_weight = LinearWeightGrad.apply(grad, x, wish)
            else:
                grad_weight = run(linear_weight_grad, grad, x, wish=wish)
        if for_bias:
            if again:
                grad_bias = grad.sum(list(range(grad.dim() - 1))) if grad.dim() > 1 else grad
            else:
                grad_bias = run(linear_bias_grad, grad)
        return grad_x, grad_weight, grad_bias


class LinearWeightGrad(UntracedFunction):
    @staticmethod
    def forward(ctx: Any, grad: Any, x: Any, wish: Layout) -> Any:
        ctx.save_for_backward(grad, x)
        return run(linear_weight_grad, grad, x, wish=wish)

    @staticmethod
    def backward(ctx: Any, grad_weight: Any) -> Any:
        grad, x = ctx.saved_tensors
        return F.linear(x, grad_weight), F.linear(grad, conjugate(grad_weight.t())), None


_apply_linear = bare_apply(Linear)


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    distributed = type(x) is DTensor and type(weight) is DTensor
    if not distributed or not (bias is None or type(bias) is DTensor) or not x._layout.shape:
        operands = (x, weight, bias)
        if not are_distributed(*operands):
            return linear(*all_distributed(aten.linear.default, operands))
        # The ordinary path says what is wrong with the shapes.
        return DTensor.__torch_dispatch__(aten.linear.default, None, operands)
    shape = weight._layout.shape
    if len(shape) != 2 or (bias is not None and bias._layout.shape != shape[:1]):
        # A vector, or a bias that is broadcast: torch's own steps, which say what does not fit.
        return aten.linear.default.decompose(x, weight, bias)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        layout = x._layout
        if (
            layout.snapshot
            or weight._layout.snapshot
            or (bias is not None and bias._layout.snapshot)
        ):
            for operand in (x, weight, bias):
                if operand is not None:
                    current(operand)
        if weight.requires_grad and len(layout.shape) > 2:
            x = merged(x, len(layout.shape) - 1)
        return _apply_linear(x, weight, bias)
    return _linear(x, weight, bias)


def _linear(x: Any, weight: Any, bias: Any) -> Any:
    op = aten.linear.default
    return run(op, x, weight) if bias is None else run(op, x, weight, bias)


KERNELS = (("linear", linear),)
