"""What the ranks hold of a tiling, all ranks present at once."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.shard.device import RankDevice
from shardwise.shard.spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardingSpec,
    ShardMetadata,
)
from shardwise.shard.tiling import Tiling
from shardwise.simulation.ranks import each_rank, localize


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
