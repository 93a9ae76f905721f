"""Calls of one recurrent layer, and of its gradients."""

import torch

from shardwise.ops.nn.recurrent import (
    NUM_STATES,
    recurrent,
    recurrent_grads,
    recurrent_packed,
    recurrent_packed_grads,
)
from shardwise.testing import Sample

_generator = torch.Generator().manual_seed(5)


#: Too many operands to try everything.
RECURRENT_KERNELS = {recurrent, recurrent_grads, recurrent_packed, recurrent_packed_grads}


def t(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator)


def recurrent_samples() -> list[Sample]:
    return [
        *_layer("lstm", gates=4, bidirectional=True),
        *_layer("gru", gates=3, batch_first=True),
        *_layer("rnn_tanh", gates=1, biases=False),
        *_layer("gru", gates=3, bidirectional=True, batch_sizes=(3, 1)),
    ]


def _layer(
    kind, gates, biases=True, bidirectional=False, batch_first=False, batch_sizes=None
) -> list[Sample]:
    steps, batch, width, hidden = 2, 3, 4, 5
    directions = 2 if bidirectional else 1
    x = t(batch, steps, width) if batch_first else t(steps, batch, width)
    states = [t(directions, batch, hidden) for _ in range(NUM_STATES[kind])]
    weights = []
    for _ in range(directions):
        weights += [t(gates * hidden, width), t(gates * hidden, hidden)]
        weights += [t(gates * hidden), t(gates * hidden)] if biases else []
    run, run_grads, batch = recurrent, recurrent_grads, batch_first
    if batch_sizes:
        run, run_grads, batch = recurrent_packed, recurrent_packed_grads, batch_sizes
        x = t(sum(batch_sizes), width)
    options = (kind, biases, bidirectional, batch)
    outputs = run(*options, x, *states, *weights)
    grads = [torch.randn(o.shape, generator=_generator) for o in outputs]
    return [
        Sample(run, (*options, x, *states, *weights)),
        Sample(run_grads, (*options, *grads, x, *states, *weights)),
    ]
