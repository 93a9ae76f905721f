"""Moving sharded tensors, and taking blocks out of them, with their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwise.core.layout import Layout
from shardwise.core.once import differentiated_once
from shardwise.core.placements import Shard as ShardPlacement
from shardwise.core.untraced import UntracedFunction
from shardwise.shard.blocks import blocks_of, held_blocks
from shardwise.shard.device import RankDevice
from shardwise.shard.reshard import move_pieces
from shardwise.shard.spec import EnumerableShardingSpec, ShardMetadata
from shardwise.shard.tiling import Tiling, make_tiling
from shardwise.simulation.parts import sized

if TYPE_CHECKING:
    from shardwise.shard.tensor import ShardedTensor


class Reshard(UntracedFunction):
    @staticmethod
    def forward(ctx: Any, x: ShardedTensor, target: Tiling) -> ShardedTensor:
        ctx.source, ctx.kind = x._tiling, type(x)
        held = move_pieces(x._local, x._tiling, target, "reshard")
        return type(x).over(held, target, like=x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return sharded_like(grad, ctx.source, ctx.kind), None


class ToLocalShard(UntracedFunction):
    """A rank's block as a plain tensor; its gradient is the block of the tensor's gradient."""

    @staticmethod
    def forward(ctx: Any, x: ShardedTensor) -> torch.Tensor:
        ctx.like = x
        return sized(blocks_of(x._tiling, x._local.detach()))

    @staticmethod
    @differentiated_once("a sharded module")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        tiling = ctx.like._tiling
        return type(ctx.like).over(held_blocks(tiling, grad), tiling, like=ctx.like)


def sharded_like(x: Any, tiling: Tiling, kind: type[ShardedTensor]) -> ShardedTensor:
    """A gradient, perhaps a DTensor without a spec, in a tiling; differentiable."""
    sharded = with_spec(x, kind)
    return sharded if sharded._tiling is tiling else Reshard.apply(sharded, tiling)


def with_spec(x: Any, kind: type[ShardedTensor]) -> ShardedTensor:
    """A DTensor as a sharded tensor, with the spec of the way it is cut."""
    if isinstance(x, kind):
        return x
    (placement,) = x.placements
    if not placement.is_shard():
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
    @staticmethod
    def forward(ctx: Any, x: Any, tiling: Tiling, kind: type[ShardedTensor]) -> ShardedTensor:
        ctx.tiling, ctx.kind = tiling, kind
        return kind.over(held_blocks(tiling, x._local), tiling)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return sharded_like(grad, ctx.tiling, ctx.kind), None, None
