"""What a pickled DTensor consists of: worlds come and go, so a mesh is kept by value."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.core.grid import grid_like
from shardwise.core.layout import Layout, make_layout
from shardwise.core.world import current_world
from shardwise.errors import WorldError
from shardwise.simulation.local_tensor import LocalTensor
from shardwise.simulation.ranks import my_coordinate
from shardwise.simulation.roster import make_roster


def packed(local: torch.Tensor, layout: Layout) -> tuple[Any, Any, Any]:
    if isinstance(local, LocalTensor):
        tensor: Any = ("simulated", local._parts, local._roster.ranks, local._roster.index)
    else:
        tensor = ("real", local)
    grid = layout.grid
    mesh = (grid.device_type, grid.shape, grid.ranks, grid.axis_names)
    return (
        tensor,
        mesh,
        (layout.placements, layout.order, layout.shape, layout.stride, layout.dtype),
    )


def unpacked(tensor: Any, mesh: Any, layout: Any) -> tuple[torch.Tensor, Layout]:
    """The tensor in the world of now. What was played has every rank's part; a process only one."""
    world = current_world()
    device_type, shape, ranks, axis_names = mesh
    if world.simulated and tensor[0] == "real":
        raise WorldError(
            f"The tensor was saved by one process, which holds its own part only, and cannot be "
            f"loaded in {world}, which plays all ranks. Save full_tensor() instead."
        )
    grid = grid_like(device_type, shape, ranks, axis_names)
    placements, order, global_shape, stride, dtype = layout
    found = make_layout(grid, placements, global_shape, stride, dtype, order)
    if tensor[0] == "real":
        return tensor[1], found
    _, parts, held_by, index = tensor
    if world.simulated:
        return LocalTensor(parts, make_roster(world, held_by, index)), found
    my_coordinate(grid)  # a rank outside the mesh has no part
    return parts[index[held_by.index(world.rank)]].clone(), found
