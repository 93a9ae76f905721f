"""Moves between tilings, devices and plain tensors, with their gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch.functions import parse_to
from shardwise.comm import collectives
from shardwise.comm.watch import because
from shardwise.core.box import Box
from shardwise.core.layout import Layout
from shardwise.core.mesh import Grid
from shardwise.core.placements import Shard as ShardPlacement
from shardwise.core.untraced import UntracedFunction, differentiated_once
from shardwise.core.world import world_caches
from shardwise.errors import LayoutError, UnsupportedError
from shardwise.shard.spec import EnumerableShardingSpec, RankDevice, ShardMetadata
from shardwise.shard.tiling import (
    Tiling,
    group_grid,
    group_ranks,
    local_of_shards,
    make_tiling,
    on_device,
    shard_whole,
    shards_of,
)
from shardwise.simulation.ranks import each_rank, sized_copy
from shardwise.simulation.roster import rank_int

if TYPE_CHECKING:
    from shardwise.shard.tensor import ShardedTensor


def exchanged(x: torch.Tensor, counts: Sequence[Sequence[int]], grid: Grid) -> torch.Tensor:
    """Send `counts[i][j]` entries of dim 0 from rank i of the group to rank j.

    Received entries are concatenated in the order of ranks. All ranks know all counts; if all are
    0, nothing is sent.
    """
    if not any(map(any, counts)):
        return x
    arriving = list(zip(*counts, strict=True))
    sent = [_here(grid, [row[j] for row in counts]) for j in range(len(counts))]
    got = [_here(grid, [row[i] for row in arriving]) for i in range(len(counts))]
    return collectives.all_to_all_uneven(x, sent, got, grid, 0)


def _here(grid: Grid, values: Sequence[int]) -> Any:
    """This rank's value; in a simulated world, one value per rank."""
    if grid.coordinate is not None:
        return values[grid.coordinate[0]]
    return rank_int(grid.world, grid.ranks, values)


#: The index of a source's box, that of a target's box, and their intersection.
Overlap = tuple[int, int, Box]


@functools.lru_cache(maxsize=512)
def overlaps(source: Tiling, target: Tiling) -> dict[tuple[int, int], list[Overlap]]:
    """For each (sender, receiver), what the first has and the second needs, in a fixed order."""
    found: dict[tuple[int, int], list[Overlap]] = {}
    ranks = source.grid.ranks
    boxes = {rank: (source.on_rank(rank), target.on_rank(rank)) for rank in ranks}
    for sender in ranks:
        for receiver in ranks:
            shared = []
            for a, box in enumerate(boxes[sender][0]):
                for b, wanted in enumerate(boxes[receiver][1]):
                    if (common := box.box.intersect(wanted.box)) is not None:
                        shared.append((a, b, common))
            if shared:
                found[sender, receiver] = shared
    return found


world_caches.append(overlaps.cache_clear)


def move_boxes(local: torch.Tensor, source: Tiling, target: Tiling, what: str) -> torch.Tensor:
    """The local tensors of `target` from those of `source`: one all-to-all, owner to owner.

    Bytes are sent, so any dtype works.
    """
    grid, dtype = source.grid, local.dtype
    if grid.outside:
        return local
    pairs = overlaps(source, target)

    def pack(place: Any, mine: torch.Tensor) -> torch.Tensor:
        rank = grid.ranks[place[0]]
        views, boxes = source.box_views(rank, mine), source.on_rank(rank)
        parts = [mine.new_empty(0)]
        for receiver in grid.ranks:
            for a, _, box in pairs.get((rank, receiver), ()):
                parts.append(views[a][box.within(boxes[a].box).slices].reshape(-1))
        return torch.cat(parts).view(torch.uint8)

    def unpack(place: Any, arrived: torch.Tensor) -> torch.Tensor:
        rank = grid.ranks[place[0]]
        values = arrived.view(dtype)
        new = target.empty_local(rank, dtype, arrived.device)
        views, boxes, at = target.box_views(rank, new), target.on_rank(rank), 0
        for sender in grid.ranks:
            for _, b, box in pairs.get((sender, rank), ()):
                into = views[b][box.within(boxes[b].box).slices]
                into.copy_(values[at : at + box.volume].view(box.sizes))
                at += box.volume
        return new

    counts = [
        [sum(box.volume for *_, box in pairs.get((i, j), ())) for j in grid.ranks]
        for i in grid.ranks
    ]
    with because(what, implicit=False):
        packed = each_rank(grid, pack, local)
        arrived = exchanged(packed, [[n * dtype.itemsize for n in row] for row in counts], grid)
    return each_rank(grid, unpack, arrived)


