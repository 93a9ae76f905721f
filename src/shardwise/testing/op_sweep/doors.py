"""Readings of a result: whole, in other placements, as local tensors; with their gradients.

A reading is a path through one or two of the doors (`redistribute`, `full_tensor`, `to_local`), and
the gradient that comes back through them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise._torch.pytree import tree_map_only
from shardwise.core.layout import Layout, canonical_order
from shardwise.core.placements import REPLICATE, SUM, Partial, Placement, Shard, short
from shardwise.dtensor.autograd import gradient_layout
from shardwise.dtensor.tensor import DTensor
from shardwise.simulation.parts import sized_copy
from shardwise.testing.op_sweep.alone import fixed_gradients, placed
from shardwise.testing.op_sweep.compare import Different
from shardwise.testing.op_sweep.table import OpCall, tensors_of
from shardwise.testing.op_sweep.ways import laid_out, lots_of

#: How a tensor is handed over at the end: as it lies, whole, or each rank's part of it. With
#: `terms`, the gradients that ranks bring back for a replica add up to the gradient.
_ENDS = ("placed", "whole", "whole, terms", "local", "local, terms")


@dataclass(frozen=True)
class Reading:
    """Where a tensor is moved to, if anywhere, and how it is handed over there."""

    target: tuple[Placement, ...] | None
    order: tuple[int, ...] | None
    end: str

    def __str__(self) -> str:
        order = "" if self.order is None else f" in order {self.order}"
        moved = "" if self.target is None else f"moved to {short(self.target)}{order}, "
        return moved + {"placed": "read as it lies"}.get(self.end, f"read {self.end}")

    def read(
        self, x: DTensor, grad: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """What is read of `x`, the gradient of that, and a DTensor of the same values."""
        if self.target is not None:
            x = x.redistribute(placements=self.target, order=self.order)
            _check_order(x._layout, self.order)
        mesh, layout = x.device_mesh, x._layout
        whole: tuple[Placement, ...] = (REPLICATE,) * len(x.placements)
        if self.end == "placed":
            return x, None if grad is None else laid_out(grad, mesh, whole), x
        terms = self.end.endswith("terms")
        where = gradient_layout(layout).placements
        order: tuple[int, ...] | None = layout.order
        if self.end.startswith("whole"):
            layout, where, order = layout.with_placements(whole), whole, None
        if terms:
            where = tuple(SUM if p.is_replicate() else p for p in where)
        door = x.full_tensor if self.end.startswith("whole") else x.to_local
        read = door(grad_placements=where if terms else None)
        given = None
        if grad is not None:
            given = sized_copy(laid_out(grad, mesh, where, order)._local, True)
        return read, given, DTensor._wrap(_inside(read), layout)


def _check_order(found: Layout, asked: tuple[int, ...] | None) -> None:
    """Without an order the axes are in their own: placements alone then say who holds what."""
    if found.order != canonical_order(found.placements, asked):
        raise Different(f"moved to {found!r}, asked for order {asked}")


def _inside(read: torch.Tensor) -> torch.Tensor:
    return sized_copy(read.detach(), False)


def reading(layout: Layout, key: str) -> Reading:
    """A reading of a tensor that lies so, drawn by lot: the same for the same key."""
    lots = lots_of(key)
    # Programs read results as they come more often than not.
    if lots.random() < 0.5:
        return Reading(None, None, lots.choice(_ENDS[1:]))
    num_axes = layout.grid.num_axes
    choices: list[Placement] = [REPLICATE, *map(Shard, range(len(layout.shape)))]
    if layout.dtype.is_floating_point or layout.dtype.is_complex:
        # Terms along several axes have to be of one kind.
        real = layout.dtype.is_floating_point
        choices.append(lots.choice([SUM, SUM, Partial("avg"), Partial("max")]) if real else SUM)
    placements = [lots.choice(choices) for _ in range(num_axes)]
    order = tuple(lots.sample(range(num_axes), num_axes)) if lots.random() < 0.5 else None
    last = placements[-1]
    if isinstance(last, Shard) and order is None and not _is_cut_before(placements):
        parts = layout.grid.shape[-1]
        sizes = (*[0] * (parts - 1), layout.shape[last.dim])
        placements[-1] = lots.choice([last, Shard(last.dim, sizes)])
    return Reading(tuple(placements), order, lots.choice(_ENDS))


def _is_cut_before(placements: list[Placement]) -> bool:
    """Whether an axis before the last one shards its dim: no sizes are named inside of a shard."""
    *before, last = placements
    return isinstance(last, Shard) and any(p.is_shard(last.dim) for p in before)


# Writes after a call: what shares memory on one device shares values everywhere.
#
# An operand or a result is written to, and then all operands and all results are read, with the
# gradients of the operands. A write that one device refuses must be refused. What backward needs
# is another matter: where one device finds it overwritten, a rank may have kept a copy of it, and
# the other way round. Then either may refuse, and what is not refused must be right.

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
