"""Convolutions; pooling, resizing, sampling and padding of planes, which are whole.

A plane is the last one, two or three dims of a tensor. The dims in front of it, batch and channels,
are the same in every operand and result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.core.layout import fits_shard, shard_with
from shardwise.core.placements import REPLICATE, SUM, Partial, Placement, Shard
from shardwise.core.sizes import Size, lengths
from shardwise.dispatch.rule import (
    Call,
    Choice,
    Group,
    LocalCall,
    Rule,
    Table,
    linear_choices,
    rule,
    sharded_together,
    table,
    unless_empty,
)
from shardwise.ops.math.pointwise import FIRST

aten = torch.ops.aten


def planes(
    *ops: Any, dims: int, linear: Sequence[Group] = (), shapes: Mapping[str, int] | None = None
) -> tuple[tuple[Any, ...], Rule]:
    """An entry of a table: `ops` treat the last `dims` dims as a whole.

    `shapes` maps names of arguments that hold a global shape to the number of that output.
    """

    def choices(call: Call) -> Iterator[Choice]:
        yield call.replicated()
        front = call.inputs[0].ndim - dims
        local = unless_empty(call.op, _positions(call.op, shapes))
        for dim in range(front):
            inputs, outputs = [dim] * len(call.inputs), [dim] * len(call.outputs)
            yield from sharded_together(call, inputs, outputs, local)
        yield from linear_choices(call, linear)

    return ops, Rule(choices, "... " + "[p] " * dims + "-> ... " + "[q] " * dims)


def _positions(op: Any, shapes: Mapping[str, int] | None) -> tuple[tuple[int, int], ...]:
    if not shapes:
        return ()
    return tuple(
        (position, shapes[a.name])
        for position, a in enumerate(op._schema.arguments)
        if a.name in shapes
    )


# -- sampling at given positions -------------------------------------------------------------


def grid_sample_choices(call: Call) -> Iterator[Choice]:
    """Planes (n, c, *in) and positions (n, *out, k) -> (n, c, *out)."""
    yield call.replicated()
    local = unless_empty(call.op)
    yield from sharded_together(call, (0, 0), (0,), local)
    yield from sharded_together(call, (1, REPLICATE), (1,), local)
    for dim in range(1, call.inputs[1].ndim - 1):
        yield from sharded_together(call, (REPLICATE, dim), (dim + 1,), local)
    yield from linear_choices(call, FIRST)


def grid_sample_grad_choices(call: Call) -> Iterator[Choice]:
    """The gradient, planes and positions -> the gradients of planes and positions."""
    # The gradient of the positions is always returned.
    first = 0 if call.argument("output_mask")[0] else 1
    local = unless_empty(call.op)
    yield call.replicated()
    yield from sharded_together(call, (0, 0, 0), (0, 0)[first:], local)
    yield from sharded_together(call, (1, 1, REPLICATE), (1, SUM)[first:], local)
    for dim in range(1, call.inputs[2].ndim - 1):
        inputs = (dim + 1, REPLICATE, dim)
        yield from sharded_together(call, inputs, (SUM, dim)[first:], local)
    yield from linear_choices(call, FIRST)


# -- fractional pooling ----------------------------------------------------------------------


def fractional_pool_choices(call: Call) -> Iterator[Choice]:
    """Planes and the random numbers of each plane: batch and channels may be sharded."""
    yield call.replicated()
    local = unless_empty(call.op)
    dims = len(call.argument("kernel_size"))
    batched = call.inputs[0].ndim == dims + 2
    for dim in (0, 1) if batched else (0,):
        # The random numbers always have a batch dim.
        samples = dim if batched else dim + 1
        yield from sharded_together(call, (dim, samples), (dim, dim), local)


# -- im2col and col2im -----------------------------------------------------------------------


def columns_choices(call: Call) -> Iterator[Choice]:
    """`im2col`: each channel becomes consecutive rows of the result; `col2im` is the inverse."""
    yield call.replicated()
    batched = call.outputs[0].ndim == (3 if call.op is aten.im2col.default else 4)
    local = unless_empty(call.op)
    if batched:
        yield from sharded_together(call, (0,), (0,), local)
    at = 1 if batched else 0
    before, after = call.inputs[0].shape[at], call.outputs[0].shape[at]
    larger, smaller = max(before, after), min(before, after)
    if type(smaller) is int and smaller % call.axis_size == 0 and larger % smaller == 0:
        yield Choice((Shard(at),), (Shard(at),), local, even=((0, at),))
    yield from linear_choices(call, FIRST)


# -- moving channels -------------------------------------------------------------------------


def shuffle_choices(call: Call) -> Iterator[Choice]:
    """Dims before the channels and planes do not change."""
    yield call.replicated()
    local = unless_empty(call.op)
    channels = call.inputs[0].ndim - 3
    for dim in range(channels):
        yield from sharded_together(call, (dim,), (dim,), local)
    few = min(call.inputs[0].shape[channels], call.outputs[0].shape[channels])
    if type(few) is int and few % call.axis_size == 0:
        # A run of channels becomes one plane: shards are whole runs, on both sides.
        yield Choice((Shard(channels),), (Shard(channels),), local, even=((0, channels),))
    yield from linear_choices(call, FIRST)


def _resizing(dims: int, *names: str) -> list[tuple[tuple[Any, ...], Rule]]:
    """Resizing to a given size, and its gradient."""
    backward = [f"{name}_backward" for name in names]
    return [
        planes(*_named(*names), dims=dims, linear=FIRST),
        planes(*_named(*backward), dims=dims, linear=FIRST, shapes={"input_size": 0}),
    ]


def _own_grids(theta: torch.Tensor, size: Sequence[int], align_corners: bool) -> torch.Tensor:
    """The grids of this rank's affine maps, if it has any."""
    if not theta.shape[0]:
        return theta.new_empty((0, *size[2:], len(size) - 2))
    return aten.affine_grid_generator.default(theta, [theta.shape[0], *size[1:]], align_corners)


