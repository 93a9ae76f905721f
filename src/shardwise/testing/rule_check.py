"""No rule is trusted: every choice of a rule is played in a simulated world.

`check_rule` lays the sample's tensors out as each combination of choices wants them, runs the
local call on each rank, puts the result together as the outputs' placements say, and compares it
with the op on one device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwise.rules.rule import Rule
from shardwise.simulation.world import simulate
from shardwise.testing.played import Played, grid_of_shape, in_words
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
