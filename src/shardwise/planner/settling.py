"""Plans that cost about the same, but need fewer kernel calls.

Note [Settling]
A rank makes one lookup and one update per width of its shards, one request per group of tables that
are split by rows over the same ranks, and one all-reduce for all replicated tables. None of these
is a sum over tables, so the search and its bound leave them out. Here one or two tables at a time
get another option or other ranks, if that lowers the time with these costs and keeps the cost
without them within a limit. The search also starts from the plan with no table replicated, since
only the last of those changes saves the all-reduce.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.planner.costs import Setting
from shardwise.planner.problem import Array, Assignment, Ints, Option
from shardwise.planner.workload import Workload

#: The most changes that are tried, kicks of the best plan, and tables that a kick changes.
_TRIES, _KICKS, _KICKED = 30_000, 40, 3
#: How many of the least loaded ranks are tried for one shard, and for several.
_PLACES, _SPREAD = 8, 5
#: The norm of the ranks' seconds: the slowest counts most, the others break ties.
_NORM = 24
_GAIN = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class _Way:
    """One option of a table: its load, and what decides which kernel calls it shares."""

    choice: int
    everywhere: Array
    shard: Array
    #: How many shards there are; 0 if every rank has one.
    shards: int
    #: Whether it is replicated, and its width: shards of one stack are looked up together.
    stack: tuple[bool, int]
    by_rows: bool


class Settling:
    """Changes of one plan; see Note [Settling]."""

    def __init__(
        self,
        plan: Assignment,
        work: Workload,
        setting: Setting,
        most_s: float,
        seconds: float | None = None,
    ) -> None:
        problem = self.problem = plan.problem
        self._end = np.inf if seconds is None else time.process_time() + seconds
        #: The largest load that a rank may have, without the costs of Note [Settling].
        self._most = np.concatenate([[most_s - problem.base_s], problem.capacity]) * (1 + 1e-9)
        c = setting.constants
        self._call_s = c.lookup.call_s + c.update.call_s if c.width_s is None else c.width_s
        self._group_s, self._copies_s = c.group_s, c.copies_s
        self._base_s = problem.base_s
        self._ways = [
            [_way(number, option, use.table.embedding_dim) for number, option in enumerate(each)]
            for use, each in zip(work.uses, problem.options, strict=True)
        ]
        self._all = np.arange(problem.num_ranks)
        self._rng = np.random.default_rng(0)
        self._tries = 0
        self._load(plan)

    def plans(self) -> Iterator[Assignment]:
        """Better and better plans."""
        if max(self._call_s, self._group_s, self._copies_s) <= 0:
            return
        best = self._settle()
        kept = self._assignment()
        yield kept
        if self._copies_s > 0:
            self._spread_copies()
            found = self._settle()
            if found < best * (1 - _GAIN):
                best, kept = found, self._assignment()
                yield kept
        for _ in range(_KICKS):
            if self._over():
                return
            self._load(kept)
            for table in self._rng.permutation(len(self._ways))[:_KICKED].tolist():
                self._change(table, at_random=True)
            found = self._settle()
            if found < best * (1 - _GAIN):
                best, kept = found, self._assignment()
                yield kept

    def _over(self) -> bool:
        return self._tries >= _TRIES or time.process_time() > self._end

    # -- the state: per table its way and ranks; loads, and shards of each stack, per rank -----

    def _load(self, plan: Assignment) -> None:
        self.chosen = [ways[c] for ways, c in zip(self._ways, plan.chosen, strict=True)]
        self.ranks = [ranks.copy() for ranks in plan.ranks]
        self.loads = plan.loads()
        self.stacks = {
            way.stack: np.zeros(len(self._all), np.int64) for each in self._ways for way in each
        }
        self.groups: Counter[tuple[int, ...]] = Counter()
        for table in range(len(self._ways)):
            self._count(table, 1)

    def _assignment(self) -> Assignment:
        return Assignment(self.problem, [way.choice for way in self.chosen], list(self.ranks))

    def _count(self, table: int, times: int) -> None:
        way, ranks = self.chosen[table], self.ranks[table]
        self.stacks[way.stack][ranks if way.shards else self._all] += times
        if way.by_rows:
            group = (way.stack[1], *sorted(ranks.tolist()))
            self.groups[group] += times
            if not self.groups[group]:
                del self.groups[group]

    def _put(self, table: int, way: _Way, ranks: Ints) -> None:
        """Give a table another option or other ranks."""
        self._count(table, -1)
        for sign, one, places in (
            (-1.0, self.chosen[table], self.ranks[table]),
            (1.0, way, ranks),
        ):
            self.loads += sign * one.everywhere
            self.loads[places] += sign * one.shard
        self.chosen[table], self.ranks[table] = way, ranks
        self._count(table, 1)

    def _seconds(self) -> float:
        """The objective; infinite if a rank is over a limit."""
        self._tries += 1
        if (self.loads > self._most).any():
            return np.inf
        stacks = sum((each > 0 for each in self.stacks.values()), np.zeros(len(self._all)))
        each = self.loads[:, 0] + np.maximum(stacks - 1, 0) * self._call_s
        copied = any(way.stack[0] for way in self.chosen)
        shared = len(self.groups) * self._group_s + copied * self._copies_s
        each = each + (self._base_s + shared)
        most = float(each.max())
        return most * float(((each / most) ** _NORM).mean()) ** (1 / _NORM)

    # -- changes -----------------------------------------------------------------------------

    def _settle(self) -> float:
        """Change tables in turn until nothing helps."""
        now, waited = self._seconds(), 0
        for table in itertools.cycle(range(len(self._ways))):
            if waited == len(self._ways) or self._over():
                return now
            found = min(self._change(table, now), self._swap(table, now))
            waited = waited + 1 if found >= now * (1 - _GAIN) else 0
            now = min(now, found)
        return now

    def _spread_copies(self) -> None:
        """Give each replicated table another option, if it has one: that which ends lowest."""
        for table, way in enumerate(self.chosen):
            others = [other for other in self._ways[table] if not other.stack[0]]
            if way.stack[0] and others:
                self._put(table, *self._lowest(others))

    def _change(self, table: int, now: float = np.inf, *, at_random: bool = False) -> float:
        """The best option and ranks for a table, or random ones."""
        before = self.chosen[table], self.ranks[table]
        tried = [(way, ranks) for way in self._ways[table] for ranks in self._places(way)]
        if at_random:
            tried = [tried[int(self._rng.integers(len(tried)))]]
        best = before
        for way, ranks in tried:
            self._put(table, way, ranks)
            seconds = self._seconds()
            if seconds < now * (1 - _GAIN):
                now, best = seconds, (way, ranks)
        self._put(table, *best)
        return now

    def _places(self, way: _Way) -> list[Ints]:
        if not way.shards:
            return [np.zeros(0, np.int64)]
        lowest = np.argsort(self.loads[:, 0], kind="stable")
        if way.shards == 1:
            return [lowest[i : i + 1] for i in range(min(_PLACES, len(lowest)))]
        if way.shards > _SPREAD:
            return [np.sort(lowest[: way.shards])]
        sets = itertools.combinations(lowest[: max(_SPREAD, way.shards)].tolist(), way.shards)
        return [np.sort(np.asarray(each, np.int64)) for each in sets]

    def _lowest(self, ways: Sequence[_Way]) -> tuple[_Way, Ints]:
        def height(pair: tuple[_Way, Ints]) -> float:
            way, ranks = pair
            loads = self.loads[:, 0] + way.everywhere[..., 0]
            loads[ranks] += way.shard[0]
            return float((loads**_NORM).sum())

        return min(((way, ranks) for way in ways for ranks in self._places(way)), key=height)

    def _swap(self, table: int, now: float) -> float:
        """Exchange the ranks of a table with those of another that has as many shards."""
        mine = self.ranks[table]
        for other in range(table):
            theirs = self.ranks[other]
            if len(mine) != len(theirs) or not len(mine) or (mine == theirs).all():
                continue
            self._put(table, self.chosen[table], theirs)
            self._put(other, self.chosen[other], mine)
            seconds = self._seconds()
            if seconds < now * (1 - _GAIN):
                return seconds
            self._put(table, self.chosen[table], mine)
            self._put(other, self.chosen[other], theirs)
        return now


def _way(choice: int, option: Option, dim: int) -> _Way:
    what = option.what
    by_columns, copied = what.kind == "column_wise", what.kind == "data_parallel"
    nothing = np.zeros(2)
    return _Way(
        choice,
        nothing if option.everywhere is None else option.everywhere,
        nothing if option.shards is None else option.shards[0],
        option.num_shards,
        (copied, dim // what.holders if by_columns else dim),
        not by_columns and not copied and what.holders > 1,
    )
