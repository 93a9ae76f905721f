"""Local search: moves and swaps that lower the highest ranks; repacking all ranks at once.

Every step lowers the highest of the ranks that it changes (see Note [Heights]). So the sorted list
of heights decreases lexicographically, and the search ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

from shardwise.planner.packing import Packing
from shardwise.planner.problem import ANY, BLOCK, HOST, Array, Assignment, Ints, Option, Problem

#: The relative gain of a step; with less, rounding errors would keep the search going.
_GAIN = 1e-9


#: Groups of ranks that are tried, and ways to divide their tables.
_DIVISIONS, _MOST_DIVISIONS = 24, 20_000


@cache
def _divisions(num_ranks: int, num_tables: int) -> list[Array]:
    """For each rank, which tables it gets in each of all divisions."""
    digits = np.indices((num_ranks,) * num_tables).reshape(num_tables, -1).T
    return [(digits == rank).astype(float) for rank in range(num_ranks)]


class Search:
    """Steps that lower the highest ranks of a packing."""

    def __init__(self, packing: Packing, allowed: Sequence[Sequence[int]], rng_seed: int = 0):
        self.packing = packing
        #: Per table, the options that may be tried.
        self.allowed = allowed
        self._rng = np.random.default_rng(rng_seed)
        self.num_steps = 0

    def run(self, target: float, late: Callable[[], bool], *, max_steps: int = 1 << 30) -> None:
        """Run until the highest rank is at the target, no step helps, or time is up."""
        packing = self.packing
        at_once = packing.problem.at_once
        while self.num_steps < max_steps and packing.highest > target:
            if at_once is not None and packing.highest <= packing.loads[:, 0].sum() / at_once:
                return  # the ranks share cores: only the sum counts now
            if late():
                return
            self.num_steps += 1
            worst = int(packing.heights.argmax())
            if not (self._move_or_swap(worst) or self._choose_again(worst) or self._divide(worst)):
                return

    # -- move a shard of the worst rank, or swap it with a smaller one -----------------------

    def _movable(self, rank: int) -> list[tuple[int, int]]:
        """(table, number of its shard) of the shards on a rank that may move."""
        packing = self.packing
        found = []
        for table in sorted(packing.tables_on[rank]):
            if packing.option(table).scope != BLOCK:
                for number in np.flatnonzero(packing.ranks[table] == rank).tolist():
                    found.append((table, number))
        return found

    def _targets(self, table: int) -> Ints | None:
        """The ranks that a shard of a table may go to; None for all."""
        packing = self.packing
        option = packing.option(table)
        if option.scope == HOST:
            per_host = packing.problem.ranks_per_host
            host = int(packing.ranks[table][0]) // per_host
            if option.num_shards > 1:
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
            option, shard = packing.option(table), self._shard(table, number)
            left = float(packing.height(load - shard))
            if left >= limit:
                continue
            raised = packing.height(packing.loads + shard)
            raised = np.maximum(raised, left)
            raised[worst] = np.inf
            if option.distinct and option.num_shards > 1:
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
        if not movable:
            return False
        mine = np.asarray([self._shard(*each) for each in movable])
        for rank in others:
            theirs = self._movable(rank)
            if not theirs:
                continue
            change = np.asarray([self._shard(*each) for each in theirs])[None] - mine[:, None]
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
            option = packing.option(table)
            if mine[0] == theirs[0]:
                return False
            if option.num_shards > 1:
                if option.distinct and place in packing.ranks[table]:
                    return False
                targets = self._targets(table)
                if targets is not None and place not in targets:
                    return False
        return True

    # -- repack whole tables of the worst rank and some others --------------------------------

    def _divide(self, worst: int) -> bool:
        """Try every division of whole tables among the worst rank and two or three others."""
        packing = self.packing
        whole = {rank: self._whole(rank) for rank in range(packing.num_ranks)}
        if not whole[worst]:
            return False
        limit = packing.heights[worst] * (1 - _GAIN)
        others = [r for r in range(packing.num_ranks) if r != worst and packing.heights[r] < limit]
        for trial in range(_DIVISIONS if len(others) > 1 else 0):
            size = min(2 + trial % 2, len(others))
            picked = self._rng.permutation(len(others))[:size].tolist()
            group = [worst, *(others[i] for i in picked)]
            tables = [table for rank in group for table in whole[rank]]
            if len(group) ** len(tables) > _MOST_DIVISIONS:
                continue
            masks = _divisions(len(group), len(tables))
            shards = np.stack([self._shard(table) for table in tables])
            fixed = [packing.loads[r] - sum(map(self._shard, whole[r])) for r in group]
            after = np.stack(
                [
                    packing.height(rest + mask @ shards)
                    for rest, mask in zip(fixed, masks, strict=True)
                ]
            ).max(0)
            best = int(after.argmin())
            if after[best] >= limit:
                continue
            for number, table in enumerate(tables):
                place = next(r for r, mask in zip(group, masks, strict=True) if mask[best, number])
                if place != int(packing.ranks[table][0]):
                    self._relocate(table, 0, place)
            return True
        return False

    def _whole(self, rank: int) -> list[int]:
        on = sorted(self.packing.tables_on[rank])
        return [table for table in on if self.packing.option(table).num_shards == 1]

    def _shard(self, table: int, number: int = 0) -> Array:
        shards = self.packing.option(table).shards
        assert shards is not None, "an option with shards"
        return shards[number]

    # -- another option for a table that loads the worst rank --------------------------------

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
                    continue  # moving its shards was tried already
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
            loads = packing.loads.copy()
            option.add_to(loads, ranks)
            return float(packing.height(loads).max())
        assert option.shards is not None, "an option loads something"
        if option.num_shards == 1:
            highest = float(packing.height(packing.loads[ranks[0]] + option.shards[0]))
        else:
            touched, where = np.unique(ranks, return_inverse=True)
            loads = packing.loads[touched].copy()
            np.add.at(loads, where, option.shards)
            highest = float(packing.height(loads).max())
        return highest if worst in ranks else max(highest, float(packing.heights[worst]))

    # -- random changes, to leave a local optimum --------------------------------------------

    def kick(self, num: int) -> None:
        """Give `num` random tables of the highest and lowest ranks a random option each."""
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


# -- repacking all ranks -------------------------------------------------------------------------
# Note [Filling]
# With few tables per rank it matters which pieces (shards that may be on any rank) share a rank,
# and moves and swaps seldom find good sets. Here tables keep their options, blocks and replicated
# tables stay where they are, and all pieces are packed again: the largest that is left goes first,
# with a few smaller ones that fill its rank best. Ranks with the same room are interchangeable, so
# a partial filling is the set of pieces that are left and the number of ranks left per room. This
# is a beam search: it keeps many partial fillings, those that waste least. No filling can waste
# more than the ranks have to spare in total.


Bits = npt.NDArray[np.uint64]

#: Pieces are bits of an integer.
_MOST_PIECES = 64
#: Rooms are rounded down to multiples of this, so that ranks of a host have equal rooms.
_GRAIN = 1e-4
#: Sets of pieces that may share a rank with the largest of them.
_SETS = 50_000
#: Completions of a piece that are listed, and those that are tried for one partial filling.
_KNOWN, _TRIED = 4_000, 60
#: Sums of loads may differ by so much.
_ROUNDING = 1e-9
_ONE = np.uint64(1)
#: Mixes the bits of two numbers into one.
_ODD = np.uint64(0x9E3779B97F4A7C15)


#: Ranks that are filled: the kind of each, and its pieces as bits.
_Found = list[tuple[int, int]]


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """The pieces, largest first, and all sets of few of them, the smallest sum first."""

    table: Ints
    number: Ints
    loads: Array
    set_loads: Array
    set_bits: Bits
    #: The largest piece of each set.
    set_first: Ints


class Filler:
    """Fills the ranks of plans of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._known: tuple[tuple[tuple[int, int], ...], _Pieces] | None = None

    def refilled(self, plan: Assignment, cost_s: float, width: int) -> Assignment | None:
        """A plan with the same options within `cost_s`; None if none is found.

        `width` is the number of partial fillings that the search keeps.
        """
        problem = self.problem
        unit = problem.unit(cost_s - problem.base_s)
        fixed = np.zeros((problem.num_ranks, len(unit)))
        free: list[tuple[int, int]] = []
        for table, ranks in enumerate(plan.ranks):
            option = plan.option(table)
            if option.everywhere is not None:
                fixed += option.everywhere
            if option.shards is None:
                continue
            if option.scope == BLOCK or (option.scope == HOST and option.num_shards > 1):
                np.add.at(fixed, ranks, option.shards)
            else:
                free += [(table, number) for number in range(option.num_shards)]
        rooms = (np.concatenate([unit[:1], problem.capacity]) - fixed) / unit
        if not free or len(free) > _MOST_PIECES or (rooms < -_ROUNDING).any():
            return None
        rooms = np.maximum(np.floor(rooms / _GRAIN + 1e-6), 0) * _GRAIN
        kinds, kind_of, counts = np.unique(rooms, axis=0, return_inverse=True, return_counts=True)
        pieces = self._pieces(plan, tuple(free))
        found = _Filling(pieces, _apart_of(plan, pieces), unit, kinds, counts).run(width)
        if found is None:
            return None
        made = plan.copy()
        made.ranks = [ranks.copy() for ranks in made.ranks]
        _put_pieces(made, pieces, found, kind_of)
        return made

    def _pieces(self, plan: Assignment, free: tuple[tuple[int, int], ...]) -> _Pieces:
        key = tuple((table, plan.chosen[table] * _MOST_PIECES + n) for table, n in free)
        if self._known is None or self._known[0] != key:
            loads = np.stack([plan.option(t).shards[n] for t, n in free])  # type: ignore[index]
            order = np.argsort(-loads[:, 0], kind="stable")
            loads = loads[order]
            members, bits = _sets(len(free))
            sums = np.concatenate([loads, np.zeros((1, loads.shape[1]))])[members].sum(1)
            by_size = np.argsort(sums[:, 0], kind="stable")
            table, number = np.asarray(free, np.int64)[order].T
            made = _Pieces(table, number, loads, sums[by_size], bits[by_size], members[by_size, 0])
            self._known = key, made
        return self._known[1]


