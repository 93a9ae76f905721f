"""One case played: on one device, and on the ranks of the world that is there.

Note [What one device does]
It trains on the whole batch. Only batch norm has statistics of its own for each rank's part, as
with torch's DDP: there one device takes the mean of the losses of the parts, each with its own
buffers, and a rank's buffers are compared with those of its part.

Compared is how far each parameter went from its first value, so a step that is too short is seen
even where the parameter is large.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise import checkpoint
from shardwise.comm.local_tensor import LocalTensor
from shardwise.core.world import current_world
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import (
    CollectiveError,
    LaunchError,
    RankMismatchError,
    ShardwiseError,
    WorldError,
)
from shardwise.testing.batches import per_rank, split_batch
from shardwise.testing.differences import Values
from shardwise.testing.steps.case import Case
from shardwise.testing.steps.doors import global_batch, open_doors
from shardwise.testing.steps.kinds import KINDS, Batch
from shardwise.testing.steps.modules import WIDTH, Trained
from shardwise.testing.steps.train import NUM_STEPS, Run, freeze, plain_loss

EXAMPLES_PER_PART = 4
#: What says that something went wrong; other errors of shardwise say that something is not done.
FAULTS = (RankMismatchError, CollectiveError, LaunchError, WorldError)


@dataclass
class Outcome:
    """What a rank holds in the end; or the text of the refusal, or of the failure."""

    parameters: Values = field(default_factory=dict)
    buffers: Values = field(default_factory=dict)
    #: Parameters of the module that was copied, which train no further.
    left: Values = field(default_factory=dict)
    refused: str = ""
    failed: str = ""


# -- what is trained -------------------------------------------------------------------------


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build(case: Case) -> tuple[Trained, list[list[Batch]]]:
    """The module and, for each step, its batches: the same each time."""
    kind = KINDS[case.kind]
    with default_dtype(torch.float32 if "autocast" in case.options else torch.float64):
        torch.manual_seed(case.seed)
        module = kind.make()
        module.recompute = "recompute" in case.options
        if case.options & {"unused", "sometimes"}:
            module.spare = nn.Linear(WIDTH, WIDTH)
        if "late" in case.options:
            freeze(module, late_parameters(module), frozen=True)
        size = EXAMPLES_PER_PART * case.num_parts
        num_batches = 2 if case.options & {"accumulate", "no_sync"} else 1
        batches = [[kind.batch(module, size) for _ in range(num_batches)] for _ in range(NUM_STEPS)]
    return module, batches


def late_parameters(module: nn.Module) -> list[str]:
    """Every second parameter that is trained; tables have no gradient to leave out."""
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    return [name for name in trained if not name.startswith("tables.")][::2]


# -- one device ------------------------------------------------------------------------------


class LossOfParts:
    """The mean of the losses of a batch's parts, each with buffers of its own."""

    def __init__(self, module: nn.Module, num_parts: int) -> None:
        self.buffers = [
            {name: buffer.clone() for name, buffer in module.named_buffers()}
            for _ in range(num_parts)
        ]

    def __call__(self, module: nn.Module, batch: Any) -> torch.Tensor:
        losses = []
        parts = split_batch(batch, len(self.buffers))
        for part, buffers in zip(parts, self.buffers, strict=True):
            for name, buffer in buffers.items():
                path, _, key = name.rpartition(".")
                module.get_submodule(path)._buffers[key] = buffer
            losses.append(plain_loss(module, part))
        return torch.stack(losses).mean()


def play_alone(case: Case) -> list[Outcome]:
    """One device, as what each rank should hold in the end."""
    module, batches = build(case)
    first = _changes(module, {})
    late = late_parameters(_thawed(case, module))
    parts = LossOfParts(module, case.num_parts) if _has_own_statistics(case) else None
    run = Run(module, case.options, case.optimizer, late, parts or plain_loss)
    for batch in batches:
        run.step(batch)
    outcome = Outcome(_changes(run.module, first), _buffers(run.module))
    if run.left is not None:
        outcome.left = _changes(run.left, first)
    if parts is None:
        return [outcome] * case.mesh.num_ranks
    return [
        Outcome(outcome.parameters, parts.buffers[case.part_of(rank)], outcome.left)
        for rank in range(case.mesh.num_ranks)
    ]


