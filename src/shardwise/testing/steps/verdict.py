"""Verdicts: a case right, refused or wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from shardwise.comm.simulate import simulate
from shardwise.testing.steps.case import Case
from shardwise.testing.steps.judge import judge
from shardwise.testing.steps.subject import training_of
from shardwise.testing.steps.training import Outcome, play

#: Cases that share a simulated world, in which plans of calls are found once.
CASES_PER_WORLD = 60


@dataclass(frozen=True)
class Verdict:
    """`kind` is "ok", "refused" or "wrong"."""

    case: Case
    kind: str
    text: str = ""

    def __str__(self) -> str:
        said = f"\n    {self.text}" if self.text else ""
        return f'{self.kind}: --replay "{self.case}"{said}'


def verdict_of(case: Case, outcomes: list[Outcome], folder: Path) -> Verdict:
    judgement = judge(training_of(case), outcomes, folder)
    return Verdict(case, judgement.kind, judgement.text)


def prove(
    cases: Iterable[Case], report: Callable[[Verdict], None] = lambda _: None
) -> list[Verdict]:
    """The verdicts of cases that are played in simulated worlds."""
    verdicts = []
    with TemporaryDirectory() as folder:
        for number, group in enumerate(_worlds(cases)):
            homes = [Path(folder, f"{number}-{index}") for index in range(len(group))]
            with simulate(group[0].mesh.num_ranks):
                made = [
                    play(training_of(case), home) for case, home in zip(group, homes, strict=True)
                ]
            for case, outcomes, home in zip(group, made, homes, strict=True):
                verdicts.append(verdict_of(case, outcomes, home))
                report(verdicts[-1])
    return verdicts


def _worlds(cases: Iterable[Case]) -> Iterator[list[Case]]:
    """Cases of as many ranks together, a limited number at a time."""
    by_size: dict[int, list[Case]] = {}
    for case in cases:
        by_size.setdefault(case.mesh.num_ranks, []).append(case)
    for size in sorted(by_size):
        alike = by_size[size]
        for start in range(0, len(alike), CASES_PER_WORLD):
            yield alike[start : start + CASES_PER_WORLD]
