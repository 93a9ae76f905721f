"""The backend of plain torch kernels.

Note [Backward is a lookup]
The gradient of a row is the sum, over the bags that looked it up, of the gradients of those bags.
With ids sorted by row that is a lookup again: rows are the bags, and what is looked up in them are
bags' gradients. So the same fast kernel serves both ways, and nothing as large as the number of ids
times the width is ever written. It runs over some thousand rows at a time, which stay in the cache
until they have been applied.

Note [An update is a product]
Where a row changes by a number times its gradient (SGD, row-wise Adagrad), the update of a whole
stack is `weight += S × grad`: S has a row for each row of the stack and, in it, the number at each
bag that looked the row up. MKL multiplies such a matrix in half the time that reducing and adding
take, and no row's gradient is ever written. It walks over all rows of the stack, so it is used only
when the batch looked up a fair part of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from shardwise.embedding.backend import Query
from shardwise.embedding.by_row import ByRow, by_row, in_parts
from shardwise.embedding.fused import RowUpdate, mean_squares
from shardwise.exchange.order import places

#: Numbers of a gradient that are held at a time: four megabytes. Fewer cost more calls than they
#: save in misses of the cache.
_CHUNK_NUMBERS = 1 << 20
#: Rows of a stack per id of a batch, up to which a product that walks over all rows is faster.
_ROWS_PER_ID = 8


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
        rows, _, bags, weights, starts = by_row(query, weight.shape[0])
        if not rows.numel():
            return rows, grad.new_zeros(0, weight.shape[1])
        return rows, _summed(grad, bags, starts.to(bags.dtype), weights)

    def update(
        self, weight: torch.Tensor, query: Query, grad: torch.Tensor, rule: RowUpdate
    ) -> None:
        is_product = rule.optimizer.scales_rows and not rule.optimizer.weight_decay
        for first, last, looked_up in in_parts(query, weight.shape[0]):
            here = weight[first:last]
            if is_product and _worth_a_product(here, looked_up):
                _add_product(here, looked_up, grad, rule.on(first, last))
            else:
                _add_rows(here, looked_up, grad, rule.on(first, last))


def _add_rows(weight: torch.Tensor, looked_up: ByRow, grad: torch.Tensor, rule: RowUpdate) -> None:
    rows, _, bags, weights, starts = looked_up
    for some, sums in _chunks(grad, bags, weights, starts):
        rule.apply(weight, rows[some], sums)


def _chunks(
    grad: torch.Tensor, bags: torch.Tensor, weights: torch.Tensor | None, starts: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor]]:
    """The gradients of rows, some thousand at a time, and which of the rows they are of."""
    num_rows = starts.shape[0] - 1
    step = max(1, num_rows)
    if grad.device.type == "cpu":
        step = max(1, _CHUNK_NUMBERS // grad.shape[1])
    for first in range(0, num_rows, step):
        edges = starts[first : first + step + 1]
        start, end = int(edges[0]), int(edges[-1])
        offsets = (edges - start).to(bags.dtype)
        heavy = None if weights is None else weights[start:end]
        yield slice(first, first + step), _summed(grad, bags[start:end], offsets, heavy)


def _worth_a_product(weight: torch.Tensor, looked_up: ByRow) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.float64)
        and torch.backends.mkl.is_available()
        and weight.shape[0] <= _ROWS_PER_ID * looked_up.ids.shape[0] < 2**31
    )


def _add_product(
    weight: torch.Tensor, looked_up: ByRow, grad: torch.Tensor, rule: RowUpdate
) -> None:
    """See Note [An update is a product]."""
    rows, ids, bags, weights, starts = looked_up
    squares = _squares(grad, looked_up) if rule.optimizer.needs_squares else None
    factors = rule.optimizer.row_factors(rows, squares, rule.state)
    if weights is not None:
        weights = weights.to(weight.dtype)
    if isinstance(factors, torch.Tensor):
        # Of every row of the stack, since ids are numbers in it.
        values = factors.new_empty(weight.shape[0]).index_copy_(0, rows, factors)
        values = values.index_select(0, ids)
        values, alpha = values if weights is None else values.mul_(weights), 1.0
    else:
        values = weight.new_ones(bags.shape[0]) if weights is None else weights
        alpha = factors
    edges = torch.zeros(weight.shape[0] + 1, dtype=torch.int32)
    edges[1:].index_copy_(0, rows, starts.diff().to(torch.int32))
    edges = edges.cumsum(0, dtype=torch.int32)
    matrix = _compressed(edges, bags, values, (weight.shape[0], grad.shape[0]))
    torch.addmm(weight, matrix, grad, alpha=alpha, out=weight)


def _squares(grad: torch.Tensor, looked_up: ByRow) -> torch.Tensor:
    """The mean square of the gradient of each row."""
    rows, ids, bags, weights, starts = looked_up
    if weights is not None:
        squares = grad.new_empty(rows.shape[0])
        for some, sums in _chunks(grad, bags, weights, starts):
            squares[some] = mean_squares(sums)
        return squares
    # Most rows are in one bag, and have its gradient: only those of several are added up.
    squares = mean_squares(grad).index_select(0, bags.index_select(0, starts[:-1]))
    counts = starts.diff()
    several = places(counts > 1)
    edges = starts.new_zeros(several.shape[0] + 1)
    torch.cumsum(counts.index_select(0, several), 0, out=edges[1:])
    for some, sums in _chunks(grad, bags.index_select(0, _repeats(ids)), None, edges):
        squares.index_copy_(0, several[some], mean_squares(sums))
    return squares


def _repeats(ids: torch.Tensor) -> torch.Tensor:
    """Where, in ids that are sorted, one stands that is there more than once."""
    like_last = torch.zeros(ids.shape[0] + 1, dtype=torch.bool)
    torch.eq(ids[1:], ids[:-1], out=like_last[1:-1])
    return places(like_last[:-1] | like_last[1:])


def _compressed(
    edges: torch.Tensor, columns: torch.Tensor, values: torch.Tensor, shape: tuple[int, int]
) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(edges, columns, values, shape, check_invariants=False)


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
