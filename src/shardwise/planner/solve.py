"""Solve a problem: a first plan quickly, better ones over time, and a bound on the best.

Note [Same answer everywhere]
Work is limited in steps, not in seconds. So the answer depends only on the problem, unless the
limit of seconds ends the search.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardwise.errors import LayoutError
from shardwise.planner.exact import ExactProblem, find_highs
from shardwise.planner.layouts import laid_out
from shardwise.planner.levels import Levels
from shardwise.planner.local_search import Filler, Search
from shardwise.planner.packing import Packing, packed
from shardwise.planner.problem import Array, Assignment, Bound, Bounds, Problem, TooMany
from shardwise.planner.replicas import Replicas

#: The most columns of the exact program, which proves less with several hosts.
_MOST_COLUMNS, _MOST_ON_HOSTS = 30_000, 1_100
#: The most kicks of the local search, and per table; the most tables times ranks.
_KICKS, _TABLE_KICKS = 2_000, 50
_KICK_TABLES = 20_000
#: Within one host, and for few tables times ranks, the solver is quick: it is asked after so many
#: packings. Otherwise all packings come first.
_FIRST, _QUICK_PAIRS = 4, 500
#: How many plans are kicked in turn, and how often without success.
_POOL, _FAILED = 4, 30
#: Partial fillings that are kept; costs that are tried, from near the best to the wanted one.
_WIDTH, _SHARES = 300, (0.8, 0.5, 0.0)
#: The gap of a program of levels; by how much the next bound that is tried is higher.
_LEVELS_GAP, _STEP = 0.0005, 0.0099
#: The most rounds of replicas: in all, per table, and times pieces times ranks; the fewest.
_EXCHANGES, _TABLE_EXCHANGES, _EXCHANGED, _LEAST_EXCHANGES = 10_000, 200, 40_000_000, 1_000


class NoPlanFits(LayoutError):
    """No plan keeps every rank within its memory."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of the search."""

    seconds: float
    cost_s: float
    bound_s: float
    by: str

    @property
    def gap(self) -> float:
        return gap_of(self.cost_s, self.bound_s)


@dataclass(slots=True, eq=False)
class Solution:
    """The best plan found, and the proof."""

    assignment: Assignment
    cost_s: float
    bound: Bound
    #: The best bound: that of `bound`, or one that the solver proved.
    bound_s: float
    history: list[Progress] = field(default_factory=list)
    cpu_s: float = 0.0
    timed_out: bool = False
    solver: str = "own search"

    @property
    def gap(self) -> float:
        return gap_of(self.cost_s, self.bound_s)


def gap_of(cost_s: float, bound_s: float) -> float:
    """By how much a cost may exceed the best one, relative to the bound.

    >>> round(gap_of(1.02, 1.0), 3)
    0.02
    """
    return max(0.0, cost_s / bound_s - 1) if bound_s > 0 else 0.0


class _Run:
    """One search: the best plan so far, the clock, and the progress callback."""

    def __init__(
        self,
        problem: Problem,
        gap: float,
        seconds: float | None,
        tell: Callable[[Progress], None] | None,
    ) -> None:
        self.problem, self.gap, self.seconds, self.tell = problem, gap, seconds, tell
        self.start = time.process_time()
        self.bounds, self.filler = Bounds(problem), Filler(problem)
        self.best: Assignment | None = None
        self.cost = math.inf
        self.bound_s = 0.0
        self.history: list[Progress] = []
        self.timed_out = False
        #: HiGHS, where it may be asked; and whether it was.
        self.highs: Any = None
        self.asked_highs = False

    def elapsed(self) -> float:
        return time.process_time() - self.start

    def may_ask(self) -> bool:
        """Whether HiGHS is there to be asked, with the gap still open and time left."""
        return self.highs is not None and not self.closed and not self.late()

    def left_s(self) -> float:
        """The seconds that HiGHS may take."""
        return 20.0 if self.seconds is None else max(0.05, self.seconds - self.elapsed())

    def useful(self, cost_s: float) -> list[list[int]]:
        """Per table, the options that a plan within this cost may use."""
        return allowed_lists(self.problem, self.bounds.useful(cost_s))

    def late(self) -> bool:
        """Whether time is up and there is an answer."""
        if self.seconds is None or self.elapsed() < self.seconds:
            return False
        self.timed_out = True
        return self.best is not None

    def offer(self, found: Assignment, by: str) -> bool:
        if not found.fits():
            return False
        cost = found.cost()
        if cost >= self.cost * (1 - 1e-12):
            return False
        self.best, self.cost = found, cost
        self.note(by)
        return True

    def note(self, by: str) -> None:
        progress = Progress(self.elapsed(), self.cost, self.bound_s, by)
        self.history.append(progress)
        if self.tell is not None:
            self.tell(progress)

    @property
    def wanted_s(self) -> float:
        """The cost that closes the gap."""
        return self.bound_s * (1 + self.gap)

    @property
    def closed(self) -> bool:
        return self.cost <= self.wanted_s


