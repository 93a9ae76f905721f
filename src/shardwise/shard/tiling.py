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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core.grid import Grid
from shardwise.core.layout import Layout, contiguous_stride, make_layout, shard_with
from shardwise.core.world import world_caches
from shardwise.errors import LayoutError
from shardwise.shard.spec import ChunkShardingSpec, Shape, ShardingSpec, ShardMetadata

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
