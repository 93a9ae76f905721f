"""Outputs of modules, laid out as a plan's `output_plan` and `return_local_tensor` say.

A plain output is this rank's shard of a joint batch: together the outputs are one tensor, split
along dim 0. As in lookups, a plain tensor belongs to a rank's own loss, and a
sharded one to the mean of the losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm.agreement import gather_numbers
from shardwise.core.mesh import Grid
from shardwise.core.once import differentiated_once
from shardwise.core.untraced import UntracedFunction, untraced
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import ArgumentError, LayoutError
from shardwise.shard.lookup.linear import DivideGradient
from shardwise.shard.moves import sharded_like, with_spec
from shardwise.shard.spec import EnumerableShardingSpec, RankDevice, ShardingSpec, ShardMetadata
from shardwise.shard.tensor import ShardedTensor
from shardwise.shard.tiling import (
    Tiling,
    device_type_of,
    home_grid,
    local_of_shards,
    make_tiling,
    shards_of,
)
from shardwise.simulation.parts import is_per_rank, sized
from shardwise.simulation.ranks import each_rank, localize, one_for_all


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """A plan for the output of one module."""

    where: str
    spec: ShardingSpec | None
    local: bool
    grad_reduction: str


@untraced
def lay_out(output: Any, plan: OutputPlan, process_group: Any, text: str) -> Any:
    """The output in the plan's spec; this rank's shard of it with `plan.local`.

    `text` encodes the plan for compiled graphs: a compiler traces this function.
    """
    if not isinstance(output, torch.Tensor):
        raise ArgumentError(
            f"The plan lays out the output of {plan.where!r}, which is a {type(output).__name__}, "
            "not a tensor."
        )
    if plan.spec is None and not isinstance(output, DTensor):
        return output
    if torch.compiler.is_dynamo_compiling():
        return torch.ops.shardwise.lay_out(output, text)
    if plan.spec is not None and not isinstance(output, DTensor):
        grid = home_grid(process_group, device_type_of(plan.spec))
        output = joined(output, grid, plan.grad_reduction)
    return place_output(output, plan)


def place_output(x: Any, plan: OutputPlan) -> torch.Tensor:
    """A DTensor, laid out as the plan says."""
    if plan.spec is not None:
        x = with_spec(x, ShardedTensor).resharded(plan.spec)
    if not plan.local:
        return x
    shard = with_spec(x, ShardedTensor).local_tensor()
    return in_local_loss(shard, len(x._layout.grid.ranks), plan)


def in_local_loss(shard: torch.Tensor, num_ranks: int, plan: OutputPlan) -> torch.Tensor:
    """A shard of a joint tensor, for each rank's own loss."""
    if plan.grad_reduction == "mean" and shard.requires_grad:
        return DivideGradient.apply(shard, num_ranks)
    return shard


def joined(x: torch.Tensor, grid: Grid, grad_reduction: str) -> ShardedTensor:
    """The ranks' own tensors as one, sharded along dim 0."""
    what = "output_plan"

    def describe(mine: torch.Tensor) -> tuple[Sequence[int], str | None]:
        if not 1 <= mine.dim() <= 8:
            return [0] * 9, f"an output has 1 to 8 dims, found shape {tuple(mine.shape)}."
        return [mine.dim(), *mine.shape, *[0] * (8 - mine.dim())], None

    shapes = [tuple(sizes[:ndim]) for ndim, *sizes in gather_numbers(grid, what, describe, x)]
    if len({shape[1:] for shape in shapes}) > 1:
        raise LayoutError(f"{what}: outputs differ in more than their first dim: {shapes}.")
    return Join.apply(x, joint_tiling(shapes, grid), grad_reduction)


def joint_tiling(shapes: Sequence[Sequence[int]], grid: Grid) -> Tiling:
    """The tiling of the concatenation of tensors of these shapes, one per rank."""
    device, at, boxes = torch.device(grid.device_type), 0, []
    for rank, shape in zip(grid.ranks, shapes, strict=True):
        boxes.append(ShardMetadata([at] + [0] * (len(shape) - 1), shape, RankDevice(rank, device)))
        at += shape[0]
    return make_tiling(EnumerableShardingSpec(boxes), (at, *shapes[0][1:]), grid)


class Join(UntracedFunction):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tiling: Tiling, grad_reduction: str) -> ShardedTensor:
        ctx.tiling, ctx.plain = tiling, not is_per_rank(x)
        ctx.factor = len(tiling.grid.ranks) if grad_reduction == "mean" else 1
        made = ShardedTensor.over(
            local_of_shards(tiling, localize(tiling.grid, x.detach())), tiling
        )
        made.grad_reduction = grad_reduction
        return made

    @staticmethod
    @differentiated_once("a sharded module")
    def backward(ctx: Any, grad: Any) -> Any:
        own = local_gradient(grad, ctx.tiling, ctx.factor)
        return one_for_all(own) if ctx.plain else sized(own), None, None


def local_gradient(grad: Any, tiling: Tiling, factor: int) -> torch.Tensor:
    """Each rank's shard of a joint tensor's gradient, for its own output."""
    local = sharded_like(grad, tiling, ShardedTensor)._local
    return each_rank(tiling.grid, lambda _, mine: mine * factor, shards_of(tiling, local))
