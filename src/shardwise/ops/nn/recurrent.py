"""Recurrent layers and cells (LSTM, GRU, plain), with kernels above autograd.

Torch decomposes a recurrent net into its steps, or calls a kernel that takes only plain tensors.
Here a layer is one op: the batch may be sharded, the weights are gathered. In a cell, torch adds
gates in place into views, which needs all of them on one rank; here they are new tensors, and both
batch and weights may be sharded. See Note [Above autograd].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.core.placements import REPLICATE, SUM, Partial, Placement
from shardwise.core.untraced import UntracedFunction, differentiated_once
from shardwise.dispatch.rule import (
    Call,
    Choice,
    Rule,
    Table,
    sharded_together,
    table,
    unless_empty,
)
from shardwise.dtensor.autograd import direct_apply
from shardwise.dtensor.tensor import DTensor, run
from shardwise.lookup.ids import has_values
from shardwise.ops.operands import replicated

#: How many states each kind carries from step to step.
NUM_STATES = {"lstm": 2, "gru": 1, "rnn_tanh": 1, "rnn_relu": 1}


def recurrent(
    kind: str, has_biases: bool, bidirectional: bool, batch_first: bool, x: Any, *rest: Any
) -> tuple[Any, ...]:
    """The outputs of all steps and the final states. `rest`: initial states, then weights."""
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
    """The gradients of input, initial states and weights.

    `operands` are the gradients of the outputs, then the operands of `recurrent`, which runs
    again: what its kernels save for backward differs between devices.
    """
    num = 1 + NUM_STATES[kind]
    grads, inputs = operands[:num], operands[num:]
    if inputs[0].is_meta:
        return tuple(map(torch.empty_like, inputs))
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in inputs]
        outputs = recurrent(kind, has_biases, bidirectional, batch_first, *leaves)
        found = torch.autograd.grad(outputs, leaves, grads)
    # The plan expects the strides of the inputs; kernels return others.
    return tuple(
        g if g.stride() == x.stride() else torch.empty_like(x).copy_(g)
        for g, x in zip(found, inputs, strict=True)
    )


def recurrent_choices(call: Call) -> Iterator[Choice]:
    batch = _batch_dims(call)
    weights = [REPLICATE] * (len(call.inputs) - len(batch))
    yield call.replicated()
    local = unless_empty(recurrent)
    yield from sharded_together(call, (*batch, *weights), batch, local)


def recurrent_grad_choices(call: Call) -> Iterator[Choice]:
    batch = _batch_dims(call)
    num_weights = len(call.inputs) - 2 * len(batch)
    inputs: list[int | Placement] = [*batch, *batch, *[REPLICATE] * num_weights]
    outputs: list[int | Placement] = [*batch, *[SUM] * num_weights]
    yield call.replicated()
    yield from sharded_together(call, inputs, outputs, unless_empty(recurrent_grads))
    for reduce_op in ("sum", "avg"):
        term = Partial(reduce_op)
        others = [REPLICATE] * (len(call.inputs) - len(batch))
        yield Choice((*[term] * len(batch), *others), (term,) * len(call.outputs))


def _batch_dims(call: Call) -> list[int]:
    """The dim of the batch in the steps and in each state."""
    kind, batch_first = call.args[0], call.args[3]
    return [0 if batch_first else 1, *[1] * NUM_STATES[kind]]


# -- layers, above autograd ------------------------------------------------------------------


class Layer(UntracedFunction):
    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], *operands: Any) -> Any:
        ctx.options = options
        ctx.save_for_backward(*operands)
        return tuple(run(recurrent, *options, *operands))

    @staticmethod
    @differentiated_once("a recurrent layer")
    def backward(ctx: Any, *grads: Any) -> Any:
        like = ctx.saved_tensors[0]
        grads = tuple(distributed(grad, like) for grad in grads)  # zeros for an unused state
        return None, *run(recurrent_grads, *ctx.options, *grads, *ctx.saved_tensors)


_apply = direct_apply(Layer)


def _layers(
    kind: str,
    x: Any,
    states: list[Any],
    weights: list[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Any, ...]:
    """One layer after the other; the states of all layers are stacked along dim 0."""
    options = (kind, has_biases, bidirectional, batch_first)
    each, directions = len(weights) // num_layers, 2 if bidirectional else 1
    states = [distributed(state, x) for state in states]
    last: list[list[Any]] = [[] for _ in states]
    for layer in range(num_layers):
        own = [s.narrow(0, layer * directions, directions) for s in states]
        x, *found = _run(options, x, *own, *weights[layer * each : (layer + 1) * each])
        for kept, state in zip(last, found, strict=True):
            kept.append(state)
        if dropout and train and layer + 1 < num_layers:
            x = F.dropout(x, dropout, True)
    return x, *(kept[0] if num_layers == 1 else torch.cat(kept) for kept in last)


def _run(options: tuple[Any, ...], *operands: Any) -> Any:
    if torch.is_grad_enabled() and any(t.requires_grad for t in operands):
        return _apply(options, *operands)
    return run(recurrent, *options, *operands)


def distributed(state: Any, x: Any) -> Any:
    """`state` replicated, if it is zeros: a module or autograd makes them alike on every rank."""
    if isinstance(state, DTensor) or not isinstance(x, DTensor):
        return state
    if not has_values(state) or bool(state.any()):
        return state  # the call raises for a plain tensor
    return replicated(state, x)


def _kernel(kind: str) -> Callable[..., Any]:
    def layers(x: Any, hx: Any, params: list[Any], *options: Any) -> tuple[Any, ...]:
        states = list(hx) if kind == "lstm" else [hx]
        return _layers(kind, x, states, list(params), *options)

    return layers


# -- cells, above autograd -------------------------------------------------------------------

#: The number of gates in the rows of each kind's weights.
_NUM_GATES = {"lstm_cell": 4, "gru_cell": 3, "rnn_tanh_cell": 1, "rnn_relu_cell": 1}


def _state(kind: str, x: Any, state: Any, w_ih: Any, w_hh: Any) -> Any:
    """The previous state, distributed if it is plain zeros; torch raises for sizes that misfit."""
    if x.dim() == 2 and state.dim() == 2:
        hidden = w_hh.shape[1]
        fits = (
            tuple(w_hh.shape) == (_NUM_GATES[kind] * hidden, hidden)
            and tuple(w_ih.shape) == (_NUM_GATES[kind] * hidden, x.shape[1])
            and tuple(state.shape) == (x.shape[0], hidden)
        )
        if fits:
            return distributed(state, next(t for t in (x, w_ih, w_hh) if isinstance(t, DTensor)))
    fake = [torch.empty(t.shape, device="meta") for t in (x, state, w_ih, w_hh)]
    fake_state = [fake[1]] * 2 if kind == "lstm_cell" else fake[1]
    getattr(torch, kind)(fake[0], fake_state, *fake[2:])
    return state


def lstm_cell(
    x: Any, hx: list[Any], w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
) -> tuple[Any, Any]:
    h, c = (_state("lstm_cell", x, state, w_ih, w_hh) for state in hx)
    gates = F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh)
    enter, keep, new, leave = gates.chunk(4, 1)
    c = keep.sigmoid() * c + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * c.tanh(), c


def gru_cell(x: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    h = _state("gru_cell", x, hx, w_ih, w_hh)
    of_x = F.linear(x, w_ih, b_ih).chunk(3, 1)
    of_h = F.linear(h, w_hh, b_hh).chunk(3, 1)
    reset, keep = (of_x[0] + of_h[0]).sigmoid(), (of_x[1] + of_h[1]).sigmoid()
    new = (of_x[2] + of_h[2] * reset).tanh()
    return (h - new) * keep + new


def rnn_tanh_cell(x: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    h = _state("rnn_tanh_cell", x, hx, w_ih, w_hh)
    return (F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh)).tanh()


def rnn_relu_cell(x: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    h = _state("rnn_relu_cell", x, hx, w_ih, w_hh)
    return (F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh)).relu()


RULES: Table = table(
    ((recurrent,), Rule(recurrent_choices, "[t] b [i], [l] b [h], [w] -> [t] b [h], [l] b [h]")),
    (
        (recurrent_grads,),
        Rule(recurrent_grad_choices, "[t] b [h], [l] b [h], ... -> [t] b [i], [l] b [h], [w]"),
    ),
)

KERNELS: tuple[tuple[str, Any], ...] = (
    *((f"{kind}.input", _kernel(kind)) for kind in NUM_STATES),
    ("lstm_cell", lstm_cell),
    ("gru_cell", gru_cell),
    ("rnn_tanh_cell", rnn_tanh_cell),
    ("rnn_relu_cell", rnn_relu_cell),
)
