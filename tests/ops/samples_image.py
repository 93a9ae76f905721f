"""Calls of the ops that images go through: convolutions, pooling, resizing, sampling."""

import torch

from shardwise.ops.nn import image
from shardwise.testing import Sample

aten = torch.ops.aten
_generator = torch.Generator().manual_seed(1)


#: They read where an index points, or divide by what a part has none of: nothing can be tried out.
IMAGE_KERNELS = set(image.RULES)


def t(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator)


def image_samples() -> list[Sample]:
    return [*_convolutions(), *_pools(), *_resized(), *_sampled(), *_blocks()]


def _convolutions() -> list[Sample]:
    return [
        *_convolution(t(3, 4, 5), t(6, 4, 2), t(6)),
        *_convolution(t(3, 4, 5, 6), t(2, 4, 3, 2), t(2), padding=[1, 0], stride=[2, 1]),
        *_convolution(t(2, 3, 4, 3, 3), t(2, 3, 2, 1, 2), None),
        *_convolution(t(3, 4, 5), t(4, 6, 2), t(6), transposed=True, output_padding=[0]),
        # Groups: two of two channels, three that no mesh of two divides, and depthwise.
        *_convolution(t(3, 4, 5), t(6, 2, 2), t(6), groups=2),
        *_convolution(t(2, 6, 5), t(3, 2, 2), t(3), groups=3),
        *_convolution(t(2, 4, 5, 5), t(4, 1, 3, 3), None, groups=4, dilation=[2, 2]),
        *_convolution(t(2, 4, 5), t(4, 3, 2), t(6), groups=2, transposed=True),
    ]


def _convolution(x, weight, bias, **changed) -> list[Sample]:
    """A convolution and its gradients, all of them and those of a layer that comes first."""
    dims = x.dim() - 2
    options = {
        "stride": [1] * dims,
        "padding": [0] * dims,
        "dilation": [1] * dims,
        "transposed": False,
        "output_padding": [0] * dims,
        "groups": 1,
    } | changed
    rest = tuple(options.values())
    out = aten.convolution.default(x, weight, bias, *rest)
    grad = torch.randn(out.shape, generator=_generator)
    backward, sizes = aten.convolution_backward.default, None if bias is None else [len(bias)]
    masks = [[True, True, bias is not None]]
    if changed == {}:
        masks.append([False, True, False])
    return [
        Sample(aten.convolution.default, (x, weight, bias, *rest)),
        *(Sample(backward, (grad, x, weight, sizes, *rest, mask)) for mask in masks),
    ]


def _pools() -> list[Sample]:
    square, cube = t(3, 2, 6, 6), t(2, 3, 4, 4, 4)
    return [
        Sample(aten.avg_pool2d.default, (square, [2, 2])),
        Sample(aten.avg_pool2d.default, (square[0], [3, 2], [1, 1], [1, 0])),
        Sample(
            aten.avg_pool2d_backward.default,
            (t(3, 2, 3, 3), square, [2, 2], [2, 2], [0, 0], False, True, None),
        ),
        Sample(aten.avg_pool3d.default, (cube, [2, 2, 2])),
        Sample(
            aten.avg_pool3d_backward.default,
            (t(2, 3, 2, 2, 2), cube, [2] * 3, [2] * 3, [0] * 3, False, True, None),
        ),
        Sample(aten._adaptive_avg_pool2d.default, (square, [3, 2])),
        Sample(aten._adaptive_avg_pool2d_backward.default, (t(3, 2, 3, 2), square)),
        Sample(aten._adaptive_avg_pool3d.default, (cube, [3, 2, 1])),
        Sample(aten._adaptive_avg_pool3d_backward.default, (t(2, 3, 3, 2, 1), cube)),
        *_max_pool(aten.max_pool2d_with_indices, square, [2, 2], [2, 2], [0, 0], [1, 1], False),
        *_max_pool(aten.max_pool2d_with_indices, square[0], [2, 2], [1, 1], [1, 1], [1, 1], True),
        *_max_pool(aten.max_pool3d_with_indices, cube, [2] * 3, [2] * 3, [0] * 3, [1] * 3, False),
        *_max_pool(aten.adaptive_max_pool2d, square, [3, 2], kept=0),
        *_max_pool(aten.adaptive_max_pool3d, cube, [3, 2, 1], kept=0),
        *_fractional(aten.fractional_max_pool2d, square, 2),
        *_fractional(aten.fractional_max_pool2d, square[0], 2),
        *_fractional(aten.fractional_max_pool3d, cube, 3),
        Sample(
            aten.max_unpool2d.default, (*aten.adaptive_max_pool2d.default(square, [3, 3]), [6, 6])
        ),
        Sample(
            aten.max_unpool3d.default,
            (*aten.max_pool3d_with_indices.default(cube, [2] * 3), [4] * 3, [2] * 3, [0] * 3),
        ),
    ]


