"""Training: the same steps on one device, on simulated ranks and in processes.

Note [A training that can be killed]
A checkpoint has the model, the optimizers, the number of steps done and their losses. Batches are
drawn again from the seed, so a training that continues from a checkpoint takes the same steps as
one that was never stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.checkpoint import Checkpoints, inspect
from shardwise.comm.agreement import agree
from shardwise.core.mesh import grid_of
from shardwise.core.world import current_world
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import ArgumentError
from shardwise.launch import Note, launch
from shardwise.report import Mesh, StepReport, report_step
from shardwise.report.step import optimizer_tensors
from shardwise.simulation.parts import agreed, on_rank
from shardwise.simulation.world import simulate

#: Called after each step with its number, loss and examples per second.
Progress = Callable[[int, float, float], None]


class Task(Protocol):
    """A model, how it is sharded, and its examples. Picklable, for processes."""

    num_steps: int
    title: str

    def model(self) -> nn.Module: ...

    def optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]: ...

    def optimizers_within(self, model: nn.Module) -> list[Any]:
        """Optimizers that are part of the model and update it in backward."""
        ...

    def identity(self) -> dict[str, Any]:
        """Equal for two runs of one training, whatever the number of steps and ranks."""
        ...

    def shard(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module: ...

    def batches(self) -> Iterator[Any]: ...

    def loss(self, model: nn.Module, batch: Any, num_ranks: int) -> torch.Tensor:
        """Each rank's loss; `num_ranks` is 0 on one device."""
        ...

    def num_examples(self, batch: Any) -> int: ...

    def examine(self, model: nn.Module) -> dict[str, Any]:
        """Metrics of a plain, trained model."""
        ...


@dataclass(frozen=True)
class Keeping:
    """Where and how often a training is saved; see Note [A training that can be killed]."""

    folder: str
    #: Every so many steps, and at the end; None saves nothing.
    every: int | None = None
    #: How many checkpoints stay.
    keep: int = 2
    #: Whether to continue from the latest checkpoint, if there is one.
    resume: bool = False


@dataclass
class TrainingRun:
    """The result of a training."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]
    seconds: float
    num_examples: int
    report: StepReport | None = None
    found: Mapping[str, Any] = field(default_factory=dict)
    #: How many steps an earlier run did.
    num_resumed: int = 0


def train_alone(task: Task, progress: Progress) -> TrainingRun:
    """On one device."""
    model = task.model()
    run = _Training(task, model, 0).run(progress)
    run.found = task.examine(model)
    return run


def train_simulated(
    task: Task, num_ranks: int, progress: Progress, keeping: Keeping | None = None
) -> TrainingRun:
    """In one process that plays all ranks."""
    with simulate(num_ranks):
        return train_sharded(task, num_ranks, progress, keeping)


def train_in_processes(
    task: Task, num_ranks: int, progress: Progress, keeping: Keeping | None = None
) -> TrainingRun:
    """In processes that talk through gloo; the report of one step has each rank's own memory."""

    def noted(rank: int, value: tuple[int, float, float]) -> None:
        progress(*value)

    runs = launch(_one_process, num_ranks, task, num_ranks, keeping, on_note=noted)
    run: TrainingRun = runs[0]
    return run


def _one_process(
    note: Note, task: Task, num_ranks: int, keeping: Keeping | None
) -> TrainingRun | None:
    leads = dist.get_rank() == 0
    progress: Progress = (lambda *what: note(what)) if leads else (lambda *what: None)
    run = train_sharded(task, num_ranks, progress, keeping)
    return run if leads else None


def train_sharded(
    task: Task, num_ranks: int, progress: Progress, keeping: Keeping | None = None
) -> TrainingRun:
    """In the current world; every rank calls it and gets the same."""
    mesh = Mesh(("ranks",), (num_ranks,)).make()
    request = f"{task.title}: {task.identity()}, {task.num_steps} steps, {keeping}"
    agree(grid_of(mesh), "the training", request)
    model = task.shard(task.model(), mesh)
    return _Training(task, model, num_ranks, mesh, keeping).run(progress)


