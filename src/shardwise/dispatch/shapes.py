"""Shapes and memory order of results, where torch's shape functions differ from its kernels.

The kernel is asked (Note [Kernels are asked] in `infer`): it runs on small tensors with the memory
order of the call's tensors, on the device of the mesh. So the answer holds for this build of torch
on this device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardwise._torch.dispatch import suggest_memory_format
from shardwise._torch.functions import tree_leaves, tree_map, tree_map_only
from shardwise.core.layout import Shape, contiguous_stride, dense_stride

aten = torch.ops.aten

#: With more entries than this, a call whose sizes cannot be made smaller is not asked.
_MOST_ENTRIES = 2**16

#: Whatever its tensors' sizes, so long as each equals the same others.
_ANY_SIZES = (
    aten._fft_c2c.default,
    aten._fft_c2r.default,
    aten._fft_r2c.default,
    aten._linalg_svd.default,
    aten._log_softmax_backward_data.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten.angle.default,
    aten.batch_norm_backward.default,
    aten.binary_cross_entropy.default,
    aten.floor_divide.default,
    aten.glu_backward.default,
    aten.huber_loss_backward.default,
    aten.ldexp.Tensor,
    aten.linalg_eig.default,
    aten.linalg_solve_triangular.default,
    aten.log_sigmoid_forward.default,
    aten.mse_loss_backward.default,
    aten.native_batch_norm.default,
    aten.native_batch_norm_backward.default,
    aten.native_layer_norm_backward.default,
    aten.smooth_l1_loss_backward.default,
)
#: With the sizes of the call.
_OWN_SIZES = (
    aten.channel_shuffle.default,
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.fractional_max_pool3d_backward.default,
    aten.max_unpool2d.default,
    aten.nonzero_static.default,
    aten.pixel_shuffle.default,
    aten.pixel_unshuffle.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad2d_backward.default,
    aten.reflection_pad3d.default,
    aten.reflection_pad3d_backward.default,
    aten.replication_pad2d.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d.default,
    aten.replication_pad3d_backward.default,
)
#: The ops, with whether their sizes may be made smaller.
ASKED: dict[Any, bool] = {op: op in _ANY_SIZES for op in (*_ANY_SIZES, *_OWN_SIZES)}


def with_kernel_strides(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, device: str
) -> Any:
    """`result`, the tensors without values of an `ASKED` op, in the memory order of its kernel.

    It stays as it is if the kernel refuses the small tensors.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not all(t.numel() for t in tensors):
        return result  # some kernels end the process
    if ASKED[op]:
        smaller = _smaller(op, args, tensors)
    elif sum(t.numel() for t in tensors) <= _MOST_ENTRIES:
        smaller = int
    else:
        return result
    stand_in = functools.partial(_stand_in, smaller, device)
    given, named = tree_map_only(torch.Tensor, stand_in, (list(args), dict(kwargs)))
    try:
        found = op(*_sizes_of(op, given, smaller), **named)
    except Exception:
        return result
    made = iter(tree_leaves(found))
    return tree_map(lambda leaf: _ordered_like(leaf, next(made)), result)


