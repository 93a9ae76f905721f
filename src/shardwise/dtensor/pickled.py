"""What a pickled DTensor consists of: worlds come and go, so a mesh is kept by value."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.core.grid import grid_like
from shardwise.core.layout import Layout, make_layout
from shardwise.simulation import pickling


def packed(local: torch.Tensor, layout: Layout) -> tuple[Any, Any, Any]:
    grid = layout.grid
    mesh = (grid.device_type, grid.shape, grid.ranks, grid.axis_names)
    return (
        pickling.packed(local),
        mesh,
        (layout.placements, layout.order, layout.shape, layout.stride, layout.dtype),
    )


def unpacked(tensor: Any, mesh: Any, layout: Any) -> tuple[torch.Tensor, Layout]:
    """The tensor in the world of now. What was played has every rank's part; a process only one."""
    pickling.check_world(tensor, both=True)
    grid = grid_like(*mesh)
    placements, order, global_shape, stride, dtype = layout
    found = make_layout(grid, placements, global_shape, stride, dtype, order)
    return pickling.unpacked(tensor, grid), found
