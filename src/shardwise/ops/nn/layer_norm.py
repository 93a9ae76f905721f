"""Layer and RMS norm: any dim in front of the normalised ones may be sharded."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardwise.core.placements import REPLICATE, SUM, Placement, Shard
from shardwise.dispatch.rule import Call, Choice, Rule, Table, table

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
    """Gradient, input, mean and deviation are sharded alike; the weights' gradients add up."""
    others = (REPLICATE,) * (len(call.inputs) - 4)
    wanted = call.argument("output_mask")
    yield call.replicated()
    for dim in range(_num_batch_dims(call)):
        for sizes in call.splits([(i, dim) for i in range(4)]):
            shard = Shard(dim, sizes)
            every: tuple[Placement, ...] = (shard, SUM, SUM)
            outputs = tuple(p for p, asked in zip(every, wanted, strict=True) if asked)
            yield Choice((shard,) * 4 + others, outputs)


def rms_norm_grad_choices(call: Call) -> Iterator[Choice]:
    """Gradient, input and deviation are sharded alike; the weight's gradients add up."""
    others = (REPLICATE,) * (len(call.inputs) - 3)
    wanted = call.argument("output_mask")
    yield call.replicated()
    for dim in range(_num_batch_dims(call)):
        for sizes in call.splits([(i, dim) for i in range(3)]):
            shard = Shard(dim, sizes)
            every: tuple[Placement, ...] = (shard, SUM)
            outputs = tuple(p for p, asked in zip(every, wanted, strict=True) if asked)
            yield Choice((shard,) * 3 + others, outputs)


RULES: Table = table(
    ((aten._fused_rms_norm.default,), Rule(layer_norm_choices, "... [n], [n] -> ... [n], ...")),
    (
        (aten._fused_rms_norm_backward.default,),
        Rule(rms_norm_grad_choices, "... [n], ... -> ... [n], [n]"),
    ),
    ((aten.native_layer_norm.default,), Rule(layer_norm_choices, "... [n], [n], [n] -> ... [n]")),
    (
        (aten.native_layer_norm_backward.default,),
        Rule(layer_norm_grad_choices, "... [n], ... -> ... [n], [n], [n]"),
    ),
)
