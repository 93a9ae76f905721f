"""Pickled sharded tensors: a process group is kept as its ranks, and looked up when loading."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardwise.errors import WorldError
from shardwise.shard.spec import decode_spec, encode_spec
from shardwise.shard.tiling import Tiling, group_ranks, home_grid, make_tiling
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
    return pickling.packed(local), encode_spec(tiling.spec), grid_facts


def unpacked(held: Any, spec: Any, meta: Any) -> tuple[torch.Tensor, Tiling]:
    """The reverse, in the current world."""
    shape, device_type, ranks = meta
    pickling.check_world(held, both=False)
    group = group_of_load(ranks, "The tensor")
    tiling = make_tiling(decode_spec(spec), tuple(shape), home_grid(group, device_type))
    return pickling.unpacked(held, tiling.grid), tiling


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
