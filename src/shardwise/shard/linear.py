"""`F.linear` of each rank's local inputs with a sharded weight.

The weight stays where it is: inputs are gathered on all ranks, each computes with its shard, and
results are sent back. Backward runs the same steps in reverse. Each rank has its own loss. Its
input gets the gradient of that loss; the weight gets that of the mean of the losses, or of their
sum, as the tensor's `grad_reduction` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.comm import collectives
from shardwise.comm.agreement import gather_numbers
from shardwise.comm.watch import because
from shardwise.core.mesh import Grid
from shardwise.core.placements import Partial
from shardwise.core.untraced import UntracedFunction, differentiated_once
from shardwise.lookup.ids import has_values
from shardwise.shard.local_batch import LayerCall, Stage, declare, split_of, traced
from shardwise.shard.moves import exchanged
from shardwise.shard.tensor import ShardedTensor
from shardwise.shard.tiling import DimSplit, Tiling, local_of_shards, natural_spec
from shardwise.simulation.parts import is_per_rank, sized
from shardwise.simulation.ranks import each_rank, localize, one_for_all


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
    grid, in_features = weight._tiling.grid, weight._tiling.shape[1]

    def describe(mine: torch.Tensor) -> tuple[Sequence[int], str | None]:
        if not mine.dim() or mine.shape[-1] != in_features or mine.dtype != weight.dtype:
            return [0], (
                f"inputs have shape (..., {in_features}) and dtype {weight.dtype}; found "
                f"{tuple(mine.shape)}, {mine.dtype}."
            )
        return [mine.numel() // in_features if in_features else 0], None

    counts = tuple(n for (n,) in gather_numbers(grid, what, describe, x))
    route = ToEveryone(weight._tiling, split, counts)
    return _Linear.apply(weight, route, x, whole)


@dataclass(frozen=True, slots=True)
class ToEveryone:
    """Every rank gets all inputs.

    Ranks compute columns of the result, which are concatenated (`joined`), or terms of a sum.
    """

    tiling: Tiling
    split: DimSplit
    #: The rows of each rank's input.
    num_rows: tuple[int, ...]

    @property
    def grid(self) -> Grid:
        return self.tiling.grid

    @property
    def joined(self) -> bool:
        return self.split.dim == 0

    @property
    def num_columns(self) -> int:
        return self.tiling.shape[0]

    def send(self, x: torch.Tensor) -> torch.Tensor:
        return all_gather_uneven(localize(self.grid, x), self.num_rows, self.grid)

    def send_grad(self, grad: torch.Tensor) -> torch.Tensor:
        return reduce_scatter_uneven(localize(self.grid, grad), self.num_rows, self.grid)

    def _columns(self, rank: int) -> int:
        """How many columns of the result a rank computes."""
        return self.split.intervals[rank][1] if self.joined else self.num_columns

    def reply(self, results: torch.Tensor) -> torch.Tensor:
        if not self.joined:
            return reduce_scatter_uneven(results, self.num_rows, self.grid)
        grid = self.grid
        ranks = grid.ranks
        counts = [[n * self._columns(sender) for n in self.num_rows] for sender in ranks]
        arrived = exchanged(each_rank(grid, lambda _, r: r.reshape(-1), results), counts, grid)

        def join(place: Any, flat: torch.Tensor) -> torch.Tensor:
            mine = self.num_rows[place[0]]
            parts = flat.split([mine * self._columns(sender) for sender in ranks])
            out = flat.new_empty(mine, self.num_columns)
            for sender, part in zip(ranks, parts, strict=True):
                start, length = self.split.intervals[sender]
                out[:, start : start + length] = part.view(mine, length)
            return out

        return each_rank(grid, join, arrived)

    def reply_grad(self, grad: torch.Tensor) -> torch.Tensor:
        if not self.joined:
            return all_gather_uneven(localize(self.grid, grad), self.num_rows, self.grid)
        grid = self.grid
        ranks, total = grid.ranks, sum(self.num_rows)
        counts = [[n * self._columns(owner) for owner in ranks] for n in self.num_rows]

        def part(_: Any, mine: torch.Tensor) -> torch.Tensor:
            columns = []
            for owner in ranks:
                start, length = self.split.intervals[owner]
                columns.append(mine[:, start : start + length].reshape(-1))
            return torch.cat(columns)

        arrived = exchanged(each_rank(grid, part, grad), counts, grid)

        def stack(place: Any, flat: torch.Tensor) -> torch.Tensor:
            return flat.view(total, self._columns(ranks[place[0]]))

        return each_rank(grid, stack, arrived)


class _Linear(UntracedFunction):
    """`apply(weight, route, x, bias)`: inputs travel to the shards, results travel back."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: ShardedTensor,
        route: ToEveryone,
        x: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        grid, needs = route.grid, ctx.needs_input_grad
        in_features = weight._tiling.shape[1]
        ctx.weight, ctx.route, ctx.x, ctx.bias = weight, route, x.detach(), bias
        ctx.on_holder = Stage((needs[0], needs[2]))
        ctx.at_home = Stage((any(needs), *([] if bias is None else [needs[3]])))

        def compute(place: Any, held: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            rank = grid.ranks[place[0]]
            start, length = route.split.intervals[rank]

            def local(shard: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor]:
                mine = rows if route.joined else rows[:, start : start + length]
                return (F.linear(mine, shard),)

            return ctx.on_holder.run(rank, local, [weight._tiling.shard(rank, held), rows])[0]

        def finish(place: Any, rows: torch.Tensor, x: torch.Tensor, *bias: Any) -> torch.Tensor:
            def local(rows: torch.Tensor, *bias: torch.Tensor) -> tuple[torch.Tensor]:
                rows = rows + bias[0] if bias else rows
                return (rows.view(*x.shape[:-1], rows.shape[-1]),)

            return ctx.at_home.run(grid.ranks[place[0]], local, [rows, *bias])[0]

        with because("F.linear", implicit=False):
            flat = each_rank(grid, lambda _, mine: mine.reshape(-1, in_features), ctx.x)
            results = each_rank(grid, compute, weight._local, route.send(flat))
            rows = route.reply(results)
        return sized(each_rank(grid, finish, rows, ctx.x, *([] if bias is None else [bias])))

    @staticmethod
    @differentiated_once("a sharded module")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        route, weight, needs = ctx.route, ctx.weight, ctx.needs_input_grad
        grid = route.grid
        rows, *of_bias = ctx.at_home.backward(grid, grad)
        with because("F.linear", implicit=False):
            shard, flat = ctx.on_holder.backward(grid, route.reply_grad(localize(grid, rows)))
            of_weight = of_x = None
            if needs[0]:
                if weight.grad_reduction == "mean":
                    shard = each_rank(grid, lambda _, g: g / len(grid.ranks), shard)
                held = local_of_shards(weight._tiling, shard)
                of_weight = ShardedTensor.over(held, weight._tiling, like=weight)
            if needs[2]:
                flat = route.send_grad(flat)
                of_x = each_rank(grid, lambda _, g, x: g.reshape(x.shape), flat, ctx.x)
        return (
            of_weight,
            None,
            _like(of_x, ctx.x),
            _like(of_bias[0] if needs[3] else None, ctx.bias),
        )


def _like(grad: torch.Tensor | None, x: torch.Tensor | None) -> torch.Tensor | None:
    """A gradient per rank, or one for all if `x` is one tensor."""
    if grad is None or x is None:
        return None
    return sized(grad) if is_per_rank(x) else one_for_all(sized(grad))


def all_gather_uneven(x: torch.Tensor, counts: tuple[int, ...], grid: Grid) -> torch.Tensor:
    """The ranks' rows, concatenated; rank i of the group has `counts[i]` of them.

    They are padded to the largest count while they are sent.
    """
    longest = max(counts)
    if longest == 0:
        return x
    if min(counts) == longest:
        return collectives.all_gather(x, grid, 0)
    padded = each_rank(grid, lambda _, mine: _padded(mine, longest), x)
    gathered = collectives.all_gather(padded, grid, 0)

    def compact(_: Any, rows: torch.Tensor) -> torch.Tensor:
        parts = rows.split(longest)
        return torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])

    return each_rank(grid, compact, gathered, axes=())


def reduce_scatter_uneven(x: torch.Tensor, counts: tuple[int, ...], grid: Grid) -> torch.Tensor:
    """The sum of the ranks' rows, of which rank i of the group gets `counts[i]`."""
    longest = max(counts)
    if longest == 0:
        return x
    if min(counts) == longest:
        return collectives.reduce_scatter(x, "sum", grid, 0)

    def spread(_: Any, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([_padded(part, longest) for part in rows.split(list(counts))])

    reduced = collectives.reduce_scatter(each_rank(grid, spread, x), "sum", grid, 0)
    return each_rank(grid, lambda place, rows: rows[: counts[place[0]]], reduced)


def _padded(x: torch.Tensor, length: int) -> torch.Tensor:
    if x.shape[0] == length:
        return x.contiguous()
    out = x.new_zeros((length, *x.shape[1:]))
    out[: x.shape[0]] = x
    return out


def gather_whole(x: ShardedTensor) -> torch.Tensor:
    """The whole tensor, for each rank's local loss."""
    ordered = x if x._tiling.natural else x.resharded(natural_spec(x._tiling))
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
