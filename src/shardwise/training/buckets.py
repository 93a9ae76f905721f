"""Buckets: parameters whose gradients are reduced together, flattened into one row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.core.mesh import Grid
from shardwise.core.placements import REPLICATE
from shardwise.dtensor.tensor import DTensor
from shardwise.ops.lookup.row_sparse import RowSparse
from shardwise.simulation.ranks import each_rank, localize, one_for_all, split_row
from shardwise.training.contract import Reduction

#: A collective: along which axis of which mesh, and how it reduces.
Collective = tuple[Grid, int, str]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters of one dtype and device whose gradients have the same reduction."""

    parameters: tuple[nn.Parameter, ...]
    reduction: Reduction


@dataclass(slots=True)
class SentBucket:
    """A row that is being reduced: its parameters, and its collectives in order."""

    parameters: list[nn.Parameter]
    collectives: tuple[Collective, ...]
    row: torch.Tensor


def make_buckets(
    parameters: Iterable[tuple[nn.Parameter, Reduction]], bucket_bytes: int
) -> list[Bucket]:
    """Buckets of parameters in the order given, that in which gradients are expected."""
    buckets: list[Bucket] = []
    room: dict[Any, tuple[int, list[nn.Parameter]]] = {}
    for parameter, reduction in parameters:
        key = (reduction, parameter.dtype, parameter.device)
        left, members = room.get(key, (0, []))
        size = parameter.numel() * parameter.element_size()
        if size > left and members:
            buckets.append(Bucket(tuple(members), reduction))
            left, members = 0, []
        members.append(parameter)
        room[key] = ((left or bucket_bytes) - size, members)
    return [*buckets, *(Bucket(tuple(m), key[0]) for key, (_, m) in room.items())]


def collectives_for(parameter: nn.Parameter, reduction: Reduction) -> tuple[Collective, ...]:
    """The collectives that the present gradient needs; equal on all ranks."""
    if reduction.means:
        return tuple((grid, axis, "sum") for grid, axis in reduction.means)
    grad: Any = parameter.grad
    if not isinstance(grad, DTensor):
        return ()  # the ranks of a DTensor run one program: none of them has a gradient
    return tuple(
        (grid, axis, grad.placements[axis].reduce_op)  # type: ignore[attr-defined]
        for grid, axis in reduction.sums
        if grad.placements[axis].is_partial()
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, RowSparse):
        tensor = tensor.terms()
    return tensor._local if isinstance(tensor, DTensor) else tensor


def flattened(members: Sequence[nn.Parameter], grid: Grid, share: float) -> torch.Tensor:
    """All gradients and a flag for each in one row, times `share`."""
    flags = [float(p.grad is not None) for p in members]
    parts = [
        torch.zeros_like(_local(p)) if p.grad is None else _local(p.grad).detach() for p in members
    ]

    def flatten(_: Any, *here: torch.Tensor) -> torch.Tensor:
        dense = [part.to_dense() if part.is_sparse else part for part in here]
        row = torch.cat([*(part.reshape(-1) for part in dense), dense[0].new_tensor(flags)])
        return row if share == 1 else row.mul_(share)

    return each_rank(grid, flatten, *(localize(grid, part) for part in parts), axes=())


def put_back(sent: SentBucket, row: torch.Tensor) -> None:
    """The reverse of `flattened`: set the gradients from the reduced row."""
    grid = sent.collectives[0][0]
    held = [localize(grid, _local(p).detach()) for p in sent.parameters]
    views, flags = split_row(grid, row, held)
    for number, (parameter, view) in enumerate(zip(sent.parameters, views, strict=True)):
        if parameter.grad is None and not one_for_all(flags)[number]:
            continue  # no rank used it
        _set_gradient(parameter, view, sent.collectives)


def _set_gradient(
    parameter: nn.Parameter, view: torch.Tensor, collectives: Sequence[Collective]
) -> None:
    if not isinstance(parameter, DTensor):
        parameter.grad = one_for_all(view) if type(parameter.data) is torch.Tensor else view
        return
    grad: Any = parameter.grad
    layout = parameter._layout if grad is None else grad._layout
    placements = list(layout.placements)
    for grid, axis, _ in collectives:
        if grid is layout.grid and placements[axis].is_partial():
            placements[axis] = REPLICATE
    parameter.grad = DTensor._wrap(view, layout.with_placements(tuple(placements)))
