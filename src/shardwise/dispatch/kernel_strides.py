"""The memory order of results where torch's shape functions have another one than its kernels.

The kernel is asked (Note [Kernels are asked] in `infer`): it runs on small tensors whose dims lie
in memory as those of the call do, on the device of the mesh. So the answer is that of this build of
torch, on this device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise._torch.pytree import tree_leaves, tree_map, tree_map_only
from shardwise.core.layout import Shape, dense_stride
from shardwise.core.strides import same_stride

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

    It stays as it is where the kernel refuses the small tensors.
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
