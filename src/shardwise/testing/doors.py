"""Reads of a result through conversions, and writes to operands and results.

A reading is one or two of the conversions `redistribute`, `full_tensor` and `to_local`, and the
gradient that comes back through them.

After a write to an operand or a result, all operands and results are read, with the gradients of
the operands: what shares memory on one device shares values everywhere. A write that one device
refuses must be refused. Whether backward needs an overwritten value may differ, since a rank may
have kept a copy of it: either side may refuse, and what is not refused must be right.
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
from shardwise.testing.alone import OpCall, fixed_gradients, placed, tensors_of
from shardwise.testing.compare import Different
from shardwise.testing.layouts import laid_out, random_of

#: How a tensor is read at the end: as it is placed, whole, or each rank's shard. With `terms`, the
#: gradients that ranks give for a replica add up to the gradient.
_ENDS = ("placed", "whole", "whole, terms", "local", "local, terms")


@dataclass(frozen=True)
class Reading:
    """The placements to redistribute a tensor to, if any, and how it is read there."""

    target: tuple[Placement, ...] | None
    order: tuple[int, ...] | None
    end: str

    def __str__(self) -> str:
        order = "" if self.order is None else f" in order {self.order}"
        moved = "" if self.target is None else f"moved to {short(self.target)}{order}, "
        return moved + {"placed": "read as placed"}.get(self.end, f"read {self.end}")

    def read(
        self, x: DTensor, grad: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """What is read of `x`, its gradient, and a DTensor of the same values."""
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
    """Without an order, placements alone say which rank holds what."""
    if found.order != canonical_order(found.placements, asked):
        raise Different(f"moved to {found!r}, asked for order {asked}")


def _inside(read: torch.Tensor) -> torch.Tensor:
    return sized_copy(read.detach(), False)


def reading(layout: Layout, key: str) -> Reading:
    """A reading of a tensor in this layout, drawn at random by `key`."""
    random = random_of(key)
    # Most programs read results as they come.
    if random.random() < 0.5:
        return Reading(None, None, random.choice(_ENDS[1:]))
    num_axes = layout.grid.num_axes
    choices: list[Placement] = [REPLICATE, *map(Shard, range(len(layout.shape)))]
    if layout.dtype.is_floating_point or layout.dtype.is_complex:
        # Terms along several axes have to be of one kind.
        real = layout.dtype.is_floating_point
        choices.append(random.choice([SUM, SUM, Partial("avg"), Partial("max")]) if real else SUM)
    placements = [random.choice(choices) for _ in range(num_axes)]
    order = tuple(random.sample(range(num_axes), num_axes)) if random.random() < 0.5 else None
    last = placements[-1]
    if isinstance(last, Shard) and order is None and not _is_sharded_before(placements):
        parts = layout.grid.shape[-1]
        sizes = (*[0] * (parts - 1), layout.shape[last.dim])
        placements[-1] = random.choice([last, Shard(last.dim, sizes)])
    return Reading(tuple(placements), order, random.choice(_ENDS))


def _is_sharded_before(placements: list[Placement]) -> bool:
    """Whether an earlier axis shards the last one's dim, so that no sizes may be given."""
    *before, last = placements
    return isinstance(last, Shard) and any(p.is_shard(last.dim) for p in before)


# -- writes ----------------------------------------------------------------------------------

#: The autograd history of the operands: none, results of an earlier op, or leaves.
_HISTORIES = ("none", "op", "leaf")


@dataclass(frozen=True)
class Write:
    """Which tensor is written to, and the autograd history of the operands."""

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
    """A write to an operand or a result, drawn at random by `key`."""
    random = random_of(key)
    names = [("operand", i) for i in range(len(sample.tensors))]
    names += [("result", i) for i in range(num_results)]
    to, number = random.choice(names)
    return Write(to, number, random.choice(_HISTORIES) if differentiable else "none")


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
    """Whether entries share memory, as in overlapping windows: a write is then undefined."""
    if not tensor.numel():
        return False
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    places = torch.arange(reach + 1).as_strided(tensor.shape, tensor.stride())
    return places.unique().numel() < tensor.numel()


def is_overwritten(error: BaseException) -> bool:
    """Whether autograd refuses because a write changed what backward needs."""
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
