"""run_demo: train on one device, train sharded, compare, report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from shardwise.demo.criteo import ClickFile, read_clicks
from shardwise.demo.language import Writing
from shardwise.demo.recommending import MIXED_PLAN, Recommending
from shardwise.demo.show import BOUND, bar, facts, show
from shardwise.demo.training import (
    Task,
    largest_difference,
    train_alone,
    train_in_processes,
    train_simulated,
)
from shardwise.embedding import Plan
from shardwise.errors import ArgumentError, LayoutError
from shardwise.report.html import write_html

STEPS = {"dlrm": 240, "gpt": 150}
MODELS = tuple(STEPS)
SHOWN_LINES = 5


@dataclass(frozen=True)
class Options:
    """What may be asked of the demonstration."""

    model: str = "dlrm"
    ranks: int = 4
    processes: int | None = None
    steps: int | None = None
    seed: int = 0
    plan: str | None = None
    data: str | None = None
    report: str = "report.html"


def run_demo(options: Options, console: Console) -> int:
    """0 when the sharded model has one device's numbers, else 1."""
    task = _task(options, console)
    num_ranks = options.processes or options.ranks
    world = f"{num_ranks} gloo processes" if options.processes else f"{num_ranks} simulated ranks"
    torch.set_num_threads(1)  # the model is small: more threads wait for each other
    with bar(console, "one device", task.num_steps) as progress:
        one = train_alone(task, progress)
    with bar(console, world, task.num_steps) as progress:
        train = train_in_processes if options.processes else train_simulated
        many = train(task, num_ranks, progress)
    assert many.report is not None, "a sharded training reports its last step"
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
    data = _read(options.data, console) if options.data is not None else None
    plan = MIXED_PLAN if options.plan is None else Plan.load(options.plan)
    if data is not None and options.plan is None:
        plan = _plan_for(data)
    if options.plan is None and data is None and num_ranks < 2:
        plan = Plan.of("row_wise")  # the mixed plan names two ranks
    task = Recommending(num_steps, options.seed, plan, data)
    if task.size % num_ranks:
        raise LayoutError(f"{task.size} examples per step do not divide among {num_ranks} ranks.")
    plan.cuts(task.tables(), num_ranks)  # or the mistake would be found after a training
    return task


def _plan_for(data: ClickFile) -> Plan:
    """Large tables by rows, small ones whole: on one rank, or on all where they are tiny."""
    entries = {}
    for table in data.tables():
        rows = table.num_embeddings
        kind = "row_wise" if rows > 5000 else "table_wise" if rows > 100 else "data_parallel"
        entries[table.name] = kind
    return Plan(entries)


def _read(path: str, console: Console) -> ClickFile:
    data = read_clicks(path)
    console.print(f"{path}: {len(data):,} examples.", highlight=False)
    if data.bad:
        console.print(f"{len(data.bad):,} bad lines were left out:", highlight=False)
        for number, why in list(data.bad.items())[:SHOWN_LINES]:
            console.print(f"  line {number}: {why}", highlight=False, markup=False)
        if len(data.bad) > SHOWN_LINES:
            console.print(f"  and {len(data.bad) - SHOWN_LINES:,} more", highlight=False)
    return data
