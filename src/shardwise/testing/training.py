"""A training run, on one device and on the ranks of the current world.

Note [What one device does]
It trains on the whole batch; or, with `by_parts`, on the mean of the losses of the ranks' batches,
each with its own buffers, and a rank's buffers are compared with those of its batch. That is for
batch norm, whose statistics are those of a rank's own batch, as with torch's DDP, and for a loss
that may not be a mean over examples.

The change of each parameter since the start is compared, so a step that is too short shows even
where the parameter is large.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import checkpoint
from shardwise.core.world import current_world
from shardwise.dtensor.tensor import DTensor
from shardwise.embedding import EmbeddingBagCollection, EmbeddingCollection
from shardwise.errors import (
    CollectiveError,
    LaunchError,
    RankMismatchError,
    ShardwiseError,
    WorldError,
)
from shardwise.simulation.parts import on_rank
from shardwise.simulation.ranks import on_every_rank
from shardwise.testing.batches import per_rank, split_batch
from shardwise.testing.compare import Values
from shardwise.testing.loop import Loss, StepRun, freeze, plain_loss, updates_together
from shardwise.testing.mesh import Mesh

NUM_STEPS = 3

#: Errors that say that something went wrong; other errors of shardwise are refusals.
FAULTS = (RankMismatchError, CollectiveError, LaunchError, WorldError)
#: The error allowed, relative to the change of a parameter: in double precision, and under autocast
#: on top of what bfloat16 changes on one device.
BOUND = 1e-8
AUTOCAST_BOUND = 0.05

Steps = list[list[Any]]


@dataclass(frozen=True)
class Training:
    """What is trained and how.

    `build` makes the module and the batches of each step, the same each time; `shard` shards the
    module. A batch is split along `data_axes`, unless `lay_out` makes one DTensor of it.
    """

    mesh: Mesh
    data_axes: tuple[str, ...]
    options: frozenset[str]
    optimizer: str
    build: Callable[[], tuple[nn.Module, Steps]]
    shard: Callable[[nn.Module, DeviceMesh], nn.Module]
    lay_out: Callable[[Any, DeviceMesh], Any] | None = None
    loss: Loss = plain_loss
    by_parts: bool = False
    bound: float = BOUND

    @property
    def num_parts(self) -> int:
        return self.mesh.num_parts(self.data_axes)

    def part_of(self, rank: int) -> int:
        return self.mesh.part_of(rank, self.data_axes)

    def begin(self) -> tuple[nn.Module, Steps, list[str]]:
        """The plain module, the batches, and which parameters are frozen for a time."""
        module, steps = self.build()
        late = late_parameters(module)
        if "late" in self.options:
            freeze(module, late, frozen=True)
        return module, steps, late


@dataclass
class TrainingOutcome:
    """What a rank holds in the end; or the text of a refusal or a failure."""

    parameters: Values = field(default_factory=dict)
    buffers: Values = field(default_factory=dict)
    #: Parameters of the module that was copied.
    left: Values = field(default_factory=dict)
    refused: str = ""
    failed: str = ""


def late_parameters(module: nn.Module) -> list[str]:
    """Every second trained parameter; those of tables may have no gradient."""
    collections = [
        name
        for name, inner in module.named_modules()
        if isinstance(inner, (EmbeddingBagCollection, EmbeddingCollection))
    ]
    return [
        name
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and not name.startswith(tuple(f"{c}." for c in collections))
    ][::2]


# -- one device ------------------------------------------------------------------------------


class LossOfParts:
    """The mean of the losses of a batch's parts, each with its own buffers."""

    def __init__(self, loss: Loss, module: nn.Module, num_parts: int) -> None:
        self.loss = loss
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
            losses.append(self.loss(module, part))
        return torch.stack(losses).mean()


def play_alone(training: Training) -> list[TrainingOutcome]:
    """Train on one device: what each rank should hold in the end."""
    module, steps, late = training.begin()
    first = _changes(module, {})
    loss = training.loss
    parts = LossOfParts(loss, module, training.num_parts) if training.by_parts else None
    run = StepRun(module, training.options, training.optimizer, late, parts or loss)
    run.around_backward = updates_together
    for batches in steps:
        run.step(batches)
    outcome = TrainingOutcome(_changes(run.module, first), _buffers(run.module))
    if run.left is not None:
        outcome.left = _changes(run.left, first)
    ranks = range(training.mesh.num_ranks)
    if parts is None:
        return [outcome for _ in ranks]
    return [
        TrainingOutcome(outcome.parameters, parts.buffers[training.part_of(rank)], outcome.left)
        for rank in ranks
    ]


# -- many ranks ------------------------------------------------------------------------------


def play(training: Training, folder: Path) -> list[TrainingOutcome]:
    """Train on ranks: what those of a simulated world, or of this process, hold in the end."""
    run: StepRun | None = None
    try:
        module, steps, late = training.begin()
        first = _changes(module, {})
        mesh = training.mesh.make()
        if training.by_parts:
            _give_each_rank_its_own(module)
        sharded = training.shard(module, mesh)
        run = StepRun(sharded, training.options, training.optimizer, late, training.loss)
        for batches in steps:
            run.step([_laid_out(training, batch, mesh) for batch in batches])
        if "save" in training.options:
            checkpoint.save({"model": run.module}, folder / "saved")
        return _outcomes(run, first)
    except Exception as error:
        begun = run is not None and run.has_stepped
        refused = isinstance(error, ShardwiseError) and not isinstance(error, FAULTS) and not begun
        text = f"{type(error).__name__}: {error}"
        if refused:
            return [TrainingOutcome(refused=text)] * _num_present()
        return [TrainingOutcome(failed=f"{text}\n{_own_lines(error)}")] * _num_present()


def _laid_out(training: Training, batch: Any, mesh: DeviceMesh) -> Any:
    if training.lay_out is not None:
        return training.lay_out(batch, mesh)
    return per_rank(split_batch(batch, training.num_parts), training.part_of)


def _num_present() -> int:
    return len(current_world().present)


def _own_lines(error: Exception) -> str:
    """Where it was raised: the last frames of this package, and the last of all."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "shardwise" in f.filename and "testing/steps" not in f.filename]
    shown = [*own[-3:], *frames[-1:]]
    return "\n".join(f"  {Path(f.filename).name}:{f.lineno} {f.line}" for f in shown)


def _give_each_rank_its_own(module: nn.Module) -> None:
    """Give each simulated rank its own buffers, since ranks update them differently."""
    for owner in module.modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[key] = on_every_rank(_cloned(buffer))


def _cloned(tensor: torch.Tensor) -> Callable[[int], torch.Tensor]:
    return lambda _: tensor.clone()


# -- values ----------------------------------------------------------------------------------


def _outcomes(run: StepRun, first: Values) -> list[TrainingOutcome]:
    made = [TrainingOutcome() for _ in range(_num_present())]
    for name, parameter in _parameters(run.module):
        for outcome, value in zip(made, _on_ranks(parameter), strict=True):
            outcome.parameters[name] = value - first.get(name, 0)
    for name, buffer in run.module.named_buffers():
        for outcome, value in zip(made, _on_ranks(buffer), strict=True):
            outcome.buffers[name] = value
    if run.left is not None:
        for name, parameter in _parameters(run.left):
            for outcome, value in zip(made, _on_ranks(parameter), strict=True):
                outcome.left[name] = value - first[name]
    return made


def _parameters(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All of them, under each name: a lost tie shows."""
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
    return [on_rank(value, rank).clone() for rank in current_world().present]
