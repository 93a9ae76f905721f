"""Composite ops on LocalTensors: recurrent layers, packed sequences, `tensor_split` by a tensor.

Torch runs these in C++ as steps, each of which is an op on the ranks' parts. Between the steps it
reads memory, which a LocalTensor lacks, and it writes to tensors that it made from plain ones
alone, which ranks share. So counts become the plain tensor that all ranks agree on, and plain
states become one tensor per rank, before torch runs the op.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from shardwise._torch.dispatch import run_instead
from shardwise.simulation.local_tensor import LocalTensor

aten = torch.ops.aten


def _counts(x: Any) -> Any:
    return x.agreed() if type(x) is LocalTensor else x


def _of_each_rank(states: Any, like: LocalTensor) -> Any:
    if isinstance(states, (list, tuple)):
        return [_of_each_rank(state, like) for state in states]
    if type(states) is LocalTensor:
        return states
    roster = like._roster
    return LocalTensor([states.clone() for _ in range(roster.num_parts)], roster, sized=True)


def _recurrent(own: Any, x: Any, states: Any, *rest: Any) -> Any:
    return own(x, _of_each_rank(states, x) if type(x) is LocalTensor else states, *rest)


def _recurrent_packed(own: Any, x: Any, batch_sizes: Any, states: Any, *rest: Any) -> Any:
    states = _of_each_rank(states, x) if type(x) is LocalTensor else states
    return own(x, _counts(batch_sizes), states, *rest)


def _pad_packed(own: Any, x: Any, batch_sizes: Any, *options: Any) -> Any:
    if type(x) is not LocalTensor:
        return own(x, batch_sizes, *options)
    batch_sizes = _counts(batch_sizes)
    one = x.on_rank(x.ranks[0]).detach()
    _, lengths = aten._pad_packed_sequence.default(one, batch_sizes, *options)
    return padded_steps(x, batch_sizes.tolist(), *options), lengths


def padded_steps(
    x: torch.Tensor, batch_sizes: Sequence[int], batch_first: bool, value: float, total: int
) -> torch.Tensor:
    """The steps of a packed sequence, each padded to the first, in one tensor of `total` steps."""
    steps = []
    for step, size in zip(x.split(list(batch_sizes)), batch_sizes, strict=True):
        no_others = (0, 0) * (x.dim() - 1)
        missing = (*no_others, 0, batch_sizes[0] - size)
        steps.append(torch.constant_pad_nd(step, missing, value))
    steps += [torch.full_like(steps[0], value)] * (total - len(steps))
    padded = torch.stack(steps)
    return padded.transpose(0, 1) if batch_first else padded


def _split(own: Any, x: Any, where: Any, *dim: Any) -> Any:
    return own(x, _counts(where), *dim)


def _pack_grad(own: Any, grad: Any, shape: Any, batch_sizes: Any, batch_first: bool) -> Any:
    if type(grad) is not LocalTensor:
        return own(grad, shape, batch_sizes, batch_first)
    sizes = _counts(batch_sizes).tolist()
    return padded_steps(grad, sizes, batch_first, 0.0, shape[1 if batch_first else 0])


@functools.cache
def run_composites() -> torch.library.Library:
    """Run these ops so from now on; the cache keeps the library alive."""
    library = torch.library.Library("aten", "IMPL")
    for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        run_instead(library, getattr(aten, kind).input, _recurrent)
        run_instead(library, getattr(aten, kind).data, _recurrent_packed)
    run_instead(library, aten._pad_packed_sequence.default, _pad_packed)
    run_instead(library, aten._pack_padded_sequence_backward.default, _pack_grad)
    run_instead(library, aten.tensor_split.tensor_indices_or_sections, _split)
    return library
