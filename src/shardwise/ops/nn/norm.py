"""Batch, instance, layer, RMS and group norm; for kernels see Note [Above autograd].

Batch norm in training uses the statistics of the whole batch, however it is sharded. Only sums are
communicated: two per channel in forward, and one of two values per channel in backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.core.layout import fits_shard, shard_with
from shardwise.core.placements import REPLICATE, SUM, Placement, Shard
from shardwise.core.sizes import equal
from shardwise.core.untraced import SkipsNone, without_autocast
from shardwise.dispatch.rule import (
    Call,
    Choice,
    LocalCall,
    Rule,
    Table,
    linear_choices,
    rule,
    sharded_together,
    table,
    unless_empty,
)
from shardwise.dtensor.autograd import direct_apply, gradient_layout, redistribute
from shardwise.dtensor.tensor import DTensor, run
from shardwise.ops.nn.image import group_counts
from shardwise.ops.operands import all_distributed, are_distributed, as_view, fake

aten = torch.ops.aten


def _others(x: Any) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _wide(x: Any, per_channel: Any) -> Any:
    """A value per channel, broadcastable to `x`."""
    return per_channel.view(-1, *[1] * (x.dim() - 2))


def _wide_dtype(x: Any) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def channel_sum(x: Any) -> Any:
    """The sum of each channel, in float32 or wider."""
    return x.sum(_others(x), dtype=_wide_dtype(x))


def channel_square_sum(x: Any, mean: Any) -> Any:
    """The sum of the squared distances of each channel from its mean."""
    return (x.to(_wide_dtype(x)) - _wide(x, mean)).square().sum(_others(x))


def through_statistics(grad: Any, x: Any, mean: Any, slope: Any, shift: Any) -> Any:
    """The gradient of `x`, with the terms through the mean and variance of its channel."""
    centred = x.to(_wide_dtype(x)) - _wide(x, mean)
    return (grad - centred * _wide(x, slope) - _wide(x, shift)).to(x.dtype)


def batch_norm_choices(call: Call) -> Iterator[Choice]:
    """With given statistics: elementwise, with one value per channel in the other operands.

    Training is decomposed, see `BatchNorm`.
    """
    if call.argument("training"):
        return
    num = len(call.inputs) - 1
    local = LocalCall(normalised_shard)
    yield replace(call.replicated(), local=local)
    for dim in range(call.inputs[0].ndim):
        each = 0 if dim == 1 else REPLICATE
        outputs = (dim, REPLICATE, REPLICATE)
        yield from sharded_together(call, (dim, *[each] * num), outputs, local)


def normalised_shard(x: torch.Tensor, *rest: Any) -> Any:
    """A shard, normalised by given statistics; returns no statistics."""
    nothing = x.new_empty(0)
    if not x.numel():
        return torch.empty_like(x), nothing, nothing
    return aten.native_batch_norm.default(x, *rest)[0], nothing, nothing


def batch_norm_grad_choices(call: Call) -> Iterator[Choice]:
    """With given statistics: gradient, input, values per channel -> three gradients."""
    if call.argument("train"):
        return
    num = len(call.inputs) - 2
    yield call.replicated()
    local = LocalCall(normalised_shard_grad, per_rank=True)
    for dim in range(call.inputs[0].ndim):
        each, grad = (0, 0) if dim == 1 else (REPLICATE, SUM)
        outputs = call.asked((dim, grad, grad))
        yield from sharded_together(call, (dim, dim, *[each] * num), outputs, local)
    yield from linear_choices(call, ((0,),))


def normalised_shard_grad(
    coordinate: Any, layouts: Sequence[Any], grad: torch.Tensor, x: torch.Tensor, *rest: Any
) -> Any:
    """Zeros for an empty shard; asks only for the input's size, so that graphs stay general."""
    asked = rest[-1]
    if math.prod(x.shape):
        return aten.native_batch_norm_backward.default(grad, x, *rest)
    outputs = iter(layouts[-sum(asked) :])
    return tuple(
        x.new_zeros(next(outputs).local_shape(coordinate)) if wanted else None for wanted in asked
    )


