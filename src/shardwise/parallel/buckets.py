"""Buckets: parameters whose gradients travel together, and the row of numbers they travel as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.comm.ranks import each_rank, localize, one_for_all, split_row
from shardwise.core.grid import Grid
from shardwise.core.placements import REPLICATE
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import LayoutError
from shardwise.parallel.line import Line


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters whose gradients travel together; `average` when they are each rank's own."""

    parameters: tuple[nn.Parameter, ...]
    grid: Grid
    axis: int
    average: bool


def make_buckets(module: nn.Module, line: Line, bucket_bytes: int) -> list[Bucket]:
    """Parameters in reverse order, in buckets of one dtype, mesh and kind."""
    buckets: list[Bucket] = []
    room: dict[Any, tuple[int, list[nn.Parameter]]] = {}
    for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
        kind = _kind(parameter, line)
        if kind is None or line.size == 1:
            continue
        key = (parameter.dtype, parameter.device, *kind)
        left, members = room.get(key, (0, []))
        size = parameter.numel() * parameter.element_size()
        if size > left and members:
            buckets.append(Bucket(tuple(members), *kind))
            left, members = 0, []
        members.append(parameter)
        room[key] = ((left or bucket_bytes) - size, members)
    return [*buckets, *(Bucket(tuple(m), *key[2:]) for key, (_, m) in room.items())]


def _kind(parameter: torch.Tensor, line: Line) -> tuple[Grid, int, bool] | None:
    """Grid and axis to reduce over, and whether to average; None when there is nothing to do."""
    if not isinstance(parameter, DTensor):
        return line.grid, line.axis, True
    grid = parameter._layout.grid
    axis = line.axis_in(grid)
    if axis is not None:
        return (grid, axis, False) if parameter.placements[axis].is_replicate() else None
    if grid.world.simulated:
        raise LayoutError(
            f"A parameter is on {grid!r} of ranks {list(grid.ranks)}: the part of the mesh that "
            "rank 0 sees. A simulated world has all ranks: give parallelize_module the whole mesh."
        )
    return line.grid, line.axis, True


def waits(parameter: torch.Tensor, bucket: Bucket) -> bool:
    """Whether there is something to reduce: a DTensor's gradient may be whole already."""
    grad = parameter.grad
    if bucket.average or grad is None:
        return True
    return isinstance(grad, DTensor) and grad.placements[bucket.axis].is_partial()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local if isinstance(tensor, DTensor) else tensor


def flattened(members: Sequence[nn.Parameter], bucket: Bucket) -> torch.Tensor:
    """All gradients and the flags in one row; each rank's share of the mean where they are own."""
    flags = [float(p.grad is not None) for p in members]
    parts = [
        torch.zeros_like(_local(p)) if p.grad is None else _local(p.grad).detach() for p in members
    ]
    share = 1 / bucket.grid.shape[bucket.axis] if bucket.average else 1.0

    def flatten(_: Any, *here: torch.Tensor) -> torch.Tensor:
        row = torch.cat([*(part.reshape(-1) for part in here), here[0].new_tensor(flags)])
        return row if share == 1 else row.mul_(share)

    held = [localize(bucket.grid, part) for part in parts]
    return each_rank(bucket.grid, flatten, *held, axes=())


def put_back(parameters: Sequence[nn.Parameter], bucket: Bucket, flat: torch.Tensor) -> None:
    """The reverse of `flattened`, of what was reduced: gradients of the parameters."""
    held = [localize(bucket.grid, _local(p).detach()) for p in parameters]
    pieces, flags = split_row(bucket.grid, flat, held)
    for number, (parameter, piece) in enumerate(zip(parameters, pieces, strict=True)):
        if parameter.grad is None and not one_for_all(flags)[number]:
            continue  # no rank used it
        _set_gradient(parameter, piece, bucket)


def _set_gradient(parameter: nn.Parameter, piece: torch.Tensor, bucket: Bucket) -> None:
    if not isinstance(parameter, DTensor):
        parameter.grad = one_for_all(piece) if type(parameter.data) is torch.Tensor else piece
        return
    grad: Any = parameter.grad
    layout = parameter._layout if grad is None else grad._layout
    if not bucket.average:
        placements = list(layout.placements)
        placements[bucket.axis] = REPLICATE
        layout = layout.with_placements(tuple(placements))
    parameter.grad = DTensor.wrap(piece, layout)
