"""The planner against torchrec's, under torchrec's own costs; and on large sets of tables.

    python -m benchmarks.planner --peer-python /path/to/python-with-torchrec [--keep FOLDER]

torchrec plans each of thirty tasks in its own process and writes its search space with its own cost
estimates to a file. This planner gets the same options and costs, and a tenth of torchrec's CPU
seconds, or 30 where that is less. Without --peer-python that part is skipped with a message. CPU
seconds are of one thread; torchrec's results in --keep are reused.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner_tasks import large_task, tasks
from shardwise.planner.problem import ANY, BLOCK, HOST, Option, Problem
from shardwise.planner.solve import solve

GAP = 0.0099
LEAST_S = 30.0


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", help="a python in which torchrec is installed")
    parser.add_argument("--keep", help="a folder for what the peer found")
    parser.add_argument("--tasks", type=int, nargs="*", help="numbers of tasks; all without")
    parser.add_argument("--seconds", type=float, help="CPU seconds per task instead of a tenth")
    parser.add_argument("--no-large", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.keep or scratch)
        folder.mkdir(exist_ok=True)
        if options.peer_python is None and not list(folder.glob("*.json")):
            print("no --peer-python: the comparison with torchrec is left out")
        else:
            compare(folder, options)
    if not options.no_large:
        large()


# -- the peer's problems ---------------------------------------------------------------------


def peer_result(number: int, folder: Path, python: str | None) -> dict[str, Any] | None:
    file = folder / f"{number}.json"
    if not file.is_file() and python is not None:
        program = Path(__file__).with_name("planner_peer.py")
        ran = subprocess.run(
            [python, str(program), str(number), str(file)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if ran.returncode:
            print(f"task {number}: the peer failed: {ran.stderr.strip().splitlines()[-1:]}")
    return json.loads(file.read_text()) if file.is_file() else None


def peer_problem(found: dict[str, Any]) -> Problem:
    """The peer's search space: the same options, costs and memory."""
    per_host, num = found["ranks_per_host"], found["ranks"]
    names: list[str] = []
    options: dict[str, list[Option]] = {}
    for each in found["options"]:
        if each["table"] not in options:
            options[each["table"]] = []
            names.append(each["table"])
        shards = np.asarray(each["shards"], float)
        label = f"{each['kind']}/{each['kernel']}"
        if each["by"] == "uniform":
            rows = shards[0] if (shards == shards[0]).all() else shards
            made = Option(label, everywhere=rows)
        elif each["by"] == "device":
            made = Option(label, shards=shards, scope=ANY, distinct=False)
        elif each["by"] == "host" and each["kind"] == "table_column_wise":
            made = Option(label, shards=shards, scope=HOST, distinct=False)
        else:
            made = Option(label, shards=shards, scope=BLOCK)
        options[each["table"]].append(simplified(made, per_host, num // per_host))
    kept = [[options[n][i] for i in undominated(options[n])] for n in names]
    return Problem(names, kept, num, np.asarray(found["capacity"], float), per_host)


def simplified(option: Option, ranks_per_host: int, num_hosts: int) -> Option:
    """The same option without redundant constraints."""
    if option.shards is None:
        return option
    if option.scope == HOST and (len(option.shards) == 1 or num_hosts == 1):
        return replace(option, scope=ANY)
    if option.scope == BLOCK and len(option.shards) == ranks_per_host * num_hosts:
        everywhere = 0.0 if option.everywhere is None else option.everywhere
        rows = option.shards + everywhere
        if (option.shards == option.shards[0]).all() and rows.ndim == 2:
            rows = rows[0] if (rows == rows[0]).all() else rows
        return replace(option, everywhere=rows, shards=None)
    return option


def undominated(options: Sequence[Option]) -> list[int]:
    """The options that no other one with the same number of shards dominates."""
    kept: list[int] = []
    for number, option in enumerate(options):
        others = [i for i in kept if _is_as_good(options[i], option)]
        if others:
            continue
        kept = [i for i in kept if not _is_as_good(option, options[i])]
        kept.append(number)
    return kept


def _is_as_good(one: Option, other: Option) -> bool:
    if one.num_shards != other.num_shards or (one.everywhere is None) != (other.everywhere is None):
        return False
    if one.shards is not None and other.shards is not None:
        free = one.scope == other.scope or (one.scope == ANY and other.scope == HOST)
        if not free or (one.distinct and not other.distinct and one.num_shards > 1):
            return False
        if not (one.shards <= other.shards).all():
            return False
    if one.everywhere is not None and other.everywhere is not None:
        return bool((one.everywhere <= other.everywhere).all())
    return True


def compare(folder: Path, options: argparse.Namespace) -> None:
    print(
        f"{'tables x ranks':<24} {'torchrec':>9} {'CPU s':>7} {'ours':>9} {'CPU s':>7} "
        f"{'ratio':>6} {'gap':>7} {'of its time':>11}"
    )
    ratios, times, gaps, total = [], [], [], 0.0
    for number, task in enumerate(tasks()):
        if options.tasks is not None and number not in options.tasks:
            continue
        peer = peer_result(number, folder, options.peer_python)
        if peer is None or peer["cost"] is None:
            said = "the peer found no plan" if peer else "no result of the peer"
            print(f"{task.name:<24} {said}")
            continue
        start = time.process_time()
        problem = peer_problem(peer)
        seconds = options.seconds or max(LEAST_S, 0.085 * peer["cpu_s"])
        found = solve(problem, gap=GAP, seconds=seconds)
        cpu_s = time.process_time() - start
        assert found.assignment.fits(), "a plan within memory"
        ratios.append(found.cost_s / peer["cost"])
        times.append(cpu_s / peer["cpu_s"])
        gaps.append(found.gap)
        total += cpu_s
        print(
            f"{task.name:<24} {peer['cost']:9.4f} {peer['cpu_s']:7.1f} {found.cost_s:9.4f} "
            f"{cpu_s:7.2f} {ratios[-1]:6.3f} {found.gap:7.2%} {times[-1]:11.3f}",
            flush=True,
        )
    if ratios:
        small, quick = sum(gap <= 0.01 for gap in gaps), sum(each <= 0.1 for each in times)
        print(
            f"{len(ratios)} tasks: geometric mean {_mean(ratios):.3f} of torchrec's cost and "
            f"{_mean(times):.3f} of its CPU seconds; gap at most 1% in {small}, largest "
            f"{max(gaps):.1%}, mean {sum(gaps) / len(gaps):.1%}; {total:.0f} CPU seconds, at most "
            f"a tenth of torchrec's in {quick}"
        )


def _mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


# -- large sets of tables --------------------------------------------------------------------


def large() -> None:
    from shardwise.lookup.tiling import Table
    from shardwise.planner import plan, workload

    for number, ranks, hosts, memory in ((856, 128, 16, 40e9), (10_000, 1_000, 125, 40e9)):
        drawn = large_task(number, ranks).tables
        tables = [Table(t.name, t.rows, t.dim) for t in drawn]
        start = time.process_time()
        work = workload(
            tables,
            batch=65_536,
            ids_per_bag={t.name: t.ids_per_bag for t in drawn},
            repeated=0.855,
        )
        found = plan(work, ranks, hosts=hosts, memory=memory, gap=0.01)
        cpu_s = time.process_time() - start
        print(
            f"{number} tables x {ranks} ranks on {hosts} hosts: {1e3 * found.cost_s:.4g} ms, gap "
            f"{found.gap:.2%}, {cpu_s:.1f} CPU seconds"
        )


if __name__ == "__main__":
    sys.exit(main())