# -- above autograd --------------------------------------------------------------------------
class BatchNorm(SkipsNone):
    """Normalises by given statistics, or by those of the batch; returns mean and deviation too."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, eps: float
    ) -> Any:
        given, x = x, _as_suggested(x)
        if training:
            mean, var = _statistics(x)
        ctx.save_for_backward(given, weight, mean, var)
        ctx.options = (training, eps)
        ctx.bias_dtype = None if bias is None else bias.dtype
        narrow = [s if weight is None else s.to(weight.dtype) for s in (mean, var)]
        # In half precision, torch's kernel takes no bias with statistics in float32.
        apart = training and weight is None and bias is not None and bias.dtype != mean.dtype
        args = (x, weight, None if apart else bias, *narrow, False, 0.0, eps)
        out = run(aten.native_batch_norm.default, *args)[0]
        if apart:
            out = out + _wide(x, bias)
        ctx.mark_non_differentiable(mean, var)
        return out, mean, var

    @staticmethod
    def backward(ctx: Any, grad: Any, *_: Any) -> Any:
        x, weight, mean, var = ctx.saved_tensors
        training, eps = ctx.options
        if torch.is_grad_enabled():  # double backward
            found = _differentiable_grads(grad, x, weight, mean, var, training, eps)
            found = tuple(depending(g, grad, x, weight) for g in found)
        else:
            found = _grads(grad, x, weight, mean, var, training, eps, ctx.needs_input_grad[0])
        if ctx.bias_dtype is not None:  # without a weight, sums have the dtype of the statistics
            found = (*found[:2], found[2].to(ctx.bias_dtype))
        wanted = zip(found, ctx.needs_input_grad[:3], strict=True)
        return *(g if w else None for g, w in wanted), None, None, None, None


_apply = direct_apply(BatchNorm)


class Depending(SkipsNone):
    """A gradient that requires grad because `sources` do; the sources get no gradient from it.

    Torch's formula of batch norm is one op: all its results require grad if one operand does.
    """

    @staticmethod
    def forward(ctx: Any, grad: Any, *sources: Any) -> Any:
        ctx.num_sources = len(sources)
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, *[None] * ctx.num_sources


class GradDepends(SkipsNone):
    """Its argument, whose gradient depends on `sources`."""

    @staticmethod
    def forward(ctx: Any, x: Any, *sources: Any) -> Any:
        ctx.save_for_backward(*sources)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        sources = ctx.saved_tensors
        return depending(grad, *sources), *[None] * len(sources)


_apply_depending = direct_apply(Depending)
_apply_grad_depends = direct_apply(GradDepends)


def depending(grad: Any, *sources: Any) -> Any:
    """`grad`, which requires grad if one of `sources` does, like the result of one op."""
    if not torch.is_grad_enabled() or grad is None or grad.requires_grad:
        return grad
    tracked = [source for source in sources if source is not None and source.requires_grad]
    return _apply_depending(grad, *tracked) if tracked else grad


def _unbiased(var: Any, count: Any) -> Any:
    if type(count) is int:
        return var * (count / max(count - 1, 1))
    return var * count / max(count - 1, 1)  # compiled code keeps no quotient of symbols


def _count(x: Any) -> Any:
    return math.prod(x.shape) // x.shape[1] if x.shape[1] else 0


def _statistics(x: Any) -> tuple[Any, Any]:
    """Mean and variance of each channel over the whole batch.

    Two passes: the variance as a difference of large sums would lose precision.
    """
    count = max(_count(x), 1)
    mean = _reduced(run(channel_sum, x) / count)
    return mean, _reduced(run(channel_square_sum, x, mean) / count)


def _reduced(x: Any) -> Any:
    return redistribute(x, gradient_layout(x._layout))


@without_autocast  # in backward it may meet another narrow dtype
def _grads(
    grad: Any, x: Any, weight: Any, mean: Any, var: Any, training: bool, eps: float, for_x: bool
) -> tuple[Any, Any, Any]:
    op = aten.native_batch_norm_backward.default
    if weight is None and mean.dtype != x.dtype:
        weight = torch.ones_like(mean)  # makes the sums over channels have this dtype
    narrow = [s if weight is None else s.to(weight.dtype) for s in (mean, var)]
    mask = [True, True, True]
    by_rows = run(op, grad, x, weight, *narrow, None, None, False, eps, mask)
    for_input, for_weight, for_bias = by_rows
    if not training or not for_x:
        return by_rows
    # One reduction for both, which are also the gradients of weight and bias.
    for_weight, for_bias = _reduced(torch.stack([for_weight, for_bias])).unbind()
    scale = torch.rsqrt(var + eps) / _count(x)
    per_channel = scale if weight is None else scale * weight
    slope = per_channel * torch.rsqrt(var + eps) * for_weight
    shift = per_channel * for_bias
    return run(through_statistics, for_input, x, mean, slope, shift), for_weight, for_bias


def _differentiable_grads(
    grad: Any, x: Any, weight: Any, mean: Any, var: Any, training: bool, eps: float
) -> tuple[Any, Any, Any]:
    """The same with differentiable ops."""
    dims = _others(x)
    if training:
        mean = x.mean(dims)
        var = (x - _wide(x, mean)).square().mean(dims)
    deviation = _wide(x, torch.rsqrt(var + eps))
    normal = (x - _wide(x, mean)) * deviation
    scaled = grad if weight is None else grad * _wide(x, weight)
    for_x = scaled
    if training:
        for_x = scaled - scaled.mean(dims, True) - normal * (scaled * normal).mean(dims, True)
    return for_x * deviation, (grad * normal).sum(dims), grad.sum(dims)


def native_batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, Any, Any]:
    """The output, and the mean and reciprocal deviation of the batch."""
    operands = (x, weight, bias, running_mean, running_var)
    if not are_distributed(*operands):
        operands = tuple(all_distributed(aten.native_batch_norm.default, operands))
        return native_batch_norm(*operands, training, momentum, eps)
    without_statistics = not training and (running_mean is None or running_var is None)
    if without_statistics or any(t is not None and type(t) is not DTensor for t in operands):
        args = (*operands, training, momentum, eps)
        return DTensor.__torch_dispatch__(aten.native_batch_norm.default, None, args)
    if torch.is_grad_enabled():
        _refuse_gradients(running_mean, running_var)
    if training:
        aten.native_batch_norm.default(*map(fake, operands), True, momentum, eps)
        out, mean, var = _apply(x, weight, bias, None, None, True, eps)
        _update(running_mean, mean, momentum)
        _update(running_var, _unbiased(var, _count(x)), momentum)
        return out, mean, torch.rsqrt(var + eps)
    out, mean, _ = _apply(x, weight, bias, running_mean, running_var, False, eps)
    nothing = mean.new_empty((0,))
    return out, nothing, nothing


def _refuse_gradients(*statistics: Any) -> None:
    if any(x is not None and x.requires_grad for x in statistics):
        raise RuntimeError(
            "A batch norm is not differentiable with respect to its running mean and variance, as "
            "on one device: detach() them."
        )


def _update(running: Any, found: Any, momentum: float) -> None:
    if running is not None:
        with torch.no_grad():
            running.copy_(running * (1 - momentum) + found * momentum)


def batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    if not x.numel():  # as torch: an empty batch changes no statistics
        out = x.clone() if weight is None else x * weight[0]
        return out if bias is None else out + bias[0]
    channels = x.shape[1] if x.dim() > 1 else 0
    per_channel = {
        "running_mean": running_mean,
        "running_var": running_var,
        "weight": weight,
        "bias": bias,
    }
    for name, given in per_channel.items():
        if given is not None and not equal(given.numel(), channels):
            raise RuntimeError(
                f"A batch norm of {channels} channels: {name} should have as many elements, found "
                f"{given.numel()}."
            )
    args = (x, weight, bias, running_mean, running_var, training, momentum, eps)
    return native_batch_norm(*args)[0]


def _as_suggested(x: Any) -> Any:
    """`x` in the memory order of one device's result: dense, or channels last."""
    if x.dim() in (4, 5):
        last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        if x.is_contiguous(memory_format=last):
            return x
    return x.contiguous()