def _affine_grid_choices(call: Call) -> Iterator[Choice]:
    """Each affine map has one grid; their number is also in `size`."""
    yield call.replicated()
    yield from linear_choices(call, FIRST)
    local = LocalCall(_own_grids)
    yield from sharded_together(call, (0,), (0,), local)


def _named(*names: str) -> list[Any]:
    return [getattr(aten, name).default for name in names]


#: The inputs whose values the op may refuse; see `dispatch.local_call`.
REFUSED: dict[Any, slice] = dict.fromkeys(
    (aten.max_unpool2d.default, aten.max_unpool3d.default), slice(1, 2)
)


# -- convolutions --------------------------------------------------------------------------------
# The batch, input or output channels, or whole groups of channels may be sharded. Positions may
# not: a shard of them would need a halo exchange.


@dataclass(frozen=True, slots=True)
class ConvSplit:
    """How one axis shards a convolution: the dim of each tensor, or its placement."""

    input: int | Placement
    weight: int | Placement
    output: int | Placement
    bias: int | Placement
    #: The gradients of input, weight and bias when the output's gradient is placed like the output.
    grads: tuple[int | Placement, ...]
    #: Whether it shards whole groups of channels; then no other axis may shard channels.
    grouped: bool = False


def _ways(call: Call, x: int) -> Iterator[ConvSplit]:
    """The splits of a call whose operand `x` is the input."""
    yield ConvSplit(0, REPLICATE, 0, REPLICATE, (0, SUM, SUM))
    if call.argument("groups") != 1:
        yield from _group_ways(call, x)
        return
    out_dim, in_dim = (1, 0) if call.argument("transposed") else (0, 1)
    yield ConvSplit(REPLICATE, out_dim, 1, 0, (SUM, out_dim, 0))
    yield ConvSplit(1, in_dim, SUM, SUM, (1, in_dim, REPLICATE))


