"""Packing: tables placed on ranks, largest shards first.

Note [Heights]
The height of a rank is its seconds, plus a penalty if its bytes exceed the capacity. A plan whose
highest rank has no penalty fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shardwise.planner.problem import BLOCK, HOST, Array, Assignment, Ints, Option, Problem

_NO_RANKS: Ints = np.zeros(0, np.int64)


class Packing:
    """An assignment that can change, with the loads of its ranks."""

    def __init__(self, problem: Problem, scale_s: float) -> None:
        self.problem = problem
        num_tables, self.num_ranks = len(problem.names), problem.num_ranks
        self.chosen = [-1] * num_tables
        self.ranks: list[Ints] = [_NO_RANKS] * num_tables
        self.width = 1 + len(problem.capacity)
        self.loads = np.zeros((self.num_ranks, self.width))
        self._limit = problem.capacity * (1 + 1e-12)
        self._unit = problem.unit(max(scale_s, 1e-12))
        # Seconds per byte over the capacity.
        self.penalty = 50 * self._unit[0] / self._unit[1:]
        #: Whether shards are placed by the larger of seconds and bytes, each relative to its limit.
        self.balance = False
        self.heights = np.zeros(self.num_ranks)
        #: Tables with a shard on each rank.
        self.tables_on: list[set[int]] = [set() for _ in range(self.num_ranks)]
        self.tables_everywhere: set[int] = set()

    @staticmethod
    def of(assignment: Assignment, scale_s: float) -> Packing:
        """The same plan, ready to be changed."""
        packing = Packing(assignment.problem, scale_s)
        each = zip(assignment.chosen, assignment.ranks, strict=True)
        for table, (choice, ranks) in enumerate(each):
            packing.put(table, choice, ranks)
        return packing

    def copy(self) -> Packing:
        made = Packing.__new__(Packing)
        made.__dict__.update(self.__dict__)
        made.chosen, made.ranks = list(self.chosen), list(self.ranks)
        made.loads, made.heights = self.loads.copy(), self.heights.copy()
        made.tables_on = [set(each) for each in self.tables_on]
        made.tables_everywhere = set(self.tables_everywhere)
        return made

    def height(self, loads: Array) -> Array:
        over = loads[..., 1:] - self._limit
        if not (over > 0).any():
            return loads[..., 0]
        return loads[..., 0] + np.maximum(over, 0) @ self.penalty

    def score(self, loads: Array) -> Array:
        """A shard goes to the rank where this ends lowest."""
        if self.balance:
            return np.asarray((loads / self._unit).max(-1))
        return self.height(loads)

    def option(self, table: int) -> Option:
        return self.problem.options[table][self.chosen[table]]

    # -- changing one table ------------------------------------------------------------------

    def take(self, table: int) -> None:
        """Take a table off its ranks."""
        option, ranks = self.option(table), self.ranks[table]
        if option.everywhere is not None:
            self.loads -= option.everywhere
            self.tables_everywhere.discard(table)
        if option.shards is not None:
            np.subtract.at(self.loads, ranks, option.shards)
        for rank in ranks.tolist():
            self.tables_on[rank].discard(table)
        self._refresh(option, ranks)

    def put(self, table: int, choice: int, ranks: Ints) -> None:
        option = self.problem.options[table][choice]
        self.chosen[table], self.ranks[table] = choice, ranks
        option.add_to(self.loads, ranks)
        if option.everywhere is not None:
            self.tables_everywhere.add(table)
        for rank in ranks.tolist():
            self.tables_on[rank].add(table)
        self._refresh(option, ranks)

    def _refresh(self, option: Option, ranks: Ints) -> None:
        if option.everywhere is not None:
            self.heights = np.array(self.height(self.loads))
        elif len(ranks):
            self.heights[ranks] = self.height(self.loads[ranks])

    # -- where shards go ---------------------------------------------------------------------

    def place(self, option: Option) -> Ints | None:
        """Ranks for the shards of an option, given the current loads; None if there are none."""
        if option.shards is None:
            return _NO_RANKS
        if option.scope == BLOCK:
            return self._place_blocks(option.shards)
        if option.scope == HOST:
            return self._place_on_host(option)
        return self._place_shards(option, None)

    def _place_shards(self, option: Option, only: Ints | None) -> Ints | None:
        shards = option.shards
        assert shards is not None, "an option with shards"
        loads = self.loads if only is None else self.loads[only]
        num = len(shards)
        if num == 1:
            place = int(self.score(loads + shards[0]).argmin())
            return np.array([place if only is None else only[place]])
        if option.distinct:
            if num > len(loads):
                return None
            # Shards are nearly equal: the largest goes where it ends lowest.
            heights = self.score(loads + shards[0])
            places = np.argsort(heights, kind="stable")[:num]
            order = np.argsort(-shards[:, 0], kind="stable")
            ranks = np.empty(num, np.int64)
            ranks[order] = places
        else:
            loads = loads.copy()
            ranks = np.empty(num, np.int64)
            for number in np.argsort(-shards[:, 0], kind="stable").tolist():
                place = int(self.score(loads + shards[number]).argmin())
                ranks[number] = place
                loads[place] += shards[number]
        return ranks if only is None else only[ranks]

    def _place_on_host(self, option: Option) -> Ints | None:
        per_host = self.problem.ranks_per_host
        shards = option.shards
        assert shards is not None, "an option with shards"
        best: tuple[float, Ints] | None = None
        order = np.argsort(self.loads[:, 0].reshape(-1, per_host).min(1), kind="stable")
        for host in order[:4].tolist():
            only = np.arange(host * per_host, (host + 1) * per_host)
            ranks = self._place_shards(option, only)
            if ranks is None:
                continue
            loads = self.loads[only].copy()
            np.add.at(loads, ranks - host * per_host, shards)
            highest = float(self.height(loads).max())
            if best is None or highest < best[0]:
                best = highest, ranks
        return None if best is None else best[1]

    def _place_blocks(self, shards: Array) -> Ints | None:
        per_host, num_hosts = self.problem.ranks_per_host, self.problem.num_hosts
        num_blocks = len(shards) // per_host
        if num_blocks > num_hosts or num_blocks * per_host != len(shards):
            return None
        loads = self.loads.reshape(num_hosts, per_host, self.width) + shards[:per_host]
        highest = self.score(loads).max(1)
        hosts = np.argsort(highest, kind="stable")[:num_blocks]
        return self.problem.ranks_of(hosts)

    # -- the first packing -------------------------------------------------------------------

    def fill(self, chosen: Sequence[int], order: Sequence[int]) -> bool:
        """Give each table its chosen option, in that order; False if one cannot be placed."""
        for table in order:
            ranks = self.place(self.problem.options[table][chosen[table]])
            if ranks is None:
                return False
            self.put(table, chosen[table], ranks)
        return True

    def fill_hosts(self, chosen: Sequence[int], hosts: Sequence[Ints]) -> bool:
        """Give each table its option on ranks of these hosts, the largest shards first."""
        per_host = self.problem.ranks_per_host
        inside = np.arange(per_host)
        options = [each[c] for each, c in zip(self.problem.options, chosen, strict=True)]

        def largest(table: int) -> tuple[float, int]:
            option = options[table]
            free = option.shards is not None and option.scope != BLOCK
            return (-float(option.shards[0, 0]) if free else -np.inf), table  # type: ignore[index]

        for table in sorted(range(len(chosen)), key=largest):
            option = options[table]
            if option.shards is None:
                ranks = _NO_RANKS
            elif option.scope == BLOCK:
                ranks = self.problem.ranks_of(hosts[table])
            else:
                found = []
                for host in np.unique(hosts[table]).tolist():
                    num = int((hosts[table] == host).sum())
                    part = replace(option, shards=option.shards[:num])
                    placed = self._place_shards(part, host * per_host + inside)
                    if placed is None:
                        return False
                    found.append(placed)
                ranks = np.concatenate(found)
            self.put(table, chosen[table], ranks)
        return True

    def assignment(self) -> Assignment:
        return Assignment(self.problem, list(self.chosen), list(self.ranks))

    @property
    def highest(self) -> float:
        return float(self.heights.max())


def packed(
    problem: Problem,
    chosen: Sequence[int],
    scale_s: float,
    *,
    memory_first: bool = False,
    balance: bool = False,
) -> Packing | None:
    """Place replicated tables first, then blocks of hosts, then shards, largest first."""
    packing = Packing(problem, scale_s)
    packing.balance = balance
    flat = problem.flat
    peaks = flat.peak[flat.first[:-1] + np.asarray(chosen)]
    relative = peaks[:, 1:] / np.maximum(problem.capacity, 1.0)
    share = np.maximum(relative.max(1) if memory_first else 0.0, peaks[:, 0] / max(scale_s, 1e-12))
    options = [each[choice] for each, choice in zip(problem.options, chosen, strict=True)]
    turn = np.array([0 if o.shards is None else 1 if o.scope == BLOCK else 2 for o in options])
    order = np.lexsort((np.arange(len(chosen)), -share, turn)).tolist()
    filled = packing.fill(chosen, order)
    packing.balance = False
    return packing if filled else None
