"""Pieces onto ranks: largest first, then moves and swaps that lower the highest ranks.

Note [Heights]
The height of a rank is its seconds, plus a penalty where its bytes exceed the capacity. A plan
whose highest rank has no penalty fits. Every step lowers the higher of the ranks that it
touches, so the list of heights falls lexicographically and the search ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shardwise.planner.problem import ANY, BLOCK, HOST, Array, Assignment, Ints, Option, Problem

_NO_RANKS: Ints = np.zeros(0, np.int64)
#: Steps must gain this share, or they would go on for rounding errors.
_GAIN = 1e-9


class Packing:
    """An assignment under change, with the loads of its ranks."""

    def __init__(self, problem: Problem, scale_s: float) -> None:
        self.problem = problem
        num_tables, self.num_ranks = len(problem.names), problem.num_ranks
        self.chosen = [-1] * num_tables
        self.ranks: list[Ints] = [_NO_RANKS] * num_tables
        self.width = 1 + len(problem.capacity)
        self.loads = np.zeros((self.num_ranks, self.width))
        # Bytes over the capacity cost this many seconds per byte.
        self.penalty = 50 * max(scale_s, 1e-12) / np.maximum(problem.capacity, 1.0)
        self._limit = problem.capacity * (1 + 1e-12)
        self._unit = np.concatenate([[max(scale_s, 1e-12)], np.maximum(problem.capacity, 1.0)])
        #: Whether pieces are placed by seconds and bytes alike, as shares of what there is.
        self.balance = False
        self.heights = np.zeros(self.num_ranks)
        #: Tables with a piece on each rank.
        self.tables_on: list[set[int]] = [set() for _ in range(self.num_ranks)]
        self.tables_everywhere: set[int] = set()

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
        """What is to be low where a piece is placed."""
        if self.balance:
            return np.asarray((loads / self._unit).max(-1))
        return self.height(loads)

    # -- changing one table ------------------------------------------------------------------

    def take(self, table: int) -> None:
        """Remove a table's load."""
        option = self.problem.options[table][self.chosen[table]]
        ranks = self.ranks[table]
        if option.everywhere is not None:
            self.loads -= option.everywhere
            self.tables_everywhere.discard(table)
        if option.pieces is not None:
            np.subtract.at(self.loads, ranks, option.pieces)
            for rank in ranks.tolist():
                self.tables_on[rank].discard(table)
        self._refresh(option, ranks)

    def put(self, table: int, choice: int, ranks: Ints) -> None:
        option = self.problem.options[table][choice]
        self.chosen[table], self.ranks[table] = choice, ranks
        if option.everywhere is not None:
            self.loads += option.everywhere
            self.tables_everywhere.add(table)
        if option.pieces is not None:
            np.add.at(self.loads, ranks, option.pieces)
            for rank in ranks.tolist():
                self.tables_on[rank].add(table)
        self._refresh(option, ranks)

    def _refresh(self, option: Option, ranks: Ints) -> None:
        if option.everywhere is not None:
            self.heights = np.array(self.height(self.loads))
        elif len(ranks):
            self.heights[ranks] = self.height(self.loads[ranks])

    # -- where pieces go ---------------------------------------------------------------------

    def place(self, option: Option) -> Ints | None:
        """Ranks for the pieces of an option on the loads as they are; None if there are none."""
        if option.pieces is None:
            return _NO_RANKS
        if option.scope == BLOCK:
            return self._place_blocks(option.pieces)
        if option.scope == HOST:
            return self._place_on_host(option)
        return self._place_pieces(option, None)

    def _place_pieces(self, option: Option, only: Ints | None) -> Ints | None:
        pieces = option.pieces
        assert pieces is not None, "an option with pieces"
        loads = self.loads if only is None else self.loads[only]
        num = len(pieces)
        if num == 1:
            place = int(self.score(loads + pieces[0]).argmin())
            return np.array([place if only is None else only[place]])
        if option.distinct:
            if num > len(loads):
                return None
            # Pieces are nearly alike: the largest goes where it ends lowest.
            heights = self.score(loads + pieces[0])
            places = np.argsort(heights, kind="stable")[:num]
            order = np.argsort(-pieces[:, 0], kind="stable")
            ranks = np.empty(num, np.int64)
            ranks[order] = places
        else:
            loads = loads.copy()
            ranks = np.empty(num, np.int64)
            for number in np.argsort(-pieces[:, 0], kind="stable").tolist():
                place = int(self.score(loads + pieces[number]).argmin())
                ranks[number] = place
                loads[place] += pieces[number]
        return ranks if only is None else only[ranks]

    def _place_on_host(self, option: Option) -> Ints | None:
        per_host = self.problem.ranks_per_host
        pieces = option.pieces
        assert pieces is not None, "an option with pieces"
        best: tuple[float, Ints] | None = None
        order = np.argsort(self.loads[:, 0].reshape(-1, per_host).min(1), kind="stable")
        for host in order[:4].tolist():
            only = np.arange(host * per_host, (host + 1) * per_host)
            ranks = self._place_pieces(option, only)
            if ranks is None:
                continue
            loads = self.loads[only].copy()
            np.add.at(loads, ranks - host * per_host, pieces)
            highest = float(self.height(loads).max())
            if best is None or highest < best[0]:
                best = highest, ranks
        return None if best is None else best[1]

    def _place_blocks(self, pieces: Array) -> Ints | None:
        per_host, num_hosts = self.problem.ranks_per_host, self.problem.num_hosts
        num_blocks = len(pieces) // per_host
        if num_blocks > num_hosts or num_blocks * per_host != len(pieces):
            return None
        loads = self.loads.reshape(num_hosts, per_host, self.width) + pieces[:per_host]
        highest = self.score(loads).max(1)
        hosts = np.argsort(highest, kind="stable")[:num_blocks]
        return (hosts[:, None] * per_host + np.arange(per_host)).reshape(-1)

    # -- the first packing -------------------------------------------------------------------

    def fill(self, chosen: Sequence[int], order: Sequence[int]) -> bool:
        """Give each table its chosen option, in that order; False if one cannot be placed."""
        for table in order:
            ranks = self.place(self.problem.options[table][chosen[table]])
            if ranks is None:
                return False
            self.put(table, chosen[table], ranks)
        return True

    def assignment(self) -> Assignment:
        return Assignment(self.problem, list(self.chosen), list(self.ranks))

    @property
    def highest(self) -> float:
        return float(self.heights.max())

    @property
    def fits(self) -> bool:
        return bool((self.loads[:, 1:] <= self.problem.capacity * (1 + 1e-9)).all())


