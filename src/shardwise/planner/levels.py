"""The program of levels: what one rank holds, and how full the ranks of each host are.

Note [Levels]
Where a rank holds few shards, means over ranks are weak bounds, since they ignore that shards are
whole. Here a column is a set of pieces (shards that may be on any rank) that fits on one rank.
Ranks and hosts have no names: the level of a host is the largest sum of pieces on one of its ranks,
and the sets, sorted by their sums, fill the hosts from the highest level down. So there is no
symmetry to break, and with some hundred sets the solver is quick.

The cost minus the level of a host is its room for blocks. The program limits only the total of
these rooms, and keeps blocks off hosts that have no room for a block of that size. Levels are
rounded down, so that there are few. The bound stays valid. A solution says what each rank of a host
holds; its blocks are then packed into the rooms, a problem with hosts as ranks (Note [Filling]).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.planner.exact import MixedProgram
from shardwise.planner.local_search import Filler
from shardwise.planner.problem import BLOCK, HOST, Array, Assignment, Option, Problem, TooMany

#: The most sets of pieces; the distance of levels, relative to the cost.
_SETS, _APART = 2_000, 0.005
#: Partial packings of blocks that are kept, and costs that are tried.
_WIDTH, _COSTS = 300, 6
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class _LevelOption:
    """One option of a table, with the least loads it may cause, relative to cost and capacity."""

    table: int
    choice: int
    option: Option
    everywhere: Array
    block: Array
    num_blocks: int
    piece: Array
    num_pieces: int

    @property
    def apart(self) -> int:
        """How many of its pieces one rank may hold."""
        return 1 if self.option.distinct else self.num_pieces


@dataclass(frozen=True, slots=True, eq=False)
class _Set:
    """Pieces that fit on one rank: the number of each piece's option, and their total load."""

    ways: tuple[int, ...]
    load: Array