class Reshard(UntracedFunction):
    @staticmethod
    def forward(ctx: Any, x: ShardedTensor, target: Tiling) -> ShardedTensor:
        ctx.source, ctx.kind = x._tiling, type(x)
        local = move_boxes(x._local, x._tiling, target, "reshard")
        return type(x).over(local, target, like=x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return sharded_like(grad, ctx.source, ctx.kind), None


class ToLocalShard(UntracedFunction):
    """A rank's shard as a plain tensor; its gradient is divided by `over`."""

    @staticmethod
    def forward(ctx: Any, x: ShardedTensor, over: int = 1) -> torch.Tensor:
        ctx.like, ctx.over = x, over
        return sized_copy(shards_of(x._tiling, x._local), True)

    @staticmethod
    @differentiated_once("a sharded module")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        tiling = ctx.like._tiling
        mine = local_of_shards(tiling, grad if ctx.over == 1 else grad / ctx.over)
        return type(ctx.like).over(mine, tiling, like=ctx.like), None


def sharded_like(x: Any, tiling: Tiling, kind: type[ShardedTensor]) -> ShardedTensor:
    """A gradient, perhaps a DTensor without a spec, in this tiling; differentiable."""
    recorded = torch.is_grad_enabled() and x.requires_grad
    if not isinstance(x, kind) and is_replicated(x) and not recorded:
        return kind.over(shard_whole(tiling, x._local), tiling)  # nothing is sent
    sharded = with_spec(x, kind)
    return sharded if sharded._tiling is tiling else Reshard.apply(sharded, tiling)


def is_replicated(x: Any) -> bool:
    return all(p.is_replicate() for p in x._layout.placements)


def with_spec(x: Any, kind: type[ShardedTensor]) -> ShardedTensor:
    """A DTensor as a sharded tensor, with a spec of its placement."""
    if isinstance(x, kind):
        return x
    if len(x.placements) != 1:
        raise LayoutError(
            f"A sharded tensor is split over the ranks of one group; found {x._layout!r}, on a "
            "mesh of several axes. redistribute() it, and wrap full_tensor() or its shards anew."
        )
    if not x.placements[0].is_shard():
        x = x.redistribute(placements=[ShardPlacement(0)])
    layout: Layout = x._layout
    device = torch.device(layout.grid.device_type)
    boxes = []
    for rank, coordinate in layout.grid.coordinates.items():
        offsets, sizes = layout.box(coordinate)
        boxes.append(ShardMetadata(offsets, sizes, RankDevice(rank, device)))
    tiling = make_tiling(EnumerableShardingSpec(boxes), tuple(layout.shape), layout.grid)
    return WithSpec.apply(x, tiling, kind)


class WithSpec(UntracedFunction):
    """A DTensor in the tiling that its shards fit."""

    @staticmethod
    def forward(ctx: Any, x: Any, tiling: Tiling, kind: type[ShardedTensor]) -> ShardedTensor:
        ctx.tiling, ctx.kind = tiling, kind
        return kind.over(local_of_shards(tiling, x._local), tiling)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return sharded_like(grad, ctx.tiling, ctx.kind), None, None


def converted(
    x: ShardedTensor, args: Any, kwargs: Any, copy: bool, process_group: Any
) -> ShardedTensor:
    """`x.to(*args, **kwargs)`, differentiable; `x` itself if nothing changes."""
    device, dtype, non_blocking, memory_format = parse_to(*args, **kwargs)
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        raise UnsupportedError(
            f"A sharded tensor was asked for memory_format={memory_format}: its shards are "
            "contiguous. Use torch.preserve_format or torch.contiguous_format."
        )
    if process_group is not None:
        _check_same_ranks(x, process_group)
    new: Any = x
    if dtype is not None and dtype != x.dtype:
        new = torch.Tensor.to(x, dtype)
    if device is not None and _is_elsewhere(device, x.device):
        new = ToDevice.apply(new, device, non_blocking, process_group)
    if memory_format is torch.contiguous_format and not new.is_contiguous():
        new = new.contiguous()
    return x.clone() if copy and new is x else new


def _check_same_ranks(x: ShardedTensor, process_group: Any) -> None:
    ranks, asked = x._tiling.grid.ranks, group_ranks(process_group)
    if ranks != asked:
        raise LayoutError(
            f"The tensor is on ranks {list(ranks)}, and the process_group has {list(asked)}: a "
            "conversion leaves every shard on its rank. Give a group of the same ranks in the same "
            "order, or reshard(spec)."
        )


def _is_elsewhere(device: torch.device, here: torch.device) -> bool:
    other_one = device.index is not None and device.index != here.index
    return device.type != here.type or (here.type != "cpu" and other_one)


class ToDevice(UntracedFunction):
    """The shards on another device, each on its rank; gradients go back to the first."""

    @staticmethod
    def forward(
        ctx: Any, x: ShardedTensor, device: torch.device, non_blocking: bool, process_group: Any
    ) -> ShardedTensor:
        ctx.source, ctx.device, ctx.kind = x._tiling, x.device, type(x)
        ctx.non_blocking = non_blocking
        ctx.there = _tiling_on(x, device, process_group)
        local = x._local.detach().to(device, non_blocking=non_blocking)
        return type(x).over(local, ctx.there, like=x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        sharded = sharded_like(grad, ctx.there, ctx.kind)
        local = sharded._local.to(ctx.device, non_blocking=ctx.non_blocking)
        return ctx.kind.over(local, ctx.source, like=sharded), None, None, None


def _tiling_on(x: ShardedTensor, device: torch.device, process_group: Any) -> Tiling:
    """The tiling on another device."""
    tiling = x._tiling
    if device.type == tiling.grid.device_type:
        return tiling
    # Ranks may name different device indices; they agree on the device type.
    spec = on_device(tiling, torch.device(device.type))
    grid = group_grid(process_group or x.process_group, device.type)
    return make_tiling(spec, tiling.shape, grid)
