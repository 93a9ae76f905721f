"""Calls of group, batch and RMS norm."""

import torch

from shardwise.ops.nn import norm
from shardwise.testing import Sample

aten = torch.ops.aten
_generator = torch.Generator().manual_seed(3)


def t(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator)


def norm_samples() -> list[Sample]:
    return [*_group(), *_batch(), *_rms()]


def _group() -> list[Sample]:
    x, weight, bias = t(3, 6, 4), t(6), t(6)
    found = []
    for groups, affine in ((2, True), (3, True), (6, False)):
        parameters = (weight, bias) if affine else (None, None)
        sizes = (3, 6, 4, groups)
        _, mean, deviation = aten.native_group_norm.default(x, *parameters, *sizes, 1e-5)
        for mask in ([True, affine, affine], [True, False, False]):
            args = (t(3, 6, 4), x, mean, deviation, parameters[0], *sizes, mask)
            found.append(Sample(aten.native_group_norm_backward.default, args))
        found.append(Sample(aten.native_group_norm.default, (x, *parameters, *sizes, 1e-5)))
    return found


def _batch() -> list[Sample]:
    x, weight, bias, mean, var = t(3, 4, 5), t(4), t(4), t(4), t(4).square() + 0.5
    forward, backward = aten.native_batch_norm.default, aten.native_batch_norm_backward.default
    grad, mask = t(3, 4, 5), [True, True, True]
    return [
        Sample(forward, (x, weight, bias, mean, var, False, 0.1, 1e-5)),
        Sample(forward, (x[..., 0], None, None, mean, var, False, 0.1, 1e-5)),
        Sample(backward, (grad, x, weight, mean, var, None, None, False, 1e-5, mask)),
        Sample(backward, (grad, x, None, mean, var, None, None, False, 1e-5, [True, False, False])),
        Sample(norm.channel_sum, (x,)),
        Sample(norm.channel_square_sum, (x, mean)),
        Sample(norm.through_statistics, (grad, x, mean, t(4), t(4))),
    ]


def _rms() -> list[Sample]:
    x, weight = t(2, 3, 4), t(4)
    _, deviation = aten._fused_rms_norm.default(x, [4], weight, 1e-5)
    backward = aten._fused_rms_norm_backward.default
    found = [
        Sample(aten._fused_rms_norm.default, (x, [4], weight, 1e-5)),
        Sample(aten._fused_rms_norm.default, (x, [3, 4], None, 1e-5)),
    ]
    if torch._C._dispatch_has_kernel_for_dispatch_key(backward.name(), "CPU"):
        found.append(Sample(backward, (t(2, 3, 4), x, [4], deviation, weight, [True, True])))
    return found
