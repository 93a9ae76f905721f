"""LSTM, GRU and plain recurrent nets, above autograd: see Note [Above autograd].

Torch takes a recurrent net apart into its steps, or hands it whole to a kernel that knows plain
tensors only. Here a layer is one op: the batch may be sharded, the weights are gathered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from shardwise.core.once import differentiated_once
from shardwise.core.placements import REPLICATE
from shardwise.core.untraced import UntracedFunction
from shardwise.dtensor.autograd import direct_apply
from shardwise.dtensor.tensor import DTensor, run
from shardwise.rules.ids import has_values
from shardwise.rules.recurrent import NUM_STATES, recurrent, recurrent_grads


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
        grads = tuple(distributed(grad, like) for grad in grads)  # of a state nobody used: zeros
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
    """Zeros that a module or autograd makes are the same on every rank."""
    if isinstance(state, DTensor) or not isinstance(x, DTensor):
        return state
    if not has_values(state) or bool(state.any()):
        return state  # the call says that it is plain
    return DTensor.from_local(state, x.device_mesh, [REPLICATE] * x._layout.grid.num_axes)


def lstm(x: Any, hx: list[Any], params: list[Any], *options: Any) -> tuple[Any, ...]:
    return _layers("lstm", x, list(hx), list(params), *options)


def gru(x: Any, hx: Any, params: list[Any], *options: Any) -> tuple[Any, ...]:
    return _layers("gru", x, [hx], list(params), *options)


def rnn_tanh(x: Any, hx: Any, params: list[Any], *options: Any) -> tuple[Any, ...]:
    return _layers("rnn_tanh", x, [hx], list(params), *options)


def rnn_relu(x: Any, hx: Any, params: list[Any], *options: Any) -> tuple[Any, ...]:
    return _layers("rnn_relu", x, [hx], list(params), *options)


_BY_NAME = {"lstm": lstm, "gru": gru, "rnn_tanh": rnn_tanh, "rnn_relu": rnn_relu}
KERNELS = tuple((f"{name}.input", _BY_NAME[name]) for name in NUM_STATES)
