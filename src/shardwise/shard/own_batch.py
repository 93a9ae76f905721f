"""Each rank's own batch meets a table or a weight that all ranks share.

Note [Own batches]
The weight stays where it is; what every rank brings travels to it:

    1. the ranks tell each other how much they bring                 all-gather, a few numbers
    2. everybody's batch goes to every rank                          all-gather
    3. each rank runs a local function on its block of the weight    nothing
    4. results go home: cut along the weight's columns they are      all-to-all
       joined, cut along what is summed over they are added          reduce-scatter

Backward goes the same way in reverse: the gradient of step 4, the local function's gradient, and
the gradient of what was brought, added up over ranks. Batches of different size are padded to the
largest on the wire only.

Each rank has a loss of its own. What it brought gets the gradient of that loss; the weight's is
that of the mean of the losses, or of their sum, as the tensor's `grad_reduction` says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from shardwise.comm import collectives
from shardwise.comm.local_tensor import LocalTensor
from shardwise.comm.ranks import each_rank, localize, one_for_all
from shardwise.comm.watch import because
from shardwise.core.grid import Grid
from shardwise.errors import LayoutError, UnsupportedError
from shardwise.shard.agree import gather_rows, gather_texts
from shardwise.shard.all_to_all import exchanged
from shardwise.shard.blocks import held_blocks, sized
from shardwise.shard.tensor import ShardedTensor
from shardwise.shard.tiling import Blocks, Tiling


def blocks_for(weight: ShardedTensor, what: str) -> Blocks:
    """How a weight is cut that an own batch can meet."""
    tiling = weight._tiling
    if tiling.blocks is None or len(tiling.shape) != 2:
        raise UnsupportedError(
            f"{what} needs a weight of two dims, cut along one of them with one block per rank; "
            f"found shape {tiling.shape} and {tiling.spec}. Use reshard(spec) first."
        )
    return tiling.blocks


def announced(
    grid: Grid,
    what: str,
    describe: Callable[..., tuple[Sequence[int], str | None]],
    *tensors: torch.Tensor,
) -> list[tuple[int, ...]]:
    """How much each rank brings, as `describe(*its tensors)` counts it, by rank.

    `describe` also says what is wrong with a batch, if anything: every rank hears of it and raises.
    """
    faults: dict[int, str] = {}

    def row(place: Any, *mine: torch.Tensor) -> torch.Tensor:
        counts, fault = describe(*mine)
        if fault is not None:
            faults[grid.ranks[place[0]]] = fault
        return torch.tensor([fault is not None, *counts])

    mine = each_rank(grid, row, *tensors)
    rows = gather_rows(grid, what, lambda rank: _of_rank(mine, rank)).tolist()
    wrong = [rank for rank, (flag, *_) in zip(grid.ranks, rows, strict=True) if flag]
    if wrong:
        texts = gather_texts(grid, what, lambda rank: faults.get(rank, ""))
        said = "; ".join(
            f"rank {rank}: {text}" for rank, text in zip(grid.ranks, texts, strict=True) if text
        )
        raise LayoutError(f"{what}: the ranks {wrong} bring a batch that does not fit. {said}")
    return [tuple(counts) for _, *counts in rows]


def _of_rank(x: Any, rank: int) -> torch.Tensor:
    return x.on_rank(rank) if isinstance(x, LocalTensor) else x


@dataclass(frozen=True, slots=True)
class Exchange:
    """What moves where, for one call: known before the weight is touched."""

    what: str
    tiling: Tiling
    blocks: Blocks
    #: `local(stretch, block, *gathered, *travelling)`: a result for every row of the joint batch.
    local: Callable[..., torch.Tensor]
    #: `finish(rows, *own, *staying)`: what the caller gets for the rows that came home.
    finish: Callable[..., torch.Tensor]
    #: Whether ranks compute columns of the result, which are joined, or terms, which are added.
    joined: bool
    num_columns: int
    #: By rank: rows of the result.
    num_rows: tuple[int, ...]
    #: For each tensor that has a gradient: its length on each rank, or None when it stays home.
    travels: tuple[tuple[int, ...] | None, ...]
    grad_reduction: str

    @property
    def grid(self) -> Grid:
        return self.tiling.grid

    def columns(self, rank: int) -> int:
        """How many columns of the result a rank computes."""
        return self.blocks.stretches[rank][1] if self.joined else self.num_columns

    def home(self, results: torch.Tensor) -> torch.Tensor:
        """Each rank's rows of the result, out of what the ranks computed for all rows."""
        if not self.joined:
            return reduce_scatter_uneven(results, self.num_rows, self.grid)
        grid = self.grid
        ranks = grid.ranks
        counts = [[n * self.columns(sender) for n in self.num_rows] for sender in ranks]
        arrived = exchanged(each_rank(grid, lambda _, r: r.reshape(-1), results), counts, grid)

        def join(place: Any, flat: torch.Tensor) -> torch.Tensor:
            mine = self.num_rows[place[0]]
            parts = flat.split([mine * self.columns(sender) for sender in ranks])
            out = flat.new_empty(mine, self.num_columns)
            for sender, part in zip(ranks, parts, strict=True):
                start, length = self.blocks.stretches[sender]
                out[:, start : start + length] = part.view(mine, length)
            return out

        return each_rank(grid, join, arrived)

    def back(self, grad: torch.Tensor) -> torch.Tensor:
        """The reverse of `home`: the gradient of what each rank computed for all rows."""
        if not self.joined:
            return all_gather_uneven(grad, self.num_rows, self.grid)
        grid = self.grid
        ranks, total = grid.ranks, sum(self.num_rows)
        counts = [[n * self.columns(owner) for owner in ranks] for n in self.num_rows]

        def part(_: Any, mine: torch.Tensor) -> torch.Tensor:
            pieces = []
            for owner in ranks:
                start, length = self.blocks.stretches[owner]
                pieces.append(mine[:, start : start + length].reshape(-1))
            return torch.cat(pieces)

        arrived = exchanged(each_rank(grid, part, grad), counts, grid)

        def stack(place: Any, flat: torch.Tensor) -> torch.Tensor:
            return flat.view(total, self.columns(ranks[place[0]]))

        return each_rank(grid, stack, arrived)


