"""Bags whose rows lie with several ranks: pooled piece by piece there, put together at home.

Everything here runs on one rank's plain tensors, under torch's own autograd.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.core.once import differentiated_once
from shardwise.core.untraced import UntracedFunction
from shardwise.shard.lookup import bags
from shardwise.shard.tiling import Stretch

# -- at the owner of the rows --------------------------------------------------------------------


class PoolPieces:
    """The sum of each piece."""

    def __init__(self, sparse: bool) -> None:
        self.sparse = sparse

    def __call__(
        self,
        _: Stretch,
        block: torch.Tensor,
        rows: torch.Tensor,
        starts: torch.Tensor,
        weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor]:
        return (bags.lookup(block, rows, starts, "sum", weights, sparse=self.sparse),)


class StrongestRows:
    """The maximum of each piece; with `longest`, also which of its rows has it, by column.

    That is sent as the smallest kind of number that counts to `longest`.
    """

    def __init__(self, longest: int | None) -> None:
        self.longest = longest

    def __call__(
        self, _: Stretch, block: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        if self.longest is None:
            return (bags.lookup(block, rows, starts, "max"),)
        values, winners = PieceMaximum.apply(block, rows, starts)
        return values, winners.to(_counting_to(self.longest))


def _counting_to(longest: int) -> torch.dtype:
    if longest <= 2**8:
        return torch.uint8
    return torch.int32 if longest < 2**31 else torch.int64


class PieceMaximum(UntracedFunction):
    """`apply(block, rows, starts)`: the maximum of each piece, and the place of its row in it."""

    @staticmethod
    def forward(
        ctx: Any, block: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        place = torch.arange(rows.numel(), device=rows.device)
        values, winners = bags.maximum(block.index_select(0, rows), place, starts)
        ctx.shape = block.shape
        ctx.save_for_backward(rows[winners])
        winners -= starts.unsqueeze(1)
        ctx.mark_non_differentiable(winners)
        return values, winners

    @staticmethod
    @differentiated_once("a sharded module")
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        (rows,) = ctx.saved_tensors
        num_columns = ctx.shape[1]
        at = rows * num_columns + torch.arange(num_columns, device=rows.device)
        flat = grad.new_zeros(ctx.shape[0] * num_columns)
        return flat.index_add_(0, at.view(-1), grad.reshape(-1)).view(ctx.shape), None, None


# -- at home -------------------------------------------------------------------------------------


class AddPieces:
    """The sum, or the mean, of each bag. An empty bag is zero."""

    def __init__(self, mean: bool) -> None:
        self.mean = mean

    def __call__(
        self, pieces: torch.Tensor, bag: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        out = pieces.new_zeros(lengths.numel(), pieces.shape[1]).index_add(0, bag, pieces)
        return out / lengths.clamp(min=1).unsqueeze(1).to(out.dtype) if self.mean else out


class MaximumOfPieces:
    """The maximum of each bag. An empty bag is zero.

    Where rows of several ranks share the maximum, the gradient is the first one's in the bag, as on
    one device: with `trains`, the places of the pieces' own winners come home too.
    """

    def __init__(self, trains: bool) -> None:
        self.trains = trains

    def __call__(self, pieces: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        if not self.trains:
            bag, lengths, *_ = rest
            return _maximum_by_bag(pieces, bag, lengths)[0]
        winners, bag, lengths, starts, order = rest
        place = order.int()[starts.unsqueeze(1) + winners]
        return BagMaximum.apply(pieces, place, bag, lengths)


def _maximum_by_bag(
    pieces: torch.Tensor, bag: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The maximum of the pieces of each bag, and a piece that has it; zero for an empty bag."""
    num_pieces = torch.bincount(bag, minlength=lengths.numel())
    values, piece = bags.maximum(pieces, torch.argsort(bag), bags.starts(num_pieces))
    return values, piece.clamp_(min=0)


class BagMaximum(UntracedFunction):
    """`apply(pieces, place, bag, lengths)`: the maximum of each bag.

    `place` says where in the batch each value of a piece is from, `bag` the bag of each piece.
    """

    @staticmethod
    def forward(
        ctx: Any,
        pieces: torch.Tensor,
        place: torch.Tensor,
        bag: torch.Tensor,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        values, piece = _maximum_by_bag(pieces, bag, lengths)
        if not bag.numel():
            ctx.save_for_backward(torch.zeros_like(pieces, dtype=torch.bool), bag)
            return values
        first = place.gather(0, piece)
        shared = pieces == values[bag]
        if bool((shared & (place < first[bag])).any()):
            late = torch.iinfo(place.dtype).max
            to = bag.unsqueeze(1).expand_as(place)
            first = first.scatter_reduce(0, to, place.masked_fill(~shared, late), "amin")
        ctx.save_for_backward(place == first[bag], bag)
        return values

    @staticmethod
    @differentiated_once("a sharded module")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        won, bag = ctx.saved_tensors
        return grad[bag] * won, None, None, None
