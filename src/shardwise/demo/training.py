"""Training: the same steps on one device, on simulated ranks and in processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.local_tensor import LocalTensor
from shardwise.comm.simulate import simulate
from shardwise.dtensor.tensor import DTensor
from shardwise.launch import Note, launch
from shardwise.report import Mesh, StepReport, report_step

#: Called after each step with its number, loss and examples per second.
Progress = Callable[[int, float, float], None]


class Task(Protocol):
    """A model, how it is sharded, and its examples. Importable, so that processes can have it."""

    num_steps: int
    title: str

    def model(self) -> nn.Module: ...

    def optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]: ...

    def kept(self, model: nn.Module) -> list[torch.Tensor]:
        """What optimizers that are part of the model keep."""
        ...

    def shard(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module: ...

    def batches(self) -> Iterator[Any]: ...

    def loss(self, model: nn.Module, batch: Any, num_ranks: int) -> torch.Tensor:
        """Each rank's loss; `num_ranks` is 0 on one device."""
        ...

    def num_examples(self, batch: Any) -> int: ...

    def examine(self, model: nn.Module) -> dict[str, Any]:
        """What a model that was trained on one device, or gathered, knows."""
        ...


@dataclass
class Run:
    """What a training left behind."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]
    seconds: float
    num_examples: int
    report: StepReport | None = None
    found: Mapping[str, Any] = field(default_factory=dict)


def train_alone(task: Task, progress: Progress) -> Run:
    """On one device."""
    model = task.model()
    run = _train(task, model, 0, progress)
    run.found = task.examine(model)
    return run


def train_simulated(task: Task, num_ranks: int, progress: Progress) -> Run:
    """In one process that plays all ranks."""
    with simulate(num_ranks):
        return _train_sharded(task, num_ranks, progress)


def train_in_processes(task: Task, num_ranks: int, progress: Progress) -> Run:
    """In processes that talk through gloo; the report of one step has each rank's own memory."""

    def noted(rank: int, value: tuple[int, float, float]) -> None:
        if rank == 0:
            progress(*value)

    runs = launch(_one_process, num_ranks, task, num_ranks, on_note=noted)
    run: Run = runs[0]
    run.losses = [sum(each) / num_ranks for each in zip(*(r.losses for r in runs), strict=True)]
    if run.report is not None:
        run.report.memory = [r.report.memory[rank] for rank, r in enumerate(runs)]
    return run


def _one_process(note: Note, task: Task, num_ranks: int) -> Run:
    return _train_sharded(task, num_ranks, lambda *what: note(what))


def _train_sharded(task: Task, num_ranks: int, progress: Progress) -> Run:
    mesh = Mesh(("ranks",), (num_ranks,)).make()
    model = task.shard(task.model(), mesh)
    return _train(task, model, num_ranks, progress, mesh)


def _train(
    task: Task,
    model: nn.Module,
    num_ranks: int,
    progress: Progress,
    mesh: DeviceMesh | None = None,
) -> Run:
    optimizers = task.optimizers(model)
    losses: list[float] = []
    num_examples = 0
    report: StepReport | None = None
    begin = time.perf_counter()

    def update() -> None:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    for number, batch in enumerate(task.batches()):
        if mesh is not None and number == task.num_steps - 1:
            taken: list[float] = []

            def forward(batch: Any = batch, taken: list[float] = taken) -> torch.Tensor:
                loss = task.loss(model, batch, num_ranks)
                taken.append(mean_of(loss))
                return loss

            def kept() -> list[torch.Tensor]:
                states = [_states(optimizer) for optimizer in optimizers]
                return [*task.kept(model), *(t for state in states for t in state)]

            report = report_step(task.title, model, mesh, forward, update, kept)
            losses += taken
        else:
            loss = task.loss(model, batch, num_ranks)
            loss.backward()
            update()
            losses.append(mean_of(loss))
        num_examples += task.num_examples(batch)
        progress(number + 1, losses[-1], num_examples / (time.perf_counter() - begin))
    seconds = time.perf_counter() - begin
    parameters = {name: whole(p.detach()) for name, p in model.named_parameters()}
    return Run(losses, parameters, seconds, num_examples, report)


def _states(optimizer: torch.optim.Optimizer) -> Sequence[torch.Tensor]:
    from shardwise.report.memory import optimizer_tensors

    return optimizer_tensors(optimizer)


def mean_of(loss: torch.Tensor) -> float:
    """The mean of the ranks' losses, or the loss of this process."""
    value = loss.detach()
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, LocalTensor):
        return float(torch.stack([value.on_rank(rank) for rank in value.ranks]).mean())
    return float(value)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that a parameter stands for."""
    value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return value.agreed().clone() if isinstance(value, LocalTensor) else value.clone()


def largest_difference(one: Run, many: Run) -> tuple[float, str]:
    """Between the parameters of two runs, and in which."""
    found = (0.0, "")
    for name, value in one.parameters.items():
        difference = float((value - many.parameters[name]).abs().max()) if value.numel() else 0.0
        found = max(found, (difference, name))
    return found