def _max_pool(packet, x, *options, kept=5) -> list[Sample]:
    """`kept`: how many options the gradient takes too."""
    out, where = packet.default(x, *options)
    backward = getattr(aten, f"{packet.__name__}_backward").default
    grad = torch.randn(out.shape, generator=_generator)
    return [
        Sample(packet.default, (x, *options)),
        Sample(backward, (grad, x, *options[:kept], where)),
    ]


def _fractional(packet, x, dims) -> list[Sample]:
    batch, channels = (x.shape[0], x.shape[1]) if x.dim() == dims + 2 else (1, x.shape[0])
    places = torch.rand((batch, channels, dims), generator=_generator)
    sizes = ([2] * dims, [2] * dims)
    out, where = packet.default(x, *sizes, places)
    backward = getattr(aten, f"{packet.__name__}_backward").default
    return [
        Sample(packet.default, (x, *sizes, places)),
        Sample(backward, (torch.randn(out.shape, generator=_generator), x, *sizes, where)),
    ]


def _resized() -> list[Sample]:
    found = []
    for dims, names in (
        (1, ("upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_linear1d")),
        (2, ("upsample_nearest2d", "_upsample_nearest_exact2d")),
        (2, ("upsample_bilinear2d", "upsample_bicubic2d")),
        (2, ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")),
        (3, ("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_trilinear3d")),
    ):
        x, larger = t(2, 3, *[4, 5, 3][:dims]), [7, 6, 5][:dims]
        for name in names:
            corners = (False,) if "linear" in name or "cubic" in name else ()
            grad = torch.randn((2, 3, *larger), generator=_generator)
            backward = getattr(aten, f"{name}_backward").default
            found += [
                Sample(getattr(aten, name).default, (x, larger, *corners)),
                Sample(backward, (grad, larger, list(x.shape), *corners)),
            ]
    return found


def _sampled() -> list[Sample]:
    found = [Sample(aten.affine_grid_generator.default, (t(5, 2, 3), [5, 1, 3, 4], False))]
    for dims, packet in ((2, "grid_sampler_2d"), (3, "grid_sampler_3d")):
        x, outer = t(2, 3, *[4, 5, 3][:dims]), [3, 4, 2][:dims]
        places = torch.rand((2, *outer, dims), generator=_generator) * 2 - 1
        grad = torch.randn((2, 3, *outer), generator=_generator)
        backward = getattr(aten, f"{packet}_backward").default
        found += [
            Sample(getattr(aten, packet).default, (x, places, 0, 0, False)),
            Sample(backward, (grad, x, places, 0, 0, False, [True, True])),
        ]
    return found


def _blocks() -> list[Sample]:
    ones, zeros = [1, 1], [0, 0]
    return [
        Sample(aten.im2col.default, (t(3, 4, 4, 5), [2, 2], ones, zeros, ones)),
        Sample(aten.im2col.default, (t(4, 4, 5), [2, 2], ones, zeros, ones)),
        Sample(aten.col2im.default, (t(3, 16, 12), [4, 5], [2, 2], ones, zeros, ones)),
        Sample(aten.pixel_shuffle.default, (t(3, 16, 2, 3), 2)),
        Sample(aten.pixel_unshuffle.default, (t(3, 4, 4, 6), 2)),
        Sample(aten.native_channel_shuffle.default, (t(3, 4, 2, 3), 2)),
    ]
