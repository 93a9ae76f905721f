"""Each rank's own batch meets a table or a weight that all ranks share.

Note [Own batches]
The weight stays where it is; what every rank brings travels to it:

    1. the ranks tell each other how much they bring, and what is wrong with it
    2. batches go to the ranks that hold what they ask for
    3. each rank runs a local function on its block of the weight
    4. results go home, where they are put together

A weight that is cut along its columns, or along what is summed over, has something for every entry
on every rank; a table that is cut along its rows has it on one. See `routes` for both ways.

Backward goes the same way in reverse: the gradient of step 4, the local function's gradient, and
the gradient of what was brought.

Each rank has a loss of its own. What it brought gets the gradient of that loss; the weight's is
that of the mean of the losses, or of their sum, as the tensor's `grad_reduction` says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm.watch import because
from shardwise.core.once import differentiated_once
from shardwise.core.untraced import UntracedFunction
from shardwise.errors import UnsupportedError
from shardwise.ops.lookup.row_sparse import make as make_row_sparse
from shardwise.shard.lookup.routes import BatchRoute
from shardwise.shard.lookup.stage import Stage
from shardwise.shard.tensor import ShardedTensor
from shardwise.shard.tiling import Blocks, Tiling, held_blocks
from shardwise.simulation.parts import is_per_rank, sized
from shardwise.simulation.ranks import each_rank, localize, one_for_all

#: What a local function gives: a tensor that has a gradient, and perhaps more that have none.
Results = tuple[torch.Tensor, ...]


def blocks_for(weight: ShardedTensor, what: str) -> Blocks:
    """How a weight is cut that an own batch can meet."""
    tiling = weight._tiling
    if tiling.blocks is None or len(tiling.shape) != 2:
        raise UnsupportedError(
            f"{what} needs a weight of two dims, cut along one of them with one block per rank; "
            f"found shape {tiling.shape} and {tiling.spec}. Use reshard(spec) first."
        )
    return tiling.blocks


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one call does, and where; known before the weight is touched."""

    what: str
    tiling: Tiling
    blocks: Blocks
    route: BatchRoute
    #: `local(stretch, block, *there, *travelling)`: what a rank computes for those who ask.
    local: Callable[..., Results]
    #: `finish(*results, *own, *staying)`: what the caller gets out of the results that came home.
    finish: Callable[..., torch.Tensor]
    #: For each tensor that has a gradient: whether it travels, or stays with the rank it is of.
    travels: tuple[bool, ...]
    grad_reduction: str
    #: Whether the weight's gradient holds only the rows that were looked up.
    sparse: bool = False


class OwnBatch(UntracedFunction):
    """`apply(weight, exchange, there, own, *tensors)`; see Note [Own batches].

    `there` have travelled already and `own` stay; neither has a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: ShardedTensor,
        exchange: Exchange,
        there: tuple[torch.Tensor, ...],
        own: tuple[torch.Tensor, ...],
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        tiling, route = exchange.tiling, exchange.route
        grid = tiling.grid
        needs = ctx.needs_input_grad[4:]
        moving = [i for i, travels in enumerate(exchange.travels) if travels]
        staying = [i for i, travels in enumerate(exchange.travels) if not travels]
        away = Stage((ctx.needs_input_grad[0], *(needs[i] for i in moving)))
        home = Stage((ctx.needs_input_grad[0] or any(needs), *(needs[i] for i in staying)))

        def compute(place: Any, held: torch.Tensor, *rest: torch.Tensor) -> Results:
            rank = grid.ranks[place[0]]
            known, leaves = rest[: len(there)], rest[len(there) :]
            local = functools.partial(exchange.local, exchange.blocks.stretches[rank])
            block = tiling.block(rank, held)
            return away.run(rank, lambda b, *moved: local(b, *known, *moved), [block, *leaves])

        with because(exchange.what, implicit=False):
            travelled = [route.send(tensors[i]) for i in moving]
            results = each_rank(grid, compute, weight._local, *there, *travelled)
            rows, *more = [route.home(result) for result in results]

        def finish(place: Any, rows: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            known, leaves = rest[: len(more) + len(own)], rest[len(more) + len(own) :]
            (out,) = home.run(
                grid.ranks[place[0]],
                lambda rows, *stayed: (exchange.finish(rows, *known, *stayed),),
                [rows, *leaves],
            )
            return out

        ctx.exchange, ctx.weight, ctx.away, ctx.home = exchange, weight, away, home
        ctx.plain = [not is_per_rank(t) for t in tensors]
        return sized(each_rank(grid, finish, rows, *more, *own, *(tensors[i] for i in staying)))

    @staticmethod
    @differentiated_once("a sharded module")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        exchange: Exchange = ctx.exchange
        route, grid = exchange.route, exchange.tiling.grid
        needs = ctx.needs_input_grad[4:]
        rows, *stayed = ctx.home.backward(grid, grad)
        with because(exchange.what, implicit=False):
            block, *moved = ctx.away.backward(grid, route.back(localize(grid, rows)))
            grads: list[Any] = []
            for need, travels, plain in zip(needs, exchange.travels, ctx.plain, strict=True):
                found = (moved if travels else stayed).pop(0)
                if not need:
                    grads.append(None)
                    continue
                own = sized(route.send_back(found) if travels else found)
                grads.append(one_for_all(own) if plain else own)
        weight_grad = _weight_gradient(ctx, block) if ctx.needs_input_grad[0] else None
        return weight_grad, None, None, None, *grads


def _weight_gradient(ctx: Any, block: torch.Tensor) -> torch.Tensor:
    exchange: Exchange = ctx.exchange
    tiling = exchange.tiling
    num_losses = len(tiling.grid.ranks) if exchange.grad_reduction == "mean" else 1
    if exchange.sparse:
        layout = tiling.layout(ctx.weight.dtype)
        rows, values = each_rank(tiling.grid, lambda _, g: _rows_of(g), block)
        return make_row_sparse(layout, rows, values) / num_losses
    if num_losses > 1:
        block = each_rank(tiling.grid, lambda _, g: g.div_(num_losses), block)
    return ShardedTensor.over(held_blocks(tiling, block), tiling, like=ctx.weight)


def _rows_of(grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a block that have a gradient, and theirs; none where no lookup was run."""
    if grad.layout is torch.sparse_coo:
        return grad._indices()[0], grad._values()
    return torch.empty(0, dtype=torch.int64, device=grad.device), grad[:0]