def _smaller(op: Any, args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Callable[[int], int]:
    """A function that makes sizes small; equal ones stay equal, and larger ones larger."""
    sizes = {int(size) for t in tensors for size in t.shape}
    if op is aten.native_layer_norm_backward.default:
        sizes |= set(args[2])
    ranks = {size: rank for rank, size in enumerate(sorted(sizes - {0, 1}), start=2)}
    return lambda size: ranks.get(size, size)


def _sizes_of(op: Any, args: list[Any], smaller: Callable[[int], int]) -> list[Any]:
    """The arguments with their sizes made smaller too."""
    if op is aten._fft_c2r.default:
        size = args[0].shape[args[1][-1]]
        return [*args[:3], max(1, 2 * (size - 1))]
    if op is aten.native_layer_norm_backward.default:
        return [*args[:2], list(map(smaller, args[2])), *args[3:]]
    return args


def _stand_in(smaller: Callable[[int], int], device: str, x: torch.Tensor) -> torch.Tensor:
    """A small tensor whose dims have the memory order of `x`; dense, or expanded, if `x` is."""
    steps: Shape = tuple(x.stride())
    shape = [smaller(size) for size in x.shape]
    order = sorted(range(len(steps)), key=lambda d: (steps[d] != 0, -steps[d]))
    own = [size if step else 1 for size, step in zip(shape, steps, strict=True)]
    given = [size if step else 1 for size, step in zip(x.shape, steps, strict=True)]
    if shape == list(x.shape):
        stride = steps
    elif same_stride(given, steps, dense_stride(given, order)):
        stride = dense_stride(own, order)
    else:  # with gaps
        stride = dense_stride([2 * size for size in own], order)
    stride = tuple(new if old else 0 for new, old in zip(stride, steps, strict=True))
    made = torch.empty_strided(shape, stride, dtype=x.dtype, device=device)
    # Ones are probabilities and divisors, zeros are indices.
    return made.fill_(int(smaller is not int or x.is_floating_point() or x.is_complex()))


def _ordered_like(fake: Any, found: Any) -> Any:
    """The result without values, in the memory order that the kernel's has."""
    if not isinstance(fake, torch.Tensor) or fake.dim() != found.dim() or not found.numel():
        return fake
    order = sorted(range(found.dim()), key=lambda d: -found.stride(d))
    if not same_stride(found.shape, found.stride(), dense_stride(found.shape, order)):
        return fake
    return torch.empty_strided(
        fake.shape, dense_stride(fake.shape, order), dtype=fake.dtype, device=fake.device
    )


# -- shapes --------------------------------------------------------------------------------------
# Shape functions of ops, where torch lacks one or its own differs from the kernels.
#
# They take tensors without values and return such tensors.


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
        shaped: functools.partial(_new_normal, shaped)
        for shaped in (aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
    },
    **{
        shaped: functools.partial(_indexed, shaped)
        for shaped in (aten.index.Tensor, aten._unsafe_index.Tensor)
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


# -- strides -------------------------------------------------------------------------------------
# The memory order that torch gives the result of a pointwise op.


_CHANNELS_LAST = (0, 2, 3, 1)


def iterated_stride(shape: Shape, operands: Sequence[Any]) -> Shape:
    """The strides of a new result, given its shape and the operands that are broadcast to it.

    Kernels go through memory in the order of the first operand that tells two dims apart. The
    operands have a `shape` and a `stride`, such as layouts.

    >>> from types import SimpleNamespace as Meta
    >>> row, turned = Meta(shape=(4,), stride=(1,)), Meta(shape=(2, 3, 1), stride=(1, 2, 1))
    >>> iterated_stride((2, 3, 4), [row, turned])
    (4, 8, 1)
    """
    given = [(tuple(x.shape), tuple(x.stride)) for x in operands]
    alike = all(size == shape for size, _ in given)
    if alike and (found := _common_stride(shape, [stride for _, stride in given])) is not None:
        return found
    return dense_stride(shape, _outermost_first(shape, [_broadcast(shape, *x) for x in given]))


def _common_stride(shape: Shape, strides: Sequence[Shape]) -> Shape | None:
    """The strides that all operands share, if they do; those of dims of size 1 do not matter."""
    row_major = contiguous_stride(shape)
    if 0 in shape or all(same_stride(shape, stride, row_major) for stride in strides):
        return row_major
    if len(shape) == len(_CHANNELS_LAST):
        channels_last = dense_stride(shape, _CHANNELS_LAST)
        if all(same_stride(shape, stride, channels_last) for stride in strides):
            return channels_last
    outermost_first = sorted(range(len(shape)), key=lambda d: -strides[0][d])
    first = dense_stride(shape, outermost_first)
    alike = all(stride == strides[0] for stride in strides)
    return strides[0] if alike and same_stride(shape, strides[0], first) else None


def same_stride(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two strides are the same for a tensor of this shape: dims of size 1 have none."""
    return all(a == b or size == 1 for size, a, b in zip(shape, one, other, strict=True))


def _broadcast(shape: Shape, given: Shape, stride: Shape) -> Shape:
    """The strides of an operand seen as a tensor of `shape`: 0 along dims that it repeats."""
    missing = len(shape) - len(given)
    repeats = [size != whole for size, whole in zip(given, shape[missing:], strict=True)]
    steps = [0 if repeated else step for repeated, step in zip(repeats, stride, strict=True)]
    return (*[0] * missing, *steps)


def _outermost_first(shape: Shape, strides: Sequence[Shape]) -> list[int]:
    """The dims in the order that the operands have in memory, row-major where none tells.

    Sorted by insertion, as torch does: dims that no operand can compare make the order depend on
    the way of sorting.
    """
    innermost_first = list(reversed(range(len(shape))))
    for last in range(1, len(shape)):
        moving = last
        for place in reversed(range(last)):
            order = _compared(shape, strides, innermost_first[place], innermost_first[moving])
            if order < 0:
                break
            if order > 0:
                dims = innermost_first[place], innermost_first[moving]
                innermost_first[moving], innermost_first[place] = dims
                moving = place
    return innermost_first[::-1]


def _compared(shape: Shape, strides: Sequence[Shape], one: int, other: int) -> int:
    """Negative if dim `one` is inside `other` in memory, positive if outside, 0 if unknown."""
    for stride in strides:
        if not stride[one] or not stride[other]:
            continue
        if stride[one] != stride[other]:
            return -1 if stride[one] < stride[other] else 1
        if shape[one] > shape[other]:
            return 1
    return 0
