"""One recurrent layer (LSTM, GRU, plain), forward and backward: the batch may be sharded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardwise.core.placements import REPLICATE, SUM, Partial, Placement, Shard
from shardwise.rules.parts import UnlessEmpty
from shardwise.rules.rule import Call, Choice, LocalCall, Rule, Table, table

#: How many states each kind carries from step to step.
NUM_STATES = {"lstm": 2, "gru": 1, "rnn_tanh": 1, "rnn_relu": 1}


def recurrent(
    kind: str, has_biases: bool, bidirectional: bool, batch_first: bool, x: Any, *rest: Any
) -> tuple[Any, ...]:
    """The outputs of all steps and the last states. `rest`: the first states, then weights."""
    num = NUM_STATES[kind]
    states, weights = list(rest[:num]), list(rest[num:])
    op = getattr(torch, kind)
    start = states if kind == "lstm" else states[0]
    return op(x, start, weights, has_biases, 1, 0.0, False, bidirectional, batch_first)


def recurrent_grads(
    kind: str,
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
    *operands: Any,
) -> tuple[Any, ...]:
    """The gradients of input, first states and weights.

    `operands` has the gradients of the outputs, then what `recurrent` takes, which runs again:
    what its kernels keep for their own backward differs from device to device.
    """
    num = 1 + NUM_STATES[kind]
    grads, inputs = operands[:num], operands[num:]
    if inputs[0].is_meta:
        return tuple(map(torch.empty_like, inputs))
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in inputs]
        outputs = recurrent(kind, has_biases, bidirectional, batch_first, *leaves)
        found = torch.autograd.grad(outputs, leaves, grads)
    # The kernels lay gradients out as they like; without data they were promised like the inputs.
    return tuple(
        g if g.stride() == x.stride() else torch.empty_like(x).copy_(g)
        for g, x in zip(found, inputs, strict=True)
    )


def _cut(sizes: tuple[int, ...] | None, batch_first: bool, num: int) -> tuple[Placement, ...]:
    """Steps and states with their batch sharded."""
    return Shard(0 if batch_first else 1, sizes), *[Shard(1, sizes)] * num


def recurrent_choices(call: Call) -> Iterator[Choice]:
    kind, batch_first = call.args[0], call.args[3]
    num = NUM_STATES[kind]
    weights = [REPLICATE] * (len(call.inputs) - 1 - num)
    local = LocalCall(UnlessEmpty(recurrent), per_rank=True)
    yield call.replicated()
    for sizes in call.splits(_batch_places(0, batch_first, num)):
        cut = _cut(sizes, batch_first, num)
        yield Choice((*cut, *weights), cut, local)


def recurrent_grad_choices(call: Call) -> Iterator[Choice]:
    kind, batch_first = call.args[0], call.args[3]
    num = NUM_STATES[kind]
    num_weights = len(call.inputs) - 2 * (1 + num)
    local = LocalCall(gradients_of_part, per_rank=True)
    yield call.replicated()
    places = _batch_places(0, batch_first, num) + _batch_places(1 + num, batch_first, num)
    for sizes in call.splits(places):
        cut = _cut(sizes, batch_first, num)
        weights = [REPLICATE] * num_weights
        yield Choice((*cut, *cut, *weights), (*cut, *[SUM] * num_weights), local)
    for reduce_op in ("sum", "avg"):
        term = Partial(reduce_op)
        others = [REPLICATE] * (len(call.inputs) - 1 - num)
        yield Choice((*[term] * (1 + num), *others), (term,) * len(call.outputs))


def _batch_places(first: int, batch_first: bool, num: int) -> list[tuple[int, int]]:
    return [(first, 0 if batch_first else 1), *((first + 1 + i, 1) for i in range(num))]


def gradients_of_part(coordinate: Any, layouts: Sequence[Any], *args: Any) -> tuple[Any, ...]:
    """A rank without examples has no gradient to add."""
    num = 1 + NUM_STATES[args[0]]
    inputs = args[4 + num :]
    if inputs[0].numel():
        return recurrent_grads(*args)
    return tuple(map(torch.zeros_like, inputs))


RULES: Table = table(
    ((recurrent,), Rule(recurrent_choices, "[t] b [i], [l] b [h], [w] -> [t] b [h], [l] b [h]")),
    (
        (recurrent_grads,),
        Rule(recurrent_grad_choices, "[t] b [h], [l] b [h], ... -> [t] b [i], [l] b [h], [w]"),
    ),
)
