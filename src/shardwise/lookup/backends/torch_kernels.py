"""The backend of plain torch kernels, and lookups sorted by row.

Note [Backward is a lookup]
The gradient of a row is the sum of the gradients of the bags that looked it up. With ids sorted by
row that is a lookup again, in which rows are the bags and bag gradients the table. So the same fast
kernel serves both directions, and nothing of size ids × width is ever written. It runs over some
thousand rows at a time, which stay in the cache until they are applied.

Note [An update of all rows]
Where a batch looked up a fair part of the rows, SGD's update is `weight += S @ grad`: the sparse
matrix S has a row for each row of the stack, with an entry at each bag that looked it up; MKL
multiplies it, and no row gradient is materialised.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from shardwise.lookup.backends.backend import Query
from shardwise.lookup.ids import (
    edges_of,
    repeated,
    segment_sums,
    sorted_pairs,
    sorted_with_order,
    starts_of_runs,
)
from shardwise.lookup.optimizers import SGD, FusedOptimizer, RowUpdate
from shardwise.lookup.scratch import Lent

#: Elements of a gradient at a time: 1 MB. Smaller chunks cost more in calls than they save in cache
#: misses; larger ones may come from new memory each time.
_CHUNK_NUMBERS = 1 << 18
#: Rows of a stack per id of a batch, up to which an update of all rows is faster.
_ROWS_PER_ID = 8
_HAS_MKL = torch.backends.mkl.is_available()


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
        return segment_sums(
            weight, query.ids, edges_of(query.lengths, query.ids.dtype), query.weights
        )

    def row_gradient(
        self, weight: torch.Tensor, query: Query, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [(part, part.by_row(query)) for part in in_parts(query, weight.shape[0])]
        nothing = query.ids.new_empty(0, dtype=torch.int64)
        rows = torch.cat([nothing, *(p.first_row + looked_up.rows for p, looked_up in parts)])
        shape = (rows.shape[0], grad.shape[1])
        if not rows.numel():
            return rows, grad.new_zeros(shape)
        if grad.device.type == "cpu":
            values = self._lent.numbers(math.prod(shape), grad.dtype).view(shape)
        else:
            values = grad.new_empty(shape)
        at = 0
        for _, looked_up in parts:
            for some, sums in _chunks(grad, looked_up.bags, looked_up.weights, looked_up.starts):
                values[at + some.start : at + some.stop] = sums
            at += looked_up.rows.shape[0]
        return rows, values

    def update(
        self, weight: torch.Tensor, query: Query, grad: torch.Tensor, rule: RowUpdate
    ) -> None:
        # The calls for a part cost more than a sort that does not fit the cache.
        for part in in_parts(query, weight.shape[0]):
            first, last, looked_up = part.first_row, part.last_row, part.by_row(query)
            _updater(weight[first:last], looked_up, rule.optimizer)(
                weight[first:last], looked_up, grad, rule.on(first, last)
            )


def _is_dense_enough(weight: torch.Tensor, num_ids: int) -> bool:
    """Whether an update of all rows is faster; see Note [An update of all rows]."""
    fits = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.float64)
    return fits and weight.shape[0] <= _ROWS_PER_ID * num_ids < 2**31


def _updater(
    weight: torch.Tensor, looked_up: ByRow, optimizer: FusedOptimizer
) -> Callable[[torch.Tensor, ByRow, torch.Tensor, RowUpdate], None]:
    """The fastest way to update; see Note [An update of all rows]."""
    if not isinstance(optimizer, SGD) or optimizer.weight_decay:
        return _add_rows
    dense = _HAS_MKL and _is_dense_enough(weight, looked_up.ids.shape[0])
    return _add_product if dense else _add_rows


def _add_rows(weight: torch.Tensor, looked_up: ByRow, grad: torch.Tensor, rule: RowUpdate) -> None:
    chunks = _chunks(grad, looked_up.bags, looked_up.weights, looked_up.starts)
    rule.apply_chunks(weight, looked_up.rows, chunks)


def _add_product(
    weight: torch.Tensor, looked_up: ByRow, grad: torch.Tensor, rule: RowUpdate
) -> None:
    values = weight.new_ones(looked_up.ids.shape[0])
    if looked_up.weights is not None:
        values = looked_up.weights.to(weight.dtype)
    counts = torch.bincount(looked_up.ids, minlength=weight.shape[0])
    shape = (weight.shape[0], grad.shape[0])
    matrix = _compressed(edges_of(counts, torch.int32), looked_up.bags, values, shape)
    torch.addmm(weight, matrix, grad, alpha=-rule.optimizer.lr, out=weight)


def _chunks(
    grad: torch.Tensor, bags: torch.Tensor, weights: torch.Tensor | None, starts: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Row gradients, some thousand rows at a time, with the slice of rows they belong to."""
    num_rows = starts.shape[0] - 1
    step = max(1, num_rows)
    if grad.device.type == "cpu":
        step = max(1, _CHUNK_NUMBERS // grad.shape[1])
    starts = starts.to(bags.dtype)
    edges = [*starts[:-1:step].tolist(), bags.shape[0]]
    for first, start, end in zip(range(0, num_rows, step), edges, edges[1:], strict=False):
        offsets = starts[first : first + step + 1] - start
        some_weights = None if weights is None else weights[start:end]
        last = first + offsets.shape[0] - 1
        yield slice(first, last), segment_sums(grad, bags[start:end], offsets, some_weights)


def _compressed(
    edges: torch.Tensor, columns: torch.Tensor, values: torch.Tensor, shape: tuple[int, int]
) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(edges, columns, values, shape, check_invariants=False)


# -- by row --------------------------------------------------------------------------------------
# Lookups sorted by row.
#
# On the CPU some tables are sorted at a time, so that what is sorted stays in the cache.


#: Elements of rows that are gathered at a time.
_GATHERED_NUMBERS = 1 << 22
#: Ids that are sorted at a time, unless one table has more.
_PART_IDS = 1 << 15


@dataclass
class ByRow:
    """Lookups in the order of rows."""

    #: Each row as often as it was looked up.
    ids: torch.Tensor
    #: The bags that looked them up.
    bags: torch.Tensor
    weights: torch.Tensor | None

    @functools.cached_property
    def starts(self) -> torch.Tensor:
        """Where a new row begins; and at the end, how many ids there are."""
        return starts_of_runs(self.ids)

    @functools.cached_property
    def rows(self) -> torch.Tensor:
        """The rows, each once."""
        return self.ids.index_select(0, self.starts[:-1]).long()


class Part(NamedTuple):
    """A range of a stack's rows, and its lookups: slices of the query's bags, and of its ids."""

    first_row: int
    last_row: int
    bags: Sequence[slice]
    ids: Sequence[slice]

    def of(self, query: Query) -> Query:
        """This part of a query, with rows counted from the first."""
        ids, lengths, weights = _joined(query.ids, self.ids), query.lengths, query.weights
        return Query(
            ids - self.first_row if self.first_row else ids,
            None if lengths is None else _joined(lengths, self.bags),
            None if weights is None else _joined(weights, self.ids),
        )

    def bags_of(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradients of this part's bags."""
        return _joined(grad, self.bags)

    def by_row(self, query: Query) -> ByRow:
        """Sort by row; rows are counted from the first, bags are those of the query."""
        mine, numbers = self.of(query), [_numbers(query, each) for each in self.bags]
        of_bags = numbers[0] if len(numbers) == 1 else torch.cat(numbers)
        # Bags are counted from the part's first, so that a row and a bag are a small number.
        bags = bag_of_id(mine)
        if mine.weights is None:
            num_rows = self.last_row - self.first_row
            ids, bags = sorted_pairs(mine.ids, bags, num_rows, of_bags.shape[0])
            return ByRow(ids, of_bags.index_select(0, bags), None)
        ids, order = sorted_with_order(mine.ids)
        bags = of_bags.index_select(0, bags.index_select(0, order))
        return ByRow(ids, bags, mine.weights.index_select(0, order))


def in_parts(query: Query, num_rows: int, num_ids: int | None = None) -> list[Part]:
    """All lookups, in the order of rows; tables of so many ids at a time if the query has runs."""
    if query.runs is None or query.lengths is None or query.ids.device.type != "cpu":
        bags, ids = slice(0, query.num_bags), slice(0, query.ids.shape[0])
        return [Part(0, num_rows, [bags], [ids])]
    num_bags, first_row, rows = query.runs
    num_tables = first_row.shape[0]
    bag_edges = _cumulated(num_bags.reshape(-1))
    id_edges = _cumulated(query.lengths.numpy())[bag_edges]
    # Edges of each rank's tables: the last one is the first of the next rank.
    places = np.arange(num_bags.shape[0])[:, None] * num_tables + np.arange(num_tables + 1)
    bags, ids = bag_edges[places], id_edges[places]
    before = (ids - ids[:, :1]).sum(0)
    group = before[:-1] // (num_ids or _PART_IDS)
    # A table that is there several times stays together.
    is_first = np.diff(first_row, prepend=-1) != 0
    group = group[np.maximum.accumulate(np.where(is_first, np.arange(num_tables), 0))]
    starts = np.flatnonzero(np.diff(group, prepend=-1)).tolist()
    found = []
    for start, end in zip(starts, [*starts[1:], num_tables], strict=True):
        if before[end] > before[start]:
            last_row = int(first_row[end - 1] + rows[end - 1])
            slices = [_slices(edges[:, (start, end)].tolist()) for edges in (bags, ids)]
            found.append(Part(int(first_row[start]), last_row, *slices))
    return found


def _slices(edges: list[list[int]]) -> list[slice]:
    return [slice(start, end) for start, end in edges]


def _cumulated(counts: np.ndarray) -> np.ndarray:
    edges = np.zeros(counts.shape[0] + 1, dtype=np.int64)
    np.cumsum(counts, out=edges[1:])
    return edges


def _joined(values: torch.Tensor, slices: Sequence[slice]) -> torch.Tensor:
    return values[slices[0]] if len(slices) == 1 else torch.cat([values[each] for each in slices])


def _numbers(query: Query, bags: slice) -> torch.Tensor:
    dtype = torch.int32 if query.ids.shape[0] < 2**31 else torch.int64
    return torch.arange(bags.start, bags.stop, dtype=dtype, device=query.ids.device)


def bag_of_id(query: Query) -> torch.Tensor:
    """The bag that each id is in."""
    num = query.ids.shape[0]
    if query.lengths is None:
        return _numbers(query, slice(0, num))
    return repeated(query.lengths, num, torch.int32 if num < 2**31 else torch.int64)


def products_of_rows(table: torch.Tensor, query: Query, grad: torch.Tensor) -> torch.Tensor:
    """For each id, its row times its bag's gradient; some thousand ids at a time."""
    bags = bag_of_id(query)
    step = max(1, _GATHERED_NUMBERS // table.shape[1])
    found = grad.new_empty(query.ids.shape[0])
    for start in range(0, found.shape[0], step):
        part = slice(start, start + step)
        rows = table.index_select(0, query.ids[part])
        torch.sum(rows.mul_(grad.index_select(0, bags[part])), 1, out=found[part])
    return found
