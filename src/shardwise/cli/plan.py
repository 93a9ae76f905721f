"""shardwise plan: the best plan for a file of tables, or for a model's collections."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table as RichTable

from shardwise.cli.console import console
from shardwise.comm.collectives import show_bytes
from shardwise.embedding import EmbeddingBagCollection, Plan
from shardwise.embedding.plan import EXCHANGE_DTYPES
from shardwise.errors import ArgumentError, LayoutError
from shardwise.planner.calibrate import calibrate
from shardwise.planner.costs import check_constants_path
from shardwise.planner.exact import find_highs
from shardwise.planner.explaining import (
    Comparison,
    assumed_lines,
    bars,
    choices,
    compare,
    describe_result,
    to_json,
)
from shardwise.planner.planning import UNLIMITED, PlanResult, make_setting, plan
from shardwise.planner.price import price
from shardwise.planner.solve import Progress
from shardwise.planner.workload import Workload, read_tables, with_sample, workload
from shardwise.report.case import load_target
from shardwise.report.plan_page import write_plan_page
from shardwise.testing.loop import collections_in

_UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def parse_bytes(text: str) -> float:
    """
    >>> parse_bytes("80GB"), parse_bytes("1.5 GiB")
    (80000000000.0, 1610612736.0)
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    unit = found.group(2).upper() if found else None
    if found is None or unit not in _UNITS:
        raise ArgumentError(f"Memory is written 80GB or 512MiB, found {text!r}.")
    return float(found.group(1)) * _UNITS[unit]


def run_plan(
    source: str | None,
    ranks: int,
    hosts: int,
    memory: str | None,
    batch: int | None,
    optimizer: str,
    exchange_dtype: str | None,
    output: str | None,
    sample: str | None,
    seconds: float,
    gap: float,
    constants: str,
    calibrate_to: str | None,
    compared: tuple[str, ...],
    no_solver: bool,
    as_json: bool,
    html: str | None,
) -> None:
    out = console()
    for path in (output, html, calibrate_to):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ArgumentError(f"There is no folder for {path!r}; make it first.")
        if path is not None and Path(path).is_dir():
            raise ArgumentError(f"{path!r} is a folder; name a file in it.")
    if calibrate_to is not None:
        check_constants_path(calibrate_to)
        measured = calibrate()
        measured.save(calibrate_to)
        if source is None or not as_json:
            out.print(f"The constants of this machine are in {calibrate_to}.")
        constants = calibrate_to
        if source is None:
            return
    if source is None:
        raise ArgumentError("Name a file of tables, or a model as pkg.module:factory.")
    if output is not None and Path(output).suffix not in (".toml", ".json"):
        raise ArgumentError(f"A plan file ends in .toml or .json; found {output!r}.")
    work = read_workload(source, batch, sample, ranks)
    rivals = [Plan.of(Path(path)) for path in compared]
    for rival in rivals:
        rival.holders(work.tables, ranks)  # raises if it is a plan of other tables or ranks
    if find_highs() is None and not no_solver:
        print(
            "highspy is not installed: only the built-in search and bound. For HiGHS: "
            "pip install 'shardwise[plan]'",
            file=sys.stderr,
        )
    result = plan(
        work,
        ranks,
        hosts=hosts,
        memory=None if memory is None else parse_bytes(memory),
        optimizer=optimizer,
        exchange_dtype=None if exchange_dtype is None else EXCHANGE_DTYPES[exchange_dtype],
        constants=constants,
        seconds=seconds,
        gap=gap,
        solver=not no_solver,
        tell=None if as_json else _tell,
    )
    others = [compare(result, *pair) for pair in zip(rivals, compared, strict=True)]
    if output is not None:
        result.plan.save(output)
    if html is not None:
        write_plan_page(result, others, html)
    if as_json:
        print(to_json(result, others))
        return
    show(result, others, out)
    for path in (output, html):
        if path is not None:
            out.print(f"Written: {path}")


def _tell(progress: Progress) -> None:
    """A line of progress, only on a terminal."""
    if sys.stderr.isatty():
        text = (
            f"\r{progress.seconds:6.2f} s  {1e3 * progress.cost_s:.4g} ms  gap "
            f"{100 * progress.gap:.2f}%  {progress.by:<16}"
        )
        end = "\n" if progress.by == "done" else ""
        print(text, end=end, file=sys.stderr, flush=True)


