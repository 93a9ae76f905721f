"""Convolutions: the batch, input or output channels, or whole groups of channels may be sharded.

Positions may not: a shard of them would need a halo exchange.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.core.layout import can_name, shard_with
from shardwise.core.placements import REPLICATE, SUM, Partial, Placement, Shard
from shardwise.core.sizes import lengths
from shardwise.dispatch.notation import linear_choices
from shardwise.dispatch.rule import Call, Choice, LocalCall, Rule, Table, table

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class ConvSplit:
    """How one axis places the input, weight, output and bias."""

    input: Placement
    weight: Placement
    output: Placement
    bias: Placement
    #: The gradients of input, weight and bias when the output's gradient is placed like the output.
    grads: tuple[Placement, Placement, Placement]
    #: The (tensor, dim) that only this axis may shard; 0 is the input, 1 the weight.
    alone: tuple[int, int] | None = None


def _ways(call: Call, x: int, weight: int, output: int | None) -> Iterator[ConvSplit]:
    """The splits of a call; `x` and `weight` are the numbers of these operands.

    `output` is the number of the output's gradient, if that is an operand.
    """
    batch = [(x, 0)] + ([(output, 0)] if output is not None else [])
    for sizes in call.splits(batch):
        shard = Shard(0, sizes)
        yield ConvSplit(shard, REPLICATE, shard, REPLICATE, (shard, SUM, SUM))
    if call.argument("groups") == 1:
        yield from _channel_ways(call, x, weight, output)
    else:
        yield from _group_ways(call, x)


def _channel_ways(call: Call, x: int, weight: int, output: int | None) -> Iterator[ConvSplit]:
    out_dim, in_dim = (1, 0) if call.argument("transposed") else (0, 1)
    places = [(weight, out_dim)] + ([(output, 1)] if output is not None else [])
    for sizes in call.splits(places):
        by_out, channels = Shard(out_dim, sizes), Shard(1, sizes)
        each = Shard(0, sizes)
        yield ConvSplit(REPLICATE, by_out, channels, each, (SUM, by_out, each))
    for sizes in call.splits([(x, 1), (weight, in_dim)]):
        by_in, channels = Shard(in_dim, sizes), Shard(1, sizes)
        yield ConvSplit(channels, by_in, SUM, SUM, (channels, by_in, REPLICATE))


def _group_ways(call: Call, x: int) -> Iterator[ConvSplit]:
    """Whole groups: the sharding of channels follows that of groups."""
    groups, channels = call.argument("groups"), call.inputs[x].shape[1]
    per_group = channels // groups
    for sizes in call.splits([(x, 1)]):
        if sizes is not None and any(n % per_group for n in sizes):
            continue
        counts = [n // per_group for n in sizes] if sizes else lengths(groups, call.axis_size, None)
        parts, out = call.axis_size, _out_channels(call)
        before, after = (tuple(n * size // groups for n in counts) for size in (channels, out))
        if not can_name(before, channels, parts) or not can_name(after, out, parts):
            continue
        source, each = shard_with(1, before, channels, parts), shard_with(0, after, out, parts)
        weight = shard_with(0, before, channels, parts) if call.argument("transposed") else each
        target = shard_with(1, after, out, parts)
        yield ConvSplit(source, weight, target, each, (source, weight, each), (0, 1))


def _out_channels(call: Call) -> int:
    """The number of channels of the output: known from it, or from its gradient."""
    if call.op is aten.convolution_backward.default:
        return call.inputs[0].shape[1]
    return call.outputs[0].shape[1]


def convolution_choices(call: Call) -> Iterator[Choice]:
    """Input, weight and perhaps a bias -> output."""
    num = len(call.inputs)
    yield call.replicated()
    local = LocalCall(ConvolutionOfShards(), per_rank=True)
    for way in _ways(call, 0, 1, None):
        choice = Choice((way.input, way.weight, way.bias)[:num], (way.output,))
        if way.alone is not None:
            yield replace(choice, local=local, alone=(way.alone, (1, 0)))
            continue
        if way.input.is_shard(0):
            yield replace(choice, even=((0, 0),))
        yield replace(choice, local=local)
    yield from linear_choices(call, ((0, 2), (1, 2)))


def convolution_grad_choices(call: Call) -> Iterator[Choice]:
    """The gradient of the output, input, weight -> gradients of input, weight and bias."""
    asked = call.argument("output_mask")

    def kept(grads: Sequence[Placement]) -> tuple[Placement, ...]:
        return tuple(p for p, wanted in zip(grads, asked, strict=True) if wanted)

    yield call.replicated()
    local = LocalCall(ConvolutionGradsOfShards(), per_rank=True)
    for way in _ways(call, 1, 2, 0):
        output = REPLICATE if way.output.is_partial() else way.output
        choice = Choice((output, way.input, way.weight), kept(way.grads))
        if way.alone is not None:
            yield replace(choice, local=local, alone=((1, 1), (0, 1), (2, 0)))
            continue
        if way.input.is_shard(0):
            yield replace(choice, even=((1, 0),))
        yield replace(choice, local=local)
    for op in ("sum", "avg"):
        term = Partial(op)
        yield Choice((term, REPLICATE, REPLICATE), kept((term, term, term)))
        yield Choice((REPLICATE, term, REPLICATE), kept((REPLICATE, term, REPLICATE)))
        yield Choice((REPLICATE, REPLICATE, term), kept((term, REPLICATE, REPLICATE)))


def _groups_here(x: torch.Tensor, all_channels: Any, groups: int) -> int:
    return groups if groups == 1 else groups * x.shape[1] // all_channels


@dataclass(frozen=True, slots=True)
class ConvolutionOfShards:
    """A convolution of shards, which may be empty."""

    def __call__(
        self,
        coordinate: Any,
        layouts: Sequence[Any],
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *options: Any,
    ) -> torch.Tensor:
        options, groups = options[:-1], options[-1]
        shape = layouts[-1].local_shape(coordinate)
        if x.numel() and weight.numel() and math.prod(shape):
            here = _groups_here(x, layouts[0].shape[1], groups)
            return aten.convolution.default(x, weight, bias, *options, here)
        nothing = x.new_zeros(shape)
        return nothing if bias is None else nothing + bias.view(-1, *[1] * (x.dim() - 2))


@dataclass(frozen=True, slots=True)
class ConvolutionGradsOfShards:
    """The gradients of a convolution of shards, which may be empty."""

    def __call__(
        self,
        coordinate: Any,
        layouts: Sequence[Any],
        grad: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias_sizes: Any,
        *options: Any,
    ) -> tuple[torch.Tensor | None, ...]:
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
