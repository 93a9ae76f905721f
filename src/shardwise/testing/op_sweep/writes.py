"""Writes after a call: what shares memory on one device shares values everywhere.

An operand or a result is written to, and then all operands and all results are read, with the
gradients of the operands. A write that one device refuses must be refused. What backward needs is
another matter: where one device finds it overwritten, a rank may have kept a copy of it, and the
other way round. Then either may refuse, and what is not refused must be right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise._torch.pytree import tree_map_only
from shardwise.testing.op_sweep.alone import fixed_gradients, placed
from shardwise.testing.op_sweep.pick import lots_of
from shardwise.testing.op_sweep.table import OpCall, tensors_of

#: What the operands are to autograd: plain tensors, results of an earlier op, or leaves.
_HISTORIES = ("none", "op", "leaf")


@dataclass(frozen=True)
class Write:
    """Which tensor is written to, and what the operands are to autograd."""

    to: str
    number: int
    history: str

    def __str__(self) -> str:
        words = {"none": "", "op": ", with gradients", "leaf": ", operands are leaves"}
        return f"written to {self.to} {self.number}{words[self.history]}"


@dataclass
class Written:
    """What is read after a write."""

    values: list[torch.Tensor]
    requires_grad: list[bool]
    grads: list[Any]


def drawn_write(sample: OpCall, num_results: int, differentiable: bool, key: str) -> Write:
    """A write to an operand or a result, drawn by lot: the same for the same key."""
    lots = lots_of(key)
    names = [("operand", i) for i in range(len(sample.tensors))]
    names += [("result", i) for i in range(num_results)]
    to, number = lots.choice(names)
    return Write(to, number, lots.choice(_HISTORIES) if differentiable else "none")


def written(
    write: Write,
    sample: OpCall,
    op: Callable[..., Any],
    place: Callable[[torch.Tensor], torch.Tensor],
    like: Callable[[torch.Tensor, Any], torch.Tensor],
    *,
    apart: bool = False,
) -> Written:
    """Call the op, write, and read; raises what the write or the backward pass raises.

    With `apart`, the op keeps copies of its operands and results for its backward pass.
    """
    if write.history == "none":
        sample = replace(sample, wants_grad=(False,) * len(sample.wants_grad))
    args, kwargs, leaves = placed(sample, place)
    if write.history == "op":
        args, kwargs = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
    torch.default_generator.manual_seed(0)
    operands = tensors_of((args, kwargs))
    if apart:
        args, kwargs = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
    results = tensors_of(op(*args, **kwargs))
    if apart:
        results = [t.clone() for t in results]
        for operand, copy in zip(operands, tensors_of((args, kwargs)), strict=True):
            operand.detach().copy_(copy.detach())  # some ops write to operands themselves
    _write((operands if write.to == "operand" else results)[write.number])
    tensors = [*operands, *results]
    grads = _gradients(tensors, leaves, like) if leaves else []
    requires_grad = [t.requires_grad for t in tensors]
    return Written([t.detach() for t in tensors], requires_grad, grads)


def repeats_memory(tensor: torch.Tensor) -> bool:
    """Whether entries share memory, as those of overlapping windows: a write is then undefined."""
    if not tensor.numel():
        return False
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    places = torch.arange(reach + 1).as_strided(tensor.shape, tensor.stride())
    return places.unique().numel() < tensor.numel()


def is_overwritten(error: BaseException) -> bool:
    """Whether autograd refuses since a write has changed what a backward pass needs."""
    return "modified by an inplace operation" in str(error)


def _write(tensor: torch.Tensor) -> None:
    if tensor.dtype is torch.bool:
        tensor.logical_not_()
    else:
        tensor.mul_(2).add_(1)


def _gradients(
    tensors: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    like: Callable[[torch.Tensor, Any], torch.Tensor],
) -> list[Any]:
    differentiable = [t for t in tensors if t.requires_grad]
    given = list(map(like, fixed_gradients(differentiable), differentiable))
    return list(torch.autograd.grad(differentiable, leaves, given, allow_unused=True))
