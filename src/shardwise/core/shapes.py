"""Shape functions of ops, where torch lacks one or its own differs from the kernels.

They take tensors without values and return such tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from shardwise._torch.schema import suggest_memory_format
from shardwise.core.layout import Shape
from shardwise.core.strides import iterated_stride

aten = torch.ops.aten


def _batch_norm(x: torch.Tensor, *rest: Any) -> Any:
    """With given statistics it returns none; torch's shape function is wrong."""
    if rest[4]:
        return aten.native_batch_norm.default(x, *rest)
    return torch.empty_like(x), x.new_empty(0), x.new_empty(0)


def _like_first(first: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty(first.shape, dtype=first.dtype, device=first.device)


def _new_normal(op: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Dense, whatever the strides of the deviations."""
    made = op(*args, **kwargs)
    return torch.empty(made.shape, dtype=made.dtype, device=made.device)


def _convolution(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Channels-last if an operand is; torch's shape function does not know the kernels."""
    made = aten.convolution.default(x, weight, *rest)
    if made.dim() == 3:  # kernels see an image of height 1
        x, weight = x.unsqueeze(2), weight.unsqueeze(2)
        image = _channels_last_like(made.unsqueeze(2), x, weight)
        return image.squeeze(2)
    return _channels_last_like(made, x, weight)


def _channels_last_like(made: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    for channels_last in (torch.channels_last, torch.channels_last_3d):
        if channels_last in (suggest_memory_format(x), suggest_memory_format(weight)):
            return torch.empty_like(made, memory_format=channels_last)
    return made


def _power(x: torch.Tensor, exponent: Any) -> torch.Tensor:
    """A bool for bools; torch's shape function is wrong."""
    if x.dtype is torch.bool and type(exponent) is bool:
        return torch.empty_like(x)
    return aten.pow.Tensor_Scalar(x, exponent)


def _power_(x: torch.Tensor, exponent: Any) -> torch.Tensor:
    if x.dtype is torch.bool and type(exponent) is bool:
        return x
    return aten.pow_.Scalar(x, exponent)


def _vector_norm(
    x: torch.Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> torch.Tensor:
    """Without negative dims: torch 2.11's shape function keeps such a dim of size 1."""
    if dim is not None:
        dims = [dim] if isinstance(dim, int) else dim
        dim = [d + x.ndim if -x.ndim <= d < 0 else d for d in dims]
    return aten.linalg_vector_norm.default(x, ord, dim, keepdim, **kwargs)


def _grouped_product(
    x: torch.Tensor, y: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """Of any dtype: torch's shape function refuses what its CPU kernel takes."""
    if x.dtype is torch.bfloat16:
        return aten._grouped_mm.default(x, y, offs, bias, out_dtype)
    rows = list(x.shape[:-1] if x.dim() == 2 or y.dim() == 3 else x.shape[1:-1])
    groups = [offs.shape[0]] if x.dim() == y.dim() == 2 else []
    return x.new_empty((*groups, *rows, y.shape[-1]), dtype=out_dtype or x.dtype)


class _Operand(NamedTuple):
    shape: Shape
    stride: Shape


def _indexed(op: Any, x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """In the memory order of the kernel; torch's shape function has another where a size is 1.

    The kernel goes through the tensor, with stride 0 along the indexed dims, and the indices.
    """
    made: torch.Tensor = op(x, indices)
    shape: Shape = tuple(made.shape)
    if any(type(size) is not int for size in (*x.shape, *shape)):
        return made
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    before, num_batch = dims[0], len(shape) - x.dim() + len(dims)
    if dims[-1] - before >= len(dims):  # dims between them: the indexed ones come first
        x = x.permute(*dims, *(d for d in range(x.dim()) if d not in dims))
        before = 0
    batch, after = shape[before : before + num_batch], x.dim() - before - len(dims)
    stride = (*x.stride()[:before], *[0] * num_batch, *x.stride()[before + len(dims) :])
    operands = [_Operand(shape, stride)]
    for index in indices:
        if index is not None:
            spread = index.expand(batch).reshape(*[1] * before, *batch, *[1] * after)
            operands.append(_Operand(tuple(spread.shape), spread.stride()))
    return made.new_empty_strided(shape, iterated_stride(shape, operands))


SHAPES: dict[Any, Callable[..., Any]] = {
    aten.fractional_max_pool3d_backward.default: lambda grad, x, *_: torch.empty_like(x),
    aten._grouped_mm.default: _grouped_product,
    aten.native_batch_norm.default: _batch_norm,
    aten.convolution.default: _convolution,
    **{
        op: functools.partial(_new_normal, op)
        for op in (aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
    },
    **{
        op: functools.partial(_indexed, op) for op in (aten.index.Tensor, aten._unsafe_index.Tensor)
    },
    aten.linalg_vector_norm.default: _vector_norm,
    aten.binomial.default: _like_first,
    aten.poisson.default: _like_first,
    aten._sample_dirichlet.default: _like_first,
    aten._standard_gamma.default: _like_first,
    aten._standard_gamma_grad.default: _like_first,
    aten._dirichlet_grad.default: _like_first,
    aten.pow.Tensor_Scalar: _power,
    aten.pow_.Scalar: _power_,
}
