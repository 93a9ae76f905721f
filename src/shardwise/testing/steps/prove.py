"""Cases played: three training steps of each, compared with one device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.testing.steps.case import StepCase, global_batch, open_doors
from shardwise.testing.steps.models import KINDS, WIDTH, Trained
from shardwise.testing.training import AUTOCAST_BOUND, BOUND, NUM_STEPS, Steps, Training
from shardwise.testing.verdict import judge_in_processes, judge_simulated

EXAMPLES_PER_PART = 4


def training_of(case: StepCase) -> Training:
    whole = case.has_global_batch
    return Training(
        case.mesh,
        case.data_axes,
        case.options,
        case.optimizer,
        functools.partial(build, case),
        functools.partial(open_doors, case),
        functools.partial(global_batch, case) if whole else None,
        by_parts=KINDS[case.kind].own_statistics and not whole,
        bound=AUTOCAST_BOUND if "autocast" in case.options else BOUND,
    )


def build(case: StepCase) -> tuple[Trained, Steps]:
    """The module and, for each step, its batches: the same each time."""
    kind = KINDS[case.kind]
    with _default_dtype(torch.float32 if "autocast" in case.options else torch.float64):
        torch.manual_seed(case.seed)
        module = kind.make()
        module.recompute = "recompute" in case.options
        size = EXAMPLES_PER_PART * case.num_parts
        num_batches = 2 if case.options & {"accumulate", "no_sync"} else 1
        steps: Steps = [
            [kind.batch(module, size) for _ in range(num_batches)] for _ in range(NUM_STEPS)
        ]
        if case.options & {"unused", "sometimes"}:
            module.spare = nn.Linear(WIDTH, WIDTH, bias=False)
    return module, steps


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


#: Cases that share a world; a simulated one plans each call once.
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
    """Play cases in simulated worlds, or in processes."""
    verdicts = []
    judge = judge_in_processes if in_processes else judge_simulated
    for group in _worlds(cases):
        judgements = judge(training_of, group, group[0].mesh.num_ranks)
        for case, judgement in zip(group, judgements, strict=True):
            verdicts.append(StepVerdict(case, judgement.kind, judgement.text))
            report(verdicts[-1])
    return verdicts


def _worlds(cases: Iterable[StepCase]) -> Iterator[list[StepCase]]:
    """Groups of cases with the same number of ranks, of limited size."""
    by_size: dict[int, list[StepCase]] = {}
    for case in cases:
        by_size.setdefault(case.mesh.num_ranks, []).append(case)
    for size in sorted(by_size):
        alike = by_size[size]
        for start in range(0, len(alike), CASES_PER_WORLD):
            yield alike[start : start + CASES_PER_WORLD]
