"""Asking whether all ranks would draw the same random numbers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.grid import Grid, grid_like, grid_of
from shardwise.core.world import current_world
from shardwise.rules.draws import compare_generators


def check_rng(mesh: DeviceMesh | None = None, generator: torch.Generator | None = None) -> None:
    """Raise on every rank, naming the ranks, when their generators are in different states.

    Asks about `generator`, or else about the default ones of the CPU and of the mesh's device. All
    ranks of the mesh (without one, of the world) must call it. Costs one all-gather of 8 bytes per
    generator and mesh axis.

    >>> import shardwise
    >>> from shardwise.debug import check_rng
    >>> with shardwise.simulate(4):
    ...     check_rng()
    """
    grid = grid_of(mesh) if mesh is not None else _everyone()
    if generator is not None:
        devices = [generator.device]
    else:
        devices = [torch.device(t) for t in dict.fromkeys(("cpu", grid.device_type))]
    for device in devices:
        compare_generators(grid, device, generator, "check_rng")


def _everyone() -> Grid:
    """All ranks in a row, on a device that their process group can send from."""
    world = current_world()
    device_type = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return grid_like(device_type, (world.size,), tuple(range(world.size)), None)
