"""run_demo: train on one device, train sharded in any world, compare, show a short report."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.checkpoint import Checkpoints, inspect
from shardwise.comm.agreement import agree
from shardwise.core.mesh import grid_of
from shardwise.core.world import current_world
from shardwise.demo.tasks import (
    EXAMPLES_PER_STEP,
    MIXED_PLAN,
    ClickFile,
    Recommending,
    Task,
    Writing,
    read_clicks,
)
from shardwise.embedding import Plan
from shardwise.errors import ArgumentError, LayoutError
from shardwise.launch import Note, join, launch
from shardwise.report import Mesh, report_step
from shardwise.report.html import write_html
from shardwise.report.parity import whole
from shardwise.report.step import StepReport, optimizer_tensors
from shardwise.report.tables import kinds_table, memory_table
from shardwise.simulation.world import simulate
from shardwise.testing.training import on_ranks

STEPS = {"dlrm": 240, "gpt": 150}
SHOWN_LINES = 5


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    model: str = "dlrm"
    ranks: int = 4
    processes: int | None = None
    steps: int | None = None
    seed: int = 0
    plan: str | None = None
    data: str | None = None
    report: str = "report.html"
    checkpoint_every: int | None = None
    checkpoints: str = "checkpoints"
    keep: int = 2
    resume: bool = False


def run_demo(options: Options, console: Console) -> int:
    """Return 0 if the sharded model has one device's numbers, else 1.

    Under torchrun, this process is one of the ranks, and the first rank reports.
    """
    torch.set_num_threads(1)  # more threads are slower on a small model
    joined = dist.is_torchelastic_launched()
    if joined:
        options = _joined(options)
        console = console if dist.get_rank() == 0 else Console(quiet=True)
    try:
        return _run(options, console, joined)
    finally:
        if joined:
            dist.destroy_process_group()


def _joined(options: Options) -> Options:
    num_ranks = int(os.environ["WORLD_SIZE"])
    if options.processes not in (None, num_ranks):
        raise ArgumentError(
            f"--processes {options.processes} was asked for under torchrun, which has started "
            f"{num_ranks}. Leave --processes out: torchrun's number counts."
        )
    join("gloo")
    return replace(options, processes=num_ranks)


def _run(options: Options, console: Console, joined: bool) -> int:
    task = _task(options, console)
    num_ranks = options.processes or options.ranks
    world = f"{num_ranks} gloo processes" if options.processes else f"{num_ranks} simulated ranks"
    keeping = _keeping(options)
    train: Callable[..., TrainingRun] = train_in_processes if options.processes else train_simulated
    if joined:
        train = train_sharded
    with bar(console, world, task.num_steps) as progress:
        many = train(task, num_ranks, progress, keeping)
    if joined and dist.get_rank():
        return 0
    with bar(console, "one device", task.num_steps) as progress:
        one = train_alone(task, progress)
    return _report(one, many, world, options, console)


def _keeping(options: Options) -> Keeping | None:
    if options.checkpoint_every is None and not options.resume:
        return None
    return Keeping(options.checkpoints, options.checkpoint_every, options.keep, options.resume)


def _report(
    one: TrainingRun, many: TrainingRun, world: str, options: Options, console: Console
) -> int:
    assert many.report is not None, "a sharded training reports a step"
    # All lines are the demo's own: not worth showing.
    many.report.collectives = [replace(each, line=None) for each in many.report.collectives]
    if many.num_resumed:
        world += f", the first {many.num_resumed} steps in an earlier run"
    many.report.facts = facts(one, many, world)
    show(console, many.report)
    write_html(many.report, options.report)
    console.print(f"The whole report is in {options.report}.", highlight=False)
    difference, _ = largest_difference(one, many)
    if not difference <= BOUND:
        console.print(f"The numbers are not one device's: they differ by {difference:.1e}.")
        return 1
    return 0


def _task(options: Options, console: Console) -> Task:
    num_ranks = options.processes or options.ranks
    num_steps = options.steps if options.steps is not None else STEPS[options.model]
    if num_steps < 1 or num_ranks < 1:
        raise ArgumentError(f"Steps and ranks are at least 1, found {num_steps} and {num_ranks}.")
    if not Path(options.report).resolve().parent.is_dir():
        raise ArgumentError(f"There is no folder for the report {options.report!r}.")
    if options.plan is not None and not Path(options.plan).is_file():
        raise ArgumentError(f"There is no plan file {options.plan!r}.")
    if options.model == "gpt":
        if options.data is not None:
            raise ArgumentError("--data is for the recommender; gpt reads Python's own text.")
        return Writing(num_steps, options.seed, options.plan)
    data = None
    if options.data is not None:
        data = _read(options.data, num_steps * EXAMPLES_PER_STEP, console)
    plan = MIXED_PLAN if options.plan is None else Plan.load(options.plan)
    if data is not None and options.plan is None:
        plan = _plan_for(data)
    if options.plan is None and data is None and num_ranks < 2:
        plan = Plan.of("row_wise")  # the mixed plan names two ranks
    task = Recommending(num_steps, options.seed, plan, data)
    if task.size % num_ranks:
        raise LayoutError(f"{task.size} examples per step do not divide among {num_ranks} ranks.")
    plan.cuts(task.tables(), num_ranks)  # raises before the training starts
    return task


def _plan_for(data: ClickFile) -> Plan:
    """Large tables by rows, small ones on one rank, tiny ones on all."""
    entries = {}
    for table in data.tables():
        rows = table.num_embeddings
        kind = "row_wise" if rows > 5000 else "table_wise" if rows > 100 else "data_parallel"
        entries[table.name] = kind
    return Plan(entries)


def _read(path: str, most: int, console: Console) -> ClickFile:
    """As many examples as the training takes, if the file has them."""
    data = read_clicks(path, most)
    console.print(f"{path}: {len(data):,} examples.", highlight=False)
    if data.bad:
        console.print(f"{data.num_bad:,} bad lines were left out:", highlight=False)
        for number, why in list(data.bad.items())[:SHOWN_LINES]:
            console.print(f"  line {number}: {why}", highlight=False, markup=False)
        if data.num_bad > SHOWN_LINES:
            console.print(f"  and {data.num_bad - SHOWN_LINES:,} more", highlight=False)
    return data


# -- what the demo shows ---------------------------------------------------------------------


#: Differences beyond this are not rounding.
BOUND = 1e-4


@contextlib.contextmanager
def bar(console: Console, label: str, num_steps: int) -> Iterator[StepDone]:
    """A bar with loss and examples/s; ten lines if the output is not a terminal."""
    if not console.is_terminal:
        every = max(1, num_steps // 10)

        def line(step: int, loss: float, speed: float) -> None:
            if step % every == 0 or step == num_steps:
                console.print(
                    f"{label}: step {step}/{num_steps}, loss {loss:.4f}, {speed:,.0f} examples/s",
                    highlight=False,
                )

        yield line
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TextColumn("{task.fields[speed]:,.0f} examples/s"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        shown = progress.add_task(label, total=num_steps, loss=float("nan"), speed=0.0)
        yield lambda step, loss, speed: progress.update(
            shown, completed=step, loss=loss, speed=speed
        )


def facts(one: TrainingRun, many: TrainingRun, world: str) -> dict[str, str]:
    """The figures of a run, as text."""
    found = {
        "training": f"{len(many.losses)} steps, {many.num_examples:,} examples, {world}",
        "loss on one device": f"{one.losses[0]:.6f} to {one.losses[-1]:.6f}",
        "loss when sharded": f"{many.losses[0]:.6f} to {many.losses[-1]:.6f}",
    }
    known = one.found
    if "loss" in known:
        others = f"frequencies alone {known['blind loss']:.4f}"
        if "best loss" in known:
            others = f"true probabilities {known['best loss']:.4f}, {others}"
        found["loss on new examples"] = f"{known['loss']:.4f} ({others})"
    if "accuracy" in known:
        found["on the true side of 50%"] = f"{known['accuracy']:.1%} of new examples"
    if "next characters right" in known:
        found["next characters right"] = f"{known['next characters right']:.1%} of new text"
    difference, name = largest_difference(one, many)
    found["largest difference"] = f"{difference:.1e}" + (f", in {name}" if name else "")
    seconds = f"{one.seconds:.1f} s on one device, {many.seconds:.1f} s sharded"
    return found | {"time": seconds}


def show(console: Console, report: StepReport) -> None:
    """The short report."""
    console.print()
    lines = Table.grid(padding=(0, 2))
    for name, text in report.facts.items():
        lines.add_row(Text(name, style="bold"), Text(text))
    console.print(lines)
    console.print()
    console.print(memory_table(report))
    console.print(kinds_table(report))


# -- training ------------------------------------------------------------------------------------
# Note [A training that can be killed]
# A checkpoint has the model, the optimizers, the number of steps done and their losses. Batches are
# drawn again from the seed, so a training run that continues from a checkpoint takes the same steps
# as one that was never stopped.


#: Called after each step with its number, loss and examples per second.
StepDone = Callable[[int, float, float], None]


@dataclass(frozen=True)
class Keeping:
    """Where and how often a training run is saved; see Note [A training that can be killed]."""

    folder: str
    #: Save every N steps, and at the end; None saves nothing.
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


def train_alone(task: Task, progress: StepDone) -> TrainingRun:
    """On one device."""
    model = task.model()
    run = _Training(task, model, 0).run(progress)
    run.found = task.examine(model)
    return run


def train_simulated(
    task: Task, num_ranks: int, progress: StepDone, keeping: Keeping | None = None
) -> TrainingRun:
    """In one process that plays all ranks."""
    with simulate(num_ranks):
        return train_sharded(task, num_ranks, progress, keeping)


def train_in_processes(
    task: Task, num_ranks: int, progress: StepDone, keeping: Keeping | None = None
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
    progress: StepDone = (lambda *what: note(what)) if leads else (lambda *what: None)
    run = train_sharded(task, num_ranks, progress, keeping)
    return run if leads else None


def train_sharded(
    task: Task, num_ranks: int, progress: StepDone, keeping: Keeping | None = None
) -> TrainingRun:
    """Train in the current world; every rank calls this and gets the same result."""
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

    def run(self, progress: StepDone) -> TrainingRun:
        num_resumed, num_examples = self.num_done, 0
        report, batch = None, None
        batches: Iterator[Any] = self.task.batches()
        begin = time.perf_counter()
        for number, batch in enumerate(batches):
            if number < num_resumed:
                continue
            if self.mesh is not None and number == self.task.num_steps - 1:
                report = self._reported_step(batch)
            else:
                self._step(batch)
            self.num_done = number + 1
            num_examples += len(batch)
            speed = num_examples / (time.perf_counter() - begin)
            progress(self.num_done, self._own_losses[-1], speed)
            if self.every and (
                self.num_done % self.every == 0 or self.num_done == self.task.num_steps
            ):
                self._save()
        seconds = time.perf_counter() - begin
        parameters = {name: whole(p) for name, p in self.model.named_parameters()}
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
    present = current_world().present if dist.is_initialized() else (0,)
    return float(torch.stack(on_ranks(loss, present)).mean())


def largest_difference(one: TrainingRun, many: TrainingRun) -> tuple[float, str]:
    """The largest difference between the parameters of two runs, and where; NaN is the largest."""
    found = [
        (float((value - many.parameters[name]).abs().max()), name)
        for name, value in one.parameters.items()
        if value.numel()
    ]
    return max(found, key=lambda each: (math.isnan(each[0]), each), default=(0.0, ""))
