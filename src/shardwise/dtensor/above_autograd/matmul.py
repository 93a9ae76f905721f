"""`matmul` as one op, above autograd: see Note [Above autograd].

Torch would merge the batch dims for a product of matrices, and what is merged cannot stay sharded.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.core.untraced import UntracedFunction
from shardwise.dtensor.above_autograd.einsum import Like, spread
from shardwise.dtensor.above_autograd.operands import all_distributed, are_distributed, merged
from shardwise.dtensor.autograd import direct_apply, gradient_layout
from shardwise.dtensor.tensor import DTensor, run
from shardwise.rules.contract import matmul_letters, product
from shardwise.rules.matmul import linear_weight_grad, matmul_left_grad, matmul_right_grad

aten = torch.ops.aten
_matmul = aten.matmul.default


def matmul(left: Any, right: Any) -> Any:
    """A batch of matrices times as many matrices, or times one, has a shorter way than others."""
    batched = type(left) is DTensor and type(right) is DTensor
    if batched:
        batch, others = left._layout.shape[:-2], right._layout.shape[:-2]
        if left.dim() == right.dim() == 2:
            return torch.mm(left, right)
        batched = left.dim() > 2 and (batch == others or right.dim() == 2)
    if not batched or left.dtype.is_complex:
        return _broadcast_matmul(left, right)
    if torch.is_grad_enabled() and (left.requires_grad or right.requires_grad):
        if right.requires_grad and right.dim() == 2:
            left = merged(left, left.dim() - 1)
        return _apply_batched(left, right)
    return run(_matmul, left, right)


class BatchedMatmul(UntracedFunction):
    @staticmethod
    def forward(ctx: Any, left: Any, right: Any) -> Any:
        for_left, for_right = ctx.needs_input_grad
        ctx.save_for_backward(left if for_right else None, right if for_left else None)
        ctx.right_layout, ctx.num_dims = right._layout, left.dim()
        return run(_matmul, left, right)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        left, right = ctx.saved_tensors
        for_left, for_right = ctx.needs_input_grad
        grad_left = grad_right = None
        if torch.is_grad_enabled():  # double backward
            if for_left:
                grad_left = grad @ right.mT
            if for_right:
                grad_right = (left.mT @ grad).sum_to_size(ctx.right_layout.shape)
            return grad_left, grad_right
        if for_left:
            grad_left = run(matmul_left_grad, grad, right)
        if for_right:
            alike = ctx.right_layout.ndim == ctx.num_dims
            op = matmul_right_grad if alike else linear_weight_grad
            grad_right = run(op, left, grad, wish=gradient_layout(ctx.right_layout))
        return grad_left, grad_right


_apply_batched = direct_apply(BatchedMatmul)


def _broadcast_matmul(left: Any, right: Any) -> Any:
    if max(left.dim(), right.dim()) <= 2:  # a product of matrices or vectors: nothing is merged
        return _matmul.decompose(left, right)
    if not are_distributed(left, right):
        return matmul(*all_distributed(_matmul, (left, right)))
    if type(left) is not DTensor or type(right) is not DTensor or not (left.dim() and right.dim()):
        # The ordinary path says what is wrong with the shapes.
        return DTensor.__torch_dispatch__(_matmul, None, (left, right))
    if torch.is_grad_enabled() and (left.requires_grad or right.requires_grad):
        return _apply_product(left, right)
    return run(product, left, right)


class Product(UntracedFunction):
    @staticmethod
    def forward(ctx: Any, left: Any, right: Any) -> Any:
        for_left, for_right = ctx.needs_input_grad
        ctx.save_for_backward(left if for_right else None, right if for_left else None)
        ctx.likes = (Like.of(left), Like.of(right))
        return run(product, left, right)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        left, right = ctx.saved_tensors
        for_left, for_right = ctx.needs_input_grad
        of_left, of_right = ctx.likes
        a, b, out = matmul_letters(of_left.shape, of_right.shape)
        return (
            spread(a, of_left, [out, b], [grad, right]) if for_left else None,
            spread(b, of_right, [out, a], [grad, left]) if for_right else None,
        )


_apply_product = direct_apply(Product)


KERNELS = (("matmul", matmul),)
