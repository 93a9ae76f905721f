"""Which rank computes which queries of a sharded sequence, and what that costs: pure arithmetic.

Note [Balanced queries]
Each rank holds a range of positions. With a causal mask the last ranges have the most to do: rank r
of n has r + 1/2 of the n * n / 2 blocks. So a rank above the mean hands its first queries, which
need the fewest keys, to a rank below, and gets their results back. The queries that a rank computes
are its `work` ranges. Keys and values then pass from rank to rank, and only those that a rank's
work needs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwise.comm.cost import collective_s, exchange_s

#: The first position, and one past the last.
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries that attend to keys: to all of them, or causally, as many of both."""

    queries: Range
    keys: Range
    causal: bool


def tiles(queries: Range, keys: Range, causal: bool) -> Iterator[Tile]:
    """The tiles of the queries and keys in two ranges.

    >>> [(t.queries, t.keys, t.causal) for t in tiles((4, 8), (2, 6), True)]
    [((4, 8), (2, 4), False), ((4, 6), (4, 6), True), ((6, 8), (4, 6), False)]
    """
    (first, end), (low, high) = queries, keys
    if not causal:
        if end > first and high > low:
            yield Tile(queries, keys, False)
        return
    first, high = max(first, low), min(high, end)
    if end <= first or high <= low:
        return
    if low < first:  # before all of these queries
        yield Tile((first, end), (low, min(high, first)), False)
    low = max(low, first)
    if low < high:
        yield Tile((first, high), (low, high), True)
        if high < end:
            yield Tile((high, end), (low, high), False)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The positions that each rank holds, and the queries that it attends for."""

    queries: tuple[Range, ...]
    keys: tuple[Range, ...]
    work: tuple[tuple[Range, ...], ...]
    causal: bool

    @property
    def num_ranks(self) -> int:
        return len(self.queries)

    @property
    def is_moved(self) -> bool:
        """Whether a rank attends for queries of another."""
        return any(work != (held,) for work, held in zip(self.work, self.queries, strict=True))

    def num_pairs(self, rank: int) -> int:
        """The work of a rank: how many pairs of a query and a key."""
        return sum(_num_pairs(each, self.keys[-1][1], self.causal) for each in self.work[rank])

    def handed(self, owner: int, worker: int) -> tuple[Range, ...]:
        """The queries of `owner` that `worker` attends for."""
        low, high = self.queries[owner]
        return tuple(r for r in self.work[worker] if low <= r[0] and r[1] <= high and r[0] < r[1])

    def needed(self, worker: int, owner: int) -> Range:
        """The keys of `owner` that the work of `worker` needs: the first ones."""
        low, high = self.keys[owner]
        if not any(end > first for first, end in self.work[worker]):
            return low, low
        if self.causal:
            high = min(high, max(end for _, end in self.work[worker]))
        return low, max(low, high)

    def sent_rows(self, rank: int) -> tuple[int, int]:
        """How many queries and how many keys `rank` sends to others."""
        others = [other for other in range(self.num_ranks) if other != rank]
        queries = sum(_size(r) for other in others for r in self.handed(rank, other))
        return queries, sum(_size(self.needed(other, rank)) for other in others)


@functools.lru_cache(maxsize=1024)
def schedule(queries: tuple[Range, ...], keys: tuple[Range, ...], causal: bool) -> Schedule:
    """The schedule of these ranges; balanced where a causal mask makes them unequal.

    >>> halves = ((0, 8), (8, 16))
    >>> found = schedule(halves, halves, True)
    >>> found.work, [found.num_pairs(rank) for rank in (0, 1)]
    ((((0, 8), (8, 11)), ((11, 16),)), [66, 70])
    """
    plain = Schedule(queries, keys, tuple((held,) for held in queries), causal)
    if not causal or len(queries) == 1:
        return plain
    last = keys[-1][1]
    loads = [_num_pairs(held, last, True) for held in queries]
    mean = sum(loads) / len(loads)
    kept = list(queries)
    given: list[list[Range]] = [[] for _ in queries]
    for rank in sorted(range(len(loads)), key=lambda r: -loads[r]):
        while True:
            taker = min(range(len(loads)), key=lambda r: loads[r])
            amount = min(loads[rank] - mean, mean - loads[taker])
            first, end = kept[rank]
            cut = _cut(first, end, last, amount)
            moved = _num_pairs((first, cut), last, True)
            if cut == first or taker == rank or moved < mean / 200:
                break
            kept[rank] = (cut, end)
            given[taker].append((first, cut))
            loads[rank] -= moved
            loads[taker] += moved
    work = tuple(
        (own, *sorted(others)) if others else (own,)
        for own, others in zip(kept, given, strict=True)
    )
    return Schedule(queries, keys, work, causal)


def _cut(first: int, end: int, num_keys: int, amount: float) -> int:
    """The position up to which the queries from `first` have about `amount` pairs."""
    low, high = first, end
    while low < high:
        middle = (low + high + 1) // 2
        if _num_pairs((first, middle), num_keys, True) <= amount:
            low = middle
        else:
            high = middle - 1
    return low


def _num_pairs(queries: Range, num_keys: int, causal: bool) -> int:
    first, end = queries
    if not causal:
        return max(end - first, 0) * num_keys
    rising = min(max(num_keys, first), end)  # queries before this position see all up to their own
    return (rising * (rising + 1) - first * (first + 1)) // 2 + (end - rising) * num_keys


def _size(positions: Range) -> int:
    return positions[1] - positions[0]


@dataclass(frozen=True, slots=True)
class RowBytes:
    """Bytes of one position: of a query, of its result, and of a key with its value."""

    query: int
    result: int
    pair: int


def ring_s(found: Schedule, row: RowBytes) -> float:
    """Seconds to exchange what a schedule sends in forward."""
    sent = [found.sent_rows(rank) for rank in range(found.num_ranks)]
    rounds = (found.num_ranks - 1) * exchange_s(0)
    handed = max(queries for queries, _ in sent) * (row.query + row.result)
    moving = 2 * exchange_s(0) if found.is_moved else 0.0
    pairs = max(keys for _, keys in sent) * row.pair
    return rounds + moving + exchange_s(handed + pairs) - exchange_s(0)


def heads_s(found: Schedule, row: RowBytes, repeats: float) -> float:
    """Seconds for the all-to-alls over heads; `repeats` is how often each key is sent."""
    num = found.num_ranks
    queries, keys = (max(map(_size, held)) for held in (found.queries, found.keys))
    there = queries * row.query + keys * row.pair * repeats
    back = queries * row.result
    return collective_s("all_to_all", num, there) + collective_s("all_to_all", num, back)


def spans(sizes: Sequence[int]) -> tuple[Range, ...]:
    """Consecutive ranges of these sizes."""
    found, first = [], 0
    for size in sizes:
        found.append((first, first + size))
        first += size
    return tuple(found)
