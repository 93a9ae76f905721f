"""Checks of a rule against the op on one device: every choice runs in a simulated world.

`check_rule` lays the sample's tensors out as each combination of choices says, runs the local call
on each rank, assembles the result by the outputs' placements, and compares. `missing_choices` finds
choices that a rule could offer and does not. `check_doors` calls the op on DTensors, on one to
three mesh axes in any order, reads the results through conversions with their gradients, writes to
them, and compares everything, the generator's state included.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from shardwise._torch.dispatch import OpOverload
from shardwise.core.layout import Layout, partials_commute
from shardwise.core.mesh import Grid
from shardwise.core.placements import REPLICATE, SUM, Partial, Placement, Replicate, Shard
from shardwise.dispatch.rule import Call, Rule, TensorMeta
from shardwise.simulation.world import simulate
from shardwise.testing.cases import Cases
from shardwise.testing.compare import Alone, OpCall, outcome_of
from shardwise.testing.layouts import OperandLayouts, random_of
from shardwise.testing.sample import (
    Sample,
    SampleAlone,
    SimulatedSample,
    as_text,
    difference,
    grid_of_shape,
    layout_of,
    rule_for,
)

#: One axis, uneven and with empty shards, and two axes that may share a dim.
MESHES: tuple[tuple[int, ...], ...] = ((2,), (3,), (2, 2))


@dataclass(frozen=True)
class Mistake:
    """A choice whose result differs from one device's."""

    mesh: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        return (
            f"mesh {self.mesh}: {', '.join(self.inputs)} -> {', '.join(self.outputs)}: {self.why}"
        )


@dataclass
class Report:
    """How many choices were played, and which were wrong."""

    num_played: int = 0
    mistakes: list[Mistake] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.num_played > 0 and not self.mistakes

    def __str__(self) -> str:
        found = f"{self.num_played} choices played, {len(self.mistakes)} wrong"
        return "\n".join([found, *map(str, self.mistakes)])


def check_rule(
    sample: Sample, rule: Rule | None = None, meshes: Sequence[tuple[int, ...]] = MESHES
) -> Report:
    """Play every choice of the op's rule (or of `rule`) on the sample.

    >>> import torch
    >>> x = torch.randn(4, 5)
    >>> check_rule(Sample(torch.ops.aten.neg.default, (x,))).ok
    True
    """
    rule = rule or rule_for(sample)
    report = Report()
    alone = SampleAlone(sample)
    with simulate(max(map(math.prod, meshes))):
        for shape in meshes:
            world = SimulatedSample(alone, grid_of_shape(shape))
            for plan in world.plans(rule):
                report.num_played += 1
                why = world.why_wrong(plan)
                if why:
                    report.mistakes.append(
                        Mistake(shape, as_text(plan.inputs), as_text(plan.outputs), why)
                    )
    return report


def missing_choices(
    sample: Sample, rule: Rule | None = None, ranks: int = 2, *, sums: bool = True
) -> list[str]:
    """Placements along one axis that are right for the op itself and that the rule does not offer.

    Only choices that shard something, or let a Partial sum through, are of use. The layout of an
    operand whose values are not read does not matter. Without `sums` no input is tried as a sum.
    """
    rule = rule or rule_for(sample)
    missing = []
    alone = SampleAlone(sample)
    call = alone.call
    if not call.outputs:
        return []  # a Python value of a shard says nothing about the whole
    ignored = alone.ignored()

    def as_read(layouts: Sequence[Layout]) -> tuple[str, ...]:
        return tuple("any" if i in ignored else each for i, each in enumerate(as_text(layouts)))

    with simulate(ranks):
        world = SimulatedSample(alone, grid := grid_of_shape((ranks,)))
        offered = {(as_read(plan.inputs), as_text(plan.outputs)) for plan in world.plans(rule)}
        ways = [
            [REPLICATE] if number in ignored else _ways(meta, sums)
            for number, meta in enumerate(call.inputs)
        ]
        for placements in itertools.product(*ways):
            if all(isinstance(p, Replicate) for p in placements) or _rounds(call, placements):
                continue
            layouts = [
                layout_of(m, (p,), grid) for m, p in zip(call.inputs, placements, strict=True)
            ]
            for outputs in _right_outputs(alone, world.shards(layouts), grid):
                if (as_read(layouts), as_text(outputs)) not in offered:
                    missing.append(
                        f"{', '.join(as_read(layouts))} -> {', '.join(as_text(outputs))}"
                    )
    return missing


def _rounds(call: Call, placements: Sequence[Placement]) -> bool:
    """Whether terms would be rounded before they are added, which changes the result."""
    narrowest = min(meta.dtype.itemsize for meta in call.outputs)
    return any(
        isinstance(p, Partial) and meta.dtype.itemsize > narrowest
        for p, meta in zip(placements, call.inputs, strict=True)
    )


def _ways(meta: TensorMeta, sums: bool = True) -> list[Placement]:
    # Terms of an integer tensor would be ids out of range, which some kernels do not survive.
    terms = [SUM] if sums and meta.dtype.is_floating_point else []
    return [REPLICATE, *terms, *(Shard(d) for d in range(meta.ndim))]