def _group_ways(call: Call, x: int) -> Iterator[ConvSplit]:
    """Whole groups: the sharding of channels follows that of groups."""
    groups, channels = call.argument("groups"), call.inputs[x].shape[1]
    parts, out = call.axis_size, _out_channels(call)
    for counts in group_counts(call, x, groups):
        before, after = (tuple(n * size // groups for n in counts) for size in (channels, out))
        if not fits_shard(before, channels, parts) or not fits_shard(after, out, parts):
            continue
        source, each = shard_with(1, before, channels, parts), shard_with(0, after, out, parts)
        weight = shard_with(0, before, channels, parts) if call.argument("transposed") else each
        target = shard_with(1, after, out, parts)
        yield ConvSplit(source, weight, target, each, (source, weight, each), True)


def group_counts(call: Call, x: int, groups: Size) -> Iterator[tuple[Size, ...]]:
    """How many groups of the channels of operand `x` each rank may hold; no group is split."""
    per_group = call.inputs[x].shape[1] // groups
    for sizes in call.splits([(x, 1)]):
        if sizes is None:
            yield lengths(groups, call.axis_size, None)
        elif not any(n % per_group for n in sizes):
            yield tuple(n // per_group for n in sizes)


def _out_channels(call: Call) -> int:
    """The number of channels of the output: known from it, or from its gradient."""
    if call.op is aten.convolution_backward.default:
        return call.inputs[0].shape[1]
    return call.outputs[0].shape[1]


def convolution_choices(call: Call) -> Iterator[Choice]:
    """Input, weight and perhaps a bias -> output."""
    yield call.replicated()
    local = LocalCall(convolution_of_shards, per_rank=True)
    for way in _ways(call, 0):
        inputs = (way.input, way.weight, way.bias)[: len(call.inputs)]
        alone = ((0, 1), (1, 0)) if way.grouped else ()
        for choice in sharded_together(call, inputs, (way.output,), local, alone):
            if way.input == 0:
                yield replace(choice, local=None, even=((0, 0),))
            yield choice
    yield from linear_choices(call, ((0, 2), (1, 2)))


def convolution_grad_choices(call: Call) -> Iterator[Choice]:
    """The gradient of the output, input, weight -> gradients of input, weight and bias."""
    yield call.replicated()
    local = LocalCall(convolution_grads_of_shards, per_rank=True)
    for way in _ways(call, 1):
        inputs = (REPLICATE if way.output == SUM else way.output, way.input, way.weight)
        alone = ((1, 1), (0, 1), (2, 0)) if way.grouped else ()
        for choice in sharded_together(call, inputs, call.asked(way.grads), local, alone):
            if way.input == 0:
                yield replace(choice, local=None, even=((1, 0),))
            yield choice
    for op in ("sum", "avg"):
        term = Partial(op)
        yield Choice((term, REPLICATE, REPLICATE), call.asked((term, term, term)))
        yield Choice((REPLICATE, term, REPLICATE), call.asked((REPLICATE, term, REPLICATE)))
        yield Choice((REPLICATE, REPLICATE, term), call.asked((term, REPLICATE, REPLICATE)))


def _groups_here(x: torch.Tensor, all_channels: Any, groups: int) -> int:
    return groups if groups == 1 else groups * x.shape[1] // all_channels


def convolution_of_shards(
    coordinate: Any,
    layouts: Sequence[Any],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *options: Any,
) -> torch.Tensor:
    """A convolution of shards, which may be empty."""
    options, groups = options[:-1], options[-1]
    shape = layouts[-1].local_shape(coordinate)
    if x.numel() and weight.numel() and math.prod(shape):
        here = _groups_here(x, layouts[0].shape[1], groups)
        return aten.convolution.default(x, weight, bias, *options, here)
    nothing = x.new_zeros(shape)
    return nothing if bias is None else nothing + bias.view(-1, *[1] * (x.dim() - 2))


def convolution_grads_of_shards(
    coordinate: Any,
    layouts: Sequence[Any],
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Any,
    *options: Any,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a convolution of shards, which may be empty."""
    options, groups, asked = options[:-2], options[-2], options[-1]
    for_x, for_weight, for_bias = asked
    bias_grad = grad.sum([d for d in range(grad.dim()) if d != 1]) if for_bias else None
    if not (grad.numel() and x.numel() and weight.numel()):
        zeros = (torch.zeros_like(x), torch.zeros_like(weight))
        return zeros[0] if for_x else None, zeros[1] if for_weight else None, bias_grad
    here = _groups_here(x, layouts[1].shape[1], groups)
    # The rounding of the kernel's own bias gradient depends on the local channels. This sum
    # does not: ranks with the same output gradient get the same bias gradient.
    mask = [for_x, for_weight, False]
    found = aten.convolution_backward.default(grad, x, weight, None, *options, here, mask)
    return found[0], found[1], bias_grad


RULES: Table = table(
    (
        (aten.affine_grid_generator.default,),
        Rule(_affine_grid_choices, "n [a] [b] -> n [h] [w] [2]"),
    ),
    *(
        planes(
            *_named(f"avg_pool{n}d", f"avg_pool{n}d_backward"),
            *_named(f"_adaptive_avg_pool{n}d", f"_adaptive_avg_pool{n}d_backward"),
            *_named(f"max_pool{n}d_with_indices_backward", f"adaptive_max_pool{n}d_backward"),
            *_named(f"fractional_max_pool{n}d_backward", f"max_unpool{n}d"),
            dims=n,
            linear=FIRST,
        )
        for n in (2, 3)
    ),
    *(
        planes(*_named(f"max_pool{n}d_with_indices", f"adaptive_max_pool{n}d"), dims=n)
        for n in (2, 3)
    ),
    (
        (aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default),
        Rule(fractional_pool_choices, "n c [p] [q], n c [2] -> n c [r] [s]"),
    ),
    *_resizing(1, "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_linear1d"),
    *_resizing(
        2,
        "upsample_nearest2d",
        "_upsample_nearest_exact2d",
        "upsample_bilinear2d",
        "upsample_bicubic2d",
        "_upsample_bilinear2d_aa",
        "_upsample_bicubic2d_aa",
    ),
    *_resizing(3, "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_trilinear3d"),
    (
        (aten.grid_sampler_2d.default, aten.grid_sampler_3d.default),
        Rule(grid_sample_choices, "n c [p] [q], n a b [2] -> n c a b"),
    ),
    (
        (aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default),
        Rule(grid_sample_grad_choices, "n c a b, n c [p] [q], n a b [2] -> n c [p] [q], n a b [2]"),
    ),
    (
        (aten.im2col.default, aten.col2im.default),
        Rule(columns_choices, "n c [p] [q] -> n (c [k]) [l]"),
    ),
    (
        (aten.pixel_shuffle.default, aten.pixel_unshuffle.default),
        Rule(shuffle_choices, "... (c [k]) [p] [q] -> ... c [p] [q]"),
    ),
    rule(aten.native_channel_shuffle.default, like="n [c] ... -> n [c] ...", linear=FIRST),
    # Padding that repeats or mirrors values, and its gradient.
    *(
        planes(
            *_named(f"reflection_pad{n}d", f"replication_pad{n}d"),
            *_named(f"reflection_pad{n}d_backward", f"replication_pad{n}d_backward"),
            dims=n,
            linear=FIRST,
        )
        for n in (1, 2, 3)
    ),
    (
        (aten.convolution.default,),
        Rule(convolution_choices, "n i [...], o i [...], o -> n o [...]"),
    ),
    (
        (aten.convolution_backward.default,),
        Rule(
            convolution_grad_choices, "n o [...], n i [...], o i [...] -> n i [...], o i [...], o"
        ),
    ),
)
