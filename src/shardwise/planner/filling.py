"""Fill the ranks of a plan anew, so that every one stays within a given cost.

Note [Filling]
With few tables per rank it matters which pieces share a rank, and moves and swaps seldom find out.
Here the options of tables stay, and so does what several ranks have in common (blocks, replicated
tables); pieces that may be on any rank are placed anew. The largest piece that is left goes first,
with up to three smaller ones that fill its rank best. Ranks with the same room are alike, so a
partial filling is the set of pieces that are left, and how many ranks of each room. Of these, those
that waste least are kept, many at a time; no filling may waste more than all ranks have in spare.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from shardwise.planner.problem import BLOCK, HOST, Array, Assignment, Ints, Problem

Bits = npt.NDArray[np.uint64]

#: Pieces are bits of an integer.
_MOST_PIECES = 64
#: Rooms are rounded down to this part of the whole, so that the ranks of a host are alike.
_GRAIN = 1e-4
#: Completions of a piece that are known, and those that are tried for one partial filling.
_KNOWN, _TRIED = 4_000, 60
#: Sums of loads may differ by so much.
_ROUNDING = 1e-9
_ONE = np.uint64(1)
#: Mixes the bits of two numbers into one.
_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """The pieces, largest first, and all sets of up to three of them, smallest first."""

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
        """The same options on other ranks, within `cost_s`; None if none is found.

        `width` is the number of partial fillings that are kept.
        """
        problem = self.problem
        unit = np.concatenate([[cost_s - problem.base_s], np.maximum(problem.capacity, 1.0)])
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
        found = _Filling(pieces, self._apart(plan, pieces), unit, kinds, counts).run(width)
        if found is None:
            return None
        made = plan.copy()
        made.ranks = [ranks.copy() for ranks in made.ranks]
        unused = [np.flatnonzero(kind_of.reshape(-1) == k).tolist() for k in range(len(kinds))]
        for kind, bits in found:
            rank = unused[kind].pop()
            for piece in range(len(free)):
                if bits >> piece & 1:
                    made.ranks[pieces.table[piece]][pieces.number[piece]] = rank
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

    def _apart(self, plan: Assignment, pieces: _Pieces) -> list[int]:
        """The pieces of each table whose shards need ranks of their own."""
        found = []
        for table in np.unique(pieces.table).tolist():
            option = plan.option(table)
            if option.distinct and option.num_shards > 1:
                places = np.flatnonzero(pieces.table == table).tolist()
                found.append(sum(1 << place for place in places))
        return found


@lru_cache(maxsize=8)
def _sets(num: int) -> tuple[Ints, Bits]:
    """All sets of none to three of `num` pieces, in order, filled up with `num`; and as bits."""
    one = np.arange(num)
    first, second = np.triu_indices(num, 1)
    third = np.broadcast_to(one, (len(first), num))
    pair, last = np.nonzero(third > second[:, None])
    members = np.full((1 + num + len(first) + len(pair), 3), num)
    members[1 : 1 + num, 0] = one
    members[1 + num : 1 + num + len(first), :2] = np.stack([first, second], 1)
    members[1 + num + len(first) :] = np.stack([first[pair], second[pair], last], 1)
    bit = np.concatenate([_ONE << np.arange(num, dtype=np.uint64), np.zeros(1, np.uint64)])
    return members, np.bitwise_or.reduce(bit[members], 1)


_Found = list[tuple[int, int]]


class _Filling:
    """One search for a filling; see Note [Filling]."""

    def __init__(
        self, pieces: _Pieces, apart: list[int], unit: Array, kinds: Array, counts: Ints
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
            # What is left and which ranks are left says all, waste included.
            best = np.argsort(wasted, kind="stable")[: 4 * width]
            key = rest[best] * _ODD + counts[best].astype(np.uint64) @ mixed
            _, unique = np.unique(key, return_index=True)
            kept = best[np.sort(unique)[:width]]
            steps[-1] = (parent[kept], kind[kept], bits[kept])
            left, ranks, waste = rest[kept], counts[kept], wasted[kept]

    def _completed(self, left: Bits, ranks: Ints, waste: Array) -> tuple[Ints, Ints, Bits, Array]:
        """Each with one more rank: number of the filling, kind and pieces of the rank, waste."""
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
            more = room[0] - seconds[sets[:_KNOWN]] / unit[0]
            self._memo[piece, kind] = bits[:_KNOWN], more
        return self._memo[piece, kind]


def _walked_back(steps: list[tuple[Ints, Ints, Bits]], place: int) -> _Found:
    found = []
    for parent, kind, bits in reversed(steps):
        found.append((int(kind[place]), int(bits[place])))
        place = int(parent[place])
    return found
