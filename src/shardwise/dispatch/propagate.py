"""From an op and the layouts of its inputs to a Combination and a CallPlan; errors of strict mode.

The rule is called once per mesh axis; its choices are combined over the axes, and the combination
wins whose inputs are cheapest to redistribute, unless it would split a dim of size 1. Ties go to
fewer Partials, then to sharded outputs, then to the rule's own order: the same on every rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.comm.collectives import LATENCY_S, collective_s
from shardwise.core.layout import Layout, canonical_order, make_layout, misfit, partials_commute
from shardwise.core.mesh import Grid
from shardwise.core.placements import REPLICATE, Partial, Placement, Shard, plain, short
from shardwise.core.sizes import divides
from shardwise.dispatch.catalog import is_view
from shardwise.dispatch.rule import Call, Choice, CollectiveCost, LocalCall, Rule
from shardwise.errors import RedistributionError, UnsupportedError
from shardwise.redistribute.steps import Step, cost_s, find_steps, least_s, local_bytes


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
) -> Combination:
    """The choices of the cheapest plan of `call` for inputs in `layouts`.

    Inputs in `fixed` must not move (the op writes to them). With `preferred`, the first output must
    have that layout, except that it may stay Partial where `preferred` is replicated.
    """
    grid = layouts[0].grid
    best: tuple[tuple[bool, float, int, int, int], Combination] | None = None
    calls = list(_along_axes(call, layouts, grid, preferred))
    per_axis = [list(rule.choices(seen)) for seen in calls]
    least_of = [
        [_least_s(choice, seen) for choice in choices]
        for seen, choices in zip(calls, per_axis, strict=True)
    ]
    # By lower bound: most combinations are neither checked nor searched.
    ranked = sorted(
        zip(
            _idling(call, layouts, grid, per_axis),
            map(sum, itertools.product(*least_of)),
            itertools.count(),
            itertools.product(*per_axis),
            strict=False,
        )
    )
    orders = _orders(layouts, preferred)
    for idle, least, number, choices in ranked:
        # The sums of a bound and of a cost may be rounded differently.
        if best is not None and (idle, least) > (best[0][0], best[0][1] * (1 + 1e-9)):
            break
        if not _compatible(choices, call, grid):
            continue
        for place, order in enumerate(orders):
            combination = Combination(choices, order)
            if not _is_valid(combination, call, grid):
                continue
            if any(not _stays(combination, i, layouts[i]) for i in fixed):
                continue
            if preferred is not None and not _meets(combination, preferred):
                continue
            cost = _postponed_s(choices) + _sent_s(combination.sent(), grid)
            cost += sum(
                cost_s(layout, _place(layout, combination.input(i), order))
                for i, layout in enumerate(layouts)
            )
            ties = (*_preference(combination, len(call.outputs)), number * len(orders) + place)
            if best is None or (idle, cost, *ties) < best[0]:
                best = ((idle, cost, *ties), combination)
    if best is None:
        raise UnsupportedError(unsupported(call.op, layouts, fixed))
    return best[1]


def _idling(
    call: Call, layouts: Sequence[Layout], grid: Grid, per_axis: Sequence[Sequence[Choice]]
) -> Iterable[bool]:
    """Whether each combination newly splits a dim of size 1: one rank would do all the work."""
    single = [
        {d for d, n in enumerate(meta.shape) if type(n) is int and n == 1} for meta in call.inputs
    ]
    if not any(single):
        return itertools.repeat(False)

    def splits(placements: Iterable[Placement]) -> bool:
        return any(
            isinstance(p, Shard) and p.dim in dims
            for p, dims in zip(placements, single, strict=True)
        )

    idle = []
    for axis, (size, choices) in enumerate(zip(grid.shape, per_axis, strict=True)):
        newly = size > 1 and not splits(layout.placements[axis] for layout in layouts)
        idle.append([newly and splits(choice.inputs) for choice in choices])
    return map(any, itertools.product(*idle))


def _least_s(choice: Choice, call: Call) -> float:
    """A lower bound of what a choice costs along the axis of this call."""
    sent = sum(collective_s(each.kind, call.axis_size, each.num_bytes) for each in choice.sent)
    return _postponed_s((choice,)) + sent + least_s(call.placed, choice.inputs)


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
        orders = _orders(layouts, preferred)
        for choices in itertools.product(*per_axis):
            for order in orders:
                met = (*map(id, choices), order)
                if met in done:
                    continue
                combination = Combination(choices, order)
                if preferred is not None and not _meets(combination, preferred):
                    continue
                done.add(met)
                if _compatible(choices, call, grid) and _is_valid(combination, call, grid):
                    plan = plan_of(rule, call, layouts, combination, moved=False)
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
        "operands first (x.redistribute(placements=[Replicate()])), run the op on local tensors "
        "(shardwise.local_map), or give it a rule (shardwise.register_rule)."
    )


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


def _is_valid(combination: Combination, call: Call, grid: Grid) -> bool:
    """Explicit sizes must fit, also inside another split of their dim; Partials must commute."""
    every = [(combination.input(i), x.shape) for i, x in enumerate(call.inputs)]
    every += [(combination.output(i), x.shape) for i, x in enumerate(call.outputs)]
    parts = grid.shape
    return all(
        partials_commute(placements) and misfit(placements, combination.order, shape, parts) is None
        for placements, shape in every
    )


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


def _postponed_s(choices: Sequence[Choice]) -> float:
    """Half the latency of the reductions that new Partials postpone.

    Not all of it, and none of their bytes: a gradient that stays Partial is reduced with others.
    """
    return sum(map(_postpones, choices)) * LATENCY_S / 2


def _postpones(choice: Choice) -> bool:
    """Whether an output is Partial, and no input is."""
    for placement in choice.outputs:
        if placement.is_partial():
            return not any(p.is_partial() for p in choice.inputs)
    return False


def _sent_s(sent: Sequence[tuple[int, CollectiveCost]], grid: Grid) -> float:
    return sum(collective_s(each.kind, grid.shape[axis], each.num_bytes) for axis, each in sent)


def _preference(combination: Combination, num_outputs: int) -> tuple[int, int]:
    outputs = [p for i in range(num_outputs) for p in combination.output(i)]
    return (
        sum(isinstance(p, Partial) for p in outputs),
        -sum(isinstance(p, Shard) for p in outputs),
    )


def plan_of(
    rule: Rule,
    call: Call,
    layouts: Sequence[Layout],
    chosen: Combination,
    *,
    moved: bool = True,
) -> CallPlan:
    """The plan of a combination; without `moved`, its inputs have their layouts already."""
    grid = layouts[0].grid
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


def forbid_move(op: Any, position: int, steps: Sequence[Step], target: Layout) -> None:
    """Raise if bringing an argument of `op` to `target` sends anything."""
    if any(step.communicates for step in steps):
        source = steps[0].source
        raise RedistributionError(
            f"{op} needs argument {position}, {source!r}, in {short(target.placements)}: "
            f"{_sent(steps)}, and communication must be explicit here. Write "
            f"x.redistribute({_placed(target)}) before the call."
        )


def forbid_leaf_move(found: Layout, wanted: Layout) -> None:
    """Raise if bringing a gradient to the layout of its leaf sends anything."""
    steps = find_steps(found, wanted)
    if any(step.communicates for step in steps):
        raise RedistributionError(
            f"The gradient of a leaf arrives as {found!r}, but the leaf is in "
            f"{short(wanted.placements)}: {_sent(steps)}, and communication must be explicit "
            f"here. Use leaf.redistribute({_placed(found.reduced())}) in the forward pass, "
            "whose gradient is brought back to the leaf."
        )


def forbid_sent(
    op: Any, inputs: Sequence[Layout], sent: Sequence[tuple[int, CollectiveCost]]
) -> None:
    """Raise for a local function that communicates: a lookup of sharded ids in sharded rows."""
    grid = inputs[0].grid
    talking = "; ".join(
        f"{each.kind} over axis {grid.axis_name(axis)!r} of about {int(each.num_bytes):,} bytes"
        for axis, each in sent
    )
    found = "; ".join(map(repr, inputs))
    raise RedistributionError(
        f"{op.__name__} of {found} exchanges data between ranks: {talking} per rank, and "
        "communication must be explicit here. Write ids.redistribute(placements="
        f"{[REPLICATE] * grid.num_axes!r}) before the call: the table then stays where it is."
    )


def _sent(steps: Sequence[Step]) -> str:
    talking = "; ".join(str(step) for step in steps if step.communicates)
    return f"{talking} of about {int(local_bytes(steps[0].source)):,} bytes per rank"


def _placed(layout: Layout) -> str:
    """The arguments of the redistribute call that leads to `layout`."""
    return f"placements={list(layout.placements)!r}{layout.other_order()}"
