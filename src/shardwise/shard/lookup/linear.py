"""`F.linear` of each rank's local inputs with a sharded weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.comm.agreement import gather_numbers
from shardwise.core.once import differentiated_once
from shardwise.core.placements import Partial
from shardwise.core.untraced import UntracedFunction
from shardwise.lookup.ids import has_values
from shardwise.shard.compile import LayerCall, declare, traced
from shardwise.shard.lookup.local_batch import Exchange, LocalBatch, split_of
from shardwise.shard.lookup.routes import ToEveryone
from shardwise.shard.lookup.stage import Flat
from shardwise.shard.tensor import ShardedTensor
from shardwise.shard.tiling import Interval, natural_spec


def linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`F.linear` for each rank's local plain inputs; weight, bias or both are sharded."""
    x = input
    whole = gather_whole(bias) if isinstance(bias, ShardedTensor) else bias
    if not isinstance(weight, ShardedTensor):
        return F.linear(x, weight, whole)
    what = "F.linear"
    split = split_of(weight, what)
    if not has_values(weight._local):
        return traced(_LINEAR, weight, {}, input=x, bias=whole)
    dim = split.dim
    grid, (out_features, in_features) = weight._tiling.grid, weight._tiling.shape

    def describe(mine: torch.Tensor) -> tuple[Sequence[int], str | None]:
        if not mine.dim() or mine.shape[-1] != in_features or mine.dtype != weight.dtype:
            return [0], (
                f"inputs have shape (..., {in_features}) and dtype {weight.dtype}; found "
                f"{tuple(mine.shape)}, {mine.dtype}."
            )
        return [mine.numel() // in_features if in_features else 0], None

    counts = tuple(n for (n,) in gather_numbers(grid, what, describe, x))
    route = ToEveryone(
        grid,
        split,
        joined=dim == 0,
        num_columns=out_features,
        num_brought=counts,
        num_rows=counts,
    )
    exchange = Exchange(
        what,
        weight._tiling,
        split,
        route,
        local=_outputs if dim == 0 else _terms,
        finish=_shaped,
        travels=(True,) if whole is None else (True, False),
        grad_reduction=weight.grad_reduction,
    )
    rows = Flat.apply(x, grid, in_features)
    return LocalBatch.apply(weight, exchange, (), (x,), rows, *([] if whole is None else [whole]))


def _outputs(_: Interval, shard: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
    return (F.linear(x, shard),)


def _terms(interval: Interval, shard: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
    start, length = interval
    return (F.linear(x[:, start : start + length], shard),)


def _shaped(rows: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    rows = rows if bias is None else rows + bias
    return rows.view(*x.shape[:-1], rows.shape[-1])


def gather_whole(x: ShardedTensor) -> torch.Tensor:
    """The whole tensor, for each rank's local loss."""
    ordered = x if x._tiling.natural else x.reshard(natural_spec(x._tiling))
    whole = ordered.full_tensor(grad_placements=[Partial("sum")])
    if x.grad_reduction == "sum" or not whole.requires_grad:
        return whole
    return DivideGradient.apply(whole, len(x._tiling.grid.ranks))


class DivideGradient(UntracedFunction):
    """The identity; the gradient is divided by a number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, divisor: int) -> torch.Tensor:
        ctx.divisor = divisor
        return x.view_as(x)

    @staticmethod
    @differentiated_once("a sharded module")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad / ctx.divisor, None


def _outputs_of(
    call: LayerCall, weight: torch.Tensor, input: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    dtype = weight.dtype if call.autocast_dtype is None else getattr(torch, call.autocast_dtype)
    if bias is not None:
        dtype = torch.promote_types(dtype, bias.dtype)
    return weight.new_empty((*input.shape[:-1], call.tiling.shape[0]), dtype=dtype)


_LINEAR = declare("linear", linear, _outputs_of)