def packed(
    problem: Problem,
    chosen: Sequence[int],
    scale_s: float,
    *,
    memory_first: bool = False,
    balance: bool = False,
) -> Packing | None:
    """Everywhere first, then blocks of hosts, then the pieces that are largest."""
    packing = Packing(problem, scale_s)
    packing.balance = balance
    rank_of = np.zeros(len(chosen), np.int64)
    flat = problem.flat
    peaks = flat.peak[flat.first[:-1] + np.asarray(chosen)]
    relative = peaks[:, 1:] / np.maximum(problem.capacity, 1.0)
    share = np.maximum(relative.max(1) if memory_first else 0.0, peaks[:, 0] / max(scale_s, 1e-12))
    for table, choice in enumerate(chosen):
        option = problem.options[table][choice]
        if option.pieces is None:
            rank_of[table] = 0
        elif option.scope == BLOCK or option.num_pieces > 1:
            rank_of[table] = 1 if option.scope == BLOCK else 2
        else:
            rank_of[table] = 2
    order = np.lexsort((np.arange(len(chosen)), -share, rank_of)).tolist()
    filled = packing.fill(chosen, order)
    packing.balance = False
    return packing if filled else None


# -- local search ----------------------------------------------------------------------------


class Search:
    """Steps that lower the highest ranks of a packing."""

    def __init__(self, packing: Packing, allowed: Sequence[Sequence[int]], rng_seed: int = 0):
        self.packing = packing
        #: Per table, the options that may be tried.
        self.allowed = allowed
        self._rng = np.random.default_rng(rng_seed)
        self.num_steps = 0

    def run(self, target: float, late: Callable[[], bool], *, max_steps: int = 1 << 30) -> None:
        """Until the highest rank is at the target, nothing helps, or time is over."""
        packing = self.packing
        at_once = packing.problem.at_once
        while self.num_steps < max_steps and packing.highest > target:
            if at_once is not None and packing.highest <= packing.loads[:, 0].sum() / at_once:
                return  # the ranks share cores: only their sum counts now
            if late():
                return
            self.num_steps += 1
            worst = int(packing.heights.argmax())
            if not (self._move_or_swap(worst) or self._choose_again(worst)):
                return

    # A piece of the worst rank goes elsewhere, or changes places with a smaller one.

    def _movable(self, rank: int) -> list[tuple[int, int]]:
        """(table, number of its piece) of the pieces on a rank that may go anywhere."""
        packing = self.packing
        found = []
        for table in sorted(packing.tables_on[rank]):
            option = packing.problem.options[table][packing.chosen[table]]
            if option.scope != BLOCK:
                for number in np.flatnonzero(packing.ranks[table] == rank).tolist():
                    found.append((table, number))
        return found

    def _targets(self, table: int) -> Ints | None:
        """The ranks that a piece of a table may go to; None for all."""
        packing = self.packing
        option = packing.problem.options[table][packing.chosen[table]]
        if option.scope == HOST:
            per_host = packing.problem.ranks_per_host
            host = int(packing.ranks[table][0]) // per_host
            if option.num_pieces > 1:
                return np.arange(host * per_host, (host + 1) * per_host)
        return None

    def _move_or_swap(self, worst: int) -> bool:
        packing = self.packing
        height = packing.heights[worst]
        limit = height * (1 - _GAIN)
        movable = self._movable(worst)
        best: tuple[float, int, int, int] | None = None
        load = packing.loads[worst]
        for table, number in movable:
            option = packing.problem.options[table][packing.chosen[table]]
            assert option.pieces is not None, "a movable piece"
            piece = option.pieces[number]
            left = float(packing.height(load - piece))
            if left >= limit:
                continue
            raised = packing.height(packing.loads + piece)
            raised = np.maximum(raised, left)
            raised[worst] = np.inf
            if option.distinct and option.num_pieces > 1:
                raised[packing.ranks[table]] = np.inf
            targets = self._targets(table)
            if targets is not None:
                outside = np.ones(len(raised), bool)
                outside[targets] = False
                raised[outside] = np.inf
            place = int(raised.argmin())
            if raised[place] < limit and (best is None or raised[place] < best[0]):
                best = float(raised[place]), table, number, place
        if best is not None:
            _, table, number, place = best
            self._relocate(table, number, place)
            return True
        return self._swap(worst, movable, limit)

    def _relocate(self, table: int, number: int, place: int) -> None:
        packing = self.packing
        ranks = packing.ranks[table].copy()
        ranks[number] = place
        choice = packing.chosen[table]
        packing.take(table)
        packing.put(table, choice, ranks)

    def _swap(self, worst: int, movable: Sequence[tuple[int, int]], limit: float) -> bool:
        packing = self.packing
        others = [
            rank
            for rank in np.argsort(packing.heights, kind="stable").tolist()
            if rank != worst and packing.heights[rank] < limit
        ]
        if len(others) > 24:  # the lowest ranks, and some of the others
            middle = self._rng.permutation(np.asarray(others[12:]))[:12]
            others = others[:12] + sorted(middle.tolist())
        load = packing.loads[worst]
        best: tuple[float, tuple[int, int], tuple[int, int], int] | None = None
        mine = [
            packing.problem.options[t][packing.chosen[t]].pieces[n]  # type: ignore[index]
            for t, n in movable
        ]
        if not mine:
            return False
        mine_array = np.asarray(mine)
        for rank in others:
            theirs = self._movable(rank)
            if not theirs:
                continue
            their_array = np.asarray(
                [
                    packing.problem.options[t][packing.chosen[t]].pieces[n]  # type: ignore[index]
                    for t, n in theirs
                ]
            )
            change = their_array[None] - mine_array[:, None]
            after = np.maximum(
                packing.height(load + change), packing.height(packing.loads[rank] - change)
            )
            if best is not None and after.min() >= best[0]:
                continue
            for flat in np.argsort(after, axis=None, kind="stable")[:4].tolist():
                i, j = divmod(flat, len(theirs))
                if after[i, j] >= limit or (best is not None and after[i, j] >= best[0]):
                    break
                if self._may_swap(movable[i], theirs[j], worst, rank):
                    best = float(after[i, j]), movable[i], theirs[j], rank
                    break
        if best is None:
            return False
        _, (table, number), (other, other_number), rank = best
        self._relocate(table, number, rank)
        self._relocate(other, other_number, worst)
        return True

    def _may_swap(
        self, mine: tuple[int, int], theirs: tuple[int, int], here: int, there: int
    ) -> bool:
        packing = self.packing
        for (table, _), place in ((mine, there), (theirs, here)):
            option = packing.problem.options[table][packing.chosen[table]]
            if mine[0] == theirs[0]:
                return False
            if option.num_pieces > 1:
                if option.distinct and place in packing.ranks[table]:
                    return False
                targets = self._targets(table)
                if targets is not None and place not in targets:
                    return False
        return True

    # Another option for a table that loads the worst rank.

    def _choose_again(self, worst: int) -> bool:
        packing = self.packing
        before = packing.heights[worst]
        limit = before * (1 - _GAIN)
        tables = sorted(packing.tables_on[worst])
        everywhere = sorted(packing.tables_everywhere - packing.tables_on[worst])
        if len(everywhere) > 60:
            picked = self._rng.permutation(len(everywhere))[:60]
            everywhere = [everywhere[i] for i in sorted(picked.tolist())]
        best: tuple[float, int, int, Ints] | None = None
        for table in tables + everywhere:
            old, old_ranks = packing.chosen[table], packing.ranks[table]
            packing.take(table)
            for choice in self.allowed[table]:
                option = packing.problem.options[table][choice]
                if choice == old and option.scope == ANY:
                    continue  # its pieces were moved already, one by one
                ranks = packing.place(option)
                if ranks is None:
                    continue
                height = self._height_with(option, ranks, worst)
                if height < limit and (best is None or height < best[0]):
                    best = height, table, choice, ranks
            packing.put(table, old, old_ranks)
        if best is None:
            return False
        _, table, choice, ranks = best
        packing.take(table)
        packing.put(table, choice, ranks)
        return True

    def _height_with(self, option: Option, ranks: Ints, worst: int) -> float:
        """The highest of the worst rank and those that the option loads."""
        packing = self.packing
        if option.everywhere is not None:
            loads = packing.loads + option.everywhere
            if option.pieces is not None:
                np.add.at(loads, ranks, option.pieces)
            return float(packing.height(loads).max())
        assert option.pieces is not None, "an option loads something"
        if option.num_pieces == 1:
            load = packing.loads[ranks[0]] + option.pieces[0]
            return (
                max(float(packing.height(load)), float(packing.heights[worst]))
                if (ranks[0] != worst)
                else float(packing.height(load))
            )
        touched, where = np.unique(ranks, return_inverse=True)
        loads = packing.loads[touched].copy()
        np.add.at(loads, where, option.pieces)
        highest = float(packing.height(loads).max())
        if worst not in ranks:
            highest = max(highest, float(packing.heights[worst]))
        return highest

    # A kick, so that the search may go on elsewhere.

    def kick(self, num: int) -> None:
        """Some tables that load high ranks leave, and come back in another order."""
        packing = self.packing
        order = np.argsort(-packing.heights, kind="stable")
        high = [int(r) for r in order[: max(2, packing.num_ranks // 4)]]
        low = [int(r) for r in order[-max(2, packing.num_ranks // 4) :]]
        on = sorted(set().union(*(packing.tables_on[r] for r in (*high, *low))))
        on += sorted(packing.tables_everywhere - set(on))
        if not on:
            return
        picked = self._rng.permutation(len(on))[:num]
        taken = [on[i] for i in picked.tolist()]
        for table in taken:
            packing.take(table)
        for table in taken:
            choices = list(self.allowed[table]) or [packing.chosen[table]]
            choice = choices[int(self._rng.integers(len(choices)))]
            ranks = packing.place(packing.problem.options[table][choice])
            if ranks is None:
                choice = packing.chosen[table]
                ranks = packing.place(packing.problem.options[table][choice])
                assert ranks is not None, "it was placed before"
            packing.put(table, choice, ranks)