def _right_outputs(
    alone: SampleAlone, parts: list[torch.Tensor], grid: Grid
) -> Iterator[list[Layout]]:
    try:
        found = alone.run(parts, alone.sample.op)
    except Exception:
        return  # the op itself does not run on such shards
    if isinstance(found, (list, tuple)) and len(found) != len(alone.result):
        return  # shards that are split make fewer results than the whole
    pairs = zip(alone.asked(found), alone.asked(alone.result), strict=True)
    # Outputs do not depend on one another: each has its right placements.
    right = [
        [lo for lo in _layouts_to_try(meta, grid) if _is_right(part, whole, lo)]
        for meta, (part, whole) in zip(alone.call.outputs, pairs, strict=True)
    ]
    yield from map(list, itertools.product(*right))


def _layouts_to_try(meta: TensorMeta, grid: Grid) -> list[Layout]:
    # Anything is right for a result without elements.
    ways = _ways(meta) if math.prod(meta.shape) else [REPLICATE]
    return [layout_of(meta, (placement,), grid) for placement in ways]


def _is_right(part: torch.Tensor, whole: torch.Tensor, layout: Layout) -> bool:
    try:
        return not difference(part, whole, layout)
    except Exception:
        return False  # shards have other shapes in this layout


#: A mesh of each number of axes; axes of two, so that choices of one axis serve on any.
DOOR_MESHES: tuple[tuple[int, ...], ...] = ((2,), (2, 2), (2, 2, 2))


def check_doors(
    sample: Sample,
    rule: Rule | None = None,
    num: int = 1,
    meshes: Sequence[tuple[int, ...]] = DOOR_MESHES,
) -> list[str]:
    """The mistakes of `num` draws of choices, reads and writes on each mesh, as text.

    A function of a rule file and an op that writes are not checked.

    >>> import torch
    >>> check_doors(Sample(torch.ops.aten.t.default, (torch.randn(4, 5),)))
    []
    """
    if not isinstance(sample.op, OpOverload) or sample.op._schema.is_mutable:
        return []
    mistakes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = _on_one_device(sample)
        placements = _choices(sample, rule or rule_for(sample))
        for shape in meshes:
            random = random_of(f"{sample.op} {expected.sample} {shape}")
            with simulate(math.prod(shape)):
                mesh = init_device_mesh("cpu", shape)
                for number in range(num):
                    way = _drawn(shape, placements, random)
                    for kind, play in Cases(expected, way, mesh, number, num_doors=1).each():
                        outcome, note = outcome_of(play)
                        if outcome in ("wrong", "error"):
                            mistakes.append(f"{kind} on {way}: {note}")
                        if kind == "forward" and outcome != "ok":
                            break
    return mistakes


@dataclass(frozen=True)
class _Entry:
    """An op with the interface of an entry of torch's table."""

    op: OpOverload
    variant_test_name: str = ""
    supports_autograd: bool = True

    @property
    def name(self) -> str:
        return str(self.op)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)


def _on_one_device(sample: Sample) -> Alone:
    """The call, with gradients of as many operands as possible."""
    tensors = SampleAlone(sample).tensors
    every = tuple(t.is_floating_point() or t.is_complex() for t in tensors)
    first = (every[0], *[False] * (len(every) - 1)) if every else ()
    for wants_grad in (every, first):
        with contextlib.suppress(RuntimeError):  # not differentiable with respect to one of them
            return _call_alone(sample, wants_grad)
    return _call_alone(sample, (False,) * len(every))


def _call_alone(sample: Sample, wants_grad: tuple[bool, ...]) -> Alone:
    case = OpCall(sample.args, dict(sample.kwargs), wants_grad, lambda result: result)
    return Alone(_Entry(sample.op), case)


def _choices(sample: Sample, rule: Rule) -> list[tuple[Placement, ...]]:
    """The placements of the operands along one axis of two, for each choice of the rule."""
    with simulate(2):
        played = SimulatedSample(SampleAlone(sample), grid_of_shape((2,)))
        return list(
            dict.fromkeys(tuple(lo.placements[0] for lo in p.inputs) for p in played.plans(rule))
        )


def _drawn(
    shape: tuple[int, ...], choices: Sequence[tuple[Placement, ...]], random: Random
) -> OperandLayouts:
    """A choice for each axis; an operand is replicated where they cannot be combined."""
    num_axes = len(shape)
    along = [random.choice(choices) for _ in shape]
    operands = tuple(_combined(placements) for placements in zip(*along, strict=True))
    order = tuple(random.sample(range(num_axes), num_axes))
    return OperandLayouts(shape, operands, None if order == tuple(range(num_axes)) else order)


def _combined(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    found: list[Placement] = []
    for placement in placements:
        if isinstance(placement, Shard) and len(placements) > 1:
            placement = Shard(placement.dim)  # explicit sizes do not nest
        found.append(placement if partials_commute([*found, placement]) else REPLICATE)
    return tuple(found)
