"""How well the plans of calls are reused."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.dtensor.entries import cache_counts


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Calls of this process that found their plan, calls that had to be planned, plans kept now,
    and how many may be kept before all are dropped."""

    hits: int
    misses: int
    size: int
    limit: int


def cache_stats() -> CacheStats:
    """What the cache of planned calls has done so far. Training that goes on must not add misses.

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
