"""Lookups sorted by row.

Row and bag are packed into one integer, so that one sort of plain integers is enough. On the CPU
each table is sorted by itself: its rows and bags fit into 32 bits, and its ids into the cache.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from shardwise.embedding.backends.backend import Query, Run
from shardwise.lookup.order import repeated, sorted_in_place, starts_of_runs

#: Elements of rows that are gathered at a time.
_CHUNK_NUMBERS = 1 << 22
#: Ids that are sorted at a time: their buffers take a few megabytes, which the next ones reuse.
_PART_IDS = 1 << 20


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
    """A range of a stack's rows, and the lookups there, with rows counted from the first."""

    first_row: int
    last_row: int
    looked_up: ByRow


def by_row(query: Query, num_rows: int) -> ByRow:
    """Sort what was looked up by row."""
    return next(_parts(query, num_rows, query.ids.shape[0])).looked_up


def in_parts(query: Query, num_rows: int) -> Iterator[Part]:
    """As `by_row`, some tables at a time if the query has runs."""
    return _parts(query, num_rows, _PART_IDS)


def _parts(query: Query, num_rows: int, num_ids: int) -> Iterator[Part]:
    if not query.ids.numel():
        nothing = query.ids.new_empty(0, dtype=torch.int32)
        yield Part(0, num_rows, ByRow(nothing, nothing, query.weights))
        return
    tables = _tables(query)
    if tables is None:
        yield Part(0, num_rows, _all_at_once(query, num_rows))
        return
    group: list[_TableLookups] = []
    total = 0
    for table in tables:
        group.append(table)
        total += table.num_ids
        if total >= num_ids or table is tables[-1]:
            yield _sorted_part(query, group)
            group, total = [], 0


def bag_of_id(query: Query) -> torch.Tensor:
    """The bag that each id is in."""
    if query.lengths is None:
        return torch.arange(query.ids.shape[0], device=query.ids.device)
    return repeated(query.lengths, query.ids.shape[0])


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


def _all_at_once(query: Query, num_rows: int) -> ByRow:
    """With weights, the id's position is packed instead of its bag, to find both."""
    bags = bag_of_id(query)
    what, num = bags, query.num_bags
    if query.weights is not None and query.lengths is not None:
        num = query.ids.shape[0]
        what = torch.arange(num, device=bags.device)
    bits = max(1, (num - 1).bit_length())
    assert num_rows.bit_length() + bits < 64, "rows and bags of a stack fit one number"
    keys = query.ids.to(torch.int64, copy=True).bitwise_left_shift_(bits).bitwise_or_(what)
    keys = sorted_in_place(keys)
    rows = keys >> bits
    packed = keys.bitwise_and_((1 << bits) - 1)
    weights = None
    if query.weights is not None:
        weights = query.weights.index_select(0, packed)
        packed = bags.index_select(0, packed)
    small = torch.int32 if query.ids.shape[0] < 2**31 else torch.int64
    return ByRow(rows, packed.to(small), weights)


class _TableLookups(NamedTuple):
    """The lookups of one table: its rows, and each run with its first bag and its range of ids."""

    first_row: int
    num_rows: int
    runs: list[tuple[Run, int, int, int]]

    @property
    def num_ids(self) -> int:
        return sum(end - start for _, _, start, end in self.runs)

    @property
    def num_bags(self) -> int:
        return sum(run.num_bags for run, _, _, _ in self.runs)


def _tables(query: Query) -> list[_TableLookups] | None:
    """The tables in the order of rows; None if they are unknown or 32 bits are too few."""
    if query.runs is None or query.weights is not None or query.ids.device.type != "cpu":
        return None
    assert query.lengths is not None, "runs are of bags"
    ends = np.concatenate(([0], np.cumsum(query.lengths.numpy(), dtype=np.int64)))
    found: dict[int, _TableLookups] = {}
    bag = 0
    for run in query.runs:
        table = found.setdefault(run.first_row, _TableLookups(run.first_row, run.num_rows, []))
        table.runs.append((run, bag, int(ends[bag]), int(ends[bag + run.num_bags])))
        bag += run.num_bags
    for table in found.values():
        if table.num_rows.bit_length() + _bits(table) > 32:
            return None
    last_row = max(table.first_row + table.num_rows for table in found.values())
    if max(last_row, query.ids.shape[0]) >= 2**31:
        return None
    return [found[first_row] for first_row in sorted(found)]


def _bits(table: _TableLookups) -> int:
    """How many bits a bag number of a table takes."""
    return max(1, (table.num_bags - 1).bit_length())


def _sorted_part(query: Query, tables: Sequence[_TableLookups]) -> Part:
    """Each table by itself, one after the other."""
    total = sum(table.num_ids for table in tables)
    first_row = tables[0].first_row
    ids = torch.empty(total, dtype=torch.int32)
    bags = torch.empty(total, dtype=torch.int32)
    at = 0
    for table in tables:
        num, bits = table.num_ids, _bits(table)
        if not num:
            continue
        keys = _packed(query, table, bits)
        keys.sort()
        rows = ids[at : at + num].numpy()
        np.right_shift(keys, np.uint32(bits), out=rows, casting="unsafe")
        rows += np.int32(table.first_row - first_row)
        global_bags = np.concatenate(
            [np.arange(bag, bag + run.num_bags, dtype=np.int32) for run, bag, _, _ in table.runs]
        )
        np.bitwise_and(keys, np.uint32((1 << bits) - 1), out=keys)
        numbers = torch.from_numpy(keys.view(np.int32))
        torch.index_select(torch.from_numpy(global_bags), 0, numbers, out=bags[at : at + num])
        at += num
    return Part(first_row, tables[-1].first_row + tables[-1].num_rows, ByRow(ids, bags, None))


def _packed(query: Query, table: _TableLookups, bits: int) -> np.ndarray:
    """Each row of one table and the bag that looked it up, packed into one integer."""
    assert query.lengths is not None, "runs are of bags"
    ids, lengths = query.ids.numpy(), query.lengths.numpy()
    keys = np.empty(table.num_ids, dtype=np.uint32)
    at = number = 0
    for run, bag, start, end in table.runs:
        mine = keys[at : at + end - start]
        np.subtract(ids[start:end], run.first_row, out=mine, casting="unsafe")
        np.left_shift(mine, np.uint32(bits), out=mine)
        numbers = np.arange(number, number + run.num_bags, dtype=np.uint32)
        np.bitwise_or(mine, np.repeat(numbers, lengths[bag : bag + run.num_bags]), out=mine)
        at += end - start
        number += run.num_bags
    return keys
