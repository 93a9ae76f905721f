"""Mixed-integer programs for HiGHS, and the program of all plans, each counted once.

Note [Ranks in order of appearance]
Ranks are interchangeable, so every plan has as many copies as ranks have permutations; a solver
that sees them all proves nothing in time. Here tables are ordered by size, and ranks are numbered
in the order of their first use: a table may use only ranks that the tables before it can have
used, and as many more as it has shards. With several hosts the same holds for hosts, and for the
ranks of each.

Note [Hosts first]
With `by_host`, the program only says how many shards of a table a host gets, not on which of its
ranks. That is a relaxation with few columns: its bound is valid, and its solution is a good start.

Note [Pigeonholes]
Means over the ranks of a host ignore that shards are whole. Two kinds of rows do not. A host with a
shard of some size has a rank with at least that size on top of what all its ranks have. And if it
has n shards of at least that size, one rank has n / ranks of them, rounded up.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.planner.problem import BLOCK, HOST, Array, Assignment, Ints, Option, Problem

#: Sizes of shards for which pigeonholes are counted.
_SIZES = 6


def find_highs() -> Any | None:
    """The solver's module; None if it is not installed."""
    try:
        return importlib.import_module("highspy")
    except ImportError:
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Solved:
    """What the solver found."""

    #: The best values of the columns; None if it found none.
    values: Array | None
    #: No solution is below this; infinite if there is none.
    bound: float


