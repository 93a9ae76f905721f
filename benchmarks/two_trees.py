"""The same actions with the packages of two trees, in turns.

Each tree has a process of its own, which holds its actions and times one slice of one of them when
it is asked to. Both are on one core, and one waits while the other runs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.timing import Action, Counted, geometric_mean

ROOT = Path(__file__).resolve().parents[1]


class Tree:
    """A process that times the actions of a benchmark with the package of one tree."""

    def __init__(self, root: Path, command: Sequence[str], core: int) -> None:
        if not (root / "src" / "shardwise").is_dir():
            raise SystemExit(f"{root} has no src/shardwise: name the root of a checkout.")
        # The benchmark is this tree's, whatever the package is.
        path = os.pathsep.join(map(str, (root / "src", ROOT)))
        self._process = subprocess.Popen(
            [sys.executable, "-m", *command],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
        self.names: list[str] = self._answer()

    def slice_s(self, number: int) -> float | None:
        """Seconds per call of action `number`, in one slice; None if it raises."""
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        found: float | None = self._answer()
        return found

    def end(self) -> None:
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None, "it is a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"The process of a tree ended with {self._process.wait()}.")
        return json.loads(line)


def answer(actions: Mapping[str, Action]) -> None:
    """What a tree's process does: time an action for each line with its number."""
    counted = [Counted(action) for action in actions.values()]
    print(json.dumps(list(actions)), flush=True)
    for line in sys.stdin:
        print(json.dumps(counted[int(line)].slice_s()), flush=True)


def compare(other: Path, command: Sequence[str], num_repeats: int) -> dict[str, tuple[float, ...]]:
    """By action: the ratio of the medians and of the minima, this tree's over the other's."""
    core = min(os.sched_getaffinity(0))
    trees = [Tree(root, command, core) for root in (ROOT, other)]
    found: dict[str, tuple[float, ...]] = {}
    try:
        for name in trees[0].names:
            numbers = [tree.names.index(name) for tree in trees]
            samples: list[list[float]] = [[], []]
            for turn in range(num_repeats):
                for which in (0, 1) if turn % 2 else (1, 0):
                    time_s = trees[which].slice_s(numbers[which])
                    if time_s is not None:
                        samples[which].append(time_s)
            if all(samples):
                medians, least = ([of(times) for times in samples] for of in (_median, min))
                found[name] = (medians[0] / medians[1], least[0] / least[1], *least)
    finally:
        for tree in trees:
            tree.end()
    return found


def _median(times: Sequence[float]) -> float:
    return statistics.median(times)


def print_comparison(title: str, found: Mapping[str, Sequence[float]]) -> None:
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for column in ("case", "that tree µs", "this tree µs", "ratio of minima", "of medians"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for name, (medians, minima, ours_s, theirs_s) in found.items():
        cells = (theirs_s * 1e6, ours_s * 1e6)
        table.add_row(name, *(f"{x:.2f}" for x in cells), f"{minima:.3f}", f"{medians:.3f}")
    table.add_section()
    means = (geometric_mean([row[place] for row in found.values()]) for place in (1, 0))
    table.add_row("geometric mean", "", "", *(f"{mean:.3f}" for mean in means))
    console = Console()
    (console if console.is_terminal else Console(width=120)).print(table)
