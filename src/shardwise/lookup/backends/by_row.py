"""Lookups sorted by row.

On the CPU some tables are sorted at a time, so that what is sorted stays in the cache.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from shardwise.lookup.backends.backend import Query
from shardwise.lookup.order import repeated, sorted_with_order, starts_of_runs

#: Elements of rows that are gathered at a time.
_CHUNK_NUMBERS = 1 << 22
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
        mine = self.of(query)
        bags = torch.cat(
            [_bag_of_id(query, *each) for each in zip(self.bags, self.ids, strict=True)]
        )
        ids, order = sorted_with_order(mine.ids)
        weights = None if mine.weights is None else mine.weights.index_select(0, order)
        return ByRow(ids, bags.index_select(0, order), weights)


def in_parts(query: Query, num_rows: int) -> list[Part]:
    """All lookups, in the order of rows; some tables at a time if the query has runs."""
    if query.runs is None or query.lengths is None or query.ids.device.type != "cpu":
        bags, ids = slice(0, query.num_bags), slice(0, query.ids.shape[0])
        return [Part(0, num_rows, [bags], [ids])]
    num_bags, first_row, rows = query.runs
    num_tables = first_row.shape[0]
    bag_edges = _edges(num_bags.reshape(-1))
    id_edges = _edges(query.lengths.numpy())[bag_edges]
    # Edges of each rank's tables: the last one is the first of the next rank.
    places = np.arange(num_bags.shape[0])[:, None] * num_tables + np.arange(num_tables + 1)
    bags, ids = bag_edges[places], id_edges[places]
    before = (ids - ids[:, :1]).sum(0)
    group = before[:-1] // _PART_IDS
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


def _edges(counts: np.ndarray) -> np.ndarray:
    edges = np.zeros(counts.shape[0] + 1, dtype=np.int64)
    np.cumsum(counts, out=edges[1:])
    return edges


def _joined(values: torch.Tensor, slices: Sequence[slice]) -> torch.Tensor:
    return values[slices[0]] if len(slices) == 1 else torch.cat([values[each] for each in slices])


def _bag_of_id(query: Query, bags: slice, ids: slice) -> torch.Tensor:
    """The bag that each of some ids is in."""
    dtype = torch.int32 if query.ids.shape[0] < 2**31 else torch.int64
    if query.lengths is None:
        return torch.arange(ids.start, ids.stop, dtype=dtype, device=query.ids.device)
    return repeated(query.lengths[bags], ids.stop - ids.start, dtype, first=bags.start)


def bag_of_id(query: Query) -> torch.Tensor:
    """The bag that each id is in."""
    return _bag_of_id(query, slice(0, query.num_bags), slice(0, query.ids.shape[0]))


def products_of_rows(table: torch.Tensor, query: Query, grad: torch.Tensor) -> torch.Tensor:
    """For each id, its row times its bag's gradient; some thousand ids at a time."""
    bags = bag_of_id(query)
    step = max(1, _CHUNK_NUMBERS // table.shape[1])
    found = grad.new_empty(query.ids.shape[0])
    for start in range(0, found.shape[0], step):
        part = slice(start, start + step)
        rows = table.index_select(0, query.ids[part])
        torch.sum(rows.mul_(grad.index_select(0, bags[part])), 1, out=found[part])
    return found
