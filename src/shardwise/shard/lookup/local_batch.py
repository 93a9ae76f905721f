"""Each rank's local batch with a sharded table or weight.

Note [Local batches]
The weight stays where it is, and batches are sent to it:

    1. the ranks exchange the sizes of their batches, and faults
    2. batches are sent to the ranks that hold the rows or columns that they need
    3. each rank runs a local function on its shard of the weight
    4. results are sent back, and the requester combines them

For a column-sharded table, and for a linear layer, every rank computes something for every entry;
for a row-sharded table, one rank does. See `routes` for both.

Backward runs the same steps in reverse: the gradient of step 4, of the local function, and of the
batch.

Each rank has its own loss. Its batch gets the gradient of that loss; the weight gets that of the
mean of the losses, or of their sum, as the tensor's `grad_reduction` says.
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
from shardwise.shard.tiling import DimSplit, Tiling, local_of_shards
from shardwise.simulation.parts import is_per_rank, sized
from shardwise.simulation.ranks import each_rank, localize, one_for_all

#: Of a local function: a tensor that has a gradient, and perhaps more that have none.
Results = tuple[torch.Tensor, ...]


def split_of(weight: ShardedTensor, what: str) -> DimSplit:
    """How a weight is split; raises where a local batch cannot use it."""
    tiling = weight._tiling
    if tiling.split is None or len(tiling.shape) != 2:
        raise UnsupportedError(
            f"{what} needs a weight of two dims, split along one of them with one shard per rank; "
            f"found shape {tiling.shape} and {tiling.spec}. Use reshard(spec) first."
        )
    return tiling.split


@dataclass(frozen=True, slots=True)
class Exchange:
    """One call, but for its tensors."""

    what: str
    tiling: Tiling
    split: DimSplit
    route: BatchRoute
    #: `local(interval, shard, *there, *travelling)`: what a rank computes for the requesters.
    local: Callable[..., Results]
    #: `finish(*results, *own, *staying)`: the result, on the requester.
    finish: Callable[..., torch.Tensor]
    #: For each tensor that has a gradient: whether it is sent, or stays on its rank.
    travels: tuple[bool, ...]
    grad_reduction: str
    #: Whether the weight's gradient holds only the rows that were looked up.
    sparse: bool = False


class LocalBatch(UntracedFunction):
    """`apply(weight, exchange, there, own, *tensors)`; see Note [Local batches].

    `there` have been sent already and `own` stay; neither has a gradient.
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
        on_owner = Stage((ctx.needs_input_grad[0], *(needs[i] for i in moving)))
        on_requester = Stage((ctx.needs_input_grad[0] or any(needs), *(needs[i] for i in staying)))

        def compute(place: Any, held: torch.Tensor, *rest: torch.Tensor) -> Results:
            rank = grid.ranks[place[0]]
            known, leaves = rest[: len(there)], rest[len(there) :]
            local = functools.partial(exchange.local, exchange.split.intervals[rank])
            shard = tiling.shard(rank, held)
            return on_owner.run(rank, lambda b, *moved: local(b, *known, *moved), [shard, *leaves])

        with because(exchange.what, implicit=False):
            travelled = [route.send(tensors[i]) for i in moving]
            results = each_rank(grid, compute, weight._local, *there, *travelled)
            rows, *more = [route.reply(result) for result in results]

        def finish(place: Any, rows: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            known, leaves = rest[: len(more) + len(own)], rest[len(more) + len(own) :]
            (out,) = on_requester.run(
                grid.ranks[place[0]],
                lambda rows, *stayed: (exchange.finish(rows, *known, *stayed),),
                [rows, *leaves],
            )
            return out

        ctx.exchange, ctx.weight, ctx.on_owner, ctx.on_requester = (
            exchange,
            weight,
            on_owner,
            on_requester,
        )
        ctx.plain = [not is_per_rank(t) for t in tensors]
        return sized(each_rank(grid, finish, rows, *more, *own, *(tensors[i] for i in staying)))

    @staticmethod
    @differentiated_once("a sharded module")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        exchange: Exchange = ctx.exchange
        route, grid = exchange.route, exchange.tiling.grid
        needs = ctx.needs_input_grad[4:]
        rows, *stayed = ctx.on_requester.backward(grid, grad)
        with because(exchange.what, implicit=False):
            shard, *moved = ctx.on_owner.backward(grid, route.reply_grad(localize(grid, rows)))
            grads: list[Any] = []
            for need, travels, plain in zip(needs, exchange.travels, ctx.plain, strict=True):
                found = (moved if travels else stayed).pop(0)
                if not need:
                    grads.append(None)
                    continue
                own = sized(route.send_grad(found) if travels else found)
                grads.append(one_for_all(own) if plain else own)
        weight_grad = _weight_gradient(ctx, shard) if ctx.needs_input_grad[0] else None
        return weight_grad, None, None, None, *grads


def _weight_gradient(ctx: Any, shard: torch.Tensor) -> torch.Tensor:
    exchange: Exchange = ctx.exchange
    tiling = exchange.tiling
    num_losses = len(tiling.grid.ranks) if exchange.grad_reduction == "mean" else 1
    if exchange.sparse:
        layout = tiling.layout(ctx.weight.dtype)
        rows, values = each_rank(tiling.grid, lambda _, g: _rows_of(g), shard)
        return make_row_sparse(layout, rows, values) / num_losses
    if num_losses > 1:
        shard = each_rank(tiling.grid, lambda _, g: g.div_(num_losses), shard)
    return ShardedTensor.over(local_of_shards(tiling, shard), tiling, like=ctx.weight)


def _rows_of(grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a shard that have a gradient, and their gradients; none without a lookup."""
    if grad.layout is torch.sparse_coo:
        return grad._indices()[0], grad._values()
    return torch.empty(0, dtype=torch.int64, device=grad.device), grad[:0]