def read_workload(
    source: str, batch: int | None, sample: str | None = None, ranks: int = 1
) -> Workload:
    """The tables of a file, or of the collections of a model."""
    if source.endswith((".toml", ".json")):
        if not Path(source).is_file():
            raise ArgumentError(
                f"There is no file of tables {source!r}. Write one, as docs/howto/planning.md "
                "shows, or name a model as pkg.module:factory."
            )
        work = read_tables(source, batch=batch)
    else:
        work = _workload_of_model(source, batch)
    if sample is not None:
        work = with_sample(work, _batches(sample), batch=batch, num_ranks=ranks)
    return work


def _workload_of_model(source: str, batch: int | None) -> Workload:
    made = load_target(source)()
    module = made[0] if isinstance(made, tuple) else made
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(
            f"{source} should return a module, or a module and a batch; found "
            f"{type(module).__name__}."
        )
    collections = list(collections_in(module).values())
    if not collections:
        raise LayoutError(
            f"{source} makes a {type(module).__name__} without a collection of tables, so there is "
            "nothing to plan."
        )
    kinds = {type(inner) for inner in collections}
    if len(kinds) > 1:
        raise LayoutError(
            f"{source} has pooled and unpooled collections; plan them one after the other, each "
            "from a file of its tables."
        )
    tables = [table for inner in collections for table in inner.tables]
    pooled = isinstance(collections[0], EmbeddingBagCollection)
    return workload(tables, batch=batch, pooled=pooled)


def _batches(sample: str) -> Iterable[Any]:
    file, _, name = sample.rpartition(":")
    if file.endswith(".py"):  # a module by its file
        path = Path(os.path.relpath(file))
        if path.parts[0] == os.pardir:
            sys.path.insert(0, str(path.parent.resolve()))
            path = Path(path.name)
        file = ".".join(path.with_suffix("").parts)
    found = load_target(f"{file}:{name}")()
    if not isinstance(found, Iterable):
        raise ArgumentError(f"{sample} should give batches one after another, found {found!r}.")
    return found


def show(result: PlanResult, others: list[Comparison], out: Console) -> None:
    out.print(describe_result(result), markup=False)
    out.print()
    out.print(bars(result.price, result.memory), markup=False)
    table = RichTable(title="Tables that cost most", title_justify="left")
    for name in ("table", "chosen", "ranks", "why", "next best"):
        table.add_column(name, overflow="fold")
    table.add_column("cost with it", justify="right")
    for each in choices(result, 12):
        ranks = ", ".join(map(str, each.ranks[:6])) + (" …" if len(each.ranks) > 6 else "")
        cost = "" if each.next_cost_s is None else f"{1e3 * each.next_cost_s:.4g} ms"
        table.add_row(each.table, each.label, ranks or "all", each.why, each.next_label or "", cost)
    out.print(table)
    for other in others:
        fits = "" if other.fits else "; it does not fit into memory"
        out.print(
            f"{other.name}: {1e3 * other.price.step_s:.4g} ms, {other.ratio(result):.2f} of this "
            f"plan{fits}",
            markup=False,
        )


def run_price(
    target: str,
    plan_file: str | None,
    ranks: int,
    hosts: int,
    batch: int | None,
    optimizer: str,
    constants: str,
    as_json: bool,
) -> None:
    """Price a step of a plan of tables without running it."""
    if plan_file is None:
        raise ArgumentError("--ranks prices a plan of tables: give it with --plan.")
    work = read_workload(target, batch)
    setting = make_setting(ranks, hosts, constants, optimizer, pooled=work.pooled)
    priced = price(Plan.load(plan_file), work, setting)
    out = console()
    if as_json:
        content = {
            "step_s": priced.step_s,
            "seconds": priced.seconds.tolist(),
            "memory": priced.memory.tolist(),
            "sent": priced.sent.tolist(),
        }
        print(json.dumps(content))
        return
    out.print(
        f"{len(work.uses)} tables on {ranks} ranks: {1e3 * priced.step_s:.4g} ms a step by the "
        f"constants of {setting.constants.name}; a rank holds {show_bytes(priced.memory.min())} to "
        f"{show_bytes(priced.memory.max())} and sends {show_bytes(priced.sent.min())} to "
        f"{show_bytes(priced.sent.max())}",
        markup=False,
    )
    out.print(bars(priced, UNLIMITED), markup=False)
    for line in assumed_lines(work):
        out.print(line, markup=False)
