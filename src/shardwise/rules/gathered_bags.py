"""Bags whose ids are sharded along the axis that shards the table's rows.

Every rank of the axis gets all of the ids, does its part of all bags, and the parts are combined
and cut along the bags again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.core.layout import Layout
from shardwise.core.placements import REPLICATE, Placement
from shardwise.redistribute.execute import execute
from shardwise.redistribute.search import find_steps
from shardwise.rules.rule import Call, Sent


def shared_axes(table: Layout, ids: Layout) -> list[int]:
    """The axes that shard both the table's rows and the ids."""
    return [axis for axis in table.axes_of(0) if ids.placements[axis].is_shard()]


def with_placement(layout: Layout, axes: Sequence[int], placement: Placement) -> Layout:
    placements = list(layout.placements)
    for axis in axes:
        placements[axis] = placement
    return layout.with_placements(tuple(placements))


def everywhere(x: torch.Tensor, layout: Layout, axes: Sequence[int]) -> tuple[torch.Tensor, Layout]:
    """The whole of `x` on every rank of the axes, and how it lies then."""
    target = with_placement(layout, axes, REPLICATE)
    return execute(x, find_steps(layout, target)), target


def are_ids_sharded(call: Call) -> bool:
    return bool(call.placed) and call.placed[1].is_shard() and call.inputs[1].ndim == 2


def sent(call: Call, *reductions: str) -> tuple[Sent, ...]:
    """Ids, and their weights, to everyone; then the results."""
    gathered = [
        Sent("all_gather", num_bytes(meta.shape, meta.dtype))
        for meta in call.inputs[1:]
        if meta.ndim == 2
    ]
    out = call.outputs[0]
    results = num_bytes(out.shape, out.dtype)
    return (*gathered, *(Sent(kind, results) for kind in reductions))


def num_bytes(shape: Sequence[Any], dtype: torch.dtype) -> float:
    return float(math.prod(s if type(s) is int else 1024 for s in shape) * dtype.itemsize)
