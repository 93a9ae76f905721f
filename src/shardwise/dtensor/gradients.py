"""Reduce Partial gradients together, in buckets."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise._torch.autograd import users_hooks
from shardwise.comm import collectives
from shardwise.comm.watch import because
from shardwise.core.layout import Layout
from shardwise.core.mesh import Grid
from shardwise.core.placements import REPLICATE, Partial, Placement
from shardwise.core.untraced import without_autocast
from shardwise.dispatch.wrapped import recall, reduced_layout
from shardwise.errors import UnsupportedError
from shardwise.simulation.ranks import each_rank, split_row

#: Bytes per collective. Larger saves latency, smaller saves memory.
BUCKET_BYTES = 25 * 1024 * 1024


def refuse_hooks(parameter: torch.Tensor, named: str) -> None:
    """Raise if a parameter that will be replaced has hooks of a user: they would be lost."""
    if any(users_hooks(parameter)):
        raise UnsupportedError(
            f"{named} has hooks, and will be replaced by a sharded one, whose gradients they would "
            "not see. Register hooks on the new parameter, after the module was parallelized."
        )


def reduce_gradients(
    parameters: Iterable[torch.Tensor], *, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Reduce every gradient that is Partial, in place, with few large collectives.

    Otherwise each Partial gradient is reduced at its first use, with a collective of its own.

    >>> import shardwise, torch
    >>> from shardwise.debug import CommDebugMode
    >>> with shardwise.simulate(2):
    ...     mesh = shardwise.init_device_mesh("cpu", (2,))
    ...     layer = shardwise.distribute_module(torch.nn.Linear(3, 3), mesh)
    ...     x = shardwise.ones(4, 3, device_mesh=mesh, placements=[shardwise.Shard(0)])
    ...     layer(x).sum().backward()
    ...     with CommDebugMode() as comm:
    ...         shardwise.reduce_gradients(layer.parameters())
    >>> layer.weight.grad.placements, comm.get_total_counts()
    ((Replicate(),), 1)
    """
    gradients: list[Any] = [p.grad for p in parameters if hasattr(p.grad, "_layout")]
    for gradient, found in zip(gradients, reduced_together(gradients, bucket_bytes), strict=True):
        gradient._local, gradient._layout = found


def reduced_together(
    tensors: Sequence[Any], bucket_bytes: int = BUCKET_BYTES
) -> list[tuple[torch.Tensor, Layout]]:
    """Local tensor and layout of each DTensor, reduced where it was Partial."""
    held: dict[int, HeldGradient] = {}
    for tensor in tensors:
        known = recall(tensor)
        if known is None or known[1] is not reduced_layout(tensor._layout):
            known = tensor._local, tensor._layout
        held.setdefault(id(tensor), HeldGradient(*known))
    _reduce_all(list(held.values()), bucket_bytes)
    return [(held[id(tensor)].local, held[id(tensor)].layout) for tensor in tensors]


@dataclass(slots=True)
class HeldGradient:
    """The local tensor and layout of a gradient, updated axis by axis."""

    local: torch.Tensor
    layout: Layout


def _reduce_all(gradients: Sequence[HeldGradient], bucket_bytes: int) -> None:
    for axis in range(max((g.layout.grid.num_axes for g in gradients), default=0)):
        alike: dict[Any, list[HeldGradient]] = defaultdict(list)
        for gradient in gradients:
            layout = gradient.layout
            if axis < layout.grid.num_axes and isinstance(layout.placements[axis], Partial):
                reduce_op = layout.placements[axis].reduce_op  # type: ignore[attr-defined]
                alike[layout.grid, reduce_op, layout.dtype].append(gradient)
        for (grid, reduce_op, _), members in alike.items():
            for bucket in _buckets(members, bucket_bytes):
                with because("reduce_gradients", implicit=False):
                    _reduce_bucket(bucket, reduce_op, grid, axis)


def _buckets(gradients: Sequence[HeldGradient], bucket_bytes: int) -> list[list[HeldGradient]]:
    buckets: list[list[HeldGradient]] = []
    room = 0
    for gradient in gradients:
        size = math.prod(gradient.layout.shape) * gradient.layout.dtype.itemsize
        if size > room or not buckets:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(gradient)
        room -= size
    return buckets


@without_autocast
def _reduce_bucket(bucket: Sequence[HeldGradient], reduce_op: str, grid: Grid, axis: int) -> None:
    def flatten(_: Any, *parts: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.reshape(-1) for part in parts])

    views = locals_ = [gradient.local for gradient in bucket]
    if not grid.outside:
        flat = each_rank(grid, flatten, *locals_, axes=())
        reduced = collectives.all_reduce(flat, reduce_op, grid, axis)
        views, _ = split_row(grid, reduced, locals_)
    for gradient, local in zip(bucket, views, strict=True):
        placements: list[Placement] = list(gradient.layout.placements)
        placements[axis] = REPLICATE
        gradient.local = local
        gradient.layout = gradient.layout.with_placements(tuple(placements))
