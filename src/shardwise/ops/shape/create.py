"""New tensors like another one: `zeros_like`, `new_empty` and so on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.core.placements import REPLICATE, Placement, Shard
from shardwise.core.sizes import equal_shapes
from shardwise.dispatch.rule import Call, Choice, LocalCall, Rule, Table, table

aten = torch.ops.aten


def like_choices(call: Call) -> Iterator[Choice]:
    """The values of the input do not matter, so any placement will do."""
    yield call.replicated()
    model: Placement = call.placed[0] if call.placed else REPLICATE
    if model.is_partial():
        yield Choice((model,), (REPLICATE,))
    if equal_shapes(call.inputs[0].shape, call.outputs[0].shape):
        for dim in range(call.inputs[0].ndim):
            for sizes in call.splits([(0, dim)]):
                shard = Shard(dim, sizes)
                yield Choice((shard,), (shard,))
    elif model.is_shard():
        yield Choice((model,), (REPLICATE,))


@dataclass(frozen=True, slots=True)
class NewStrided:
    """A new shard, dense, with the memory order of the global tensor."""

    def __call__(
        self, coordinate: Any, layouts: Sequence[Any], x: torch.Tensor, *_: Any, **options: Any
    ) -> torch.Tensor:
        shape, order = layouts[-1].local_shape(coordinate), layouts[-1].memory_order
        if order is None:
            return x.new_empty(shape, **options)
        inverse = sorted(range(len(order)), key=lambda i: order[i])
        return x.new_empty([shape[d] for d in order], **options).permute(inverse)


def strided_choices(call: Call) -> Iterator[Choice]:
    for choice in like_choices(call):
        yield replace(choice, local=LocalCall(NewStrided(), per_rank=True))


RULES: Table = table(
    ((aten.new_empty_strided.default,), Rule(strided_choices, "any -> ...")),
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