class OwnBatch(torch.autograd.Function):
    """`apply(weight, exchange, gathered, own, *tensors)`; see Note [Own batches].

    `gathered` have travelled already and `own` stay; neither has a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: ShardedTensor,
        exchange: Exchange,
        gathered: tuple[torch.Tensor, ...],
        own: tuple[torch.Tensor, ...],
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        grid, tiling = exchange.grid, exchange.tiling
        needs = ctx.needs_input_grad[4:]
        moving = [i for i, counts in enumerate(exchange.travels) if counts is not None]
        staying = [i for i, counts in enumerate(exchange.travels) if counts is None]
        there = Stage((ctx.needs_input_grad[0], *(needs[i] for i in moving)))
        here = Stage((ctx.needs_input_grad[0] or any(needs), *(needs[i] for i in staying)))

        def compute(place: Any, held: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            rank = grid.ranks[place[0]]
            local = functools.partial(exchange.local, exchange.blocks.stretches[rank])
            known, leaves = rest[: len(gathered)], rest[len(gathered) :]
            return there.run(
                rank,
                lambda block, *moved: local(block, *known, *moved),
                [tiling.block(rank, held), *leaves],
            )

        def finish(place: Any, rows: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            known, leaves = rest[: len(own)], rest[len(own) :]
            return here.run(
                grid.ranks[place[0]],
                lambda rows, *stayed: exchange.finish(rows, *known, *stayed),
                [rows, *leaves],
            )

        with because(exchange.what, implicit=False):
            travelled = [
                all_gather_uneven(localize(grid, tensors[i]), exchange.travels[i] or (), grid)
                for i in moving
            ]
            rows = exchange.home(each_rank(grid, compute, weight._local, *gathered, *travelled))
        ctx.exchange, ctx.weight, ctx.there, ctx.here = exchange, weight, there, here
        ctx.plain = [type(t) is not LocalTensor for t in tensors]
        return sized(each_rank(grid, finish, rows, *own, *(tensors[i] for i in staying)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        exchange, weight = ctx.exchange, ctx.weight
        grid, tiling = exchange.grid, exchange.tiling
        needs = ctx.needs_input_grad[4:]
        rows, *stayed = ctx.here.backward(grid, grad)
        with because(exchange.what, implicit=False):
            back = exchange.back(localize(grid, rows))
            block, *moved = ctx.there.backward(grid, back)
            grads: list[Any] = []
            for need, counts in zip(needs, exchange.travels, strict=True):
                found = (stayed if counts is None else moved).pop(0)
                if need and counts is not None:
                    found = reduce_scatter_uneven(localize(grid, found), counts, grid)
                grads.append(sized(found) if need else None)
        grads = [
            one_for_all(g) if p and g is not None else g
            for g, p in zip(grads, ctx.plain, strict=True)
        ]
        weight_grad = None
        if ctx.needs_input_grad[0]:
            if exchange.grad_reduction == "mean":
                block = each_rank(grid, lambda _, g: g / len(grid.ranks), block)
            weight_grad = ShardedTensor.over(held_blocks(tiling, block), tiling, like=weight)
        return weight_grad, None, None, None, *grads


class Stage:
    """A function that each rank runs by itself, with its gradient."""

    def __init__(self, needs: Sequence[bool]) -> None:
        self.needs = needs
        self.graphs: dict[int, tuple[list[torch.Tensor], torch.Tensor]] = {}

    def run(
        self, rank: int, fn: Callable[..., torch.Tensor], leaves: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        own = [x.detach().requires_grad_(n) for x, n in zip(leaves, self.needs, strict=True)]
        with torch.set_grad_enabled(any(self.needs)):
            result = fn(*own)
        self.graphs[rank] = (own, result)
        return result.detach()

    def backward(self, grid: Grid, grad: torch.Tensor) -> list[torch.Tensor]:
        """The gradient of every leaf; zeros where none is needed or none comes."""

        def here(place: Any, mine: torch.Tensor) -> list[torch.Tensor]:
            leaves, result = self.graphs[grid.ranks[place[0]]]
            wanted = [x for x, need in zip(leaves, self.needs, strict=True) if need]
            found: Any = [None] * len(wanted)
            if result.requires_grad:
                found = torch.autograd.grad(
                    result, wanted, mine, allow_unused=True, retain_graph=True
                )
            grads = iter(found)
            given = [next(grads) if need else None for need in self.needs]
            return [
                torch.zeros_like(x) if g is None else g for x, g in zip(leaves, given, strict=True)
            ]

        return list(each_rank(grid, here, grad))


class Flat(torch.autograd.Function):
    """`apply(x, grid, *last)`: `x` as rows of shape `last`, rank by rank, whatever its shape."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, grid: Grid, *last: int) -> torch.Tensor:
        ctx.x, ctx.grid, ctx.num_last = x.detach(), grid, len(last)
        return sized(each_rank(grid, lambda _, mine: mine.reshape(-1, *last), ctx.x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        found = each_rank(ctx.grid, lambda _, g, x: g.reshape(x.shape), grad, ctx.x)
        plain = type(ctx.x) is not LocalTensor
        return one_for_all(found) if plain else sized(found), None, *[None] * ctx.num_last


# -- collectives of batches of different size --------------------------------------------------


def all_gather_uneven(x: torch.Tensor, counts: tuple[int, ...], grid: Grid) -> torch.Tensor:
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
