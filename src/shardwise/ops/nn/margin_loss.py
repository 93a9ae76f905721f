"""Margin losses: samples may be sharded, classes are whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core.placements import REPLICATE, SUM, Placement, Shard
from shardwise.core.sizes import Size, equal
from shardwise.dispatch.notation import linear_choices
from shardwise.dispatch.rule import Call, Choice, LocalCall, Rule, Table, empty_safe, table
from shardwise.dispatch.schema import in_order

aten = torch.ops.aten

_NONE, _MEAN, _SUM = 0, 1, 2


@dataclass(frozen=True, slots=True)
class OverAll:
    """This rank's term of a mean over all samples: its sum over the global count."""

    op: Any
    position: int
    count: Size

    def __call__(self, coordinate: Any, layouts: Any, *args: Any, **kwargs: Any) -> Any:
        given = [a for a in args if isinstance(a, torch.Tensor)]
        results: Any
        if all(a.numel() for a in given):
            here = in_order(self.op, args, kwargs)
            here[self.position] = _SUM
            results = self.op(*here)
        else:
            results = tuple(
                given[0].new_zeros(layout.local_shape(coordinate), dtype=layout.dtype)
                for layout in layouts[len(given) :]
            )
        first, *rest = results if isinstance(results, tuple) else (results,)
        return (first / self.count, *rest) if rest else first / self.count


def _local(call: Call) -> LocalCall:
    names = [a.name for a in call.op._schema.arguments]
    if call.argument("reduction") != _MEAN:
        return empty_safe(call.op)
    samples = next(m for m in call.inputs if m.ndim == 2).shape[0]
    return LocalCall(OverAll(call.op, names.index("reduction"), samples), per_rank=True)


def loss_choices(call: Call) -> Iterator[Choice]:
    """Input and target, then class weights -> loss, and further results per sample."""
    yield call.replicated()
    if call.inputs[0].ndim != 2:
        return
    loss: Placement = SUM
    others = (REPLICATE,) * (len(call.inputs) - 2)
    for sizes in call.splits([(0, 0), (1, 0)]):
        shard = Shard(0, sizes)
        if call.argument("reduction") == _NONE:
            loss = shard
        rest = (shard,) * (len(call.outputs) - 1)
        yield Choice((shard, shard, *others), (loss, *rest), _local(call))


def grad_choices(call: Call) -> Iterator[Choice]:
    """Gradient, input, target, and further results per sample; class weights are whole."""
    yield call.replicated()
    yield from linear_choices(call, ((0,),))
    if call.inputs[1].ndim != 2:
        return
    samples = call.inputs[1].shape[0]
    weighted = {a.name for a in call.op._schema.arguments} >= {"weight"}
    each = [
        i
        for i, meta in enumerate(call.inputs)
        if i and not (weighted and i == 3) and meta.ndim and equal(meta.shape[0], samples)
    ]
    if call.argument("reduction") == _NONE:
        each.insert(0, 0)
    for sizes in call.splits([(i, 0) for i in each]):
        shard = Shard(0, sizes)
        inputs = tuple(shard if i in each else REPLICATE for i in range(len(call.inputs)))
        yield Choice(inputs, (shard,), _local(call))


RULES: Table = table(
    (
        (aten.multi_margin_loss.default, aten.multilabel_margin_loss_forward.default),
        Rule(loss_choices, "n [c], n -> n"),
    ),
    (
        (
            aten.multi_margin_loss_backward.default,
            aten.multilabel_margin_loss_backward.default,
        ),
        Rule(grad_choices, "n, n [c], n -> n [c]", shaped_like=1),
    ),
)

#: The inputs whose values the op may refuse; see `dispatch.refused`.
REFUSED: dict[Any, slice] = dict.fromkeys(
    (aten.multi_margin_loss.default, aten.multilabel_margin_loss_forward.default), slice(1, 2)
)
