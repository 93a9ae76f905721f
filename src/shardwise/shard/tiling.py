"""Tiling: a sharding spec met a tensor's shape and a group of ranks.

Note [Natural, permuted and loose tilings]
What a rank holds is one tensor, in every case.

    natural    each rank holds one block, a stretch of one dim, in the order of ranks. The tensor is
               a DTensor whose layout is `Shard(dim, sizes)`: every op works.
    permuted   the same, but ranks hold the stretches in another order. No layout says that.
    loose      anything else: several pieces that do not join, tiles of two dims.

A permuted or loose tensor is held as a DTensor of one dim, the values of rank 0, then of rank 1 and
so on: elementwise ops do not care where in the tensor a value belongs. Lookups and linear layers
work on blocks, so on natural and permuted tilings alike.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.layout import Layout, contiguous_stride, make_layout, shard_with
from shardwise.core.mesh import Grid, grid_like, grid_of
from shardwise.core.world import current_world, world_caches
from shardwise.errors import LayoutError, WorldError
from shardwise.shard.spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    RankDevice,
    Shape,
    ShardingSpec,
    ShardMetadata,
)
from shardwise.simulation.ranks import each_rank, localize

Stretch = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Blocks:
    """The dim that is cut, and each rank's `(start, length)` of it."""

    dim: int
    stretches: dict[int, Stretch]


