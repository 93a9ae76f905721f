"""Timing of callables that are compared: interleaved slices, medians, a table and JSON.

A shared machine's speed drifts. Every repeat times each callable in turn for a slice of a few
milliseconds, so that a slow phase hits all of them alike, and the ratio is the median of the
repeats' ratios. The clock counts the thread's CPU time, not that of other processes.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

SLICE_S = 0.012
WARM_UP_S = 0.03

Action = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Case:
    """The same thing, done by shardwise, by torch's DTensor, and on plain local tensors."""

    name: str
    ours: Action
    theirs: Action
    local: Action | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """Median seconds per call, or None where nothing was timed; `notes` then may say why."""

    name: str
    ours_s: float | None
    theirs_s: float | None
    local_s: float | None
    #: Ours over theirs: below 1, shardwise is faster.
    ratio: float | None
    notes: Mapping[str, str] = field(default_factory=dict)


def summarize(
    name: str, samples: Mapping[str, Sequence[float]], notes: Mapping[str, str] | None = None
) -> Result:
    """The medians of seconds per call that were taken in turn."""
    medians = {side: statistics.median(times) for side, times in samples.items()}
    ratio = None
    if "ours" in samples and "theirs" in samples:
        pairs = zip(samples["ours"], samples["theirs"], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
    return Result(
        name,
        ours_s=medians.get("ours"),
        theirs_s=medians.get("theirs"),
        local_s=medians.get("local"),
        ratio=ratio,
        notes=notes or {},
    )


def measure(case: Case, num_repeats: int) -> Result:
    """Time a case. What raises is left out and noted."""
    actions: dict[str, Action] = {}
    notes: dict[str, str] = {}
    for side in ("ours", "theirs", "local"):
        action: Action | None = getattr(case, side)
        if action is None:
            continue
        try:
            action()
        except NotImplementedError:
            notes[side] = "not supported"
        except Exception as error:
            notes[side] = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
        else:
            actions[side] = action
    return summarize(case.name, take_turns(actions, num_repeats), notes)


def take_turns(actions: Mapping[str, Action], num_repeats: int) -> dict[str, list[float]]:
    """Seconds per call of each, one sample per slice."""
    counts = {name: _calls_per_slice(action) for name, action in actions.items()}
    samples: dict[str, list[float]] = {name: [] for name in actions}
    gc.collect()
    gc.disable()
    try:
        for _ in range(num_repeats):
            for name, action in actions.items():
                samples[name].append(_slice_s(action, counts[name]) / counts[name])
    finally:
        gc.enable()
    return samples


class Counted:
    """An action that is timed slice by slice."""

    def __init__(self, action: Action) -> None:
        self._action = action
        self._count = 0

    def slice_s(self) -> float | None:
        """Seconds per call, in one slice; None if it raises."""
        if not self._count:
            gc.collect()
        gc.disable()
        try:
            if not self._count:
                self._count = _calls_per_slice(self._action)
            return _slice_s(self._action, self._count) / self._count
        except Exception:
            return None
        finally:
            gc.enable()


def _calls_per_slice(action: Action) -> int:
    """How many calls fill a slice; warms up on the way."""
    calls, end = 0, time.thread_time() + WARM_UP_S
    while time.thread_time() < end or calls < 3:
        action()
        calls += 1
    count = max(1, calls // 4)
    return max(1, round(count * SLICE_S / _slice_s(action, count)))


def _slice_s(action: Action, calls: int) -> float:
    times = range(calls)
    start = time.thread_time()
    for _ in times:
        action()
    return time.thread_time() - start


def geometric_mean(values: Sequence[float]) -> float:
    """
    >>> geometric_mean([0.5, 2.0])
    1.0
    """
    return math.exp(statistics.fmean(map(math.log, values)))


def add_options(parser: argparse.ArgumentParser, *, repeats: int) -> None:
    parser.add_argument("--repeats", type=int, default=repeats, help="slices per callable")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results here")


def mean_ratio(results: Sequence[Result]) -> float | None:
    ratios = [r.ratio for r in results if r.ratio is not None]
    return geometric_mean(ratios) if ratios else None


_UNITS = {"µs": 1e-6, "ms": 1e-3}


def print_table(
    title: str, results: Sequence[Result], *, unit: str = "µs", local: str = "local"
) -> None:
    """`local` is the heading of the column with what both are compared to."""
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("case")
    for column in (
        f"{local} {unit}",
        f"torch DTensor {unit}",
        f"shardwise {unit}",
        "ours / theirs",
    ):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            result.name,
            _cell(result, "local", unit),
            _cell(result, "theirs", unit),
            _cell(result, "ours", unit),
            _ratio_cell(result.ratio),
        )
    table.add_section()
    table.add_row("geometric mean", "", "", "", _ratio_cell(mean_ratio(results)))
    # Wide enough for a pipe, where rich would assume 80 columns and wrap.
    console = Console()
    (console if console.is_terminal else Console(width=120)).print(table)


def _cell(result: Result, side: str, unit: str) -> str:
    median: float | None = getattr(result, f"{side}_s")
    return f"{median / _UNITS[unit]:.1f}" if median is not None else result.notes.get(side, "")


def _ratio_cell(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio:.2f}" if ratio < 1 else f"[bold red]{ratio:.2f}[/]"


def write_json(path: Path | None, results: Sequence[Result], **about: Any) -> None:
    if path is None:
        return
    machine = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    content = {
        **machine,
        **about,
        "geometric_mean": mean_ratio(results),
        "results": [asdict(r) for r in results],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
