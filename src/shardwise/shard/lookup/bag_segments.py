"""Bags whose rows have several owners: each owner pools its segment, the requester combines them.

A segment is the rows of one bag with one owner. Everything here runs on one rank's plain tensors,
under torch's autograd.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.core.once import differentiated_once
from shardwise.core.untraced import UntracedFunction
from shardwise.shard.lookup import bags
from shardwise.shard.tiling import Interval

# -- on the owner ------------------------------------------------------------------------------


class SumSegments:
    """The sum of each segment."""

    def __init__(self, sparse: bool) -> None:
        self.sparse = sparse

    def __call__(
        self,
        _: Interval,
        shard: torch.Tensor,
        rows: torch.Tensor,
        starts: torch.Tensor,
        weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor]:
        return (bags.lookup(shard, rows, starts, "sum", weights, sparse=self.sparse),)


class MaxSegments:
    """The maximum of each segment; with `longest`, also the index of its row, by column.

    The index is sent in the smallest dtype that holds `longest`.
    """

    def __init__(self, longest: int | None) -> None:
        self.longest = longest

    def __call__(
        self, _: Interval, shard: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        if self.longest is None:
            return (bags.lookup(shard, rows, starts, "max"),)
        values, winners = SegmentMaximum.apply(shard, rows, starts)
        return values, winners.to(_index_dtype(self.longest))


def _index_dtype(longest: int) -> torch.dtype:
    if longest <= 2**8:
        return torch.uint8
    return torch.int32 if longest < 2**31 else torch.int64


class SegmentMaximum(UntracedFunction):
    """`apply(shard, rows, starts)`: the maximum of each segment, and its row's index in it."""

    @staticmethod
    def forward(
        ctx: Any, shard: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        place = torch.arange(rows.numel(), device=rows.device)
        values, winners = bags.maximum(shard.index_select(0, rows), place, starts)
        ctx.shape = shard.shape
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


# -- on the requester --------------------------------------------------------------------------


class AddSegments:
    """The sum, or the mean, of each bag. An empty bag is zero."""

    def __init__(self, mean: bool) -> None:
        self.mean = mean

    def __call__(
        self, segments: torch.Tensor, bag: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        out = segments.new_zeros(lengths.numel(), segments.shape[1]).index_add(0, bag, segments)
        return out / lengths.clamp(min=1).unsqueeze(1).to(out.dtype) if self.mean else out


class MaxOfSegments:
    """The maximum of each bag. An empty bag is zero.

    Where rows of several owners tie, the first one in the bag gets the gradient, as on one device:
    with `trains`, the owners also send the indices of their maxima.
    """

    def __init__(self, trains: bool) -> None:
        self.trains = trains

    def __call__(self, segments: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        if not self.trains:
            bag, lengths, *_ = rest
            return _maximum_by_bag(segments, bag, lengths)[0]
        winners, bag, lengths, starts, order = rest
        place = order.int()[starts.unsqueeze(1) + winners]
        return BagMaximum.apply(segments, place, bag, lengths)


def _maximum_by_bag(
    segments: torch.Tensor, bag: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The maximum over each bag's segments, and a segment that has it; zero for an empty bag."""
    num_segments = torch.bincount(bag, minlength=lengths.numel())
    values, segment = bags.maximum(segments, torch.argsort(bag), bags.starts(num_segments))
    return values, segment.clamp_(min=0)


class BagMaximum(UntracedFunction):
    """`apply(segments, place, bag, lengths)`: the maximum of each bag.

    `place` is the index in the batch of each value of a segment, `bag` the bag of each segment.
    """

    @staticmethod
    def forward(
        ctx: Any,
        segments: torch.Tensor,
        place: torch.Tensor,
        bag: torch.Tensor,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        values, segment = _maximum_by_bag(segments, bag, lengths)
        if not bag.numel():
            ctx.save_for_backward(torch.zeros_like(segments, dtype=torch.bool), bag)
            return values
        first = place.gather(0, segment)
        shared = segments == values[bag]
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