def _apart_of(plan: Assignment, pieces: _Pieces) -> list[int]:
    """The pieces of each table whose shards need ranks of their own."""
    found = []
    for table in np.unique(pieces.table).tolist():
        option = plan.option(table)
        if option.distinct and option.num_shards > 1:
            places = np.flatnonzero(pieces.table == table).tolist()
            found.append(sum(1 << place for place in places))
    return found


def _put_pieces(plan: Assignment, pieces: _Pieces, found: _Found, kind_of: Ints) -> None:
    """Put the pieces on ranks of the kinds that were found."""
    unused = [np.flatnonzero(kind_of.ravel() == k).tolist() for k in range(kind_of.max() + 1)]
    for kind, bits in found:
        rank = unused[kind].pop()
        for piece, (table, number) in enumerate(zip(pieces.table, pieces.number, strict=True)):
            if bits >> piece & 1:
                plan.ranks[table][number] = rank


@lru_cache(maxsize=8)
def _sets(num: int) -> tuple[Ints, Bits]:
    """All small sets of `num` pieces and the empty set, padded with `num`; and as bits."""
    sets, last = [np.zeros((1, 0), np.int64)], np.array([-1])
    while sum(map(len, sets)) + int((num - 1 - last).sum()) <= _SETS and len(last):
        parent, piece = np.nonzero(last[:, None] < np.arange(num))
        sets.append(np.concatenate([sets[-1][parent], piece[:, None]], 1))
        last = piece
    members = np.full((sum(map(len, sets)), max(1, sets[-1].shape[1])), num)
    at = 0
    for each in sets:
        members[at : at + len(each), : each.shape[1]] = each
        at += len(each)
    bit = np.concatenate([_ONE << np.arange(num, dtype=np.uint64), np.zeros(1, np.uint64)])
    return members, np.bitwise_or.reduce(bit[members], 1)