def batch_norm_with_update(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    momentum: float,
    eps: float,
) -> tuple[Any, Any, Any, Any]:
    """Batch norm in training; the last result, saved by some kernels, is empty here."""
    args = (x, weight, bias, running_mean, running_var, True, momentum, eps)
    out, mean, deviation = native_batch_norm(*args)
    return out, mean, deviation, mean.new_empty((0,), dtype=torch.uint8)


def instance_norm(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """A group norm with as many groups as channels."""
    if not use_input_stats:
        args = (x, weight, bias, running_mean, running_var, False, momentum, eps)
        return batch_norm(*args, cudnn_enabled)
    if running_mean is not None or running_var is not None:
        positions = list(range(2, x.dim()))
        with torch.no_grad():
            mean = x.mean(positions, keepdim=True)
            _update(running_mean, mean.mean([0, *positions]), momentum)
            count = math.prod(x.shape[2:])
            var = (x - mean).square().sum(positions) / max(count - 1, 1)
            _update(running_var, var.mean(0), momentum)
    if bias is not None and bias.requires_grad and torch.is_grad_enabled():
        # A group norm's formula has the sums for the bias apart; one device runs a batch norm.
        tracked = [t for t in (x, weight) if t is not None and t.requires_grad]
        bias = _apply_grad_depends(bias, *tracked) if tracked else bias
    return as_view(torch.group_norm(x.contiguous(), x.shape[1], weight, bias, eps, cudnn_enabled))


def _weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of `v * (g / norms)`, where `norms` are those of slices of `v` along `dim`."""
    others = [d for d in range(v.dim()) if d != dim % v.dim()]
    along = (grad * v).sum(others, keepdim=True) / norms
    return (g / norms) * (grad - v * (along / norms)), along


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten._weight_norm_interface_backward.default: _weight_norm_backward,
}


# -- layer norm ----------------------------------------------------------------------------------


def _num_batch_dims(call: Call) -> int:
    return call.inputs[0].ndim - len(call.argument("normalized_shape"))


def layer_norm_choices(call: Call) -> Iterator[Choice]:
    """Input, then weight and bias where there are any -> output, mean, reciprocal deviation."""
    others = (REPLICATE,) * (len(call.inputs) - 1)
    yield call.replicated()
    for dim in range(_num_batch_dims(call)):
        yield from sharded_together(call, (dim, *others), [dim] * len(call.outputs))


def layer_norm_grad_choices(call: Call) -> Iterator[Choice]:
    """Gradient, input, mean, deviation, then weights; RMS norm has no mean and no bias."""
    num_grads = len(call.argument("output_mask"))
    others = (REPLICATE,) * (len(call.inputs) - 1 - num_grads)
    yield call.replicated()
    for dim in range(_num_batch_dims(call)):
        grads = call.asked((dim, *[SUM] * (num_grads - 1)))
        yield from sharded_together(call, (*[dim] * (1 + num_grads), *others), grads)


# -- group norm ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChannelSplit:
    """How one axis shards channels, and the groups that they form."""

    channels: Placement
    per_channel: Placement
    groups: Placement


def _channel_splits(call: Call, x: int) -> Iterator[ChannelSplit]:
    channels, groups = call.inputs[x].shape[1], call.argument("group")
    parts = call.axis_size
    for counts in group_counts(call, x, groups):
        wide = tuple(n * (channels // groups) for n in counts)
        if fits_shard(wide, channels, parts):
            yield ChannelSplit(
                shard_with(1, wide, channels, parts),
                shard_with(0, wide, channels, parts),
                shard_with(1, counts, groups, parts),
            )


def group_norm_choices(call: Call) -> Iterator[Choice]:
    """Input, perhaps weight and bias -> output, mean and reciprocal deviation of each group."""
    num = len(call.inputs) - 1
    local = unless_empty(group_norm_of_shards)
    # Torch needs dense operands, and a shard of a dense tensor need not be dense.
    yield replace(call.replicated(), local=local)
    yield from sharded_together(call, (0, *[REPLICATE] * num), (0, 0, 0), local)
    for split in _channel_splits(call, 0):
        inputs = (split.channels, *[split.per_channel] * num)
        outputs = (split.channels, split.groups, split.groups)
        yield Choice(inputs, outputs, local, alone=((0, 1),))


def group_norm_of_shards(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    n: int,
    c: int,
    hxw: int,
    group: int,
    eps: float,
) -> Any:
    rows, channels = x.shape[:2]
    here = (rows, channels, hxw, group * channels // c)
    return aten.native_group_norm.default(x.contiguous(), weight, bias, *here, eps)


def group_norm_grad_choices(call: Call) -> Iterator[Choice]:
    """Gradient, input, mean, deviation, perhaps weight -> gradients of input, weight and bias."""
    num = len(call.inputs) - 4
    local = LocalCall(group_norm_grad_of_shards, per_rank=True)
    yield replace(call.replicated(), local=local)
    whole = [REPLICATE] * num
    grads = call.asked((0, SUM, SUM))
    yield from sharded_together(call, (0, 0, 0, 0, *whole), grads, local)
    for split in _channel_splits(call, 1):
        channels, each, groups = split.channels, split.per_channel, split.groups
        inputs = (channels, channels, groups, groups, *[each] * num)
        outputs = call.asked((channels, each, each))
        yield Choice(inputs, outputs, local, alone=((1, 1),))
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
    """Torch's fused kernel if the normalised dims are whole, else a mean over shards."""
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

KERNELS: tuple[tuple[str, Any], ...] = (
    ("batch_norm", batch_norm),
    ("native_batch_norm", native_batch_norm),
    ("_native_batch_norm_legit", native_batch_norm),
    ("_batch_norm_with_update", batch_norm_with_update),
    ("instance_norm", instance_norm),
    ("rms_norm", rms_norm),
)
