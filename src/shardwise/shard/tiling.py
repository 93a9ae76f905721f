"""Tiling: a spec on a shape and the ranks of a group, and how each rank stores its boxes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise._torch.c10d import mesh_without_groups
from shardwise.core.layout import Layout, contiguous_stride, make_layout, shard_with
from shardwise.core.mesh import Grid, grid_like, grid_of
from shardwise.core.world import current_world, world_caches
from shardwise.errors import WorldError
from shardwise.shard.spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    RankDevice,
    Shape,
    ShardingSpec,
    ShardMetadata,
    check_ranks,
    device_type_of,
    split_dims,
)
from shardwise.simulation.ranks import each_rank, localize

# Note [Natural, permuted and loose tilings]
# A rank stores its boxes of the tensor in one local tensor.
#
#     natural    each rank has one shard, an interval of one dim, in the order of ranks. The tensor
#                is a DTensor whose layout is `Shard(dim, sizes)`: every op works.
#     permuted   the same, but the intervals are not in the order of ranks. No layout says that.
#     loose      anything else: boxes of a rank that are not adjacent, splits along two dims.
#
# A permuted or loose tensor is stored as a DTensor of one dim: the values of rank 0, then of rank 1
# and so on. Elementwise ops do not depend on where in the tensor a value belongs. Lookups and
# linear layers need one shard per rank, so they work on natural and permuted tilings.


Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class DimSplit:
    """The dim that is split, and each rank's `(start, length)` of it."""

    dim: int
    intervals: dict[int, Interval]


