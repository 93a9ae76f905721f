"""Every plan below some cost, where they are few enough.

Note [Enumeration]
The bound is a mean over ranks. Where it is nearly reached, a plan below some cost uses the cheapest
option of almost every table: there are few choices of options whose mean is low enough, and few
hosts that their blocks can be on, since hosts are interchangeable. For each of them, Note [Filling]
says whether the pieces fit into what is left of the ranks; here no partial filling is left out, so
that none is proof that there is no such plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from shardwise.planner.local_search import (
    MOST_PIECES,
    Filling,
    Pieces,
    TooMany,
    apart_of,
    put_pieces,
)
from shardwise.planner.problem import BLOCK, HOST, Array, Assignment, Bounds, Problem

#: Choices of options at most, and of hosts; partial fillings of one, and sets of pieces.
_CHOICES, _PLACED, _PARTIAL, _SETS = 400, 5_000, 5_000, 100_000
_ONE = np.uint64(1)


def enumerated(bounds: Bounds, cost_s: float) -> Assignment | None:
    """A plan within `cost_s`; None if there is none. Raises `TooMany` if there are too many."""
    problem, num = bounds.problem, 0
    if problem.at_once is not None:
        raise TooMany  # the slowest rank is not all that counts
    for options in _choices(bounds, cost_s - problem.base_s):
        chosen = _Chosen(problem, options, cost_s)
        for hosts in _hosts(len(chosen.blocks), problem.num_hosts):
            num += 1
            if num > _PLACED:
                raise TooMany
            found = chosen.filled(hosts)
            if found is not None:
                return found
    return None


def _choices(bounds: Bounds, level: float) -> list[list[int]]:
    """All options of all tables whose mean is below the level, at the prices of memory."""
    flat, problem = bounds.flat, bounds.problem
    allowed = bounds.useful(level + problem.base_s)
    value, prices, _ = bounds._mean(level)
    if len(bounds.tables_without_option(allowed)) or value >= level:
        return []
    priced = flat.mean[:, 0] + flat.mean[:, 1:] @ prices
    cheapest, more = [], []
    for table in range(len(problem.names)):
        first = int(flat.first[table])
        own = np.flatnonzero(allowed[first : flat.first[table + 1]]).tolist()
        least = min(own, key=lambda choice: priced[first + choice])
        cheapest.append(least)
        for choice in own:
            option = problem.options[table][choice]
            if option.shards is not None and (
                (option.scope == HOST and option.num_shards > 1)
                or (option.scope == BLOCK and option.num_shards != problem.ranks_per_host)
            ):
                raise TooMany  # its hosts are not enumerated
            if choice != least:
                more.append((float(priced[first + choice] - priced[first + least]), table, choice))
    more.sort()
    found: list[list[int]] = []
    _extend(cheapest, value, level, more, found)
    return found


def _extend(
    chosen: list[int],
    mean: float,
    level: float,
    more: Sequence[tuple[float, int, int]],
    found: list[list[int]],
) -> None:
    """Add these options, and those in which further tables have others than the cheapest."""
    if len(found) >= _CHOICES:
        raise TooMany
    found.append(chosen)
    for number, (seconds, table, choice) in enumerate(more):
        if mean + seconds > level * (1 + 1e-9):
            return
        changed = [*chosen[:table], choice, *chosen[table + 1 :]]
        others = [each for each in more[number + 1 :] if each[1] != table]
        _extend(changed, mean + seconds, level, others, found)


def _hosts(num_blocks: int, num_hosts: int) -> Iterator[tuple[int, ...]]:
    """The hosts of blocks; a block is on a host of those before it, or on the next."""
    if not num_blocks:
        yield ()
        return
    for before in _hosts(num_blocks - 1, num_hosts):
        for host in range(min(max(before, default=-1) + 2, num_hosts)):
            yield (*before, host)


class _Chosen:
    """The options of all tables, whose pieces are to be placed within a cost."""

    def __init__(self, problem: Problem, chosen: list[int], cost_s: float) -> None:
        self.problem, self.chosen = problem, chosen
        options = [each[choice] for each, choice in zip(problem.options, chosen, strict=True)]
        self.room = np.concatenate([[cost_s - problem.base_s], problem.capacity])
        self.unit = np.maximum(self.room, [1e-30, *np.ones(len(problem.capacity))])
        # Ranks of a host count as alike: with the least that the shards of a block have.
        self.blocks: dict[int, Array] = {}
        free: list[tuple[int, int]] = []
        for table, option in enumerate(options):
            if option.everywhere is not None:
                self.room = self.room - option.everywhere.reshape(-1, len(self.room)).min(0)
            if option.shards is not None and option.scope == BLOCK:
                self.blocks[table] = option.shards.min(0)
            elif option.shards is not None:
                free += [(table, number) for number in range(option.num_shards)]
        if len(free) > MOST_PIECES:
            raise TooMany
        plan = Assignment(problem, chosen, [np.zeros(o.num_shards, np.int64) for o in options])
        self.pieces = _pieces(plan, free, self.room)
        self.apart = apart_of(plan, self.pieces)

    def filled(self, hosts: Sequence[int]) -> Assignment | None:
        """A plan with the blocks on these hosts; None if there is none."""
        per_host = self.problem.ranks_per_host
        rooms = np.tile(self.room, (self.problem.num_hosts, 1))
        for load, host in zip(self.blocks.values(), hosts, strict=True):
            rooms[host] -= load
        rooms /= self.unit
        if (rooms < -1e-9).any():
            return None
        rooms = np.maximum(rooms, 0.0).repeat(per_host, 0)
        kinds, kind_of, counts = np.unique(rooms, axis=0, return_inverse=True, return_counts=True)
        options = zip(self.problem.options, self.chosen, strict=True)
        ranks = [np.zeros(each[choice].num_shards, np.int64) for each, choice in options]
        for table, host in zip(self.blocks, hosts, strict=True):
            ranks[table] = host * per_host + np.arange(per_host)
        plan = Assignment(self.problem, list(self.chosen), ranks)
        if len(self.pieces.table):
            filling = Filling(self.pieces, self.apart, self.unit, kinds, counts, complete=True)
            found = filling.run(_PARTIAL)
            if found is None:
                return None
            put_pieces(plan, self.pieces, found, kind_of)
        return plan


def _pieces(plan: Assignment, free: list[tuple[int, int]], room: Array) -> Pieces:
    """The pieces, largest first, and all sets of them that fit into the room."""
    loads = np.array([plan.option(t).shards[n] for t, n in free])  # type: ignore[index]
    loads = loads.reshape(-1, len(room))
    order = np.argsort(-loads[:, 0], kind="stable")
    loads, num = loads[order], len(free)
    most = room * (1 + 1e-9) + 1e-30
    bit = _ONE << np.arange(num, dtype=np.uint64)
    sums, bits = np.zeros((1, len(room))), np.zeros(1, np.uint64)
    first, last = np.array([num]), np.array([-1])
    all_sums, all_bits, all_first = [sums], [bits], [first]
    while len(sums):
        parent, piece = np.nonzero(last[:, None] < np.arange(num))
        fits = (sums[parent] + loads[piece] <= most).all(1)
        parent, piece = parent[fits], piece[fits]
        sums, bits, last = sums[parent] + loads[piece], bits[parent] | bit[piece], piece
        first = np.minimum(first[parent], piece)
        all_sums.append(sums)
        all_bits.append(bits)
        all_first.append(first)
        if sum(map(len, all_first)) > _SETS:
            raise TooMany
    set_loads = np.concatenate(all_sums)
    by_size = np.argsort(set_loads[:, 0], kind="stable")
    table, number = np.asarray(free, np.int64).reshape(-1, 2)[order].T
    set_bits, set_first = np.concatenate(all_bits), np.concatenate(all_first)
    return Pieces(table, number, loads, set_loads[by_size], set_bits[by_size], set_first[by_size])
