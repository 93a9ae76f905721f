"""No rule is trusted: every choice of a rule is played in a simulated world.

`check_rule` lays the sample's tensors out as each combination of choices wants them, runs the
local call on each rank, puts the result together as the outputs' placements say, and compares it
with the op on one device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from shardwise.core.layout import Layout
from shardwise.core.mesh import Grid
from shardwise.core.placements import REPLICATE, SUM, Partial, Placement, Replicate, Shard
from shardwise.dispatch.rule import Call, Rule, TensorMeta
from shardwise.simulation.world import simulate
from shardwise.testing.played import Played, difference, grid_of_shape, in_words, layout_of
from shardwise.testing.sample import Sample, SampleAlone, rule_for

#: One axis, uneven and with empty shards, and two axes that may share a dim.
MESHES: tuple[tuple[int, ...], ...] = ((2,), (3,), (2, 2))


@dataclass(frozen=True)
class Mistake:
    """A choice that gives another result than one device."""

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
            world = Played(alone, grid_of_shape(shape))
            for plan in world.plans(rule):
                report.num_played += 1
                why = world.why_wrong(plan)
                if why:
                    report.mistakes.append(
                        Mistake(shape, in_words(plan.inputs), in_words(plan.outputs), why)
                    )
    return report


# The check of a rule the other way round: what it could offer, and does not.


def missing_choices(
    sample: Sample, rule: Rule | None = None, ranks: int = 2, *, sums: bool = True
) -> list[str]:
    """Placements along one axis that are right for the op itself and that the rule does not offer.

    Only choices that shard something, or let a Partial sum through, are of use. How an operand
    lies whose values are not read does not matter. Without `sums` no input is tried as a sum.
    """
    rule = rule or rule_for(sample)
    missing = []
    alone = SampleAlone(sample)
    call = alone.call
    if not call.outputs:
        return []  # an answer about a part is none about the whole
    ignored = alone.ignored()

    def as_read(layouts: Sequence[Layout]) -> tuple[str, ...]:
        return tuple("any" if i in ignored else each for i, each in enumerate(in_words(layouts)))

    with simulate(ranks):
        world = Played(alone, grid := grid_of_shape((ranks,)))
        offered = {(as_read(plan.inputs), in_words(plan.outputs)) for plan in world.plans(rule)}
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
            for outputs in _right_outputs(alone, world.parts(layouts), grid):
                if (as_read(layouts), in_words(outputs)) not in offered:
                    missing.append(
                        f"{', '.join(as_read(layouts))} -> {', '.join(in_words(outputs))}"
                    )
    return missing


def _rounds(call: Call, placements: Sequence[Placement]) -> bool:
    """Whether terms would be rounded before they are added: that is another number."""
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
        return  # the op itself does not run on such parts
    if isinstance(found, (list, tuple)) and len(found) != len(alone.result):
        return  # parts that are split make fewer results than the whole
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
        return False  # parts of other shapes than this layout has
