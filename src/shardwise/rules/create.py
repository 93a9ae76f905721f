"""Tensors made after the shape of another one."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardwise.core.placements import REPLICATE, Placement, Shard
from shardwise.rules.rule import Call, Choice, Rule, Table, table

aten = torch.ops.aten


def like_choices(call: Call) -> Iterator[Choice]:
    """The values of the model tensor do not matter, so any placement of it will do."""
    yield call.replicated()
    model: Placement = call.placed[0] if call.placed else REPLICATE
    if model.is_partial():
        yield Choice((model,), (REPLICATE,))
    if call.inputs[0].shape == call.outputs[0].shape:
        for dim in range(call.inputs[0].ndim):
            for sizes in call.splits([(0, dim)]):
                shard = Shard(dim, sizes)
                yield Choice((shard,), (shard,))
    elif model.is_shard():
        yield Choice((model,), (REPLICATE,))


RULES: Table = table(
    (
        (
            aten.zeros_like.default,
            aten.ones_like.default,
            aten.empty_like.default,
            aten.full_like.default,
        ),
        Rule(like_choices, "... -> ..."),
    ),
    (
        (
            aten.new_zeros.default,
            aten.new_ones.default,
            aten.new_empty.default,
            aten.new_full.default,
        ),
        Rule(like_choices, "any -> ...", {"size": 0}),
    ),
)
