"""Local tensors in files: one process's own, or those of a simulated world."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwise.core.mesh import Grid
from shardwise.core.world import current_world
from shardwise.errors import WorldError
from shardwise.simulation.local_tensor import LocalTensor
from shardwise.simulation.ranks import no_values
from shardwise.simulation.roster import make_roster


def packed(local: torch.Tensor) -> tuple[Any, ...]:
    """The kind of world, and plain values."""
    if isinstance(local, LocalTensor):
        return "simulated", local._parts, local._roster.ranks, local._roster.index
    return "real", local


def check_world(held: tuple[Any, ...], *, both: bool) -> None:
    """Raise unless the current world can load it; `both`: a process may load its own shard."""
    if held[0] == "real" and not dist.is_initialized():
        return
    world = current_world()
    if world.simulated and held[0] == "real":
        raise WorldError(
            f"The tensor was saved by one process, which holds only its own shard, and cannot be "
            f"loaded in {world}, which has all ranks. Save full_tensor() instead."
        )
    if not (world.simulated or both or held[0] == "real"):
        raise WorldError(
            f"The tensor was saved in a {held[0]} world and cannot be loaded in {world}. Save "
            "full_tensor() to move values between worlds."
        )


def unpacked(held: tuple[Any, ...], grid: Grid) -> torch.Tensor:
    """The inverse, on a mesh of the current world. A process takes its own shard."""
    if held[0] == "real":
        local: torch.Tensor = held[1]
        return local
    _, parts, ranks, index = held
    if grid.world.simulated:
        return LocalTensor(parts, make_roster(grid.world, ranks, index))
    if grid.outside:
        return no_values(grid, parts[0].dtype)
    own: torch.Tensor = parts[index[ranks.index(grid.world.rank)]]
    return own.clone()
