"""Group and batch norm: statistics per channel, or per group of channels.

Batch norm in training looks at the whole batch. It is taken apart (dtensor.above_autograd.norms):
the sums over the batch are functions of this file, so that a sharded batch stays where it is, and
only sums travel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.core.chunks import lengths
from shardwise.core.layout import can_name, shard_with
from shardwise.core.placements import REPLICATE, SUM, Placement, Shard
from shardwise.rules.notation import linear_choices, rule
from shardwise.rules.rule import Call, Choice, LocalCall, Rule, Table, table

aten = torch.ops.aten


# -- group norm ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChannelSplit:
    """How one axis cuts channels, and the groups that they form."""

    channels: Placement
    per_channel: Placement
    groups: Placement


def _group_cuts(call: Call, x: int) -> Iterator[ChannelSplit]:
    channels, groups = call.inputs[x].shape[1], call.argument("group")
    per_group = channels // groups
    for sizes in call.splits([(x, 1)]):
        if sizes is not None and any(n % per_group for n in sizes):
            continue
        counts = (
            tuple(n // per_group for n in sizes)
            if sizes is not None
            else lengths(groups, call.axis_size, None)
        )
        wide = tuple(n * per_group for n in counts)
        if not can_name(wide, channels, call.axis_size):
            continue
        yield ChannelSplit(
            shard_with(1, wide, channels, call.axis_size),
            shard_with(0, wide, channels, call.axis_size),
            shard_with(1, counts, groups, call.axis_size),
        )


def group_norm_choices(call: Call) -> Iterator[Choice]:
    """Input, perhaps weight and bias -> output, mean and reciprocal deviation of each group."""
    num = len(call.inputs) - 1
    local = LocalCall(group_norm_of_parts, per_rank=True)
    # Torch asks for dense operands, and a part of a dense tensor need not be dense.
    yield replace(call.replicated(), local=local)
    for sizes in call.splits([(0, 0)]):
        cut = Shard(0, sizes)
        yield Choice((cut, *[REPLICATE] * num), (cut,) * 3, local)
    for group_cut in _group_cuts(call, 0):
        inputs = (group_cut.channels, *[group_cut.per_channel] * num)
        outputs = (group_cut.channels, group_cut.groups, group_cut.groups)
        yield Choice(inputs, outputs, local, alone=((0, 1),))


def group_norm_of_parts(
    coordinate: Any,
    layouts: Sequence[Any],
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    n: int,
    c: int,
    hxw: int,
    group: int,
    eps: float,
) -> Any:
    groups = layouts[-1].local_shape(coordinate)[1]
    if not x.numel():
        outputs = layouts[-3:]
        return tuple(
            torch.zeros(o.local_shape(coordinate), dtype=o.dtype, device=x.device) for o in outputs
        )
    rows, channels = x.shape[:2]
    return aten.native_group_norm.default(
        x.contiguous(), weight, bias, rows, channels, hxw, groups, eps
    )


def group_norm_grad_choices(call: Call) -> Iterator[Choice]:
    """Gradient, input, mean, deviation, perhaps weight -> gradients of input, weight and bias."""
    asked = call.argument("output_mask")
    num = len(call.inputs) - 4
    local = LocalCall(group_norm_grad_of_parts, per_rank=True)

    def kept(*grads: Placement) -> tuple[Placement, ...]:
        return tuple(p for p, wanted in zip(grads, asked, strict=True) if wanted)

    yield replace(call.replicated(), local=local)
    for sizes in call.splits([(i, 0) for i in range(4)]):
        cut = Shard(0, sizes)
        yield Choice((*[cut] * 4, *[REPLICATE] * num), kept(cut, SUM, SUM), local)
    for group_cut in _group_cuts(call, 1):
        channels, each, groups = group_cut.channels, group_cut.per_channel, group_cut.groups
        inputs = (channels, channels, groups, groups, *[each] * num)
        yield Choice(inputs, kept(channels, each, each), local, alone=((1, 1),))
    yield from linear_choices(call, ((0,),))


def group_norm_grad_of_parts(
    coordinate: Any,
    layouts: Sequence[Any],
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    deviation: torch.Tensor,
    weight: torch.Tensor | None,
    n: int,
    c: int,
    hxw: int,
    group: int,
    asked: Sequence[bool],
) -> Any:
    rows, channels = x.shape[:2]
    if not x.numel():
        zeros = (torch.zeros_like(x), x.new_zeros(channels), x.new_zeros(channels))
        return tuple(z if wanted else None for z, wanted in zip(zeros, asked, strict=True))
    if weight is None and asked[2]:
        weight = x.new_ones(channels)  # the kernel of the CPU crashes over a bias without a weight
    return aten.native_group_norm_backward.default(
        grad.contiguous(),
        x.contiguous(),
        mean,
        deviation,
        weight,
        rows,
        channels,
        hxw,
        mean.shape[1],
        asked,
    )


# -- batch norm ------------------------------------------------------------------------------


def _others(x: Any) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _wide(x: Any, per_channel: Any) -> Any:
    """A value per channel, as it meets `x`."""
    return per_channel.view(-1, *[1] * (x.dim() - 2))


def _wide_dtype(x: Any) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def channel_sum(x: Any) -> Any:
    """The sum of each channel, in a type wide enough for it."""
    return x.sum(_others(x), dtype=_wide_dtype(x))


def channel_square_sum(x: Any, mean: Any) -> Any:
    """The sum of the squared distances of each channel from its mean."""
    return (x.to(_wide_dtype(x)) - _wide(x, mean)).square().sum(_others(x))


def through_statistics(grad: Any, x: Any, mean: Any, slope: Any, shift: Any) -> Any:
    """The gradient for `x`, less what flows back through the mean and variance of its channel."""
    centred = x.to(_wide_dtype(x)) - _wide(x, mean)
    return (grad - centred * _wide(x, slope) - _wide(x, shift)).to(x.dtype)


def _per_channel(call: Call, first: int) -> list[tuple[int, int]]:
    """The places of channels in the operands from number `first` on: one value per channel."""
    return [(i, 0) for i in range(first, len(call.inputs))]


def batch_norm_choices(call: Call) -> Iterator[Choice]:
    """With given statistics: elementwise but for channels, which all operands share.

    In training the statistics are those of the whole batch, see dtensor.above_autograd.norms.
    """
    if call.argument("training"):
        return
    num = len(call.inputs) - 1
    local = LocalCall(normalised_part)
    yield replace(call.replicated(), local=local)
    for dim in range(call.inputs[0].ndim):
        places = [(0, dim)] + (_per_channel(call, 1) if dim == 1 else [])
        for sizes in call.splits(places):
            cut = Shard(dim, sizes)
            other = Shard(0, sizes) if dim == 1 else REPLICATE
            yield Choice((cut, *[other] * num), (cut, REPLICATE, REPLICATE), local)


def normalised_part(x: torch.Tensor, *rest: Any) -> Any:
    """A part by given statistics; there are none to return."""
    nothing = x.new_empty(0)
    if not x.numel():
        return torch.empty_like(x), nothing, nothing
    return aten.native_batch_norm.default(x, *rest)[0], nothing, nothing


def batch_norm_grad_choices(call: Call) -> Iterator[Choice]:
    """With given statistics: gradient, input, values per channel -> three gradients."""
    if call.argument("train"):
        return
    asked = call.argument("output_mask")
    num = len(call.inputs) - 2
    yield call.replicated()
    local = LocalCall(normalised_grad_part, per_rank=True)
    for dim in range(call.inputs[0].ndim):
        places = [(0, dim), (1, dim)] + (_per_channel(call, 2) if dim == 1 else [])
        for sizes in call.splits(places):
            cut = Shard(dim, sizes)
            other, each = (Shard(0, sizes),) * 2 if dim == 1 else (REPLICATE, SUM)
            grads = (cut, each, each)
            outputs = tuple(p for p, wanted in zip(grads, asked, strict=True) if wanted)
            yield Choice((cut, cut, *[other] * num), outputs, local)
    yield from linear_choices(call, ((0,),))


def normalised_grad_part(
    coordinate: Any, layouts: Sequence[Any], grad: torch.Tensor, x: torch.Tensor, *rest: Any
) -> Any:
    asked = rest[-1]
    if math.prod(x.shape):
        return aten.native_batch_norm_backward.default(grad, x, *rest)
    outputs = iter(layouts[-sum(asked) :])
    return tuple(
        x.new_zeros(next(outputs).local_shape(coordinate)) if wanted else None for wanted in asked
    )


RULES: Table = table(
    (
        (aten.native_group_norm.default,),
        Rule(group_norm_choices, "n (g [c]) [...], (g [c]), (g [c]) -> n (g [c]) [...], n g, n g"),
    ),
    (
        (aten.native_group_norm_backward.default,),
        Rule(group_norm_grad_choices, "n (g [c]) [...], ..., n g, n g -> n (g [c]) [...]"),
    ),
    rule(channel_sum, like="n c ... -> c", linear=((0,),)),
    rule(channel_square_sum, like="n c ..., c -> c"),
    rule(
        through_statistics,
        like="n c ..., n c ..., c, c, c -> n c ...",
        linear=((0, 3, 4),),
        reduce_op=None,
    ),
    ((aten.native_batch_norm.default,), Rule(batch_norm_choices, "n c ..., c, c, c, c -> n c ...")),
    (
        (aten.native_batch_norm_backward.default,),
        Rule(batch_norm_grad_choices, "n c ..., n c ..., c, c, c -> n c ..., c, c"),
    ),
)
