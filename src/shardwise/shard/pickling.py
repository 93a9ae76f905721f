"""Pickled sharded tensors: a process group is kept as its ranks, and looked up when loading."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.core.mesh import grid_like
from shardwise.dtensor.pickling import checked_local
from shardwise.errors import WorldError
from shardwise.shard.spec import decode_spec, encode_spec
from shardwise.shard.tiling import Tiling, group_ranks, home_grid, listed_spec, make_tiling
from shardwise.simulation import pickling

_group: contextvars.ContextVar[Any] = contextvars.ContextVar("process group", default=None)


@contextlib.contextmanager
def load_with_process_group(process_group: Any) -> Iterator[Any]:
    """Inside, loaded sharded tensors belong to this group, not to the whole world."""
    token = _group.set(process_group)
    try:
        yield process_group
    finally:
        _group.reset(token)


def packed(local: torch.Tensor, tiling: Tiling) -> tuple[Any, Any, Any]:
    """A sharded tensor as this process's local tensors and plain values."""
    grid = tiling.grid
    grid_facts = (tiling.shape, grid.device_type, grid.ranks)
    return pickling.packed(local), encode_spec(listed_spec(tiling)), grid_facts


def unpacked(held: Any, spec: Any, meta: Any) -> tuple[torch.Tensor, Tiling]:
    """The reverse, in the current world."""
    shape, device_type, ranks = meta
    pickling.check_world(held, both=False)
    if dist.is_initialized():
        grid = home_grid(group_of_load(ranks, "The tensor"), device_type)
    else:
        grid = grid_like(device_type, (len(ranks),), tuple(ranks), None)
    tiling = make_tiling(decode_spec(spec), tuple(shape), grid)
    first = held[1] if held[0] == "real" else held[1][0]
    return checked_local(held, tiling.layout(first.dtype)), tiling


def group_of_load(ranks: Sequence[int], what: str) -> Any:
    """The group of the load; raises where `what` was saved on other ranks."""
    group = _group.get()
    found = group_ranks(group)
    if found != tuple(ranks):
        raise WorldError(
            f"{what} was saved on the group of ranks {list(ranks)}, but is loaded on "
            f"{list(found)}. Put the load under load_with_process_group(group) with such a group, "
            "or reshard(spec) before saving."
        )
    return group