class Levels:
    """The program for plans within a cost. Raises `TooMany` if there are too many sets."""

    def __init__(
        self, problem: Problem, allowed: Sequence[Sequence[int]], bound_s: float, cost_s: float
    ) -> None:
        self.problem = problem
        self._scale_s = max(cost_s - problem.base_s, 1e-30)
        self._unit = problem.unit(self._scale_s)
        self._ways = [self._way(table, c) for table, each in enumerate(allowed) for c in each]
        self._sets = self._all_sets(len(allowed))
        self.program = MixedProgram()
        low = max(0.0, (bound_s - problem.base_s) / self._scale_s)
        self._span = self.program.column(1.0, cost=1.0, lower=low, whole=False)
        self._picks = [self.program.column(1.0) for _ in self._ways]
        self._used = [self.program.column(float(self._most(each))) for each in self._sets]
        self._choose(len(allowed))
        levels, hosts = self._fill_hosts()
        self._limit(levels, hosts)
        for size in sorted({float(way.block[0]) for way in self._ways if way.num_blocks}):
            self._keep_off(size, levels, hosts)

    def seconds(self, solved: float) -> float:
        """The program's cost in seconds."""
        return solved * self._scale_s + self.problem.base_s

    def _way(self, table: int, choice: int) -> _LevelOption:
        option, none = self.problem.options[table][choice], np.zeros(len(self._unit))
        everywhere = none
        if option.everywhere is not None:
            everywhere = option.everywhere.reshape(-1, len(none)).min(0) / self._unit
        if option.shards is None:
            return _LevelOption(table, choice, option, everywhere, none, 0, none, 0)
        least, num = option.shards.min(0) / self._unit, option.num_shards
        if option.scope == BLOCK:
            num_blocks = num // self.problem.ranks_per_host
            return _LevelOption(table, choice, option, everywhere, least, num_blocks, none, 0)
        return _LevelOption(table, choice, option, everywhere, none, 0, least, num)

    # -- the program -------------------------------------------------------------------------

    def _all_sets(self, num_tables: int) -> list[_Set]:
        """All sets of pieces that fit on a rank, smallest sum first."""
        ways = self._ways
        least = np.full((num_tables, len(self._unit)), np.inf)
        for way in ways:
            least[way.table] = np.minimum(least[way.table], way.everywhere)
        room = 1.0 + _ROUNDING - least.sum(0)
        pieces = [number for number, way in enumerate(ways) if way.num_pieces]
        pieces.sort(key=lambda number: -ways[number].piece[0])
        found: list[_Set] = []

        def extend(start: int, members: tuple[int, ...], load: Array) -> None:
            for place in range(start, len(pieces)):
                number = pieces[place]
                more = load + ways[number].piece
                others = [m for m in members if ways[m].table == ways[number].table]
                if len(others) == ways[number].apart or {*others, number} != {number}:
                    continue
                if (more <= room).all():
                    found.append(_Set((*members, number), more))
                    if len(found) > _SETS:
                        raise TooMany
                    extend(place, found[-1].ways, more)

        extend(0, (), np.zeros(len(self._unit)))
        return sorted(found, key=lambda each: float(each.load[0]))

    def _most(self, each: _Set) -> int:
        """How many ranks can hold this set."""
        return min(self._ways[way].num_pieces // each.ways.count(way) for way in each.ways)

    def _choose(self, num_tables: int) -> None:
        """Each table has one option, and its pieces are in sets that are used."""
        picks: list[list[int]] = [[] for _ in range(num_tables)]
        columns: list[list[int]] = [[] for _ in self._ways]
        for column, each in zip(self._used, self._sets, strict=True):
            for number in each.ways:
                columns[number].append(column)  # twice for two of its pieces
        for way, pick, on in zip(self._ways, self._picks, columns, strict=True):
            picks[way.table].append(pick)
            if way.num_pieces:
                values = [1.0] * len(on) + [-float(way.num_pieces)]
                self.program.row([*on, pick], values, 0.0, 0.0)
        for columns_of in picks:
            self.program.row(columns_of, [1.0] * len(columns_of), 1.0, 1.0)

    def _fill_hosts(self) -> tuple[list[float], list[int]]:
        """The levels, lowest first, and how many hosts have each; sets fit into their hosts."""
        program, per_host = self.program, float(self.problem.ranks_per_host)
        levels: list[float] = [0.0]
        members: list[list[int]] = [[]]
        for column, each in zip(self._used, self._sets, strict=True):
            if len(levels) == 1 or each.load[0] >= levels[-1] + _APART:
                levels.append(float(each.load[0]))
                members.append([])
            members[-1].append(column)
        num_hosts = float(self.problem.num_hosts)
        hosts = [program.column(num_hosts) for _ in levels]
        program.row(hosts, [1.0] * len(hosts), -np.inf, num_hosts)
        # Ranks that no set of a level uses are left for sets of lower levels.
        above: list[int] = []
        for host, columns in zip(reversed(hosts), reversed(members), strict=True):
            left = program.column(float(self.problem.num_ranks), whole=False)
            values = [1.0] * (len(columns) + 1) + [-per_host] + [-1.0] * len(above)
            program.row([*columns, left, host, *above], values, 0.0, 0.0)
            above = [left]
        return levels, hosts

    def _limit(self, levels: list[float], hosts: list[int]) -> None:
        """Hosts and ranks are within the cost on average, and no level alone is above it."""
        program, num_hosts = self.program, float(self.problem.num_hosts)
        mean = []
        for way in self._ways:
            blocks = way.block * (way.num_blocks / num_hosts)
            mean.append(way.everywhere + blocks)
            if way.everywhere[0]:
                pick = self._picks[len(mean) - 1]
                room = 1.0 + _ROUNDING - way.everywhere[0]
                high = [host for host, level in zip(hosts, levels, strict=True) if level > room]
                values = [1.0] * len(high) + [num_hosts]
                program.row([*high, pick], values, -np.inf, num_hosts)
        heights = [float(each[0]) for each in mean] + [level / num_hosts for level in levels]
        program.row([*self._picks, *hosts, self._span], [*heights, -1.0], -np.inf, 0.0)
        for kind in range(len(self._unit)):
            values = [
                float(each[kind] + way.piece[kind] * way.num_pieces / self.problem.num_ranks)
                for each, way in zip(mean, self._ways, strict=True)
            ]
            if kind == 0:
                program.row([*self._picks, self._span], [*values, -1.0], -np.inf, 0.0)
            elif sum(values) > 1.0:
                program.row(self._picks, values, -np.inf, 1.0)

    def _keep_off(self, size: float, levels: list[float], hosts: list[int]) -> None:
        """Blocks of at least this size are only on hosts with a level that leaves room for one.

        The room of n hosts below a cost T is n T less their levels. T is at most 1, and with the
        least cost L and n of N hosts, n T is at most n L + N (T - L).
        """
        columns, values, below = [], [], 0
        for pick, way in zip(self._picks, self._ways, strict=True):
            if way.num_blocks and way.block[0] >= size:
                columns.append(pick)
                values.append(float(way.block[0] * way.num_blocks))
        for host, level in zip(hosts, levels, strict=True):
            if level <= 1.0 + _ROUNDING - size:
                columns.append(host)
                values.append(level)
                below += 1
        low, num_hosts = self.program.lower[self._span], float(self.problem.num_hosts)
        for least, more in ((1.0 + _ROUNDING, []), (low, [self._span])):
            rooms = [*values[:-below], *(value - least for value in values[-below:])]
            rooms += [-num_hosts] * len(more)
            self.program.row([*columns, *more], rooms, -np.inf, -num_hosts * low * len(more))

    # -- from a solution to a plan -----------------------------------------------------------

    def plan(self, values: Array, low_s: float, high_s: float) -> Assignment | None:
        """A plan with these sets, of a cost between the two; None if none is found."""
        picked = [way for way, c in zip(self._ways, self._picks, strict=True) if values[c] > 0.5]
        if any(way.option.scope == HOST and way.num_pieces > 1 for way in picked):
            return None  # the program ignores that its pieces must be on one host
        ranks: list[list[int]] = [[] for _ in picked]
        rank = 0
        for column, each in zip(reversed(self._used), reversed(self._sets), strict=True):
            for _ in range(round(values[column])):
                for number in each.ways:
                    ranks[self._ways[number].table].append(rank)
                rank += 1
        chosen = [way.choice for way in picked]
        made = Assignment(self.problem, chosen, [np.asarray(each, np.int64) for each in ranks])
        return self._packed(made, [way for way in picked if way.num_blocks], low_s, high_s)

    def _packed(
        self, plan: Assignment, blocks: Sequence[_LevelOption], low_s: float, high_s: float
    ) -> Assignment | None:
        """The plan with its blocks on hosts."""
        problem, per_host = self.problem, self.problem.ranks_per_host
        loads = np.zeros((problem.num_ranks, len(self._unit)))
        for table, ranks in enumerate(plan.ranks):
            option = plan.option(table)
            loads += 0.0 if option.everywhere is None else option.everywhere
            if len(ranks):
                assert option.shards is not None, "pieces are shards"
                np.add.at(loads, ranks, option.shards)
        options = [[Option("pieces", loads.reshape(problem.num_hosts, per_host, -1).max(1))]]
        for way in blocks:
            assert way.option.shards is not None, "a block has shards"
            shards = way.option.shards.reshape(way.num_blocks, per_host, -1).max(1)
            options.append([Option("block", shards=shards)])
        names = [str(number) for number in range(len(options))]
        hosts = Problem(names, options, problem.num_hosts, problem.capacity, 1, problem.base_s)
        nowhere = [np.zeros(each.num_shards, np.int64) for (each,) in options]
        start, filler = Assignment(hosts, [0] * len(names), nowhere), Filler(hosts)
        found, cost_s = None, low_s
        for _ in range(_COSTS):
            packed = start if len(names) == 1 else filler.refilled(start, cost_s, _WIDTH)
            if packed is None:
                low_s = cost_s
            else:
                found, high_s = packed, cost_s
            if high_s <= low_s:
                break
            cost_s = (low_s + high_s) / 2
        if found is None:
            return None
        for way, on in zip(blocks, found.ranks[1:], strict=True):
            plan.ranks[way.table] = problem.ranks_of(on)
        return plan
