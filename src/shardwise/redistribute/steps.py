"""Step: a change of one axis's placement; the cheapest sequence of steps between two layouts."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.comm.collectives import LATENCY_S, collective_s, exchange_s, local_s
from shardwise.core.layout import Layout, canonical_order, misfit, partials_commute
from shardwise.core.placements import NormPartial, Partial, Placement, Replicate, Shard, plain
from shardwise.core.sizes import Size, chunk_length, lengths, overlaps
from shardwise.core.world import world_caches
from shardwise.errors import LayoutError

#: (placement before, after) -> the kind of step. Other sizes of the same dim: a resplit.
_KINDS: dict[tuple[type, type], str] = {
    (Shard, Replicate): "all_gather",
    (Shard, Shard): "all_to_all",
    (Partial, Replicate): "all_reduce",
    (Partial, Shard): "reduce_scatter",
    (Replicate, Shard): "slice",
    (Replicate, Partial): "to_partial",
}

#: Kinds without communication.
LOCAL_KINDS = frozenset({"slice", "to_partial"})


@dataclass(frozen=True, slots=True)
class Step:
    """One axis changes its placement: `source` before, `target` after."""

    kind: str
    axis: int
    source: Layout
    target: Layout

    @property
    def communicates(self) -> bool:
        return self.kind not in LOCAL_KINDS

    def __str__(self) -> str:
        before, after = self.source.placements[self.axis], self.target.placements[self.axis]
        return (
            f"{self.kind} over axis {self.source.grid.axis_name(self.axis)!r}: {before} -> {after}"
        )


def step_kind(before: Placement, after: Placement) -> str | None:
    """The kind of step between two placements of one axis; None when it takes several."""
    if isinstance(before, Shard) and isinstance(after, Shard) and before.dim == after.dim:
        return "resplit" if before.sizes != after.sizes else None
    if isinstance(before, NormPartial) and isinstance(after, Shard):
        return None  # reduced first: terms are powers only inside the all-reduce
    before_type = Partial if isinstance(before, Partial) else type(before)
    after_type = Partial if isinstance(after, Partial) else type(after)
    return _KINDS.get((before_type, after_type))


def resplit_cost_s(size: int, parts: int, before: Shard, after: Shard, whole_bytes: float) -> float:
    """The cost of the rank that sends or receives most; what a rank keeps costs nothing.

    `whole_bytes` is the size of all shards together.
    """
    splits = lengths(size, parts, before.sizes), lengths(size, parts, after.sizes)
    kept = [row[place] for place, row in enumerate(overlaps(*splits))]
    moved = max(max(a, b) - k for a, b, k in zip(*splits, kept, strict=True))
    return exchange_s(whole_bytes * moved / max(size, 1))


def local_bytes(layout: Layout, placements: Sequence[Placement] | None = None) -> float:
    """The bytes of an average shard, in these placements; a symbolic size counts as 1024."""
    placed = zip(placements or layout.placements, layout.grid.shape, strict=True)
    num_entries = math.prod(size if type(size) is int else 1024 for size in layout.shape)
    num_shards = math.prod(n for p, n in placed if isinstance(p, Shard))
    return layout.dtype.itemsize * num_entries / num_shards


def longest(layout: Layout, axis: int) -> Size:
    """The length of the longest shard along `axis`."""
    shard: Any = layout.placements[axis]
    size = layout.shape[shard.dim]
    for other in layout.axes_of(shard.dim):
        outer: Any = layout.placements[other]
        size = max(outer.sizes) if outer.sizes else chunk_length(size, layout.grid.shape[other])
        if other == axis:
            break
    return size


# A state is one placement per axis and the order of axes. Only the innermost axis of a dim may
# stop sharding it, and an axis that starts sharding a dim becomes its innermost. Moves are tried in
# a fixed order and the first of equal paths wins, so every rank finds the same path.


#: The least cost of a step without communication.
_LOCAL_S = local_s(0)

State = tuple[tuple[Placement, ...], tuple[int, ...]]


def find_steps(source: Layout, target: Layout) -> tuple[Step, ...]:
    """The steps from `source` to `target`, two layouts of one tensor on one mesh."""
    if source is target:
        return ()
    symbolic = source.symbolic or target.symbolic
    return _search(source, target) if symbolic else _cached_search(source, target)


def cost_s(source: Layout, target: Layout) -> float:
    """The expected seconds of `find_steps(source, target)`."""
    cost = _move_costs(source)
    return sum(
        cost(step.kind, step.axis, step.source.placements, step.target.placements)
        for step in find_steps(source, target)
    )


def _search(source: Layout, target: Layout) -> tuple[Step, ...]:
    if source.grid is not target.grid or len(source.shape) != len(target.shape):
        raise LayoutError(f"{source!r} cannot become {target!r}: another mesh, or another tensor.")
    start, goal = _state(source), _state(target)
    candidates, cost_of = _candidates(start, goal), _move_costs(source)
    best: dict[State, float] = {start: 0.0}
    came: dict[State, tuple[State, int, str]] = {}
    # Sorted by the least cost of a path through a state; ties go to what was found first.
    numbers = itertools.count()
    queue = [(least_s(start[0], goal[0]), next(numbers), 0.0, start)]
    while queue:
        _, _, spent, state = heapq.heappop(queue)
        if state == goal:
            return _path(source, target, came, start, goal)
        if spent > best[state]:
            continue
        for axis, kind, after in _moves(state, candidates, source):
            if kind == "resplit" and source.symbolic:
                continue  # the sizes of its messages would be compiled in, rank by rank
            cost = spent + cost_of(kind, axis, state[0], after[0])
            if cost < best.get(after, float("inf")) - 1e-15:
                best[after] = cost
                came[after] = (state, axis, kind)
                left = least_s(after[0], goal[0])
                heapq.heappush(queue, (cost + left, next(numbers), cost, after))
    raise LayoutError(f"No sequence of steps leads from {source!r} to {target!r}.")


_cached_search = functools.lru_cache(maxsize=16384)(_search)
world_caches.append(_cached_search.cache_clear)


def least_s(before: Sequence[Placement], after: Sequence[Placement]) -> float:
    """A lower bound on the cost between two placements: one step for each axis that changes.

    >>> least_s((Shard(0), Replicate()), (Replicate(), Replicate())) >= LATENCY_S
    True
    """
    least = 0.0
    for one, other in zip(before, after, strict=True):
        if one is not other and one != other:
            least += _LOCAL_S if type(one) is Replicate else LATENCY_S
    return least


def _state(layout: Layout) -> State:
    placements = tuple(map(plain, layout.placements))
    return placements, canonical_order(placements, layout.order)


def _candidates(start: State, goal: State) -> list[list[Placement]]:
    """Per axis, the placements that a path may pass through, the target first."""
    shards = [Shard(p.dim) for p in goal[0] if isinstance(p, Shard)]
    return [
        list(dict.fromkeys([after, before, Replicate(), *shards]))
        for before, after in zip(start[0], goal[0], strict=True)
    ]


def _moves(
    state: State, candidates: list[list[Placement]], layout: Layout
) -> Iterator[tuple[int, str, State]]:
    placements, order = state
    for axis, before in enumerate(placements):
        if isinstance(before, Shard) and _innermost(placements, order, before.dim) != axis:
            continue
        for after in candidates[axis]:
            kind = step_kind(before, after)
            if kind is None:
                continue
            changed = (*placements[:axis], after, *placements[axis + 1 :])
            moved = (*(a for a in order if a != axis), axis)
            if _fits(changed, moved, axis, layout):
                yield axis, kind, (changed, canonical_order(changed, moved))


def _innermost(placements: tuple[Placement, ...], order: tuple[int, ...], dim: int) -> int:
    return [a for a in order if placements[a].is_shard(dim)][-1]


def _fits(
    placements: tuple[Placement, ...], order: tuple[int, ...], axis: int, layout: Layout
) -> bool:
    """Whether the new placement of `axis` fits the others: its sizes, or its reduction."""
    if isinstance(placements[axis], Partial):
        return partials_commute(placements)
    return misfit(placements, order, layout.shape, layout.grid.shape) is None


def _move_costs(layout: Layout) -> Callable[..., float]:
    """The cost of a move of a tensor like `layout`, by kind, axis, placements before and after."""
    num_bytes = functools.cache(functools.partial(local_bytes, layout))

    def cost(
        kind: str, axis: int, before: tuple[Placement, ...], after: tuple[Placement, ...]
    ) -> float:
        old, new, parts = before[axis], after[axis], layout.grid.shape[axis]
        if kind == "resplit" and isinstance(old, Shard) and isinstance(new, Shard):
            return resplit_cost_s(layout.shape[new.dim], parts, old, new, num_bytes(before) * parts)
        if kind in LOCAL_KINDS:
            return local_s(num_bytes(after))
        return collective_s(kind, parts, max(num_bytes(before), num_bytes(after)))

    return cost


def _path(
    source: Layout,
    target: Layout,
    came: dict[State, tuple[State, int, str]],
    start: State,
    goal: State,
) -> tuple[Step, ...]:
    moves, states = [], [goal]
    while states[-1] != start:
        before, axis, kind = came[states[-1]]
        moves.append((axis, kind))
        states.append(before)
    layouts = [source.with_placements(p, o) for p, o in reversed(states)]
    layouts[0], layouts[-1] = source, (target if moves else source)
    return tuple(
        Step(kind, axis, layouts[i], layouts[i + 1])
        for i, (axis, kind) in enumerate(reversed(moves))
    )
