"""`to`, `cpu` and `cuda` of a sharded tensor: another dtype, device or memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch.functions import parse_to
from shardwise.core.untraced import UntracedFunction
from shardwise.errors import LayoutError, UnsupportedError
from shardwise.shard.blocks import on_device
from shardwise.shard.group import group_ranks, home_grid
from shardwise.shard.moves import sharded_like
from shardwise.shard.tiling import Tiling, make_tiling

if TYPE_CHECKING:
    from shardwise.shard.tensor import ShardedTensor


@dataclass(frozen=True, slots=True)
class Conversion:
    """What the arguments of `to` ask for; None and False leave things as they are."""

    device: torch.device | None
    dtype: torch.dtype | None
    non_blocking: bool
    contiguous: bool
    copy: bool
    process_group: Any

    def check(self, x: ShardedTensor) -> None:
        if self.process_group is None:
            return
        ranks = group_ranks(self.process_group)
        if ranks != x._tiling.grid.ranks:
            raise LayoutError(
                f"The tensor is on ranks {list(x._tiling.grid.ranks)}, and the process_group has "
                f"{list(ranks)}: a conversion leaves every piece on its rank. Give a group of the "
                "same ranks in the same order, or reshard(spec)."
            )

    def moves(self, x: ShardedTensor) -> bool:
        if self.device is None:
            return False
        here = x.device
        other_one = self.device.index is not None and self.device.index != here.index
        return self.device.type != here.type or (here.type != "cpu" and other_one)


def asked_for(args: Any, kwargs: Any, copy: bool, process_group: Any) -> Conversion:
    """The arguments of `to`, as any tensor's, and the group that the result belongs to."""
    device, dtype, non_blocking, memory_format = parse_to(*args, **kwargs)
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        raise UnsupportedError(
            f"A sharded tensor was asked for memory_format={memory_format}: its pieces are kept "
            "contiguous. Use torch.preserve_format or torch.contiguous_format."
        )
    contiguous = memory_format is torch.contiguous_format
    return Conversion(device, dtype, non_blocking, contiguous, copy, process_group)


def converted(x: ShardedTensor, wanted: Conversion) -> ShardedTensor:
    """`x` as it is wanted, differentiable; `x` itself where it is so already."""
    wanted.check(x)
    new: Any = x
    if wanted.dtype is not None and wanted.dtype != x.dtype:
        new = torch.Tensor.to(x, wanted.dtype)
    if wanted.moves(x):
        new = ToDevice.apply(new, wanted.device, wanted.non_blocking, wanted.process_group)
    if wanted.contiguous and not new.is_contiguous():
        new = new.contiguous()
    if wanted.copy and new is x:
        new = x.clone()
    return new


class ToDevice(UntracedFunction):
    """The pieces on another device, each on its rank; gradients go back to the first."""

    @staticmethod
    def forward(
        ctx: Any, x: ShardedTensor, device: torch.device, non_blocking: bool, process_group: Any
    ) -> ShardedTensor:
        ctx.source, ctx.device, ctx.kind = x._tiling, x.device, type(x)
        ctx.non_blocking = non_blocking
        ctx.there = _there(x, device, process_group)
        local = x._local.detach().to(device, non_blocking=non_blocking)
        return type(x).over(local, ctx.there, like=x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        lying = sharded_like(grad, ctx.there, ctx.kind)
        local = lying._local.to(ctx.device, non_blocking=ctx.non_blocking)
        return ctx.kind.over(local, ctx.source, like=lying), None, None, None


def _there(x: ShardedTensor, device: torch.device, process_group: Any) -> Tiling:
    """How the pieces lie on another device."""
    tiling = x._tiling
    if device.type == tiling.grid.device_type:
        return tiling
    # Ranks may name devices of their own; what they all know of each other is the kind.
    spec = on_device(tiling.spec, torch.device(device.type))
    grid = home_grid(process_group or x.process_group, device.type)
    return make_tiling(spec, tiling.shape, grid)