class MixedProgram:
    """Columns and rows, collected to be passed to the solver at once; the cost is minimised."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.whole: list[bool] = []
        self.entries: list[tuple[list[int], list[float]]] = []
        self.row_lower: list[float] = []
        self.row_upper: list[float] = []

    def column(
        self, upper: float, *, cost: float = 0.0, lower: float = 0.0, whole: bool = True
    ) -> int:
        self.costs.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.costs) - 1

    def row(self, columns: list[int], values: list[float], lower: float, upper: float) -> None:
        """Add a row; the values of a column that is named twice are added up."""
        terms: dict[int, float] = {}
        for column, value in zip(columns, values, strict=True):
            terms[column] = terms.get(column, 0.0) + value
        self.entries.append((list(terms), list(terms.values())))
        self.row_lower.append(lower)
        self.row_upper.append(upper)

    def solve(
        self,
        highs: Any,
        *,
        seconds: float,
        gap: float,
        better: Callable[[Array], None] = lambda values: None,
        enough: Callable[[float], bool] = lambda bound: False,
    ) -> Solved:
        """Minimise. `better` gets each better solution; a bound that is `enough` ends it."""
        solver = highs.Highs()
        for name, value in (
            ("output_flag", False),
            ("threads", 1),
            ("random_seed", 1),
            # Its gap is relative to the cost, ours to the bound.
            ("mip_rel_gap", 0.999 * gap / (1 + gap)),
            ("mip_heuristic_effort", 0.15),
        ):
            solver.setOptionValue(name, value)
        # Its own limit is of wall time: other programs would change the answer.
        late = time.process_time() + seconds

        def interrupt(event: Any) -> None:
            bound = event.data_out.mip_dual_bound
            event.interrupt(time.process_time() > late or enough(float(bound)))

        solver.cbMipInterrupt.subscribe(interrupt)
        solver.cbSimplexInterrupt.subscribe(
            lambda event: event.interrupt(time.process_time() > late)
        )
        solver.cbMipImprovingSolution.subscribe(
            lambda event: better(np.array(event.data_out.mip_solution))
        )
        # HiGHS may run forever after it refused a model.
        accepted = solver.passModel(self._lp(highs)) != highs.HighsStatus.kError
        assert accepted, "a model without errors"
        solver.run()
        info = solver.getInfo()
        if solver.getModelStatus() == highs.HighsModelStatus.kInfeasible:
            return Solved(None, math.inf)
        bound = float(info.mip_dual_bound)
        values = np.asarray(solver.getSolution().col_value)
        found = len(values) == len(self.costs) and info.primal_solution_status == 2
        return Solved(values if found else None, bound if math.isfinite(bound) else -math.inf)

    def _lp(self, highs: Any) -> Any:
        lp = highs.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.costs), len(self.entries)
        lp.col_cost_ = np.asarray(self.costs)
        lp.col_lower_, lp.col_upper_ = np.asarray(self.lower), np.asarray(self.upper)
        lp.row_lower_ = np.asarray(self.row_lower)
        lp.row_upper_ = np.asarray(self.row_upper)
        starts = np.concatenate([[0], np.cumsum([len(c) for c, _ in self.entries])])
        lp.a_matrix_.format_ = highs.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = starts.astype(np.int32)
        lp.a_matrix_.index_ = np.asarray([c for cs, _ in self.entries for c in cs], np.int32)
        lp.a_matrix_.value_ = np.asarray([v for _, vs in self.entries for v in vs])
        kinds = (highs.HighsVarType.kContinuous, highs.HighsVarType.kInteger)
        lp.integrality_ = [kinds[whole] for whole in self.whole]
        return lp


@dataclass(frozen=True, slots=True, eq=False)
class Exact:
    """The result of the solver: a plan, if any, and the bound that it proved."""

    #: Per table the option, and the ranks of its shards, or with `by_host` their hosts.
    found: Assignment | None
    bound_s: float


_Terms = tuple[list[int], list[float]]
_PerTable = dict[int, _Terms]
_Sizes = dict[float, list[tuple[int, int]]]


@dataclass(slots=True, eq=False)
class _Used:
    """The columns of one option of a table."""

    table: int
    choice: int
    option: Option
    pick: int
    #: Rank to column, or for blocks and with `by_host` host to column.
    at: dict[int, int]
    #: Host to column, for options of one shard.
    hosts: dict[int, int]
    #: How many shards a column of `at` stands for.
    times: int = 1

    def on_host(self, host: int, ranks_per_host: int) -> list[int]:
        """The columns of the ranks of a host."""
        return [column for rank, column in self.at.items() if rank // ranks_per_host == host]


class ExactProblem:
    """One problem with the options that are left, as a mixed-integer program."""

    def __init__(
        self,
        problem: Problem,
        allowed: Sequence[Sequence[int]],
        bound_s: float,
        cost_s: float,
        *,
        by_host: bool = False,
    ) -> None:
        self.problem, self.by_host = problem, by_host
        self.base_s = problem.base_s
        self.scale_s = max(cost_s - self.base_s, 1e-30)
        self._unit: list[float] = problem.unit(self.scale_s).tolist()
        self.model = MixedProgram()
        self.used: list[_Used] = []
        num, per_host = problem.num_ranks, problem.ranks_per_host
        low, high = (bound_s - self.base_s) / self.scale_s, 1.0
        self.span = self.model.column(high, cost=1.0, lower=max(0.0, low), whole=False)
        width = 1 + len(problem.capacity)
        self._terms: list[list[_Terms]] = [
            [([], []) for _ in range(problem.num_hosts if by_host else num)] for _ in range(width)
        ]
        order = self._order(allowed)
        # How many ranks, hosts and ranks of one host the tables so far can have used.
        ranks_seen = hosts_seen = 0
        for table in order:
            shards = max((problem.options[table][c].num_shards for c in allowed[table]), default=0)
            hosts = max(
                (self._num_hosts(problem.options[table][c]) for c in allowed[table]), default=0
            )
            ranks_seen, hosts_seen = ranks_seen + shards, hosts_seen + hosts
            seen = (
                min(ranks_seen, num),
                min(hosts_seen, problem.num_hosts),
                min(ranks_seen, per_host),
            )
            picks = [self._add(table, choice, *seen) for choice in allowed[table]]
            self.model.row(picks, [1.0] * len(picks), 1.0, 1.0)
        self._limit()
        for host in range(min(hosts_seen, problem.num_hosts)):
            self._cut(host)

    def _num_hosts(self, option: Option) -> int:
        if option.scope == BLOCK:
            return option.num_shards // self.problem.ranks_per_host
        return 1 if option.scope == HOST else option.num_shards

    def _order(self, allowed: Sequence[Sequence[int]]) -> list[int]:
        """Tables of one shard come first, the largest at the head."""
        problem = self.problem

        def size(table: int) -> tuple[int, float, int]:
            options = [problem.options[table][choice] for choice in allowed[table]]
            most = max(option.num_shards for option in options)
            first = options[0]
            peak = 0.0 if first.shards is None else float(first.shards[0, 0])
            return most, -peak, table

        return sorted(range(len(problem.names)), key=size)

    def _rank_allowed(self, rank: int, ranks: int, hosts: int, local: int) -> bool:
        per_host = self.problem.ranks_per_host
        if self.problem.num_hosts == 1:
            return rank < ranks
        return rank // per_host < hosts and rank % per_host < local

    def _add(self, table: int, choice: int, ranks: int, hosts: int, local: int) -> int:
        model, problem = self.model, self.problem
        option = problem.options[table][choice]
        pick = model.column(1.0)
        used = _Used(table, choice, option, pick, {}, {})
        self.used.append(used)
        if option.everywhere is not None:
            rows = np.broadcast_to(
                option.everywhere, (problem.num_ranks, 1 + len(problem.capacity))
            )
            if self.by_host:
                rows = rows.reshape(problem.num_hosts, problem.ranks_per_host, -1).mean(1)
            for place, load in enumerate(rows):
                self._load(place, pick, load)
        if option.shards is None:
            return pick
        if option.scope == BLOCK:
            self._add_blocks(used, hosts)
        elif self.by_host:
            self._add_on_hosts(used, hosts)
        else:
            self._add_shards(used, ranks, hosts, local)
        return pick

    def _add_blocks(self, used: _Used, hosts: int) -> None:
        model, problem, option = self.model, self.problem, used.option
        per_host = problem.ranks_per_host
        num = option.num_shards // per_host
        assert option.shards is not None, "blocks are shards"
        least = option.shards.reshape(num, per_host, -1).min(0)
        for host in range(min(problem.num_hosts, max(hosts, num))):
            column = used.at[host] = model.column(1.0)
            if self.by_host:
                self._load(host, column, least.mean(0))
                continue
            for local in range(per_host):
                self._load(host * per_host + local, column, least[local])
        self._sum_to(num, used.at.values(), used.pick)

    def _add_on_hosts(self, used: _Used, hosts: int) -> None:
        model, problem, option = self.model, self.problem, used.option
        per_host, num = problem.ranks_per_host, option.num_shards
        assert option.shards is not None, "an option with shards"
        used.times = num if option.scope == HOST else 1
        count = num // used.times
        most = min(count, per_host) if option.distinct else count
        least = option.shards.min(0) * used.times / per_host
        for host in range(hosts):
            used.at[host] = model.column(float(most))
            self._load(host, used.at[host], least)
        self._sum_to(count, used.at.values(), used.pick)

    def _add_shards(self, used: _Used, ranks: int, hosts: int, local: int) -> None:
        model, problem, option = self.model, self.problem, used.option
        assert option.shards is not None, "an option with shards"
        num = option.num_shards
        most = 1.0 if option.distinct else float(num)
        # Shards may differ by a row or a column: all count as the least, to keep the bound valid.
        least = option.shards.min(0)
        for rank in range(problem.num_ranks):
            if self._rank_allowed(rank, ranks, hosts, local):
                column = used.at[rank] = model.column(most)
                self._load(rank, column, least)
        self._sum_to(num, used.at.values(), used.pick)
        if num > 1 and option.scope == HOST and problem.num_hosts > 1:
            picks = []
            for host in range(hosts):
                on = used.on_host(host, problem.ranks_per_host)
                picks.append(model.column(1.0))
                model.row([*on, picks[-1]], [1.0] * len(on) + [-float(num)], -np.inf, 0.0)
            self._sum_to(1, picks, used.pick)
        elif num == 1 and problem.num_hosts > 1:
            # The solver branches on hosts before it does on ranks.
            for host in range(problem.num_hosts):
                on = used.on_host(host, problem.ranks_per_host)
                if on:
                    used.hosts[host] = model.column(1.0)
                    self._sum_to(1, on, used.hosts[host])
        elif num > 1 and option.distinct:
            for column in used.at.values():
                model.row([column, used.pick], [1.0, -1.0], -np.inf, 0.0)

    def _sum_to(self, total: int, columns: Iterable[int], pick: int) -> None:
        """The columns add up to the total where `pick` is 1, and to 0 where it is 0."""
        summed = list(columns)
        values = [1.0] * len(summed) + [-float(total)]
        self.model.row([*summed, pick], values, 0.0, 0.0)

    def _load(self, rank: int, column: int, load: Array) -> None:
        for kind, value in enumerate(load.tolist()):
            if value:
                columns, values = self._terms[kind][rank]
                columns.append(column)
                values.append(value / self._unit[kind])

    def _limit(self) -> None:
        model, problem = self.model, self.problem
        for kind, per_rank in enumerate(self._terms):
            largest: dict[int, float] = {}
            for columns, values in per_rank:
                for column, value in zip(columns, values, strict=True):
                    largest[column] = max(largest.get(column, 0.0), value * model.upper[column])
            if kind and sum(largest.values()) <= 1.0:
                continue  # all of it fits on one rank
            # Ranks that no shard can be on are all alike.
            for columns, values in {(tuple(c), tuple(v)): (c, v) for c, v in per_rank}.values():
                if kind == 0:
                    model.row([*columns, self.span], [*values, -1.0], -np.inf, 0.0)
                elif columns:
                    model.row(columns, values, -np.inf, 1.0)
        # The mean of all ranks is a valid cut, which the solver would have to find by itself.
        total: dict[int, float] = {}
        for columns, values in self._terms[0]:
            for column, value in zip(columns, values, strict=True):
                total[column] = total.get(column, 0.0) + value
        # Places have equal numbers of ranks, so the mean of places is that of ranks.
        share = problem.ranks_per_host if self.by_host else 1
        parts = (problem.num_ranks if problem.at_once is None else problem.at_once) / share
        base = self.base_s * (problem.num_ranks / share / parts - 1.0) / self.scale_s
        model.row([*total, self.span], [*(v / parts for v in total.values()), -1.0], -np.inf, -base)

    def _cut(self, host: int) -> None:
        """See Note [Pigeonholes]."""
        model, problem = self.model, self.problem
        for kind in range(len(self._terms) if self.by_host else 1):
            shared, alone, sizes = self._on_host(host, kind)
            end: _Terms = ([self.span], [-1.0]) if kind == 0 else ([], [])
            most = 0.0 if kind == 0 else 1.0
            if kind and sum(shared[1]) + sum(sum(v) for _, v in alone.values()) <= most:
                continue
            for columns, values in alone.values():
                row = [*shared[0], *columns, *end[0]]
                model.row(row, [*shared[1], *values, *end[1]], -np.inf, most)
            if kind:
                continue
            levels = sorted(sizes, reverse=True)
            places = np.linspace(0, len(levels) - 1, _SIZES).astype(int) if levels else ()
            for size in [levels[i] for i in sorted(set(places))]:
                large = [pair for s in levels if s >= size for pair in sizes[s]]
                columns = [column for column, _ in large]
                share = [times / problem.ranks_per_host for _, times in large]
                count = model.column(float(sum(times for _, times in large)))
                model.row([*columns, count], [*share, -1.0], -np.inf, 0.0)
                row = [*shared[0], count, *end[0]]
                model.row(row, [*shared[1], size, *end[1]], -np.inf, most)

    def _on_host(self, host: int, kind: int) -> tuple[_Terms, _PerTable, _Sizes]:
        """What all ranks of a host have, single shards per table, and all shards by size."""
        per_host, num_hosts = self.problem.ranks_per_host, self.problem.num_hosts
        unit = self._unit[kind]
        shared: _Terms = ([], [])
        alone: _PerTable = {}
        sizes: _Sizes = {}
        for used in self.used:
            option = used.option
            if option.everywhere is not None:
                least = option.everywhere.reshape(-1, len(self._terms))[:, kind].min()
                shared[0].append(used.pick)
                shared[1].append(float(least) / unit)
            if option.shards is None:
                continue
            size = float(option.shards[:, kind].min()) / unit
            if option.scope == BLOCK:
                if host in used.at:
                    shared[0].append(used.at[host])
                    shared[1].append(size)
                continue
            if self.by_host or used.hosts:
                at = used.at if self.by_host else used.hosts
                columns = [at[host]] if host in at else []
            elif num_hosts == 1 and option.num_shards == 1:
                columns = [used.pick]
            else:
                columns = used.on_host(host, per_host)
            if size:
                sizes.setdefault(size, []).extend((column, used.times) for column in columns)
            if option.num_shards == 1:
                mine = alone.setdefault(used.table, ([], []))
                mine[0].extend(columns)
                mine[1].extend([size] * len(columns))
        return shared, alone, sizes

    # -- solving -----------------------------------------------------------------------------

    def solve(self, highs: Any, *, seconds: float, gap: float) -> Exact:
        solved = self.model.solve(highs, seconds=seconds, gap=gap)
        # With no solution at all, no plan is below the cost that was asked for.
        bound = min(solved.bound, 1.0) * self.scale_s + self.base_s
        return Exact(None if solved.values is None else self._assignment(solved.values), bound)

    def _assignment(self, values: Array) -> Assignment:
        problem = self.problem
        chosen = [0] * len(problem.names)
        ranks: list[Ints] = [np.zeros(0, np.int64)] * len(problem.names)
        for used in self.used:
            if values[used.pick] < 0.5:
                continue
            chosen[used.table] = used.choice
            if used.option.shards is None:
                continue
            found: list[int] = []
            per_host = problem.ranks_per_host
            for place, column in used.at.items():
                times = round(values[column]) * used.times
                if used.option.scope == BLOCK and not self.by_host:
                    found += [place * per_host + i for i in range(per_host)] * times
                else:
                    found += [place] * times
            ranks[used.table] = np.asarray(found, np.int64)
        return Assignment(problem, chosen, ranks)
