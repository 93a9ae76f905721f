"""Counts communication, explains plans, draws which rank holds what, compares what ranks run.

A collective that ran is a `CommEvent`; `Traffic` adds events up, groups and shows them, also for
`report`. A report of a whole step is in `report`, comparisons with one device in `testing`.
"""

from shardwise.debug.comm_mode import CommDebugMode
from shardwise.debug.events import CommEvent
from shardwise.debug.explain import CacheStats, Explanation, PlannedCall, cache_stats, explain
from shardwise.debug.journal import agree, check_rng
from shardwise.debug.visualize import ShardingPicture, visualize_sharding

__all__ = [
    "CacheStats",
    "CommDebugMode",
    "CommEvent",
    "Explanation",
    "PlannedCall",
    "ShardingPicture",
    "agree",
    "cache_stats",
    "check_rng",
    "explain",
    "visualize_sharding",
]
