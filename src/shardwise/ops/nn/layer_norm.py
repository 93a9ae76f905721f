"""Layer, RMS and group norm: any dim in front of the normalised ones may be sharded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.core.layout import can_name, shard_with
from shardwise.core.placements import REPLICATE, SUM, Placement, Shard
from shardwise.core.sizes import lengths
from shardwise.dispatch.notation import linear_choices
from shardwise.dispatch.rule import Call, Choice, LocalCall, Rule, Table, table
from shardwise.dtensor.tensor import DTensor
from shardwise.ops.operands import fake

aten = torch.ops.aten


def _num_batch_dims(call: Call) -> int:
    return call.inputs[0].ndim - len(call.argument("normalized_shape"))


def layer_norm_choices(call: Call) -> Iterator[Choice]:
    """Input, then weight and bias where there are any -> output, mean, reciprocal deviation."""
    others = (REPLICATE,) * (len(call.inputs) - 1)
    yield call.replicated()
    for dim in range(_num_batch_dims(call)):
        for sizes in call.splits([(0, dim)]):
            shard = Shard(dim, sizes)
            yield Choice((shard, *others), (shard,) * len(call.outputs))


def layer_norm_grad_choices(call: Call) -> Iterator[Choice]:
    """Gradient, input, mean, deviation, then weights; RMS norm has no mean and no bias."""
    wanted = call.argument("output_mask")
    num = len(wanted) + 1  # sharded inputs
    others = (REPLICATE,) * (len(call.inputs) - num)
    yield call.replicated()
    for dim in range(_num_batch_dims(call)):
        for sizes in call.splits([(i, dim) for i in range(num)]):
            shard = Shard(dim, sizes)
            grads: tuple[Placement, ...] = (shard, *(SUM,) * (len(wanted) - 1))
            outputs = tuple(p for p, asked in zip(grads, wanted, strict=True) if asked)
            yield Choice((shard,) * num + others, outputs)


# -- group norm ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChannelSplit:
    """How one axis shards channels, and the groups that they form."""

    channels: Placement
    per_channel: Placement
    groups: Placement


def _channel_splits(call: Call, x: int) -> Iterator[ChannelSplit]:
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
    local = LocalCall(group_norm_of_shards, per_rank=True)
    # Torch needs dense operands, and a shard of a dense tensor need not be dense.
    yield replace(call.replicated(), local=local)
    for sizes in call.splits([(0, 0)]):
        shard = Shard(0, sizes)
        yield Choice((shard, *[REPLICATE] * num), (shard,) * 3, local)
    for split in _channel_splits(call, 0):
        inputs = (split.channels, *[split.per_channel] * num)
        outputs = (split.channels, split.groups, split.groups)
        yield Choice(inputs, outputs, local, alone=((0, 1),))


def group_norm_of_shards(
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
    local = LocalCall(group_norm_grad_of_shards, per_rank=True)

    def kept(*grads: Placement) -> tuple[Placement, ...]:
        return tuple(p for p, wanted in zip(grads, asked, strict=True) if wanted)

    yield replace(call.replicated(), local=local)
    for sizes in call.splits([(i, 0) for i in range(4)]):
        shard = Shard(0, sizes)
        yield Choice((*[shard] * 4, *[REPLICATE] * num), kept(shard, SUM, SUM), local)
    for split in _channel_splits(call, 1):
        channels, each, groups = split.channels, split.per_channel, split.groups
        inputs = (channels, channels, groups, groups, *[each] * num)
        yield Choice(inputs, kept(channels, each, each), local, alone=((1, 1),))
    yield from linear_choices(call, ((0,),))


def group_norm_grad_of_shards(
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
        weight = x.new_ones(channels)  # the CPU kernel crashes for a bias without a weight
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


# -- RMS norm, above autograd ----------------------------------------------------------------


def rms_norm(x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """Torch's fused kernel where the normalised dims are whole, else a mean over shards."""
    num = len(normalized_shape)
    if type(x) is not DTensor or (x.is_cuda and not _shards_last(x, num)):
        return aten.rms_norm.default.decompose(x, normalized_shape, weight, eps)
    if not _fits(x, normalized_shape, weight):  # torch raises, or accepts it
        aten.rms_norm.default(fake(x), normalized_shape, fake(weight), eps)
        if not (x.is_floating_point() or x.is_complex()):  # its shape function accepts integers
            aten.rms_norm.default(torch.zeros(normalized_shape, dtype=x.dtype), normalized_shape)
    wide = x.contiguous().to(torch.promote_types(x.dtype, torch.float32))
    if eps is None:  # as in torch, for the dtype of the computation
        eps = torch.finfo(wide.dtype).eps
    mean = wide.square().mean(list(range(-num, 0)), keepdim=True)
    normal = wide * torch.rsqrt(mean + eps)
    return (normal if weight is None else normal * weight).to(x.dtype)


def _fits(x: Any, normalized_shape: Any, weight: Any) -> bool:
    """Whether torch's checks can be skipped: they take longer than the norm itself."""
    shape = tuple(normalized_shape)
    if not shape or tuple(x.shape[-len(shape) :]) != shape:
        return False
    if not (x.is_floating_point() or x.is_complex()):
        return False
    return weight is None or (tuple(weight.shape) == shape and weight.dtype == x.dtype)


def _shards_last(x: DTensor, num: int) -> bool:
    return any(isinstance(p, Shard) and p.dim >= x.dim() - num for p in x.placements)


RULES: Table = table(
    ((aten._fused_rms_norm.default,), Rule(layer_norm_choices, "... [n], [n] -> ... [n], ...")),
    (
        (aten._fused_rms_norm_backward.default,),
        Rule(layer_norm_grad_choices, "... [n], ... -> ... [n], [n]"),
    ),
    ((aten.native_layer_norm.default,), Rule(layer_norm_choices, "... [n], [n], [n] -> ... [n]")),
    (
        (aten.native_layer_norm_backward.default,),
        Rule(layer_norm_grad_choices, "... [n], ... -> ... [n], [n], [n]"),
    ),
    (
        (aten.native_group_norm.default,),
        Rule(group_norm_choices, "n (g [c]) [...], (g [c]), (g [c]) -> n (g [c]) [...], n g, n g"),
    ),
    (
        (aten.native_group_norm_backward.default,),
        Rule(group_norm_grad_choices, "n (g [c]) [...], ..., n g, n g -> n (g [c]) [...]"),
    ),
)

KERNELS: tuple[tuple[str, Any], ...] = (("rms_norm", rms_norm),)
