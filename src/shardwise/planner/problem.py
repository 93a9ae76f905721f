"""The optimization problem of the planner: options, loads and capacities, without tables or meshes.

Note [Loads]
A load is a vector: seconds first, then bytes of each kind of memory. An option of a table loads
every rank equally (`everywhere`), puts shards on some ranks (`shards`), or both. The cost of a plan
is the seconds of the most loaded rank; the bytes of no rank may exceed the capacity.

Ranks are interchangeable, so only the loads of shards count, never which rank holds them. So are
hosts, for options that need the ranks of one host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.errors import ArgumentError

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

#: Where shards may be: on any ranks; on ranks of one host; one on each rank of some hosts.
ANY, HOST, BLOCK = "any", "host", "block"


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """One way to shard a table."""

    label: str
    #: The load on every rank; one row per rank where they differ.
    everywhere: Array | None = None
    #: One row per shard.
    shards: Array | None = None
    scope: str = ANY
    #: Whether each shard needs a rank of its own.
    distinct: bool = True
    #: What the option stands for; the solver does not read it.
    what: Any = None

    @property
    def num_shards(self) -> int:
        return 0 if self.shards is None else len(self.shards)


@dataclass(frozen=True, eq=False)
class Problem:
    """Options per table, and the ranks that they are for."""

    names: Sequence[str]
    options: Sequence[Sequence[Option]]
    num_ranks: int
    #: Bytes of each kind of memory that one rank has.
    capacity: Array
    ranks_per_host: int
    #: Seconds that every plan takes on every rank.
    base_s: float = 0.0
    #: How many ranks can compute at the same time, if they share cores.
    at_once: float | None = None
    #: The options in arrays, if they are known already.
    given_flat: FlatOptions | None = None

    def __post_init__(self) -> None:
        if self.num_ranks % self.ranks_per_host:
            raise ArgumentError(
                f"{self.num_ranks} ranks cannot be shared by hosts of {self.ranks_per_host}."
            )
        empty = [n for n, each in zip(self.names, self.options, strict=True) if not each]
        if empty:
            raise ArgumentError(f"There is no option left for {', '.join(empty[:5])}.")

    @property
    def num_hosts(self) -> int:
        return self.num_ranks // self.ranks_per_host

    @cached_property
    def flat(self) -> FlatOptions:
        return FlatOptions.of(self) if self.given_flat is None else self.given_flat


@dataclass(frozen=True, eq=False)
class FlatOptions:
    """All options of all tables in arrays, grouped by table."""

    #: The first option of each table, then the number of options.
    first: Ints
    table: Ints
    #: Mean load on a rank, and the largest on one rank.
    mean: Array
    peak: Array

    @staticmethod
    def of(problem: Problem) -> FlatOptions:
        counts = [len(each) for each in problem.options]
        first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        table = np.repeat(np.arange(len(counts)), counts)
        width = 1 + len(problem.capacity)
        mean, peak = np.zeros((first[-1], width)), np.zeros((first[-1], width))
        at = 0
        for each in problem.options:
            for option in each:
                if option.everywhere is not None:
                    rows = option.everywhere.reshape(-1, width)
                    mean[at] += rows[0] if len(rows) == 1 else rows.mean(0)
                    peak[at] += rows[0] if len(rows) == 1 else rows.max(0)
                if option.shards is not None:
                    mean[at] += option.shards.sum(0) / problem.num_ranks
                    peak[at] += option.shards.max(0)
                at += 1
        return FlatOptions(first, table, mean, peak)


@dataclass(slots=True, eq=False)
class Assignment:
    """The option of each table, and the ranks of its shards."""

    problem: Problem
    chosen: list[int]
    ranks: list[Ints]

    def copy(self) -> Assignment:
        return Assignment(self.problem, list(self.chosen), list(self.ranks))

    def option(self, table: int) -> Option:
        return self.problem.options[table][self.chosen[table]]

    def loads(self) -> Array:
        """One row per rank, without `base_s`."""
        problem = self.problem
        found = np.zeros((problem.num_ranks, 1 + len(problem.capacity)))
        for table, ranks in enumerate(self.ranks):
            option = self.option(table)
            if option.everywhere is not None:
                found += option.everywhere
            if option.shards is not None:
                np.add.at(found, ranks, option.shards)
        return found

    def cost(self) -> float:
        return cost_of(self.problem, self.loads())

    def fits(self) -> bool:
        loads = self.loads()
        return bool((loads[:, 1:] <= self.problem.capacity * (1 + 1e-9)).all())


def cost_of(problem: Problem, loads: Array) -> float:
    """Seconds of a step: of the slowest rank, or of all if they share too few cores."""
    seconds = float(loads[:, 0].max()) + problem.base_s
    if problem.at_once is not None:
        total = float(loads[:, 0].sum()) + problem.base_s * problem.num_ranks
        seconds = max(seconds, total / problem.at_once)
    return float(seconds)


def simplified(option: Option, ranks_per_host: int, num_hosts: int) -> Option:
    """The same option without constraints that change nothing."""
    if option.shards is None:
        return option
    if option.scope == HOST and (len(option.shards) == 1 or num_hosts == 1):
        return replace(option, scope=ANY)
    if option.scope == BLOCK and len(option.shards) == ranks_per_host * num_hosts:
        everywhere = 0.0 if option.everywhere is None else option.everywhere
        rows = option.shards + everywhere
        if (option.shards == option.shards[0]).all() and rows.ndim == 2:
            rows = rows[0] if (rows == rows[0]).all() else rows
        return replace(option, everywhere=rows, shards=None)
    return option


def undominated(options: Sequence[Option]) -> list[int]:
    """The options that no other one with the same number of shards dominates."""
    kept: list[int] = []
    for number, option in enumerate(options):
        others = [i for i in kept if _is_as_good(options[i], option)]
        if others:
            continue
        kept = [i for i in kept if not _is_as_good(option, options[i])]
        kept.append(number)
    return kept


def _is_as_good(one: Option, other: Option) -> bool:
    if one.num_shards != other.num_shards or (one.everywhere is None) != (other.everywhere is None):
        return False
    if one.shards is not None and other.shards is not None:
        free = one.scope == other.scope or (one.scope == ANY and other.scope == HOST)
        if not free or (one.distinct and not other.distinct and one.num_shards > 1):
            return False
        if not (one.shards <= other.shards).all():
            return False
    if one.everywhere is not None and other.everywhere is not None:
        return bool((one.everywhere <= other.everywhere).all())
    return True
