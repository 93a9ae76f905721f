"""`prod`, above autograd: see Note [Above autograd].

Torch has two formulas for its gradient. The one for other tensors than its own passes the gradient
of a single factor on as it is; on one device it is computed from the factor, and requires grad.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.core.untraced import UntracedFunction
from shardwise.dtensor.above_autograd.constant import read_from
from shardwise.dtensor.tensor import DTensor

aten = torch.ops.aten


class Prod(UntracedFunction):
    """`args` are of the op; without a dim among them it is the product of all entries."""

    @staticmethod
    def forward(ctx: Any, x: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = DTensor.__torch_dispatch__(op, None, (x, *args), kwargs)
        ctx.save_for_backward(x, out)  # as torch: neither may be written to
        ctx.args = args
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, _ = ctx.saved_tensors
        return _grad(grad, x.to(grad.dtype), *ctx.args).to(x.dtype), None, None, None


def _grad(grad: Any, x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    if not x.dim():
        return grad.clone()
    if dim is None:
        return _grad(grad, x.reshape(-1), 0).reshape(x.shape)
    return (grad if keepdim else grad.unsqueeze(dim)) * _of_others(x, dim).conj()


def _of_others(x: Any, dim: int) -> Any:
    """For each factor the product of the others: no quotient, so a factor may be zero."""
    if not x.numel():
        return x
    num = x.shape[dim] - 1
    if not num:
        return read_from(torch.ones_like(x), x)
    one = torch.ones_like(x.narrow(dim, 0, 1))
    before = torch.cat([one, x.narrow(dim, 0, num)], dim).cumprod(dim)
    after = torch.cat([one, x.narrow(dim, 1, num).flip(dim)], dim).cumprod(dim)
    return before * after.flip(dim)


def prod(x: Any, *, dtype: Any = None) -> Any:
    return _prod(aten.prod.default, x, (), dtype)


def prod_dim(x: Any, dim: int, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return _prod(aten.prod.dim_int, x, (dim, keepdim), dtype)


def _prod(op: Any, x: Any, args: tuple[Any, ...], dtype: Any) -> Any:
    kwargs = {} if dtype is None else {"dtype": dtype}
    if torch.is_grad_enabled() and x.requires_grad:
        return Prod.apply(x, op, args, kwargs)
    return DTensor.__torch_dispatch__(op, None, (x, *args), kwargs)


KERNELS = (("prod", prod), ("prod.dim_int", prod_dim))
