"""Training steps of a user's model, with each option that applies, compared with one device.

The loop is that of `testing/training.py`: three optimizer steps on the sample batch, in double
precision. One device takes the mean of the losses of the ranks' parts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from shardwise._torch.functions import BatchStatistics
from shardwise._torch.pytree import tree_map
from shardwise.embedding import EmbeddingBagCollection, EmbeddingCollection
from shardwise.errors import ArgumentError
from shardwise.report.case import Case
from shardwise.report.parity import TOLERANCE
from shardwise.testing.batches import call, loss_of
from shardwise.testing.compare import Difference
from shardwise.testing.mesh import Mesh
from shardwise.testing.training import (
    AUTOCAST_BOUND,
    NUM_STEPS,
    OPTIONS,
    Loss,
    Steps,
    Training,
    agree,
    plain_loss,
)
from shardwise.testing.verdict import judge_in_processes, judge_simulated

#: Options that need a model made for them.
OF_OWN_MODELS = ("unused", "sometimes", "penalty")
#: Options for any model.
APPLY = tuple(option for option in OPTIONS if option not in OF_OWN_MODELS)
#: The default: bfloat16 can only be compared roughly, and a model of an interactive session cannot
#: be pickled.
DEFAULT = tuple(option for option in APPLY if option not in ("autocast", "pickle"))


@dataclass(frozen=True)
class Subject:
    """A model, a mesh and the options of one run."""

    case: Case
    mesh: Mesh
    options: frozenset[str]
    optimizer: str
    tolerance: float


@dataclass(frozen=True)
class TrainingParity:
    """One run compared with one device: `kind` is "ok", "refused" or "wrong"."""

    options: tuple[str, ...]
    kind: str
    text: str
    compared: tuple[Difference, ...]

    @property
    def worst(self) -> Difference | None:
        """The largest relative difference."""
        figures = [each for each in self.compared if each.scale]
        return max(figures, key=lambda each: each.largest / each.scale, default=None)


def check_training(
    case: Case,
    mesh: Mesh,
    options: Sequence[str] = (),
    *,
    optimizer: str = "momentum",
    tolerance: float = TOLERANCE,
    processes: bool = False,
) -> list[TrainingParity]:
    """Train with the options together; without any, plainly and with each that applies."""
    chosen = frozenset(options)
    if not chosen <= set(APPLY) or not agree(chosen):
        raise ArgumentError(
            f"Options of training steps are {', '.join(APPLY)}; found {', '.join(options)}"
            f"{', which exclude each other' if chosen <= set(APPLY) else ''}."
        )
    runs = [chosen] if chosen else [frozenset[str](), *_applying(case, mesh)]
    subjects = [Subject(case, mesh, run, optimizer, tolerance) for run in runs]
    judge = judge_in_processes if processes else judge_simulated
    judgements = judge(training_of, subjects, mesh.num_ranks)
    return [
        TrainingParity(tuple(sorted(run)), each.kind, each.text, each.compared)
        for run, each in zip(runs, judgements, strict=True)
    ]


def _applying(case: Case, mesh: Mesh) -> list[frozenset[str]]:
    """The options that apply to this model, each by itself."""
    module, _ = case.build()
    updating = any(getattr(inner, "optimizer", None) is not None for inner in _collections(module))
    left_out = {"no_sync", "zeros"} if updating else set()
    if _sparse(module):
        left_out |= {"clip", "zeros"}
    if any(isinstance(inner, BatchStatistics) for inner in module.modules()):
        left_out.add("save")  # ranks have different statistics: no common value to save
    if not case.data_axes(mesh):
        left_out.add("no_sync")
    return [frozenset([option]) for option in DEFAULT if option not in left_out]


def _collections(module: nn.Module) -> list[nn.Module]:
    kinds = (EmbeddingBagCollection, EmbeddingCollection)
    return [inner for inner in module.modules() if isinstance(inner, kinds)]


def _sparse(module: nn.Module) -> bool:
    """Whether some gradient is sparse: torch cannot clip it or set it to zero."""
    return any(
        getattr(inner, "sparse", False) or getattr(inner, "_sparse", False)
        for inner in module.modules()
    )


def training_of(subject: Subject) -> Training:
    case, mesh, options = subject.case, subject.mesh, subject.options
    loss: Loss = _recomputed_loss if "recompute" in options else plain_loss
    return Training(
        mesh,
        case.data_axes(mesh),
        options,
        subject.optimizer,
        functools.partial(_build, case, options),
        functools.partial(_shard, case),
        loss=loss,
        by_parts=True,
        bound=max(subject.tolerance, AUTOCAST_BOUND if "autocast" in options else 0.0),
    )


def _build(case: Case, options: frozenset[str]) -> tuple[nn.Module, Steps]:
    module, batch = case.build()
    if "autocast" not in options:
        module, batch = module.double(), tree_map(_doubled, batch)
    num_batches = 2 if options & {"accumulate", "no_sync"} else 1
    return module, [[batch] * num_batches for _ in range(NUM_STEPS)]


def _doubled(value: Any) -> Any:
    is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_number else value


def _shard(case: Case, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return case.shard(module, mesh).module


def _recomputed_loss(module: nn.Module, batch: Any) -> torch.Tensor:
    return checkpoint(lambda: loss_of(call(module, batch)), use_reentrant=False)
