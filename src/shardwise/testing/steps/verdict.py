"""Verdicts: a case right, refused or wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from shardwise.testing.steps.case import StepCase
from shardwise.testing.steps.subject import training_of
from shardwise.testing.steps.worlds import judge_in_processes, judge_simulated

#: Cases that share a world. A simulated one finds the plan of a call once.
CASES_PER_WORLD = 60


@dataclass(frozen=True)
class StepVerdict:
    """`kind` is "ok", "refused" or "wrong"."""

    case: StepCase
    kind: str
    text: str = ""

    def __str__(self) -> str:
        said = f"\n    {self.text}" if self.text else ""
        return f'{self.kind}: --replay "{self.case}"{said}'


def prove(
    cases: Iterable[StepCase],
    report: Callable[[StepVerdict], None] = lambda _: None,
    *,
    in_processes: bool = False,
) -> list[StepVerdict]:
    """The verdicts of cases that are played in simulated worlds, or in processes."""
    verdicts = []
    judge = judge_in_processes if in_processes else judge_simulated
    for group in _worlds(cases):
        judgements = judge(training_of, group, group[0].mesh.num_ranks)
        for case, judgement in zip(group, judgements, strict=True):
            verdicts.append(StepVerdict(case, judgement.kind, judgement.text))
            report(verdicts[-1])
    return verdicts


def _worlds(cases: Iterable[StepCase]) -> Iterator[list[StepCase]]:
    """Cases of as many ranks together, a limited number at a time."""
    by_size: dict[int, list[StepCase]] = {}
    for case in cases:
        by_size.setdefault(case.mesh.num_ranks, []).append(case)
    for size in sorted(by_size):
        alike = by_size[size]
        for start in range(0, len(alike), CASES_PER_WORLD):
            yield alike[start : start + CASES_PER_WORLD]