@dataclass(frozen=True, slots=True, eq=False)
class Tiling:
    """Which rank holds which boxes of a tensor. One object per value; compared by identity."""

    spec: ShardingSpec
    shape: Shape
    grid: Grid
    #: All boxes, in the order of the spec.
    boxes: tuple[ShardMetadata, ...]
    #: None for a loose tiling.
    split: DimSplit | None
    natural: bool

    def layout(self, dtype: torch.dtype) -> Layout:
        """How a tensor of this tiling is stored; see Note [Natural, permuted and loose tilings]."""
        ranks = self.grid.ranks
        if self.natural and self.split is not None:
            dim, shape = self.split.dim, self.shape
            sizes = tuple(self.split.intervals[rank][1] for rank in ranks)
        else:
            sizes = tuple(self.local_shape(rank)[0] for rank in ranks)
            dim, shape = 0, (sum(sizes),)
        placement = shard_with(dim, sizes, shape[dim], len(sizes))
        return make_layout(self.grid, (placement,), shape, contiguous_stride(shape), dtype)

    def on_rank(self, rank: int) -> list[ShardMetadata]:
        return [box for box in self.boxes if box.rank == rank]

    def device(self, rank: int) -> torch.device:
        """Where a rank stores its boxes. Ranks that share a process share its device."""
        mine = self.on_rank(rank)
        if len(self.grid.world.present) > 1 or not mine:
            return torch.device(self.grid.device_type)
        return mine[0].place.device()

    def shard_shape(self, rank: int) -> Shape:
        """The shape of a rank's one shard."""
        assert self.split is not None, "a loose tiling has several shards per rank"
        shape = list(self.shape)
        shape[self.split.dim] = self.split.intervals[rank][1]
        return tuple(shape)

    def local_shape(self, rank: int) -> Shape:
        """The shape of a rank's local tensor."""
        if self.natural:
            return self.shard_shape(rank)
        return (sum(box.numel for box in self.on_rank(rank)),)

    def shard(self, rank: int, local: torch.Tensor) -> torch.Tensor:
        """A rank's shard, as a view of its local tensor."""
        return local if self.natural else local.view(self.shard_shape(rank))

    def box_views(self, rank: int, local: torch.Tensor) -> list[torch.Tensor]:
        """A rank's boxes, as views of its local tensor, in the order of the spec."""
        mine = self.on_rank(rank)
        if self.split is None:
            parts = local.split([box.numel for box in mine]) if mine else ()
            return [p.view(box.shard_sizes) for p, box in zip(parts, mine, strict=True)]
        dim, (start, _) = self.split.dim, self.split.intervals[rank]
        shard, found = self.shard(rank, local), []
        for box in mine:
            # An empty box may be anywhere, also outside the interval.
            length = box.shard_sizes[dim]
            at = box.shard_offsets[dim] - start if length else 0
            found.append(shard.narrow(dim, at, length))
        return found

    def empty_local(self, rank: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Uninitialised memory for a rank's local tensor."""
        return torch.empty(self.local_shape(rank), dtype=dtype, device=device)

    def __deepcopy__(self, memo: Any) -> Tiling:
        return self  # one object per value

    def __reduce__(self) -> Any:
        return make_tiling, (self.spec, self.shape, self.grid)


@functools.lru_cache(maxsize=4096)
def make_tiling(spec: ShardingSpec, shape: Shape, grid: Grid) -> Tiling:
    """The tiling of a tensor, checked against its shape and the ranks of the group."""
    boxes = spec.boxes(shape)
    check_ranks(boxes, grid.ranks)
    found = _find_split(spec, boxes, shape, grid)
    if found is None:
        return Tiling(spec, shape, grid, boxes, None, natural=False)
    starts = [found.intervals[rank][0] for rank in grid.ranks if found.intervals[rank][1]]
    return Tiling(spec, shape, grid, boxes, found, natural=starts == sorted(starts))


world_caches.append(make_tiling.cache_clear)


def _find_split(
    spec: ShardingSpec, boxes: Sequence[ShardMetadata], shape: Shape, grid: Grid
) -> DimSplit | None:
    """The split, where every rank's boxes are adjacent along one dim; None elsewhere."""
    # An empty tensor may be split too: then every box counts.
    filled = [box for box in boxes if box.numel] or list(boxes)
    dims = split_dims(filled, shape)
    if len(dims) > 1 or not shape:
        return None
    named = spec.dim % len(shape) if isinstance(spec, ChunkShardingSpec) else 0
    dim = dims.pop() if dims else named
    intervals: dict[int, Interval] = dict.fromkeys(grid.ranks, (0, 0))
    for box in sorted(filled, key=lambda box: box.shard_offsets[dim]):
        start, length = intervals[box.rank]
        if length and start + length != box.shard_offsets[dim]:
            return None
        start = start if length else box.shard_offsets[dim]
        intervals[box.rank] = (start, length + box.shard_sizes[dim])
    return DimSplit(dim, intervals)


def group_ranks(process_group: Any = None) -> tuple[int, ...]:
    """The ranks of a group, of which this process must be one."""
    world = current_world()
    if process_group is None:
        return tuple(range(world.size))
    if is_outside(process_group):
        raise WorldError(
            f"Rank {world.rank} is not in the process group: only its ranks shard over it."
        )
    return tuple(dist.get_process_group_ranks(process_group))


def is_outside(process_group: Any) -> bool:
    """Whether this rank is not in the group; see Note [Ranks outside a mesh]."""
    return process_group is dist.GroupMember.NON_GROUP_MEMBER


def outside_tiling(spec: ShardingSpec, shape: Shape) -> Tiling:
    """The tiling on a rank outside the group, which knows only the ranks that the spec names."""
    ranks = sorted({box.rank for box in spec.boxes(shape)})
    mesh = mesh_without_groups(device_type_of(spec, shape), torch.tensor(ranks))
    return make_tiling(spec, shape, grid_of(mesh))


def group_grid(process_group: Any = None, device_type: str = "cpu") -> Grid:
    """A process group as a mesh of one axis, ranks in the group's order; equal groups share one."""
    ranks = group_ranks(process_group)
    world = current_world()
    known: Grid | None = world.grids.get((device_type, None, (len(ranks),), ranks))
    if known is not None:
        return known
    if len(ranks) == world.size:
        return grid_like(device_type, (len(ranks),), ranks, None)
    return grid_of(DeviceMesh.from_group(process_group, device_type))


def shard_whole(tiling: Tiling, whole: torch.Tensor) -> torch.Tensor:
    """The local tensors of a tensor that every rank has whole."""

    def copied(place: Any, whole: torch.Tensor) -> torch.Tensor:
        rank = tiling.grid.ranks[place[0]]
        local = tiling.empty_local(rank, whole.dtype, tiling.device(rank))
        for box, view in zip(tiling.on_rank(rank), tiling.box_views(rank, local), strict=True):
            view.copy_(whole[box.box.slices])
        return local

    return each_rank(tiling.grid, copied, localize(tiling.grid, whole))


def shards_of(tiling: Tiling, local: torch.Tensor) -> torch.Tensor:
    """The ranks' shards, as views of their local tensors."""
    grid = tiling.grid
    return each_rank(grid, lambda place, mine: tiling.shard(grid.ranks[place[0]], mine), local)


def local_of_shards(tiling: Tiling, shards: torch.Tensor) -> torch.Tensor:
    """The reverse of `shards_of`: local tensors out of shards."""

    def hold(place: Any, shard: torch.Tensor) -> torch.Tensor:
        if not tiling.natural:
            return shard.reshape(-1)
        # An empty shard may be empty along another dim.
        return shard.contiguous().view(tiling.shard_shape(tiling.grid.ranks[place[0]]))

    return each_rank(tiling.grid, hold, localize(tiling.grid, shards))


def natural_spec(tiling: Tiling) -> ChunkShardingSpec:
    """Dim 0 split over all ranks of the group, in their order."""
    device = torch.device(tiling.grid.device_type)
    return ChunkShardingSpec(0, [RankDevice(rank, device) for rank in tiling.grid.ranks])


def listed_spec(tiling: Tiling) -> ChunkShardingSpec | EnumerableShardingSpec:
    """The spec, which one of your own class becomes a list of boxes."""
    if isinstance(tiling.spec, (ChunkShardingSpec, EnumerableShardingSpec)):
        return tiling.spec
    return EnumerableShardingSpec(tiling.boxes)


def on_device(tiling: Tiling, device: torch.device) -> ShardingSpec:
    spec = listed_spec(tiling)
    if isinstance(spec, ChunkShardingSpec):
        return ChunkShardingSpec(spec.dim, [RankDevice(p.rank, device) for p in spec.placements])
    return EnumerableShardingSpec(
        [
            ShardMetadata(b.shard_offsets, b.shard_sizes, RankDevice(b.rank, device))
            for b in spec.shards
        ]
    )
