"""A lower bound on the cost of every plan, without a solver.

Note [Bound]
The mean over ranks of a plan's seconds and bytes does not depend on which rank holds what. So no
plan is cheaper than the least mean of seconds among choices of options whose mean of bytes fits;
and a plan of cost T uses no option that puts more than T on one rank. `_mean(T)` is the Lagrangian
dual of that choice (any prices of bytes give a valid bound), and the bound is the smallest T that
is at least `_mean(T)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.planner.problem import Array, Ints, Mask, Problem


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """A lower bound in seconds, with its proof."""

    seconds: float
    #: Seconds per byte of each kind of memory.
    prices: Array
    #: Which options a plan of that cost may use; per table the cheapest at these prices.
    allowed: Mask
    chosen: Ints
    #: What limits: the "mean" of all ranks, or one "table".
    why: str
    table: int = -1


class Bounds:
    """The bounds of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.flat = problem, problem.flat
        flat = self.flat
        self._first = flat.first[:-1]
        #: Options whose largest load fits on a rank.
        self.possible: Mask = np.asarray((flat.peak[:, 1:] <= problem.capacity).all(1))
        #: Ranks that share cores take as long as all of them one after another.
        self._slow = 1.0 if problem.at_once is None else problem.num_ranks / problem.at_once
        self._memo: dict[bytes, tuple[float, Array, Ints]] = {}

    def tables_without_option(self, allowed: Mask) -> Ints:
        count = np.add.reduceat(allowed.astype(np.int64), self._first)
        return np.flatnonzero(count == 0)

    def best(self) -> Bound | None:
        """The bound; None if a table fits on no rank, or all tables do not fit on all ranks."""
        flat, base = self.flat, self.problem.base_s
        if len(self.tables_without_option(self.possible)):
            return None
        peaks = np.where(self.possible, flat.peak[:, 0], np.inf)
        # Per table, the least that its options put on one rank: no plan is below the largest.
        least = np.minimum.reduceat(peaks, self._first)
        low = float(least.max())
        worst = int(least.argmax())
        levels = np.unique(peaks[np.isfinite(peaks) & (peaks >= low)])
        start, stop = 0, len(levels) - 1
        if not np.isfinite(self._mean(levels[stop])[0]):
            return None
        # mean(T) falls and T rises: the first level at which T reaches the mean.
        while start < stop:
            middle = (start + stop) // 2
            if self._mean(levels[middle])[0] <= levels[middle]:
                stop = middle
            else:
                start = middle + 1
        level = float(levels[start])
        seconds, prices, chosen = self._mean(level)
        why, table = "mean", -1
        if seconds <= level:
            # Below this level fewer options are allowed: their mean, or the level itself.
            below = self._mean(float(levels[start - 1]))[0] if start else np.inf
            if min(level, below) > seconds:
                seconds = min(level, below)
                why = "mean" if below < level else "table"
                tight = np.flatnonzero((flat.peak[:, 0] == level) & self.possible)
                table = (
                    worst if level == low else int(flat.table[tight[0]]) if why == "table" else -1
                )
        allowed = self._allowed(max(level, seconds))
        total = seconds + base
        if self._slow > 1.0:
            free = self._mean(np.inf)[0]
            total = max(total, (free + base) * self._slow)
        return Bound(float(total), prices, allowed, chosen, why, table)

    def _allowed(self, level: float) -> Mask:
        return self.possible & (self.flat.peak[:, 0] <= level)

    def _mean(self, level: float) -> tuple[float, Array, Ints]:
        allowed = self._allowed(level)
        if len(self.tables_without_option(allowed)):
            return np.inf, np.zeros(len(self.problem.capacity)), np.zeros(0, np.int64)
        key = np.packbits(allowed).tobytes()
        if key not in self._memo:
            self._memo[key] = self.dual(allowed)
        return self._memo[key]

    def dual(self, allowed: Mask) -> tuple[float, Array, Ints]:
        """The least mean of seconds of choices that fit on average; infinite where none does."""
        mean, capacity = self.flat.mean, self.problem.capacity
        prices = np.zeros(len(capacity))
        seconds = np.where(allowed, mean[:, 0], np.inf)
        if len(self.tables_without_option(allowed)):
            return np.inf, prices, np.zeros(0, np.int64)
        for kind in range(len(capacity)):
            bytes_of = np.where(allowed, mean[:, 1 + kind], np.inf)
            if np.minimum.reduceat(bytes_of, self._first).sum() > capacity[kind] * (1 + 1e-12):
                return np.inf, prices, np.zeros(0, np.int64)
        value, chosen = self._at(seconds, prices)
        for _ in range(3 if len(capacity) > 1 else 1):
            used = mean[chosen, 1:].sum(0)
            over = np.flatnonzero(used > capacity * (1 + 1e-12))
            if not len(over):
                break
            for kind in over.tolist():
                prices = self._raised(seconds, prices, kind)
            value, chosen = self._at(seconds, prices)
        return value, prices, chosen

    def _at(self, seconds: Array, prices: Array) -> tuple[float, Ints]:
        priced = seconds if not prices.any() else seconds + self.flat.mean[:, 1:] @ prices
        least = np.minimum.reduceat(priced, self._first)
        chosen = _argmin(priced, least, self.flat.table)
        return float(least.sum() - prices @ self.problem.capacity), chosen

    def _raised(self, seconds: Array, prices: Array, kind: int) -> Array:
        """The price of one kind of memory at which the chosen options just fit."""
        mean, capacity = self.flat.mean, self.problem.capacity
        low, high = prices[kind], max(prices[kind], 1e-15)
        trial = prices.copy()

        def used(price: float) -> float:
            trial[kind] = price
            _, chosen = self._at(seconds, trial)
            return float(mean[chosen, 1 + kind].sum())

        while used(high) > capacity[kind] and high < 1e6:
            low, high = high, high * 8
        for _ in range(40):
            if high - low <= 1e-4 * high:
                break
            middle = (low + high) / 2
            if used(middle) > capacity[kind]:
                low = middle
            else:
                high = middle
        # The dual has its peak between the two.
        found, best = prices.copy(), -np.inf
        for price in (low, high):
            trial[kind] = price
            value, _ = self._at(seconds, trial)
            if value > best:
                found, best = trial.copy(), value
        # Choices at the upper price fit.
        found[kind] = high
        return found

    def useful(self, cost: float) -> Mask:
        """The options that a plan cheaper than `cost` may use, by their reduced costs."""
        level = cost - self.problem.base_s
        allowed = self._allowed(level)
        value, prices, _ = self._mean(level)
        if not np.isfinite(value) or self._slow > 1.0:
            return allowed
        priced = self.flat.mean[:, 0] + self.flat.mean[:, 1:] @ prices
        priced = np.where(allowed, priced, np.inf)
        least = np.minimum.reduceat(priced, self._first)
        more = priced - least[self.flat.table]
        return allowed & (value + more < level)


def _argmin(values: Array, least: Array, table: Ints) -> Ints:
    """Per table the first option with the least value."""
    hits = np.flatnonzero(values <= least[table])
    owners = table[hits]
    return hits[np.concatenate([[True], owners[1:] != owners[:-1]])]
