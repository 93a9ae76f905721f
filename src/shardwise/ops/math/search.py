"""Search for values in a sorted sequence or in a set."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardwise.core.placements import REPLICATE, Placement, Shard
from shardwise.dispatch.rule import Call, Choice, Rule, Table, table

aten = torch.ops.aten


def _each_value(call: Call, values: int) -> Iterator[Choice]:
    """Each value is searched for on its own; the sequence or set is whole."""
    yield call.replicated()
    for dim in range(call.inputs[values].ndim):
        for sizes in call.splits([(values, dim)]):
            shard: Placement = Shard(dim, sizes)
            inputs = tuple(shard if i == values else REPLICATE for i, _ in enumerate(call.inputs))
            yield Choice(inputs, (shard,))


def bucketize_choices(call: Call) -> Iterator[Choice]:
    yield from _each_value(call, 0)


def searchsorted_choices(call: Call) -> Iterator[Choice]:
    """One sequence for all values, or one per row: then both are sharded by rows."""
    sequence = call.inputs[0]
    if sequence.ndim == 1:
        yield from _each_value(call, 1)
        return
    yield call.replicated()
    num = len(call.inputs)
    for dim in range(sequence.ndim - 1):
        for sizes in call.splits([(i, dim) for i in range(num)]):
            shard: Placement = Shard(dim, sizes)
            yield Choice((shard,) * num, (shard,))
    last = sequence.ndim - 1
    for sizes in call.splits([(1, last)]):
        shard = Shard(last, sizes)
        yield Choice((REPLICATE, shard, *(REPLICATE,) * (num - 2)), (shard,))


def searchsorted_number_choices(call: Call) -> Iterator[Choice]:
    yield call.replicated()


RULES: Table = table(
    ((aten.bucketize.Tensor,), Rule(bucketize_choices, "..., [n] -> ...")),
    ((aten.searchsorted.Tensor,), Rule(searchsorted_choices, "... [n], ... m -> ... m")),
    ((aten.searchsorted.Scalar,), Rule(searchsorted_number_choices, "[n] -> ")),
    (
        (aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar),
        Rule(bucketize_choices, "..., [n] -> ..."),
    ),
)
