"""From an op and the layouts of its inputs to a CallPlan.

The rule is called once per mesh axis; its choices are combined over the axes, and the combination
wins whose inputs are cheapest to redistribute. Ties go to fewer Partials, then to sharded outputs,
then to the rule's own order: the same on every rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.comm.cost import LATENCY_S, collective_s
from shardwise.core.layout import Layout, canonical_order, make_layout, partials_commute
from shardwise.core.mesh import Grid
from shardwise.core.placements import Partial, Placement, Shard, plain
from shardwise.core.sizes import divides
from shardwise.dispatch.catalog import is_view
from shardwise.dispatch.rule import Call, Choice, CollectiveCost, LocalCall, Rule
from shardwise.errors import UnsupportedError
from shardwise.redistribute.search import cost_s, find_steps, least_s
from shardwise.redistribute.steps import Step


@dataclass(frozen=True, slots=True)
class CallPlan:
    """How a call runs; the same on every rank."""

    op: Any
    #: Per tensor input, its steps; None when no input moves.
    steps: tuple[tuple[Step, ...], ...] | None
    #: The layouts of the inputs of the local call, and of the outputs.
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    local: LocalCall | None
    #: `(name of an argument, number of an output)`: the argument is that output's local shape.
    local_shape: tuple[tuple[str, int], ...]
    #: The collectives that the local function runs, each with its axis.
    sent: tuple[tuple[int, CollectiveCost], ...] = ()

    @property
    def sent_s(self) -> float:
        """Seconds that the collectives of the local function are expected to take."""
        return _sent_s(self.sent, self.inputs[0].grid)


@dataclass(frozen=True, slots=True)
class Combination:
    """One choice per axis and the order of axes that goes with them."""

    choices: tuple[Choice, ...]
    order: tuple[int, ...]

    def input(self, number: int) -> tuple[Placement, ...]:
        return tuple(c.inputs[number] for c in self.choices)

    def output(self, number: int) -> tuple[Placement, ...]:
        return tuple(c.outputs[number] for c in self.choices)

    def sent(self) -> tuple[tuple[int, CollectiveCost], ...]:
        return tuple((axis, sent) for axis, c in enumerate(self.choices) for sent in c.sent)


def propagate(
    rule: Rule,
    call: Call,
    layouts: Sequence[Layout],
    *,
    fixed: Sequence[int] = (),
    preferred: Layout | None = None,
) -> CallPlan:
    """The cheapest plan of `call` for inputs in `layouts`.

    Inputs in `fixed` must not move (the op writes to them). With `preferred`, the first output must
    have that layout, except that it may stay Partial where `preferred` is replicated.
    """
    grid = layouts[0].grid
    best: tuple[tuple[float, int, int, int], Combination] | None = None
    combinations = list(enumerate(_combinations(rule, call, layouts, grid, preferred)))
    # By lower bound, so that most combinations need no search.
    current = [tuple(map(plain, layout.placements)) for layout in layouts]
    combinations.sort(key=lambda each: _least_s(each[1], current))
    for number, combination in combinations:
        if any(not _stays(combination, i, layouts[i]) for i in fixed):
            continue
        if preferred is not None and not _meets(combination, preferred):
            continue
        pending = _postponed_s(combination) + _sent_s(combination.sent(), grid)
        if best is not None and pending + _least_s(combination, current) > best[0][0]:
            continue
        cost = pending + sum(
            cost_s(layout, _place(layout, combination.input(i), combination.order))
            for i, layout in enumerate(layouts)
        )
        key = (cost, *_preference(combination, len(call.outputs)), number)
        if best is None or key < best[0]:
            best = (key, combination)
    if best is None:
        raise UnsupportedError(unsupported(call.op, layouts, fixed))
    return _plan(rule, call, layouts, best[1], grid)


def _least_s(combination: Combination, current: Sequence[tuple[Placement, ...]]) -> float:
    """A lower bound of the cost of redistributing the inputs."""
    return sum(least_s(here, combination.input(i)) for i, here in enumerate(current))


def every_plan(
    rule: Rule, call: Call, starts: Iterable[tuple[Sequence[Layout], Layout | None]]
) -> Iterator[CallPlan]:
    """The plan of each combination of choices, cheap or expensive: for checking rules.

    `starts` are layouts of the inputs, each with a preferred output. A plan that several of them
    lead to comes once, and without the steps that would lead there.
    """
    asked: dict[Any, list[Choice]] = {}
    # Equal choices become one object, so that combinations compare by identity.
    known: dict[Choice, Choice] = {}
    done: set[Any] = set()
    for layouts, preferred in starts:
        grid = layouts[0].grid
        per_axis = []
        for seen in _along_axes(call, layouts, grid, preferred):
            key = (seen.axis_size, seen.placed, seen.wanted)
            if key not in asked:
                asked[key] = [known.setdefault(c, c) for c in rule.choices(seen)]
            per_axis.append(asked[key])
        for choices in itertools.product(*per_axis):
            for order in _orders(layouts, preferred):
                combination = Combination(choices, order)
                met = (*map(id, choices), order)
                if met in done or not (preferred is None or _meets(combination, preferred)):
                    continue
                done.add(met)
                if _compatible(choices, call, grid) and _is_valid(combination, call):
                    plan = _plan(rule, call, layouts, combination, grid, moved=False)
                    same = (plan.inputs, plan.outputs, plan.local)
                    if same not in done:
                        done.add(same)
                        yield plan


#: What to do instead of an op that gives a tensor another's memory, as compiled `x.data = y` does.
_TAKES_OVER = "Write the values, x.data.copy_(y), or assign x.data = y outside of compiled code."
_INSTEAD = {"aten::set": _TAKES_OVER, "aten::set_": _TAKES_OVER}


def unsupported(op: Any, layouts: Sequence[Layout], fixed: Sequence[int] = ()) -> str:
    """The message for an op that no rule covers, or not for these layouts."""
    name = getattr(op, "__name__", None) if not hasattr(op, "_schema") else str(op)
    found = "; ".join(map(repr, layouts))
    if hasattr(op, "_schema") and op._schema.name in _INSTEAD:
        instead = _INSTEAD[op._schema.name]
        return f"{name} does not have a sharding strategy registered. Found {found}. {instead}"
    if fixed:
        return (
            f"{name} does not have a sharding strategy registered. It writes to "
            f"{layouts[fixed[0]]!r}, which must not move. Found {found}. "
            "Redistribute that tensor first, or use the op that returns a new tensor."
        )
    return (
        f"{name} does not have a sharding strategy registered. Found {found}. Either gather the "
        "operands first (x.redistribute(placements=[Replicate()])) or run the op on local tensors "
        "(x.to_local(), then DTensor.from_local)."
    )


def _combinations(
    rule: Rule, call: Call, layouts: Sequence[Layout], grid: Grid, preferred: Layout | None
) -> Iterator[Combination]:
    per_axis = [list(rule.choices(seen)) for seen in _along_axes(call, layouts, grid, preferred)]
    orders = _orders(layouts, preferred)
    for choices in itertools.product(*per_axis):
        if _compatible(choices, call, grid):
            for order in orders:
                combination = Combination(choices, order)
                if _is_valid(combination, call):
                    yield combination


def _along_axes(
    call: Call, layouts: Sequence[Layout], grid: Grid, preferred: Layout | None
) -> Iterator[Call]:
    """The call as the rule gets it for each axis."""
    for axis, size in enumerate(grid.shape):
        yield replace(
            call,
            axis_size=size,
            placed=tuple(plain(layout.placements[axis]) for layout in layouts),
            wanted=(preferred.placements[axis],) if preferred is not None else (),
        )


def _orders(layouts: Sequence[Layout], preferred: Layout | None) -> list[tuple[int, ...]]:
    preferred_orders = [preferred.order] if preferred is not None else []
    return list(dict.fromkeys([*preferred_orders, *(layout.order for layout in layouts)]))


def _compatible(choices: Sequence[Choice], call: Call, grid: Grid) -> bool:
    """Whether the choices of all axes can be combined."""
    # Not hashed: a local call may hold a symbolic size.
    locals_ = [c.local for c in choices if c.local is not None]
    if any(local != locals_[0] for local in locals_):
        return False
    for axis, choice in enumerate(choices):
        for number, dim in choice.alone:
            if any(c.inputs[number].is_shard(dim) for a, c in enumerate(choices) if a != axis):
                return False
        for number, dim in choice.even:
            split = math.prod(
                n
                for c, n in zip(choices, grid.shape, strict=True)
                if c.inputs[number].is_shard(dim)
            )
            if not divides(split, call.inputs[number].shape[dim]) or not _divides(
                call, choice, split
            ):
                return False
    return True


def _divides(call: Call, choice: Choice, split: int) -> bool:
    return all(
        not isinstance(p, Shard) or divides(split, call.outputs[i].shape[p.dim])
        for i, p in enumerate(choice.outputs)
    )


def _is_valid(combination: Combination, call: Call) -> bool:
    """Explicit sizes are valid only on the outermost axis of a dim; Partials must commute."""
    every = [combination.input(i) for i in range(len(call.inputs))]
    every += [combination.output(i) for i in range(len(call.outputs))]
    for placements in every:
        if not partials_commute(placements):
            return False
        outer: set[int] = set()
        for axis in combination.order:
            placement = placements[axis]
            if isinstance(placement, Shard):
                if placement.sizes is not None and placement.dim in outer:
                    return False
                outer.add(placement.dim)
    return True


def _place(layout: Layout, placements: tuple[Placement, ...], order: tuple[int, ...]) -> Layout:
    """`layout` with `placements`; itself when it has them, masks included."""
    current = tuple(map(plain, layout.placements))
    if placements == current and canonical_order(placements, order) == layout.order:
        return layout
    return layout.with_placements(placements, order)


def _stays(combination: Combination, number: int, layout: Layout) -> bool:
    placements = combination.input(number)
    if _place(layout, placements, combination.order) is not layout:
        return False
    outputs = [combination.output(i) for i in range(len(combination.choices[0].outputs))]
    return not outputs or outputs[0] == placements


def _meets(combination: Combination, preferred: Layout) -> bool:
    placements = combination.output(0)
    for found, asked in zip(placements, preferred.placements, strict=True):
        if found != asked and not (asked.is_replicate() and found.is_partial()):
            return False
    return canonical_order(placements, combination.order) == preferred.order


def _postponed_s(combination: Combination) -> float:
    """Half the latency of the reductions that new Partials postpone.

    Not all of it, and none of their bytes: a gradient that stays Partial is reduced with others.
    """
    pending = sum(
        any(p.is_partial() for p in choice.outputs)
        and not any(p.is_partial() for p in choice.inputs)
        for choice in combination.choices
    )
    return pending * LATENCY_S / 2


def _sent_s(sent: Sequence[tuple[int, CollectiveCost]], grid: Grid) -> float:
    return sum(collective_s(each.kind, grid.shape[axis], each.num_bytes) for axis, each in sent)


def _preference(combination: Combination, num_outputs: int) -> tuple[int, int]:
    outputs = [p for i in range(num_outputs) for p in combination.output(i)]
    return (
        sum(isinstance(p, Partial) for p in outputs),
        -sum(isinstance(p, Shard) for p in outputs),
    )


def _plan(
    rule: Rule,
    call: Call,
    layouts: Sequence[Layout],
    chosen: Combination,
    grid: Grid,
    *,
    moved: bool = True,
) -> CallPlan:
    """The plan of a combination; without `moved`, its inputs have their layouts already."""
    inputs = tuple(
        _place(layout, chosen.input(i), chosen.order) for i, layout in enumerate(layouts)
    )
    starts = layouts if moved else inputs
    steps = tuple(find_steps(a, b) for a, b in zip(starts, inputs, strict=True))
    local = next((c.local for c in chosen.choices if c.local is not None), None)
    copied = any(steps) or (local is not None and local.copies)
    snapshot = is_view(call.op) and (copied or any(layout.snapshot for layout in layouts))
    outputs = tuple(
        make_layout(
            grid,
            chosen.output(i),
            meta.shape,
            meta.stride,
            meta.dtype,
            chosen.order,
            snapshot=snapshot,
        )
        for i, meta in enumerate(call.outputs)
    )
    return CallPlan(
        call.op,
        steps if any(steps) else None,
        inputs,
        outputs,
        local,
        tuple(rule.local_shape.items()),
        chosen.sent(),
    )