def _has_own_statistics(case: Case) -> bool:
    return KINDS[case.kind].own_statistics and not case.has_global_batch


def _thawed(case: Case, module: nn.Module) -> nn.Module:
    """A module like it of which nothing is frozen late: for the names."""
    return build(_without(case, "late"))[0] if "late" in case.options else module


def _without(case: Case, option: str) -> Case:
    return Case(
        case.kind, case.mesh, case.doors, case.options - {option}, case.optimizer, case.seed
    )


# -- many ranks ------------------------------------------------------------------------------


def play(case: Case, folder: Path) -> list[Outcome]:
    """What the ranks present hold in the end: all of a simulated world, or this process."""
    run: Run | None = None
    try:
        module, batches = build(case)
        first = _changes(module, {})
        late = late_parameters(_thawed(case, module))
        mesh = case.mesh.make()
        if _has_own_statistics(case):
            _give_each_rank_its_own(module)
        run = Run(open_doors(case, module, mesh), case.options, case.optimizer, late)
        for step in batches:
            if case.has_global_batch:
                run.step([global_batch(batch, case, mesh) for batch in step])
            else:
                run.step(
                    [per_rank(split_batch(batch, case.num_parts), case.part_of) for batch in step]
                )
        if "save" in case.options:
            checkpoint.save({"model": run.module}, folder / "saved")
        return _outcomes(run, first)
    except Exception as error:
        begun = run is not None and run.has_stepped
        refused = isinstance(error, ShardwiseError) and not isinstance(error, FAULTS) and not begun
        text = f"{type(error).__name__}: {error}"
        if refused:
            return [Outcome(refused=text)] * _num_present()
        return [Outcome(failed=f"{text}\n{_own_lines(error)}")] * _num_present()


def _num_present() -> int:
    world = current_world()
    return world.size if world.simulated else 1


def _own_lines(error: Exception) -> str:
    """Where it was raised: the last lines of this package, and the last of all."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "shardwise" in f.filename and "testing/steps" not in f.filename]
    shown = [*own[-3:], *frames[-1:]]
    return "\n".join(f"  {Path(f.filename).name}:{f.lineno} {f.line}" for f in shown)


def _give_each_rank_its_own(module: nn.Module) -> None:
    """Buffers that ranks change differently, in a world that would keep one for all."""
    if current_world().simulated:
        for owner in module.modules():
            for key, buffer in owner._buffers.items():
                if buffer is not None:
                    owner._buffers[key] = LocalTensor.per_rank(_cloned(buffer))


def _cloned(tensor: torch.Tensor) -> Callable[[int], torch.Tensor]:
    return lambda _: tensor.clone()


# -- values ----------------------------------------------------------------------------------


def _outcomes(run: Run, first: Values) -> list[Outcome]:
    made = [Outcome() for _ in range(_num_present())]
    for name, parameter in _parameters(run.module):
        for outcome, value in zip(made, _on_ranks(parameter), strict=True):
            outcome.parameters[name] = value - first[name]
    for name, buffer in run.module.named_buffers():
        for outcome, value in zip(made, _on_ranks(buffer), strict=True):
            outcome.buffers[name] = value
    if run.left is not None:
        for name, parameter in _parameters(run.left):
            for outcome, value in zip(made, _on_ranks(parameter), strict=True):
                outcome.left[name] = value - first[name]
    return made


def _parameters(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All of them, under each name: a tie that was lost shows."""
    yield from module.named_parameters(remove_duplicate=False)


def _changes(module: nn.Module, first: Values) -> Values:
    return {
        name: parameter.detach().clone() - first.get(name, 0)
        for name, parameter in _parameters(module)
    }


def _buffers(module: nn.Module) -> Values:
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def _on_ranks(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The whole value on each rank that is present."""
    value = tensor.detach()
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, LocalTensor):
        return [value.on_rank(rank).clone() for rank in range(_num_present())]
    return [value.clone()] * _num_present()