class _Filling:
    """One search for a filling; see Note [Filling]."""

    def __init__(
        self,
        pieces: _Pieces,
        apart: list[int],
        unit: Array,
        kinds: Array,
        counts: Ints,
    ) -> None:
        self.loads = pieces.loads / unit
        self.pieces, self.apart, self.unit = pieces, apart, unit
        self.kinds, self.counts = kinds, counts
        self.spare = float(kinds[:, 0] @ counts - self.loads[:, 0].sum())
        self._memo: dict[tuple[int, int], tuple[Bits, Array]] = {}

    def run(self, width: int) -> _Found | None:
        """Per filled rank its kind and its pieces."""
        if self.spare < 0:
            return None
        num = len(self.loads)
        left = np.array([(1 << num) - 1], np.uint64)
        ranks, waste = self.counts[None], np.zeros(1)
        steps: list[tuple[Ints, Ints, Bits]] = []
        mixed = np.uint64(1 + self.counts.max()) ** np.arange(len(self.counts), dtype=np.uint64)
        while True:
            parent, kind, bits, wasted = self._completed(left, ranks, waste)
            if not len(parent):
                return None
            rest = left[parent] & ~bits
            done = np.flatnonzero(rest == 0)
            steps.append((parent, kind, bits))
            if len(done):
                return _walked_back(steps, int(done[0]))
            counts = ranks[parent]
            counts[np.arange(len(parent)), kind] -= 1
            # The pieces and ranks that are left determine the rest, the waste included.
            best = np.argsort(wasted, kind="stable")[: 4 * width]
            key = rest[best] * _ODD + counts[best].astype(np.uint64) @ mixed
            _, unique = np.unique(key, return_index=True)
            kept = best[np.sort(unique)[:width]]
            steps[-1] = (parent[kept], kind[kept], bits[kept])
            left, ranks, waste = rest[kept], counts[kept], wasted[kept]

    def _completed(self, left: Bits, ranks: Ints, waste: Array) -> tuple[Ints, Ints, Bits, Array]:
        """Fillings with one more rank: which one it extends, kind and pieces of the rank, waste."""
        parents, kinds, all_bits, wastes = [], [], [], []
        lowest = left & (~left + _ONE)
        first = np.log2(lowest.astype(float)).round().astype(np.int64)
        for piece in np.unique(first).tolist():
            for kind in range(len(self.kinds)):
                at = np.flatnonzero((first == piece) & (ranks[:, kind] > 0))
                bits, more = self._completions(piece, kind)
                if not len(at) or not len(bits):
                    continue
                fits = (bits & ~left[at, None]) == 0
                fits &= waste[at, None] + more <= self.spare + _ROUNDING
                fits &= fits.cumsum(1) <= _TRIED
                filling, which = np.nonzero(fits)
                parents.append(at[filling])
                kinds.append(np.full(len(filling), kind))
                all_bits.append(bits[which])
                wastes.append(waste[at[filling]] + more[which])
        if not parents:
            none = np.zeros(0, np.int64)
            return none, none, none.astype(np.uint64), none.astype(float)
        return (
            np.concatenate(parents),
            np.concatenate(kinds),
            np.concatenate(all_bits),
            np.concatenate(wastes),
        )

    def _completions(self, piece: int, kind: int) -> tuple[Bits, Array]:
        """The piece with others that share a rank of this kind, and the waste, least first."""
        if (piece, kind) not in self._memo:
            pieces, unit = self.pieces, self.unit
            room = self.kinds[kind] - self.loads[piece] + _ROUNDING / 1000
            seconds = pieces.set_loads[:, 0]
            stop = np.searchsorted(seconds, room[0] * unit[0], side="right")
            start = np.searchsorted(seconds, (room[0] - self.spare - _ROUNDING) * unit[0])
            sets = np.arange(stop - 1, start - 1, -1)
            sets = sets[pieces.set_first[sets] > piece]
            sets = sets[(pieces.set_loads[sets, 1:] <= room[1:] * unit[1:]).all(1)]
            bits = pieces.set_bits[sets] | (_ONE << np.uint64(piece))
            for table in self.apart:
                both = bits & np.uint64(table)
                alone = (both & (both - _ONE)) == 0
                bits, sets = bits[alone], sets[alone]
            if (room < 0).any():
                bits, sets = bits[:0], sets[:0]
            bits, sets = bits[:_KNOWN], sets[:_KNOWN]
            self._memo[piece, kind] = bits, room[0] - seconds[sets] / unit[0]
        return self._memo[piece, kind]


def _walked_back(steps: list[tuple[Ints, Ints, Bits]], place: int) -> _Found:
    found = []
    for parent, kind, bits in reversed(steps):
        found.append((int(kind[place]), int(bits[place])))
        place = int(parent[place])
    return found
