"""The mixed-integer program for HiGHS, with the symmetry of ranks broken by the model.

Note [Ranks in order of appearance]
Ranks are interchangeable, so every plan has as many copies as ranks have permutations; a solver
that sees them all proves nothing in time. Here tables are ordered by size, and ranks are numbered
in the order of their first use: a table may use no rank beyond those that the tables before it can
have used. With several hosts the same holds for hosts, and for the ranks inside each.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.planner.problem import BLOCK, HOST, Array, Assignment, Ints, Option, Problem


def find_highs() -> Any | None:
    """The solver's module; None if it is not installed."""
    try:
        return importlib.import_module("highspy")
    except ImportError:
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Exact:
    """The result of the solver: a better plan, if any, and the bound that it proved."""

    found: Assignment | None
    bound_s: float


class _Model:
    """Columns and rows, collected to be passed to the solver at once."""

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
        self.entries.append((columns, values))
        self.row_lower.append(lower)
        self.row_upper.append(upper)


@dataclass(slots=True, eq=False)
class _Used:
    """The columns of one option of a table."""

    table: int
    choice: int
    option: Option
    pick: int
    #: Rank to column, or for blocks host to column.
    at: dict[int, int]
    #: Host to column, for options of one shard.
    hosts: dict[int, int]


class ExactProblem:
    """One problem with the options that are left, as a mixed-integer program."""

    def __init__(
        self, problem: Problem, allowed: Sequence[Sequence[int]], bound_s: float, cost_s: float
    ) -> None:
        self.problem = problem
        self.base_s = problem.base_s
        self.scale_s = max(cost_s - self.base_s, 1e-30)
        self.model = _Model()
        self.used: list[_Used] = []
        num, per_host = problem.num_ranks, problem.ranks_per_host
        low, high = (bound_s - self.base_s) / self.scale_s, 1.0
        self.span = self.model.column(high, cost=1.0, lower=max(0.0, low), whole=False)
        width = 1 + len(problem.capacity)
        self._terms: list[list[tuple[list[int], list[float]]]] = [
            [([], []) for _ in range(num)] for _ in range(width)
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
            for rank in range(problem.num_ranks):
                self._load(rank, pick, rows[rank])
        if option.shards is None:
            return pick
        if option.scope == BLOCK:
            self._add_blocks(used, hosts)
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
            for local in range(per_host):
                self._load(host * per_host + local, column, least[local])
        columns = list(used.at.values())
        model.row([*columns, used.pick], [1.0] * len(columns) + [-float(num)], 0.0, 0.0)

    def _add_shards(self, used: _Used, ranks: int, hosts: int, local: int) -> None:
        model, problem, option = self.model, self.problem, used.option
        assert option.shards is not None, "an option with shards"
        num = option.num_shards
        most = 1.0 if option.distinct else float(num)
        # Shards may differ by a row or a column: all count as the least, to keep the bound valid.
        least = option.shards.min(0)
        for rank in range(problem.num_ranks):
            if self._rank_allowed(rank, ranks, hosts, local) or num > 1:
                column = used.at[rank] = model.column(most)
                self._load(rank, column, least)
        columns = list(used.at.values())
        model.row([*columns, used.pick], [1.0] * len(columns) + [-float(num)], 0.0, 0.0)
        if num > 1 and option.scope == HOST and problem.num_hosts > 1:
            per_host = problem.ranks_per_host
            picks = []
            for host in range(problem.num_hosts):
                on = [used.at[r] for r in range(host * per_host, (host + 1) * per_host)]
                picks.append(model.column(1.0))
                model.row([*on, picks[-1]], [1.0] * len(on) + [-float(num)], -np.inf, 0.0)
            model.row([*picks, used.pick], [1.0] * len(picks) + [-1.0], 0.0, 0.0)
        elif num == 1 and problem.num_hosts > 1:
            # The solver branches on hosts before it does on ranks.
            per_host = problem.ranks_per_host
            for host in range(problem.num_hosts):
                on = [used.at[r] for r in used.at if r // per_host == host]
                if on:
                    used.hosts[host] = model.column(1.0)
                    model.row([*on, used.hosts[host]], [1.0] * len(on) + [-1.0], 0.0, 0.0)
        elif num > 1 and option.distinct:
            for column in columns:
                model.row([column, used.pick], [1.0, -1.0], -np.inf, 0.0)

    def _load(self, rank: int, column: int, load: Array) -> None:
        for kind, value in enumerate(load.tolist()):
            if value:
                columns, values = self._terms[kind][rank]
                columns.append(column)
                unit = self.scale_s if kind == 0 else max(self.problem.capacity[kind - 1], 1.0)
                values.append(value / unit)

    def _limit(self) -> None:
        model, problem = self.model, self.problem
        for kind, per_rank in enumerate(self._terms):
            largest: dict[int, float] = {}
            for columns, values in per_rank:
                for column, value in zip(columns, values, strict=True):
                    largest[column] = max(largest.get(column, 0.0), value * model.upper[column])
            if kind and sum(largest.values()) <= 1.0:
                continue  # all of it fits on one rank
            for columns, values in per_rank:
                if kind == 0:
                    model.row([*columns, self.span], [*values, -1.0], -np.inf, 0.0)
                elif columns:
                    model.row(columns, values, -np.inf, 1.0)
        # The mean of all ranks is a valid cut, which the solver would have to find by itself.
        total: dict[int, float] = {}
        for columns, values in self._terms[0]:
            for column, value in zip(columns, values, strict=True):
                total[column] = total.get(column, 0.0) + value
        parts = problem.num_ranks if problem.at_once is None else problem.at_once
        base = self.base_s * (problem.num_ranks / parts - 1.0) / self.scale_s
        model.row([*total, self.span], [*(v / parts for v in total.values()), -1.0], -np.inf, -base)

    # -- solving -----------------------------------------------------------------------------

    def solve(self, highs: Any, *, seconds: float, gap: float, start: Assignment | None) -> Exact:
        solver = highs.Highs()
        for name, value in (
            ("output_flag", False),
            ("threads", 1),
            ("random_seed", 1),
            ("time_limit", max(0.05, seconds)),
            ("mip_rel_gap", gap),
            ("mip_heuristic_effort", 0.15),
        ):
            solver.setOptionValue(name, value)
        solver.passModel(self._lp(highs))
        if start is not None:
            solution = highs.HighsSolution()
            solution.col_value = self._start(start).tolist()
            solver.setSolution(solution)
        solver.run()
        info = solver.getInfo()
        bound = float(info.mip_dual_bound)
        bound = bound * self.scale_s + self.base_s if np.isfinite(bound) else -np.inf
        status = solver.getModelStatus()
        if status == highs.HighsModelStatus.kInfeasible:
            return Exact(None, self.scale_s + self.base_s)
        values = np.asarray(solver.getSolution().col_value)
        if len(values) != len(self.model.costs) or info.primal_solution_status != 2:
            return Exact(None, bound)
        return Exact(self._assignment(values), bound)

    def _lp(self, highs: Any) -> Any:
        model = self.model
        lp = highs.HighsLp()
        lp.num_col_, lp.num_row_ = len(model.costs), len(model.entries)
        lp.col_cost_ = np.asarray(model.costs)
        lp.col_lower_, lp.col_upper_ = np.asarray(model.lower), np.asarray(model.upper)
        lp.row_lower_ = np.asarray(model.row_lower)
        lp.row_upper_ = np.asarray(model.row_upper)
        starts = np.concatenate([[0], np.cumsum([len(c) for c, _ in model.entries])])
        lp.a_matrix_.format_ = highs.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = starts.astype(np.int32)
        lp.a_matrix_.index_ = np.asarray([c for cs, _ in model.entries for c in cs], np.int32)
        lp.a_matrix_.value_ = np.asarray([v for _, vs in model.entries for v in vs])
        kinds = (highs.HighsVarType.kContinuous, highs.HighsVarType.kInteger)
        lp.integrality_ = [kinds[whole] for whole in model.whole]
        return lp

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
                times = round(values[column])
                if used.option.scope == BLOCK:
                    found += [place * per_host + i for i in range(per_host)] * times
                else:
                    found += [place] * times
            ranks[used.table] = np.asarray(found, np.int64)
        return Assignment(problem, chosen, ranks)

    def _start(self, start: Assignment) -> Array:
        """The values of the columns for a plan, its ranks renumbered in order of appearance."""
        values = np.zeros(len(self.model.costs))
        numbers = _renumbered(start, [used.table for used in self.used])
        loads = start.loads()
        cost = float(loads[:, 0].max())
        if self.problem.at_once is not None:
            total = float(loads[:, 0].sum()) + self.base_s * self.problem.num_ranks
            cost = max(cost, total / self.problem.at_once - self.base_s)
        values[self.span] = cost / self.scale_s
        per_host = self.problem.ranks_per_host
        for used in self.used:
            if start.chosen[used.table] != used.choice:
                continue
            values[used.pick] = 1.0
            ranks = [numbers[int(rank)] for rank in start.ranks[used.table]]
            places = (
                [r // per_host for r in ranks[::per_host]] if used.option.scope == BLOCK else ranks
            )
            for place in places:
                if place in used.at:
                    values[used.at[place]] += 1.0
                if place // per_host in used.hosts:
                    values[used.hosts[place // per_host]] += 1.0
        return values


def _renumbered(start: Assignment, tables: Sequence[int]) -> dict[int, int]:
    per_host, num = start.problem.ranks_per_host, start.problem.num_ranks
    hosts: dict[int, int] = {}
    locals_: dict[int, dict[int, int]] = {}
    for table in dict.fromkeys(tables):
        option = start.option(table)
        for rank in start.ranks[table].tolist():
            host, local = divmod(rank, per_host)
            hosts.setdefault(host, len(hosts))
            if option.scope != BLOCK:
                inside = locals_.setdefault(host, {})
                inside.setdefault(local, len(inside))
    for host in range(num // per_host):
        hosts.setdefault(host, len(hosts))
        inside = locals_.setdefault(host, {})
        for local in range(per_host):
            inside.setdefault(local, len(inside))
    return {
        host * per_host + local: hosts[host] * per_host + locals_[host][local]
        for host in range(num // per_host)
        for local in range(per_host)
    }
