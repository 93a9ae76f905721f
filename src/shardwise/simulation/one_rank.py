"""One rank of a world of any size, played without values: shapes, layouts and collectives alone.

`simulate` plays all ranks, which takes as long as they are many. Here this process is one rank, and
its tensors are on the meta device: collectives return shapes, so nothing is sent or computed. What
ranks compare before they shard is real: every other rank answers as this one does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from shardwise._torch.c10d import HashStore, fresh_c10d, silent_group
from shardwise.core.world import World, enter_world, leave_world

_BACKEND = "shardwise_one_rank"


@contextlib.contextmanager
def play_one_rank(rank: int, world_size: int) -> Iterator[World]:
    """This process as one rank of a world in which tensors have no values."""
    if _BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            _BACKEND, _make_group, extended_api=True, devices=["cpu", "cuda"]
        )
    with fresh_c10d():
        dist.init_process_group(_BACKEND, store=HashStore(), rank=rank, world_size=world_size)
        world = enter_world(dist.GroupMember.WORLD, simulated=False)
        world.has_values = False
        try:
            with torch.device("meta"):
                yield world
        finally:
            leave_world(world)


def _make_group(options: Any, backend_options: Any) -> Any:
    return silent_group(options.group_rank, options.group_size)
