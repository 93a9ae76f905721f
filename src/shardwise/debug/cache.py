"""Checks of a running program: are plans reused, do ranks draw the same random numbers?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.mesh import Grid, grid_like, grid_of
from shardwise.core.world import current_world
from shardwise.dispatch.plan import cache_counts
from shardwise.random.draws import compare_generators


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Calls of this process with a cached plan, calls that were planned, plans in the cache, and
    how many it may hold before all are dropped."""

    hits: int
    misses: int
    size: int
    limit: int


def cache_stats() -> CacheStats:
    """Hits and misses of the plan cache so far. A steady training loop must not add misses.

    >>> import shardwise
    >>> from shardwise.debug import cache_stats
    >>> with shardwise.simulate(2):
    ...     mesh = shardwise.init_device_mesh("cpu", (2,))
    ...     x = shardwise.ones(4, device_mesh=mesh, placements=[shardwise.Shard(0)])
    ...     before = cache_stats()
    ...     for _ in range(10):
    ...         x = x + x
    ...     after = cache_stats()
    >>> after.misses - before.misses, after.hits - before.hits, after.size - before.size
    (1, 9, 1)
    """
    return CacheStats(*cache_counts())


def check_rng(mesh: DeviceMesh | None = None, generator: torch.Generator | None = None) -> None:
    """Raise on every rank, naming the ranks, when their generators are in different states.

    Compares `generator`, or else the default ones of the CPU and of the mesh's device. All ranks of
    the mesh (without one, of the world) must call it. Costs one all-gather of 8 bytes per
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
    """All ranks along one axis, on a device that their process group supports."""
    world = current_world()
    device_type = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return grid_like(device_type, (world.size,), tuple(range(world.size)), None)
