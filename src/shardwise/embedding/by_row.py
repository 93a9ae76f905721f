"""What was looked up, sorted by row.

Row and bag are packed into one number, so that one sort of plain numbers does it all. On the CPU
each table is sorted by itself: its rows and bags are few enough for numbers of 32 bits, and its ids
for the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from shardwise.embedding.backend import Query, Run
from shardwise.exchange.order import repeated, sorted_in_place, starts_of_runs

#: Numbers of rows that are held at a time.
_CHUNK_NUMBERS = 1 << 22


class ByRow(NamedTuple):
    """The rows that were looked up, each once and in order, and the bags that looked them up."""

    rows: torch.Tensor
    #: The ids in order: each row as often as it was looked up.
    ids: torch.Tensor
    #: Row by row; those of the i-th row are from starts[i] up to starts[i + 1].
    bags: torch.Tensor
    weights: torch.Tensor | None
    starts: torch.Tensor


def by_row(query: Query, num_rows: int) -> ByRow:
    """Sort what was looked up by row."""
    if not query.ids.numel():
        nothing = query.ids.new_empty(0, dtype=torch.int64)
        small = nothing.to(torch.int32)
        return ByRow(nothing, small, small, query.weights, nothing.new_zeros(1))
    if query.runs is not None and query.weights is None and query.ids.device.type == "cpu":
        found = _by_table(query, query.runs)
        if found is not None:
            return found
    return _all_at_once(query, num_rows)


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
    """With weights, it is the id's position that is packed: its bag and its weight are wanted."""
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
    starts = starts_of_runs(rows)
    weights = None
    if query.weights is not None:
        weights = query.weights.index_select(0, packed)
        packed = bags.index_select(0, packed)
    small = torch.int32 if query.ids.shape[0] < 2**31 else torch.int64
    return ByRow(rows.index_select(0, starts[:-1]), rows, packed.to(small), weights, starts)


def _by_table(query: Query, runs: tuple[Run, ...]) -> ByRow | None:
    """Each table by itself; None when numbers of 32 bits are too small."""
    assert query.lengths is not None, "runs are of bags"
    tables: dict[int, list[tuple[Run, int]]] = {}
    first_bag = 0
    for run in runs:
        tables.setdefault(run.first_row, []).append((run, first_bag))
        first_bag += run.num_bags
    for parts in tables.values():
        num_bags = sum(run.num_bags for run, _ in parts)
        if parts[0][0].num_rows.bit_length() + max(1, (num_bags - 1).bit_length()) > 32:
            return None
    last_row = max(run.first_row + run.num_rows for run in runs)
    if max(last_row, query.ids.shape[0]) >= 2**31:
        return None
    ids, lengths = query.ids.numpy(), query.lengths.numpy()
    ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    # As long as they may get; memory that is never written is never there.
    rows = np.empty(ids.shape[0], dtype=np.int64)
    in_order = np.empty(ids.shape[0], dtype=np.int32)
    bags = np.empty(ids.shape[0], dtype=np.int32)
    starts = np.empty(ids.shape[0] + 1, dtype=np.int32)
    at = num_rows = 0
    for first_row in sorted(tables):
        parts = tables[first_row]
        spans = [(int(ends[bag]), int(ends[bag + run.num_bags])) for run, bag in parts]
        num = sum(end - start for start, end in spans)
        if not num:
            continue
        keys, bits = _packed(ids, lengths, parts, spans, num)
        keys.sort()
        here = in_order[at : at + num]
        np.right_shift(keys, np.uint32(bits), out=here, casting="unsafe")
        here += np.int32(first_row)
        changes = np.ones(num, dtype=bool)
        np.not_equal(here[1:], here[:-1], out=changes[1:])
        begin = np.flatnonzero(changes)
        end = num_rows + begin.shape[0]
        rows[num_rows:end] = here.take(begin)
        starts[num_rows:end] = begin + at
        global_bags = np.concatenate(
            [np.arange(bag, bag + run.num_bags, dtype=np.int32) for run, bag in parts]
        )
        np.bitwise_and(keys, np.uint32((1 << bits) - 1), out=keys)
        np.take(global_bags, keys, out=bags[at : at + num], mode="clip")
        at, num_rows = at + num, end
    starts[num_rows] = at
    return ByRow(
        torch.from_numpy(rows[:num_rows]),
        torch.from_numpy(in_order),
        torch.from_numpy(bags),
        None,
        torch.from_numpy(starts[: num_rows + 1]),
    )


def _packed(
    ids: np.ndarray,
    lengths: np.ndarray,
    parts: list[tuple[Run, int]],
    spans: list[tuple[int, int]],
    num: int,
) -> tuple[np.ndarray, int]:
    """Rows of one table and bags that looked them up, as one number each; and the bags' bits."""
    bits = max(1, (sum(run.num_bags for run, _ in parts) - 1).bit_length())
    keys = np.empty(num, dtype=np.uint32)
    at = number = 0
    for (run, bag), (start, end) in zip(parts, spans, strict=True):
        mine = keys[at : at + end - start]
        np.subtract(ids[start:end], run.first_row, out=mine, casting="unsafe")
        np.left_shift(mine, np.uint32(bits), out=mine)
        numbers = np.arange(number, number + run.num_bags, dtype=np.uint32)
        np.bitwise_or(mine, np.repeat(numbers, lengths[bag : bag + run.num_bags]), out=mine)
        at += end - start
        number += run.num_bags
    return keys, bits
