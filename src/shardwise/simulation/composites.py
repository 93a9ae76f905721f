"""Composite ops on LocalTensors: recurrent layers, packed sequences, `tensor_split` by a tensor,
`linear_cross_entropy` in chunks.

Torch runs these in C++ as steps, each of which is an op on the ranks' parts. Between the steps it
reads memory, which a LocalTensor lacks, and it writes to tensors that it made from plain ones
alone, which ranks share. So counts become the plain tensor that all ranks agree on, and plain
states become one tensor per rank, before torch runs the op. The backward of a loss in chunks does
the same in Python; it runs on the plain tensors of each rank.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from shardwise._torch.dispatch import chunked_losses, run_instead
from shardwise.core.untraced import UntracedFunction
from shardwise.simulation.local_tensor import LocalTensor, from_ranks
from shardwise.simulation.roster import rank_values_of

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


class _OnEachRank(UntracedFunction):
    """An op on the plain tensors of each rank, under its own autograd; see the module's text.

    The first result is differentiable.
    """

    @staticmethod
    def forward(ctx: Any, op: Any, like: LocalTensor, *args: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.world, ctx.ranks = like._roster.world, like.ranks
        ctx.calls = []
        columns = []
        for rank in ctx.ranks:
            here = [
                x.detach().requires_grad_(needed) if isinstance(x, torch.Tensor) else x
                for x, needed in zip(
                    (_held_by(rank, arg) for arg in args), ctx.needs_input_grad[2:], strict=True
                )
            ]
            with torch.enable_grad():
                found = op(*here)
            found = found if isinstance(found, tuple) else (found,)
            ctx.calls.append((here, found[0]))
            columns.append([x.detach() for x in found])
        joined = [from_ranks(ctx.world, ctx.ranks, row, True) for row in zip(*columns, strict=True)]
        ctx.mark_non_differentiable(*joined[1:])
        return tuple(joined)

    @staticmethod
    def backward(ctx: Any, grad: Any, *_: Any) -> Any:
        needed = [i for i, needs in enumerate(ctx.needs_input_grad[2:]) if needs]
        grads: list[Any] = [None] * len(ctx.needs_input_grad)
        if grad is None:
            return tuple(grads)
        rows = [
            torch.autograd.grad(
                loss, [here[i] for i in needed], _held_by(rank, grad), retain_graph=True
            )
            for rank, (here, loss) in zip(ctx.ranks, ctx.calls, strict=True)
        ]
        for i, row in zip(needed, zip(*rows, strict=True), strict=True):
            grads[2 + i] = from_ranks(ctx.world, ctx.ranks, row, True)
        return tuple(grads)


def _held_by(rank: int, x: Any) -> Any:
    if type(x) is LocalTensor:
        return x.on_rank(rank)
    numbers = rank_values_of(x)
    return x if numbers is None else numbers.values[numbers.ranks.index(rank)]


def _chunked_loss(op: Any) -> Any:
    def run(own: Any, *args: Any) -> Any:
        like = next((x for x in args if type(x) is LocalTensor), None)
        if like is None or not torch.is_grad_enabled():
            return own(*args)
        found = _OnEachRank.apply(op, like, *args)
        return found if len(found) > 1 else found[0]

    return run


@functools.cache
def run_composites() -> list[torch.library.Library]:
    """Run these ops so from now on; the cache keeps the libraries alive."""
    library = torch.library.Library("aten", "IMPL")
    for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        run_instead(library, getattr(aten, kind).input, _recurrent)
        run_instead(library, getattr(aten, kind).data, _recurrent_packed)
    run_instead(library, aten._pad_packed_sequence.default, _pad_packed)
    run_instead(library, aten._pack_padded_sequence_backward.default, _pack_grad)
    run_instead(library, aten.tensor_split.tensor_indices_or_sections, _split)
    losses = torch.library.Library("torch_nn", "IMPL")
    for loss in chunked_losses():
        run_instead(losses, loss, _chunked_loss(loss))
    return [library, losses]
