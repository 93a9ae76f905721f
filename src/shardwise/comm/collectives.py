"""Comm: the one place that issues collectives.

Each is a `torch.ops._c10d_functional` op on a tensor, in both worlds and under torch.compile, so
that counters, compilers and LocalTensors all see the same call.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.core.grid import Grid
from shardwise.errors import WorldError

_ops = torch.ops._c10d_functional
# Without the Python methods around them, which take a microsecond or two of their own.
_all_reduce = _ops.all_reduce.default._op
_all_gather_into_tensor = _ops.all_gather_into_tensor.default._op
_reduce_scatter_tensor = _ops.reduce_scatter_tensor.default._op
_all_to_all_single = _ops.all_to_all_single.default._op
_broadcast = _ops.broadcast.default._op
_wait_tensor = _ops.wait_tensor.default._op


def group_name(grid: Grid, axis: int) -> str:
    """The name of the process group along `axis`, as collective ops take it."""
    name = grid.group_names[axis]
    if name is None:
        if not grid.world.alive:
            raise WorldError(
                f"{grid!r} belongs to {grid.world}, whose process group is gone. Tensors do not "
                "outlive their world: gather them before, or load them from a checkpoint after."
            )
        # One process that plays all ranks sees the groups of rank 0 alone: there, a name of our own
        # stands for all groups along the axis, whether rank 0 is in one of them or not.
        if grid.world.simulated:
            name = f"axis {axis} of {grid.ranks} as {grid.shape}"
        else:
            name = grid.mesh.get_group(axis).group_name
        grid.world.lines[name] = grid.lines(axis)
        grid.world.axis_names[name] = grid.axis_name(axis)
        grid.group_names[axis] = name
    return name


#: Dtypes that gloo does not reduce, and the one they are reduced in; the same in both worlds.
_REDUCED_AS: dict[torch.dtype, torch.dtype] = {
    torch.int16: torch.int32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}


def all_reduce(x: torch.Tensor, reduce_op: str, grid: Grid, axis: int) -> torch.Tensor:
    if x.dtype in _REDUCED_AS:
        return all_reduce(x.to(_REDUCED_AS[x.dtype]), reduce_op, grid, axis).to(x.dtype)
    return _wait(_all_reduce(x.contiguous(), reduce_op, group_name(grid, axis)))


def start_all_reduce(x: torch.Tensor, reduce_op: str, grid: Grid, axis: int) -> torch.Tensor:
    """An all-reduce that runs on; its result may be read after `finished`."""
    return _ops.all_reduce(x.contiguous(), reduce_op, group_name(grid, axis))


def finished(x: torch.Tensor) -> torch.Tensor:
    """The result of a collective that was started, once it is there."""
    return _wait(x)


def all_gather(x: torch.Tensor, grid: Grid, axis: int) -> torch.Tensor:
    """The ranks' tensors, all of one shape, joined along dim 0 in the order of the axis."""
    return _wait(_all_gather_into_tensor(x.contiguous(), grid.shape[axis], group_name(grid, axis)))


def reduce_scatter(x: torch.Tensor, reduce_op: str, grid: Grid, axis: int) -> torch.Tensor:
    """Each rank's equal part of dim 0 of the reduction."""
    if x.dtype in _REDUCED_AS:
        return reduce_scatter(x.to(_REDUCED_AS[x.dtype]), reduce_op, grid, axis).to(x.dtype)
    name = group_name(grid, axis)
    return _wait(_reduce_scatter_tensor(x.contiguous(), reduce_op, grid.shape[axis], name))


def all_to_all(x: torch.Tensor, grid: Grid, axis: int) -> torch.Tensor:
    """Send entry i of dim 0 to coordinate i; stack what arrives in the order of the axis."""
    splits = [1] * grid.shape[axis]
    name = group_name(grid, axis)
    return _wait(_all_to_all_single(x.contiguous(), splits, splits, name))


def all_to_all_uneven(
    x: torch.Tensor, num_sent: list[Any], num_received: list[Any], grid: Grid, axis: int
) -> torch.Tensor:
    """Send `num_sent[i]` entries of dim 0 to coordinate i; join what arrives in that order.

    In a simulated world a count that differs between ranks is a RankInt.
    """
    return _wait(start_all_to_all_uneven(x, num_sent, num_received, grid, axis))


def start_all_to_all_uneven(
    x: torch.Tensor, num_sent: list[Any], num_received: list[Any], grid: Grid, axis: int
) -> torch.Tensor:
    """As `all_to_all_uneven`, running on; its result may be read after `finished`."""
    name = group_name(grid, axis)
    return _all_to_all_single(x.contiguous(), num_received, num_sent, name)


def broadcast(x: torch.Tensor, source: int, grid: Grid, axis: int) -> torch.Tensor:
    """The tensor of coordinate `source`, on all coordinates."""
    return _wait(_broadcast(x.contiguous(), source, group_name(grid, axis)))


def _wait(x: torch.Tensor) -> torch.Tensor:
    return _wait_tensor(x)
