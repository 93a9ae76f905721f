"""Replica exchange: many plans at once are changed at random, each at a temperature of its own.

Note [Replicas]
A replica is an option for each table, and the first host of each block. Best fit turns it into a
plan: each piece (a shard that may be on any rank), largest first, goes to the fullest rank that has
room for it, or else to the one that it overfills least. The energy is the total by which ranks
exceed the wanted cost and their memory. A change that lowers the energy is kept; others are kept at
random, more often the hotter the replica is. Replicas with neighbouring temperatures are exchanged
by the same rule. Arrays hold all replicas, so one numpy call changes them all. A better packing
than best fit may save what is missing, so the coldest replicas are returned while they still exceed
the cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from shardwise.planner.problem import BLOCK, HOST, Array, Assignment, Ints, Option, Problem

_REPLICAS = 64
#: In full ranks; the coldest replica comes last.
_TEMPERATURES = 0.15 * (0.003 / 0.15) ** np.linspace(0.0, 1.0, _REPLICAS)
#: A rank without memory for a piece counts as overfilled by this; a forbidden one by twice this.
_FAR = np.float32(100.0)
#: The weight of memory in the energy.
_PENALTY = 5.0
#: The probabilities that one, two and three tables change.
_CHANCES = (1.0, 0.4, 0.2)
#: After how many rounds replicas are returned, and how many.
_ROUNDS, _HANDED = 20, 2

Rooms = npt.NDArray[np.float32]


class Replicas:
    """Plans of one problem that are changed at random; see Note [Replicas]."""

    def __init__(self, problem: Problem, allowed: Sequence[Sequence[int]], cost_s: float) -> None:
        self.problem = problem
        self._unit = problem.unit(cost_s - problem.base_s)
        self._ways = [
            [c for c in choices if _is_free(problem, problem.options[table][c])]
            for table, choices in enumerate(allowed)
        ]
        #: Whether every table has an option that replicas can have.
        self.possible = all(self._ways) and problem.at_once is None
        if self.possible:
            self._read_options()

    @property
    def num_pieces(self) -> int:
        return max(1, len(self._load))

    def _read_options(self) -> None:
        problem, per_host = self.problem, self.problem.ranks_per_host
        shape = len(self._ways), max(map(len, self._ways)), len(self._unit)
        self._num_ways = np.array([len(each) for each in self._ways])
        self._several = np.flatnonzero(self._num_ways > 1)
        self._everywhere, self._block = np.zeros(shape), np.zeros(shape)
        self._hosts_of = np.zeros(shape[:2], np.int64)
        pieces: list[tuple[float, int, int, int, Array]] = []
        apart: list[tuple[int, int]] = []
        for table, choices in enumerate(self._ways):
            for way, choice in enumerate(choices):
                option = problem.options[table][choice]
                if option.everywhere is not None:
                    rows = option.everywhere.reshape(-1, shape[2])
                    self._everywhere[table, way] = rows.max(0) / self._unit
                if option.shards is None:
                    continue
                if option.scope == BLOCK:
                    self._block[table, way] = option.shards.max(0) / self._unit
                    self._hosts_of[table, way] = option.num_shards // per_host
                    continue
                for number, load in enumerate(option.shards / self._unit):
                    pieces.append((-load[0], table, way, number, load))
                if option.distinct and option.num_shards > 1:
                    apart.append((table, way))
        self._movable = np.flatnonzero((self._hosts_of > 0).any(1))
        pieces.sort(key=lambda piece: piece[:4])
        self._table, self._way, self._number = (
            np.array([p[1:4] for p in pieces], int).reshape(-1, 3).T
        )
        self._load = np.array([p[4] for p in pieces], np.float32).reshape(-1, shape[2])
        #: Of pieces that need ranks of their own, the number of their option.
        self._apart = [apart.index(p[1:3]) if p[1:3] in apart else None for p in pieces]
        self._num_apart = len(apart)
        most = (self._everywhere + self._block).max(1).sum(0) + self._load.sum(0)
        #: Seconds, and the memory that can be exceeded at all.
        self._kinds = [kind for kind in range(shape[2]) if kind == 0 or most[kind] > 1.0]

    def plans(self, wanted_s: Callable[[], float], rounds: int) -> Iterator[Assignment]:
        """Plans that cost little more than wanted; a better packing may be cheap enough."""
        problem, rng = self.problem, np.random.default_rng(0)
        size = _REPLICAS, len(self._ways)
        ways = (rng.random(size) * self._num_ways).astype(np.int64)
        hosts = rng.integers(0, problem.num_hosts, size)
        self._room = self._room_for(wanted_s())
        energy = self._energy(ways, hosts)
        seen: set[bytes] = set()
        for number in range(rounds):
            new_ways, new_hosts = self._changed(ways, hosts, rng)
            after = self._energy(new_ways, new_hosts)
            more = np.maximum(after - energy, 0.0)
            kept = rng.random(_REPLICAS) < np.exp(-more / _TEMPERATURES)
            ways[kept], hosts[kept], energy[kept] = new_ways[kept], new_hosts[kept], after[kept]
            warm = np.arange(number % 2, _REPLICAS - 1, 2)
            colder = 1 / _TEMPERATURES[warm + 1] - 1 / _TEMPERATURES[warm]
            less = np.minimum((energy[warm + 1] - energy[warm]) * colder, 0.0)
            warm = warm[rng.random(len(warm)) < np.exp(less)]
            for each in (ways, hosts, energy):
                each[warm], each[warm + 1] = each[warm + 1].copy(), each[warm].copy()
            if number % _ROUNDS:
                continue
            handed = 0
            for replica in np.argsort(energy, kind="stable").tolist():
                key = ways[replica].tobytes() + self._blocks(ways[replica], hosts[replica])
                if key not in seen and handed < _HANDED:
                    seen.add(key)
                    handed += 1
                    yield self._assignment(ways[replica], hosts[replica])
            room = self._room_for(wanted_s())
            if room != self._room:
                self._room = room
                energy = self._energy(ways, hosts)

    def _room_for(self, cost_s: float) -> float:
        return float((cost_s - self.problem.base_s) / self._unit[0])

    def _blocks(self, ways: Ints, hosts: Ints) -> bytes:
        return np.where(self._hosts_of[np.arange(len(ways)), ways] > 0, hosts, -1).tobytes()

    def _changed(self, ways: Ints, hosts: Ints, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Some tables get another option, others another host, or the host of another table."""
        ways, hosts = ways.copy(), hosts.copy()
        for chance in _CHANCES:
            kind = rng.random(_REPLICAS) / chance
            for low, high, tables in (
                (0.0, 0.4, self._several),
                (0.4, 0.7, self._movable),
                (0.7, 1.0, self._movable),
            ):
                at = np.flatnonzero((kind >= low) & (kind < high)) if len(tables) else ()
                if not len(at):
                    continue
                table = tables[rng.integers(0, len(tables), len(at))]
                if low == 0.0:
                    num = self._num_ways[table]
                    ways[at, table] = (ways[at, table] + rng.integers(1, num)) % num
                if high < 1.0:
                    hosts[at, table] = rng.integers(0, self.problem.num_hosts, len(at))
                else:
                    other = tables[rng.integers(0, len(tables), len(at))]
                    hosts[at, table], hosts[at, other] = hosts[at, other], hosts[at, table]
        return ways, hosts

    def _rooms(self, ways: Ints, hosts: Ints, kind: int) -> Rooms:
        """What each rank has left beside blocks and replicated tables."""
        num_hosts = self.problem.num_hosts
        tables, replicas = np.arange(ways.shape[1]), np.arange(len(ways))[:, None]
        left = (1.0 if kind else self._room) - self._everywhere[tables, ways, kind].sum(1)
        loads, hosts_of = self._block[tables, ways, kind], self._hosts_of[tables, ways]
        used = np.zeros(len(ways) * num_hosts)
        for step in range(int(hosts_of.max(initial=0))):
            at = (hosts + step) % num_hosts + replicas * num_hosts
            used += np.bincount(at.ravel(), (loads * (hosts_of > step)).ravel(), len(used))
        each = (left[:, None] - used.reshape(len(ways), num_hosts)).astype(np.float32)
        return np.repeat(each, self.problem.ranks_per_host, 1)

    def _energy(self, ways: Ints, hosts: Ints, places: list[Ints] | None = None) -> Array:
        """By how much the ranks are exceeded; `places` gets the rank of each piece."""
        replicas, num = np.arange(len(ways)), self.problem.num_ranks
        rooms = [self._rooms(ways, hosts, kind) for kind in self._kinds]
        chosen = (ways[:, self._table] == self._way).T
        loads = [chosen * self._load[:, kind, None] for kind in self._kinds]
        taken = np.zeros((self._num_apart, len(ways), num), bool)
        after = np.empty_like(rooms[0])
        # As bits, numbers below zero are larger than others, and the larger the further below.
        bits = after.view(np.uint32)
        for piece, apart in enumerate(self._apart):
            np.subtract(rooms[0], loads[0][piece][:, None], out=after)
            for memory, load in zip(rooms[1:], loads[1:], strict=True):
                after[memory < load[piece][:, None]] -= _FAR
            if apart is not None:
                after[taken[apart]] -= 2 * _FAR
            at = bits.argmin(1)
            if apart is not None:
                taken[apart, replicas, at] = True
            if places is not None:
                places.append(at)
            for left, load in zip(rooms, loads, strict=True):
                left[replicas, at] -= load[piece]
        over = [-np.minimum(left, 0.0).sum(1, dtype=float) for left in rooms]
        return over[0] + _PENALTY * sum(over[1:], np.zeros(len(ways)))

    def _assignment(self, ways: Ints, hosts: Ints) -> Assignment:
        problem = self.problem
        places: list[Ints] = []
        self._energy(ways[None], hosts[None], places)
        chosen = [each[way] for each, way in zip(self._ways, ways.tolist(), strict=True)]
        ranks = [
            np.zeros(problem.options[table][choice].num_shards, np.int64)
            for table, choice in enumerate(chosen)
        ]
        for piece, place in enumerate(places):
            table = self._table[piece]
            if ways[table] == self._way[piece]:
                ranks[table][self._number[piece]] = place[0]
        for table, num in enumerate(self._hosts_of[np.arange(len(ways)), ways].tolist()):
            if num:
                on = (hosts[table] + np.arange(num)) % problem.num_hosts
                ranks[table] = problem.ranks_of(on)
        return Assignment(problem, chosen, ranks)


def _is_free(problem: Problem, option: Option) -> bool:
    """Whether the option's shards are blocks, or may each be on any rank."""
    apart = option.distinct and option.num_shards > problem.num_ranks
    return option.shards is None or (not apart and (option.scope != HOST or option.num_shards == 1))
