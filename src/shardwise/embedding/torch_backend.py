"""The backend of plain torch kernels.

Note [Backward is a lookup]
The gradient of a row is the sum, over the bags that looked it up, of the gradients of those bags.
With ids sorted by row that is a lookup again: rows are the bags, and what is looked up in them are
bags' gradients. So the same fast kernel serves both ways, and nothing as large as the number of ids
times the width is ever written. It runs over some thousand rows at a time, which stay in the cache
until they have been applied.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from shardwise.embedding.backend import Query
from shardwise.embedding.fused import RowUpdate
from shardwise.exchange.order import repeated, sorted_in_place, starts_of_runs

#: Numbers of a gradient that are held at a time: two megabytes, about a core's own cache.
_CHUNK_NUMBERS = 1 << 19


class TorchBackend:
    """Lookups through `embedding_bag`, updates through sorted ids."""

    name = "torch"

    def look_up(self, weight: torch.Tensor, query: Query) -> torch.Tensor:
        if not query.ids.numel():
            return weight.new_zeros(query.num_bags, weight.shape[1])
        if query.lengths is None:
            rows = weight.index_select(0, query.ids)
            return rows if query.weights is None else rows.mul_(query.weights.unsqueeze(1))
        return _summed(weight, query.ids, _offsets(query), query.weights)

    def row_gradient(
        self, weight: torch.Tensor, query: Query, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not query.ids.numel():
            return query.ids.long(), grad.new_zeros(0, weight.shape[1])
        rows, bags, weights, starts = _by_row(query, weight.shape[0])
        return rows, _summed(grad, bags, starts.to(bags.dtype), weights)

    def update(
        self, weight: torch.Tensor, query: Query, grad: torch.Tensor, rule: RowUpdate
    ) -> None:
        for rows, sums in _chunks(weight, query, grad):
            rule.apply(weight, rows, sums)


def _chunks(
    weight: torch.Tensor, query: Query, grad: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Rows, each once, and the gradients of each, some thousand at a time."""
    if not query.ids.numel():
        return
    rows, bags, weights, starts = _by_row(query, weight.shape[0])
    step = rows.shape[0]
    if weight.device.type == "cpu":
        step = max(1, _CHUNK_NUMBERS // weight.shape[1])
    for first in range(0, rows.shape[0], step):
        edges = starts[first : first + step + 1]
        start, end = int(edges[0]), int(edges[-1])
        offsets = (edges - start).to(bags.dtype)
        heavy = None if weights is None else weights[start:end]
        yield rows[first : first + step], _summed(grad, bags[start:end], offsets, heavy)


def _summed(
    source: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    if weights is not None:
        weights = weights.to(source.dtype)
    return F.embedding_bag(
        ids, source, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
    )


def _offsets(query: Query) -> torch.Tensor:
    assert query.lengths is not None, "bags have lengths"
    offsets = query.ids.new_zeros(query.num_bags + 1)
    torch.cumsum(query.lengths, 0, dtype=offsets.dtype, out=offsets[1:])
    return offsets


def _bag_of_id(query: Query) -> torch.Tensor:
    if query.lengths is None:
        return torch.arange(query.ids.shape[0], device=query.ids.device)
    return repeated(query.lengths, query.ids.shape[0])


def _by_row(
    query: Query, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """The rows that were looked up, each once, in order; and for each the bags that looked it up.

    Row and bag are packed into one number, so that one sort of plain numbers does it all. With
    weights, it is the id's position that is packed, since both its bag and its weight are wanted.
    """
    bags = _bag_of_id(query)
    what = bags
    num = query.num_bags
    if query.weights is not None and query.lengths is not None:
        num = query.ids.shape[0]
        what = torch.arange(num, device=bags.device)
    bits = max(1, (num - 1).bit_length())
    assert num_rows.bit_length() + bits < 64, "rows and bags of a stack fit one number"
    keys = sorted_in_place(query.ids.to(torch.int64).bitwise_left_shift_(bits).bitwise_or_(what))
    rows = keys >> bits
    packed = keys.bitwise_and_((1 << bits) - 1)
    starts = starts_of_runs(rows)
    weights = None
    if query.weights is not None:
        weights = query.weights.index_select(0, packed)
        packed = bags.index_select(0, packed)
    small = torch.int32 if query.ids.shape[0] < 2**31 else torch.int64
    return rows.index_select(0, starts[:-1]), packed.to(small), weights, starts