def solve(
    problem: Problem,
    *,
    gap: float = 0.001,
    seconds: float | None = 60.0,
    starts: Iterable[Assignment] = (),
    exact: bool = True,
    tell: Callable[[Progress], None] | None = None,
) -> Solution:
    """The best plan found when the gap is reached, no step helps, or time is up."""
    run = _Run(problem, gap, seconds, tell)
    bound = run.bounds.best()
    if bound is None:
        raise NoPlanFits("No plan keeps every rank within its memory.")
    run.bound_s = bound.seconds
    for given in starts:
        run.offer(given, "given")
    quick = problem.num_hosts == 1 or len(problem.options) * problem.num_ranks <= _QUICK_PAIRS
    more = _first_packings(run, bound)
    packings = list(itertools.islice(more, _FIRST if quick else None))
    if run.best is None:
        raise NoPlanFits(
            "On average the tables fit, but no plan was found that keeps every rank within its "
            "memory."
        )
    for packing in sorted(packings, key=lambda each: each.highest)[:_POOL]:
        _refill(run, packing.assignment())
    if exact and not run.closed:
        run.highs = find_highs()
    _levels(run)
    for by_host in (True, False):
        _exact(run, packings, by_host)
        if by_host and problem.num_hosts > 1 and not run.closed:
            _kick(run, packings, rounds=_KICKS // 10)
            _lay_out(run)
            _exchange(run)
    packings += more
    if not run.closed:
        _kick(run, packings, rounds=_KICKS, first_seed=_KICKS)
    run.note("done")
    solver = "HiGHS and own search" if run.asked_highs else "own search"
    return Solution(
        run.best, run.cost, bound, run.bound_s, run.history, run.elapsed(), run.timed_out, solver
    )


def allowed_lists(problem: Problem, mask: np.ndarray) -> list[list[int]]:
    first = problem.flat.first
    return [
        np.flatnonzero(mask[first[t] : first[t + 1]]).tolist() for t in range(len(problem.names))
    ]


def _first_packings(run: _Run, bound: Bound) -> Iterator[Packing]:
    """Largest shards first, with the options that bounds at several levels choose."""
    problem, base = run.problem, run.problem.base_s
    first = problem.flat.first[:-1]
    level = max(bound.seconds - base, 1e-30)
    tried: set[tuple[int, ...]] = set()
    allowed = allowed_lists(problem, run.bounds.possible)
    # Levels above the bound allow more options; below it, shards are smaller and pack better.
    for factor in (1.0, 1.03, 0.6, 0.35, 1.1, 1.3, 1.6, np.inf):
        _, _, chosen = run.bounds.mean(level * factor)
        if not len(chosen):
            continue
        choices = tuple((chosen - first).tolist())
        if choices in tried:
            continue
        tried.add(choices)
        for memory_first, balance in ((False, False), (True, True), (True, False)):
            if run.late() or run.closed:
                return
            packing = packed(problem, choices, level, memory_first=memory_first, balance=balance)
            if packing is None:
                continue
            # A first answer at once, which then improves.
            run.offer(packing.assignment(), "largest first")
            search = Search(packing, allowed)
            search.run((level + base) * (1 + run.gap) - base, run.late, max_steps=_steps(problem))
            run.offer(packing.assignment(), "moves and swaps")
            yield packing
        if factor > 1.1 and run.best is not None:
            break


def _steps(problem: Problem) -> int:
    return 400 + 20 * problem.num_ranks


def _kick(run: _Run, packings: Sequence[Packing], rounds: int, first_seed: int = 0) -> None:
    """Kick the best plans in turn, each followed by local search."""
    problem = run.problem
    if not packings or problem.num_ranks * len(problem.names) > _KICK_TABLES:
        return
    assert run.best is not None, "there is an answer"
    target = run.wanted_s - problem.base_s
    # Several plans in turn: the best one may be a local optimum.
    others = sorted(packings, key=lambda packing: packing.highest)
    pool = [Packing.of(run.best, run.cost), *others[: _POOL - 1]]
    failed, cost = [0] * len(pool), np.inf
    allowed: list[list[int]] = []
    for number in range(min(rounds, _TABLE_KICKS * len(problem.names))):
        if run.late() or run.closed:
            return
        place = number % len(pool)
        if failed[place] > _FAILED:
            # This one is stuck: restart from the best plan.
            pool[place], failed[place] = Packing.of(run.best, run.cost), 0
        current = pool[place]
        if run.cost < cost:
            cost = run.cost
            allowed = run.useful(cost)
        trial = current.copy()
        search = Search(trial, allowed, rng_seed=first_seed + number)
        search.kick(2 + number // len(pool) % 4)
        search.run(target, run.late, max_steps=60)
        failed[place] += 1
        if trial.highest <= current.highest * (1 + 1e-12):
            if trial.highest < current.highest * (1 - 1e-9):
                failed[place] = 0
            pool[place] = trial
            run.offer(trial.assignment(), "kicks")
            if failed[place] == 0:
                _refill(run, trial.assignment())


def _refill(run: _Run, plan: Assignment) -> None:
    """Repack the pieces of a plan, within costs between the best and the wanted one."""
    wanted = run.wanted_s
    for share in _SHARES:
        if run.late() or run.closed:
            return
        cost = wanted + share * (run.cost - wanted)
        found = run.filler.refilled(plan, cost, _WIDTH)
        if found is None:
            return
        run.offer(found, "filling")


def _exchange(run: _Run) -> None:
    """Change the options and hosts of many plans at once, and repack the best."""
    wanted = run.wanted_s
    allowed = run.useful(run.cost)
    replicas = Replicas(run.problem, allowed, wanted)
    if not replicas.possible or run.closed:
        return
    rounds = _EXCHANGED // (replicas.num_pieces * run.problem.num_ranks)
    if rounds < _LEAST_EXCHANGES:
        return
    rounds = min(rounds, _EXCHANGES, _TABLE_EXCHANGES * len(allowed))
    for plan in replicas.plans(lambda: (run.cost + wanted) / 2, rounds):
        if run.late() or run.closed:
            return
        run.offer(plan, "replicas")
        _refill(run, plan)


def _levels(run: _Run) -> None:
    """Ask for plans within the gap of the bound; if there are none, that is the next bound."""
    while run.may_ask():
        wanted = min(run.bound_s * (1 + max(run.gap, _STEP)), run.cost / (1 + run.gap))
        allowed = run.useful(wanted)
        if not all(allowed):
            run.bound_s = wanted
            continue
        try:
            levels = Levels(run.problem, allowed, run.bound_s, wanted)
        except TooMany:
            return

        def better(values: Array, levels: Levels = levels) -> None:
            plan = levels.plan(values, run.wanted_s, run.cost)
            if plan is not None and run.offer(plan, "levels"):
                _refill(run, plan)

        def enough(bound: float, levels: Levels = levels, wanted: float = wanted) -> bool:
            run.bound_s = max(run.bound_s, min(levels.seconds(bound), wanted))
            return run.closed

        bound_s, run.asked_highs = run.bound_s, True
        solved = levels.program.solve(
            run.highs, seconds=run.left_s(), gap=_LEVELS_GAP, better=better, enough=enough
        )
        run.bound_s = max(run.bound_s, min(levels.seconds(solved.bound), wanted))
        run.note("levels")
        if run.bound_s < min(wanted, bound_s * (1 + _STEP / 2)):
            return


def _lay_out(run: _Run) -> None:
    """Ask for layouts of cheaper plans; if there are none, that is the next bound."""
    while run.may_ask():
        # No plan below the first closes the gap, and so does any plan within the second.
        proof, near = run.cost / (1 + run.gap), run.bound_s * (1 + max(run.gap, _STEP))
        for wanted in sorted({min(proof, near), near}):
            try:
                found = laid_out(run.bounds, wanted, run.highs, run.late, or_proof=wanted < near)
            except TooMany:
                continue
            run.asked_highs = True
            if found is None:
                run.bound_s = max(run.bound_s, wanted)
                run.note("layouts")
            elif not run.offer(found, "layouts"):
                return
            break
        else:
            return


def _exact(run: _Run, packings: list[Packing], by_host: bool) -> None:
    """Ask for a plan that is cheaper by more than the gap; if there is none, that is the proof."""
    if not run.may_ask():
        return
    problem = run.problem
    wanted = run.cost / (1 + run.gap)
    allowed = run.useful(wanted)
    places = problem.num_hosts if by_host else problem.num_ranks
    # Ranks are used in order, so the tables cannot use more of them than they have shards.
    most = [
        max((problem.options[t][c].num_shards for c in each), default=0)
        for t, each in enumerate(allowed)
    ]
    places = min(places, sum(most))
    size = sum(
        places if problem.options[t][c].shards is not None else 1
        for t, choices in enumerate(allowed)
        for c in choices
    )
    if size > (_MOST_ON_HOSTS if problem.num_hosts > 1 and not by_host else _MOST_COLUMNS):
        return
    run.asked_highs = True
    if not all(allowed):
        run.bound_s = max(run.bound_s, wanted)
        return
    several = problem.num_hosts > 1
    left = run.left_s() * (0.95 if not several else 0.3 if by_host else 0.9)
    model = ExactProblem(problem, allowed, run.bound_s, wanted, by_host=by_host)
    answer = model.solve(run.highs, seconds=left, gap=run.gap)
    if answer.bound_s > run.bound_s:
        run.bound_s = min(answer.bound_s, wanted)
        run.note("HiGHS")
    if answer.found is not None and not by_host:
        run.offer(answer.found, "HiGHS")
    elif answer.found is not None:
        packing = Packing(problem, run.cost)
        if packing.fill_hosts(answer.found.chosen, answer.found.ranks):
            target = run.wanted_s - problem.base_s
            Search(packing, allowed).run(target, run.late, max_steps=_steps(problem))
            run.offer(packing.assignment(), "HiGHS and moves")
            packings.append(packing)
            if several:
                _kick(run, packings, rounds=_KICKS // 10, first_seed=3 * _KICKS)
