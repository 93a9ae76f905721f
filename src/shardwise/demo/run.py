"""run_demo: train on one device, train sharded, compare, and show a short report."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from shardwise.demo import training
from shardwise.demo.data import ClickFile, read_clicks
from shardwise.demo.tasks import EXAMPLES_PER_STEP, MIXED_PLAN, Recommending, Writing
from shardwise.demo.training import (
    Keeping,
    Task,
    TrainingRun,
    largest_difference,
    train_alone,
    train_in_processes,
    train_sharded,
    train_simulated,
)
from shardwise.embedding import Plan
from shardwise.errors import ArgumentError, LayoutError
from shardwise.launch import join
from shardwise.report.html import write_html
from shardwise.report.step import StepReport
from shardwise.report.tables import kinds_table, memory_table

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
    """0 when the sharded model has one device's numbers, else 1.

    Under torchrun, this process is one of the ranks, and the first of them reports.
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
def bar(console: Console, label: str, num_steps: int) -> Iterator[training.Progress]:
    """A bar with loss and examples/s; ten lines where there is no terminal."""
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
        text = f"{known['loss']:.4f}"
        if "best loss" in known:
            text += f"; {known['best loss']:.4f} knowing the truth"
        found["loss on new examples"] = f"{text}; {known['blind loss']:.4f} knowing nothing"
    if "accuracy" in known:
        found["agrees with the planted truth"] = f"{known['accuracy']:.1%} of new examples"
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