class _Training:
    """The training loop; without a mesh, on one device."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        num_ranks: int,
        mesh: DeviceMesh | None = None,
        keeping: Keeping | None = None,
    ) -> None:
        self.task, self.model, self.num_ranks, self.mesh = task, model, num_ranks, mesh
        self.optimizers = task.optimizers(model)
        #: Those of all ranks, and those that this process has not exchanged yet.
        self._losses: list[float] = []
        self._own_losses: list[float] = []
        self.num_done = 0
        self.every = keeping.every if keeping is not None else None
        self.series = Checkpoints(keeping.folder, keep=keeping.keep) if keeping else None
        if keeping is not None and self.series is not None:
            latest = self.series.latest()
            if latest is not None and not keeping.resume:
                raise ArgumentError(
                    f"{keeping.folder} has a checkpoint of step {latest}: go on from it with "
                    "--resume, remove the folder, or choose another with --checkpoints."
                )
            if latest is not None:
                self._resume(self.series, latest)

    def run(self, progress: Progress) -> TrainingRun:
        num_resumed, num_examples = self.num_done, 0
        report, batch = None, None
        begin = time.perf_counter()
        for number, batch in enumerate(self.task.batches()):
            if number < num_resumed:
                continue
            if self.mesh is not None and number == self.task.num_steps - 1:
                report = self._reported_step(batch)
            else:
                self._step(batch)
            self.num_done = number + 1
            num_examples += self.task.num_examples(batch)
            speed = num_examples / (time.perf_counter() - begin)
            progress(self.num_done, self._own_losses[-1], speed)
            if self.every and (
                self.num_done % self.every == 0 or self.num_done == self.task.num_steps
            ):
                self._save()
        seconds = time.perf_counter() - begin
        parameters = {name: whole(p.detach()) for name, p in self.model.named_parameters()}
        losses = self._losses_of_all()
        if report is None and self.mesh is not None:
            report = self._reported_step(batch)  # resumed at the end
        if report is not None and len(each := _from_all(report.memory)) > 1:
            report.memory = [memory[rank] for rank, memory in enumerate(each)]
        return TrainingRun(
            losses, parameters, seconds, num_examples, report, num_resumed=num_resumed
        )

    # -- steps -------------------------------------------------------------------------------

    def _step(self, batch: Any) -> None:
        loss = self.task.loss(self.model, batch, self.num_ranks)
        loss.backward()
        self._update()
        self._own_losses.append(mean_of(loss))

    def _update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def _reported_step(self, batch: Any) -> StepReport:
        assert self.mesh is not None, "only a sharded step is reported"

        def forward() -> torch.Tensor:
            loss = self.task.loss(self.model, batch, self.num_ranks)
            self._own_losses.append(mean_of(loss))
            return loss

        def kept() -> list[torch.Tensor]:
            found = [t for optimizer in self.optimizers for t in optimizer_tensors(optimizer)]
            for optimizer in self.task.optimizers_within(self.model):
                found += [t for states in optimizer.state.values() for t in states.values()]
            return found

        return report_step(self.task.title, self.model, self.mesh, forward, self._update, kept)

    # -- checkpoints -------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        return {
            "task": self.task.identity(),
            "step": self.num_done,
            "losses": self._losses_of_all(),
            "model": self.model,
            "optimizers": [*self.optimizers, *self.task.optimizers_within(self.model)],
        }

    def _save(self) -> None:
        assert self.series is not None, "a training that saves knows where"
        self.series.save(self.num_done, self._state())

    def _resume(self, series: Checkpoints, step: int) -> None:
        found = inspect(series.path(step)).state
        saved = found.get("task") if isinstance(found, dict) else None
        if saved != self.task.identity():
            raise ArgumentError(
                f"{series.path(step)} belongs to another training run: it was saved for {saved}, "
                f"and this is {self.task.identity()}."
            )
        if step > self.task.num_steps:
            raise ArgumentError(
                f"{series.path(step)} has {step} steps behind it, and {self.task.num_steps} were "
                "asked for."
            )
        state = series.load(self._state(), step)
        self.num_done, self._losses = state["step"], state["losses"]

    def _losses_of_all(self) -> list[float]:
        """The mean of the ranks' losses, step by step."""
        each = _from_all(self._own_losses) if self.num_ranks else [self._own_losses]
        self._losses += [sum(of_one) / len(each) for of_one in zip(*each, strict=True)]
        self._own_losses = []
        return list(self._losses)


def _from_all(value: Any) -> list[Any]:
    """The `value` of each process, in the order of ranks."""
    if not dist.is_initialized() or len(current_world().present) == dist.get_world_size():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def mean_of(loss: torch.Tensor) -> float:
    """The mean of the ranks' losses, or the loss of this process."""
    value = loss.detach()
    if isinstance(value, DTensor):
        value = value.full_tensor()
    present = current_world().present if dist.is_initialized() else (0,)
    return float(torch.stack([on_rank(value, rank) for rank in present]).mean())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that a parameter stands for."""
    value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return agreed(value).clone()


def largest_difference(one: TrainingRun, many: TrainingRun) -> tuple[float, str]:
    """The largest difference between the parameters of two runs, and where."""
    found = (0.0, "")
    for name, value in one.parameters.items():
        difference = float((value - many.parameters[name]).abs().max()) if value.numel() else 0.0
        found = max(found, (difference, name))
    return found
