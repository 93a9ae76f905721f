"""The backend of plain torch kernels.

Note [Backward is a lookup]
The gradient of a row is the sum of the gradients of the bags that looked it up. With ids sorted by
row that is a lookup again, in which rows are the bags and bag gradients the table. So the same fast
kernel serves both directions, and nothing of size ids × width is ever written. It runs over some
thousand rows at a time, which stay in the cache until they are applied.

Note [An update is a product]
Where a row changes by a factor times its gradient (SGD, row-wise Adagrad), the update of a stack is
`weight += S @ grad`: the sparse matrix S has a row for each row of the stack, with the factor at
each bag that looked it up. MKL multiplies such a matrix in half the time of reducing and adding,
and no row gradient is materialised. It walks over all rows of the stack, so it is used only if the
batch looked up a fair part of them.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from shardwise.embedding.backends.backend import Query
from shardwise.embedding.backends.by_row import ByRow, by_row, in_parts
from shardwise.embedding.exchange.scratch import Lent
from shardwise.embedding.optimizers import RowUpdate, mean_squares
from shardwise.lookup.order import places

#: Elements of a gradient at a time: 4 MB. Smaller chunks cost more in calls than they save in cache
#: misses.
_CHUNK_NUMBERS = 1 << 20
#: Rows of a stack per id of a batch, up to which the product over all rows is faster.
_ROWS_PER_ID = 8


class TorchBackend:
    """Lookups through `embedding_bag`, updates through sorted ids."""

    name = "torch"

    def __init__(self) -> None:
        self._lent = Lent()

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
        found = by_row(query, weight.shape[0])
        if not found.rows.numel():
            return found.rows, grad.new_zeros(0, weight.shape[1])
        if grad.device.type != "cpu":
            offsets = found.starts.to(found.bags.dtype)
            return found.rows, _summed(grad, found.bags, offsets, found.weights)
        shape = (found.rows.shape[0], grad.shape[1])
        values = self._lent.numbers(math.prod(shape), grad.dtype).view(shape)
        for some, sums in _chunks(grad, found.bags, found.weights, found.starts):
            values[some] = sums
        return found.rows, values

    def update(
        self, weight: torch.Tensor, query: Query, grad: torch.Tensor, rule: RowUpdate
    ) -> None:
        bags = _Bags(grad)
        scales = rule.optimizer.scales_rows and not rule.optimizer.weight_decay
        for first, last, looked_up in in_parts(query, weight.shape[0]):
            here, mine = weight[first:last], rule.on(first, last)
            if scales and _worth_a_product(here, looked_up):
                _add_product(here, looked_up, bags, mine)
            else:
                _add_rows(here, looked_up, grad, mine)


@dataclass
class _Bags:
    """The gradients of bags, and their mean squares, which several tables share."""

    grad: torch.Tensor

    @functools.cached_property
    def squares(self) -> torch.Tensor:
        return mean_squares(self.grad)


def _add_rows(weight: torch.Tensor, looked_up: ByRow, grad: torch.Tensor, rule: RowUpdate) -> None:
    for some, sums in _chunks(grad, looked_up.bags, looked_up.weights, looked_up.starts):
        rule.apply(weight, looked_up.rows[some], sums)


def _chunks(
    grad: torch.Tensor, bags: torch.Tensor, weights: torch.Tensor | None, starts: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Row gradients, some thousand rows at a time, with the slice of rows they belong to."""
    num_rows = starts.shape[0] - 1
    step = max(1, num_rows)
    if grad.device.type == "cpu":
        step = max(1, _CHUNK_NUMBERS // grad.shape[1])
    for first in range(0, num_rows, step):
        edges = starts[first : first + step + 1]
        start, end = int(edges[0]), int(edges[-1])
        offsets = (edges - start).to(bags.dtype)
        some_weights = None if weights is None else weights[start:end]
        yield slice(first, first + step), _summed(grad, bags[start:end], offsets, some_weights)


def _worth_a_product(weight: torch.Tensor, looked_up: ByRow) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.float64)
        and torch.backends.mkl.is_available()
        and weight.shape[0] <= _ROWS_PER_ID * looked_up.ids.shape[0] < 2**31
    )


def _add_product(weight: torch.Tensor, looked_up: ByRow, bags: _Bags, rule: RowUpdate) -> None:
    """See Note [An update is a product]."""
    ids, weights = looked_up.ids, looked_up.weights
    counts = torch.bincount(ids, minlength=weight.shape[0]).to(torch.int32)
    # Factors of every row of the stack; rows that were not looked up have no entry in S.
    squares = _squares(bags, looked_up, counts) if rule.optimizer.needs_squares else None
    factors = rule.optimizer.row_factors(squares, rule.state)
    if weights is not None:
        weights = weights.to(weight.dtype)
    if isinstance(factors, torch.Tensor):
        values, alpha = factors.index_select(0, ids), 1.0
        values = values if weights is None else values.mul_(weights)
    else:
        values, alpha = weight.new_ones(ids.shape[0]) if weights is None else weights, factors
    shape = (weight.shape[0], bags.grad.shape[0])
    matrix = _compressed(_edges(counts), looked_up.bags, values, shape)
    torch.addmm(weight, matrix, bags.grad, alpha=alpha, out=weight)


def _squares(bags: _Bags, looked_up: ByRow, counts: torch.Tensor) -> torch.Tensor:
    """The mean square of the gradient of each row, looked up or not."""
    squares = bags.grad.new_zeros(counts.shape[0])
    if looked_up.weights is not None:
        some_bags, weights = looked_up.bags, looked_up.weights
        rows, edges = looked_up.rows, looked_up.starts
    else:
        # Most rows are in one bag and have its gradient: only those in several are summed.
        squares.index_copy_(0, looked_up.ids.long(), bags.squares.index_select(0, looked_up.bags))
        is_several = counts > 1
        rows = places(is_several)
        repeats = places(is_several.index_select(0, looked_up.ids))
        some_bags, weights = looked_up.bags.index_select(0, repeats), None
        edges = _edges(counts.index_select(0, rows))
    share = bags.grad.new_full((bags.grad.shape[1],), 1 / bags.grad.shape[1])
    for some, sums in _chunks(bags.grad, some_bags, weights, edges):
        squares.index_copy_(0, rows[some], torch.mv(sums.mul_(sums), share))
    return squares


def _edges(counts: torch.Tensor) -> torch.Tensor:
    """Where each group of `counts` begins, and where the last one ends."""
    edges = counts.new_zeros(counts.shape[0] + 1)
    torch.cumsum(counts, 0, dtype=counts.dtype, out=edges[1:])
    return edges


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
