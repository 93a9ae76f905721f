"""The ranks that a sharded tensor lives on: a process group as a mesh of one axis."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.grid import Grid, grid_like, grid_of
from shardwise.core.world import current_world
from shardwise.errors import WorldError


def group_ranks(process_group: Any = None) -> tuple[int, ...]:
    """The ranks of a group, of which this process must be one."""
    world = current_world()
    if process_group is None:
        return tuple(range(world.size))
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise WorldError(
            f"Rank {world.rank} is not in the process group: only its ranks shard over it."
        )
    return tuple(dist.get_process_group_ranks(process_group))


def home_grid(process_group: Any = None, device_type: str = "cpu") -> Grid:
    """The mesh of a group, its ranks in their own order; equal groups share one."""
    ranks = group_ranks(process_group)
    world = current_world()
    known: Grid | None = world.grids.get((device_type, None, (len(ranks),), ranks))
    if known is not None:
        return known
    if len(ranks) == world.size:
        return grid_like(device_type, (len(ranks),), ranks, None)
    return grid_of(DeviceMesh.from_group(process_group, device_type))
