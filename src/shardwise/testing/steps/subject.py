"""A case as a training run: its model, its batches, its doors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import nn

from shardwise.testing.steps.case import StepCase
from shardwise.testing.steps.doors import global_batch, open_doors
from shardwise.testing.steps.kinds import KINDS
from shardwise.testing.steps.modules import WIDTH, Trained
from shardwise.testing.steps.train import NUM_STEPS
from shardwise.testing.steps.training import AUTOCAST_BOUND, BOUND, Steps, Training

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