@dataclass(frozen=True, slots=True, eq=False)
class Tiling:
    """Which rank holds which boxes of a tensor. One object per value; compared by identity."""

    spec: ShardingSpec
    shape: Shape
    grid: Grid
    #: All boxes, in the order of the spec.
    boxes: tuple[ShardMetadata, ...]
    #: None for a loose tiling.
    blocks: Blocks | None
    natural: bool

    def layout(self, dtype: torch.dtype) -> Layout:
        """How a tensor of this tiling is held; see Note [Natural, permuted and loose tilings]."""
        ranks = self.grid.ranks
        if self.natural and self.blocks is not None:
            dim, shape = self.blocks.dim, self.shape
            sizes = tuple(self.blocks.stretches[rank][1] for rank in ranks)
        else:
            dim, shape = 0, (sum(box.numel for box in self.boxes),)
            sizes = tuple(sum(box.numel for box in self.on_rank(rank)) for rank in ranks)
        placement = shard_with(dim, sizes, shape[dim], len(sizes))
        return make_layout(self.grid, (placement,), shape, contiguous_stride(shape), dtype)

    def on_rank(self, rank: int) -> list[ShardMetadata]:
        return [box for box in self.boxes if box.rank == rank]

    def device(self, rank: int) -> torch.device:
        """Where a rank keeps its pieces. Ranks that share a process share its device."""
        mine = self.on_rank(rank)
        if len(self.grid.world.present) > 1 or not mine:
            return torch.device(self.grid.device_type)
        return mine[0].placement.device

    def block_shape(self, rank: int) -> Shape:
        """The shape of the one block that a rank holds."""
        assert self.blocks is not None, "a loose tiling has no blocks"
        shape = list(self.shape)
        shape[self.blocks.dim] = self.blocks.stretches[rank][1]
        return tuple(shape)

    def block(self, rank: int, held: torch.Tensor) -> torch.Tensor:
        """The block out of what a rank holds."""
        return held if self.natural else held.view(self.block_shape(rank))

    def pieces(self, rank: int, held: torch.Tensor) -> list[torch.Tensor]:
        """The rank's boxes, as views of what it holds, in the order of the spec."""
        mine = self.on_rank(rank)
        if self.blocks is None:
            parts = held.split([box.numel for box in mine]) if mine else ()
            return [p.view(box.shard_sizes) for p, box in zip(parts, mine, strict=True)]
        dim, (start, _) = self.blocks.dim, self.blocks.stretches[rank]
        block, found = self.block(rank, held), []
        for box in mine:
            # An empty box may stand anywhere, also outside the stretch.
            length = box.shard_sizes[dim]
            at = box.shard_offsets[dim] - start if length else 0
            found.append(block.narrow(dim, at, length))
        return found

    def held(self, rank: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """New memory for what a rank holds."""
        if self.natural:
            return torch.empty(self.block_shape(rank), dtype=dtype, device=device)
        size = sum(box.numel for box in self.on_rank(rank))
        return torch.empty(size, dtype=dtype, device=device)

    def cut(self, rank: int, whole: torch.Tensor) -> torch.Tensor:
        """What a rank holds of a whole tensor, as a copy."""
        held = self.held(rank, whole.dtype, self.device(rank))
        for box, piece in zip(self.on_rank(rank), self.pieces(rank, held), strict=True):
            piece.copy_(whole[box.box.slices])
        return held

    def __deepcopy__(self, memo: Any) -> Tiling:
        return self  # one object per value

    def __reduce__(self) -> Any:
        return make_tiling, (self.spec, self.shape, self.grid)


@functools.lru_cache(maxsize=4096)
def make_tiling(spec: ShardingSpec, shape: Shape, grid: Grid) -> Tiling:
    """The tiling of a tensor, checked against its shape and the ranks of the group."""
    boxes = spec.boxes(shape)
    check_ranks(boxes, grid.ranks)
    found = _blocks(spec, boxes, shape, grid)
    if found is None:
        return Tiling(spec, shape, grid, boxes, None, natural=False)
    starts = [found.stretches[rank][0] for rank in grid.ranks if found.stretches[rank][1]]
    return Tiling(spec, shape, grid, boxes, found, natural=starts == sorted(starts))


world_caches.append(make_tiling.cache_clear)


def device_type_of(spec: ShardingSpec) -> str:
    """The one kind of device that a spec names."""
    kinds = sorted({place.device.type for place in spec.places()})
    if len(kinds) > 1:
        raise LayoutError(f"A tensor is on one kind of device; the spec names {kinds}: {spec}.")
    return kinds[0]


def check_ranks(boxes: Sequence[ShardMetadata], ranks: Sequence[int]) -> None:
    outside = sorted({box.rank for box in boxes} - set(ranks))
    if outside:
        raise LayoutError(
            f"The spec places shards on ranks {outside}, which are not in the group of ranks "
            f"{list(ranks)}. A placement names a rank of the world: 'rank:{ranks[0]}/cpu'."
        )


def _blocks(
    spec: ShardingSpec, boxes: Sequence[ShardMetadata], shape: Shape, grid: Grid
) -> Blocks | None:
    """The blocks, where every rank's boxes join to one."""
    # A tensor without values may be cut all the same: then every box counts.
    filled = [box for box in boxes if box.numel] or list(boxes)
    dims = {d for box in filled for d, size in enumerate(box.shard_sizes) if size != shape[d]}
    if len(dims) > 1 or not shape:
        return None
    named = spec.dim % len(shape) if isinstance(spec, ChunkShardingSpec) else 0
    dim = dims.pop() if dims else named
    stretches: dict[int, Stretch] = dict.fromkeys(grid.ranks, (0, 0))
    for box in sorted(filled, key=lambda box: box.shard_offsets[dim]):
        start, length = stretches[box.rank]
        if length and start + length != box.shard_offsets[dim]:
            return None
        start = start if length else box.shard_offsets[dim]
        stretches[box.rank] = (start, length + box.shard_sizes[dim])
    return Blocks(dim, stretches)


# The ranks that a sharded tensor lives on: a process group as a mesh of one axis.


def group_ranks(process_group: Any = None) -> tuple[int, ...]:
    """The ranks of a group, of which this process must be one."""
    world = current_world()
    if process_group is None:
        return tuple(range(world.size))
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise WorldError(
            f"Rank {world.rank} is not in the process group: only its ranks shard over it."
        )
    return tuple(dist.get_process_group_ranks(process_group))


def home_grid(process_group: Any = None, device_type: str = "cpu") -> Grid:
    """The mesh of a group, its ranks in their own order; equal groups share one."""
    ranks = group_ranks(process_group)
    world = current_world()
    known: Grid | None = world.grids.get((device_type, None, (len(ranks),), ranks))
    if known is not None:
        return known
    if len(ranks) == world.size:
        return grid_like(device_type, (len(ranks),), ranks, None)
    return grid_of(DeviceMesh.from_group(process_group, device_type))


# Which rank holds which row of a table that is cut by rows.
# MERGED


@dataclass(frozen=True, slots=True)
class RowOwners:
    """Rows, numbered anew where blocks do not follow the order of ranks.

    By their numbers, rank 0 of the group has the first rows, rank 1 the next, and so on.
    """

    #: The first number of each rank, and one past the last.
    bounds: tuple[int, ...]
    #: One past the last row of each block in the order of rows, and what to add to its rows. Empty
    #: where the numbers of rows are the rows.
    ends: tuple[int, ...] = ()
    shifts: tuple[int, ...] = ()

    def numbered(self, rows: torch.Tensor) -> torch.Tensor:
        if not self.shifts:
            return rows
        block = torch.bucketize(rows, rows.new_tensor(self.ends), right=True)
        return rows + rows.new_tensor(self.shifts)[block]

    def owners(self, numbers: torch.Tensor) -> torch.Tensor:
        """The place in the group of the rank that holds each row."""
        return torch.bucketize(numbers, numbers.new_tensor(self.bounds[1:]), right=True)


def wire_dtype(num_rows: int) -> torch.dtype:
    """What the numbers of rows are sent as."""
    return torch.int32 if num_rows < 2**31 else torch.int64


@functools.lru_cache(maxsize=512)
def row_owners(tiling: Tiling) -> RowOwners:
    assert tiling.blocks is not None, "a table that is looked up has one block per rank"
    stretches = [tiling.blocks.stretches[rank] for rank in tiling.grid.ranks]
    bounds = (0, *itertools.accumulate(length for _, length in stretches))
    if tiling.natural:
        return RowOwners(bounds)
    by_row = sorted(
        (start + length, bound - start)
        for (start, length), bound in zip(stretches, bounds, strict=False)
        if length
    )
    ends, shifts = zip(*by_row, strict=True)
    return RowOwners(bounds, ends, shifts)


world_caches.append(row_owners.cache_clear)


# What the ranks hold of a tiling, all ranks present at once.


def cut_whole(whole: torch.Tensor, tiling: Tiling) -> torch.Tensor:
    """What each rank holds of a tensor that every rank has."""
    grid = tiling.grid

    def here(place: Any, mine: torch.Tensor) -> torch.Tensor:
        return tiling.cut(grid.ranks[place[0]], mine)

    return each_rank(grid, here, localize(grid, whole))


def blocks_of(tiling: Tiling, held: torch.Tensor) -> torch.Tensor:
    """The ranks' blocks, as views of what they hold."""
    grid = tiling.grid
    return each_rank(grid, lambda place, mine: tiling.block(grid.ranks[place[0]], mine), held)


def held_blocks(tiling: Tiling, blocks: torch.Tensor) -> torch.Tensor:
    """What the ranks hold, out of their blocks."""

    def hold(place: Any, block: torch.Tensor) -> torch.Tensor:
        if not tiling.natural:
            return block.reshape(-1)
        # A block without values may be empty along another dim.
        return block.contiguous().view(tiling.block_shape(tiling.grid.ranks[place[0]]))

    return each_rank(tiling.grid, hold, localize(tiling.grid, blocks))


def natural_spec(tiling: Tiling) -> ChunkShardingSpec:
    """The tensor cut along its first dim over all ranks of the group, in their order."""
    device = torch.device(tiling.grid.device_type)
    return ChunkShardingSpec(0, [RankDevice(rank, device) for rank in tiling.grid.ranks])


def on_device(spec: ShardingSpec, device: torch.device) -> ShardingSpec:
    if isinstance(spec, ChunkShardingSpec):
        return ChunkShardingSpec(spec.dim, [RankDevice(p.rank, device) for p in spec.placements])
    assert isinstance(spec, EnumerableShardingSpec), "there are two kinds of specs"
    return EnumerableShardingSpec(
        [
            ShardMetadata(b.shard_offsets, b.shard_sizes, RankDevice(b.rank, device))
            for b in spec.shards
        ]
    )
