"""What commands print: the console, error messages, and reports as tables."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from shardwise.errors import (
    CheckpointError,
    CollectiveError,
    LaunchError,
    ShardwiseError,
    printable,
)
from shardwise.report.parity import Parity
from shardwise.report.step import StepReport
from shardwise.report.training import TrainingParity

#: In a pipe, lines may be as long as tables need.
PIPE_WIDTH = 200


class _Escaping(Console):
    """Names come from files and may hold sequences that a terminal acts on: none gets through."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            ours = segment.control is not None or segment.text.isprintable()
            yield segment if ours else segment._replace(text=printable(segment.text))


def console() -> Console:
    """rich looks at NO_COLOR and at the width of the terminal itself."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return _Escaping(width=PIPE_WIDTH if piped else None, highlight=False)


#: Exit statuses: the request is wrong; something broke while it ran.
MISTAKE, BROKE = 2, 3


def exit_status(error: Exception) -> int:
    """The exit status of a command that raised."""
    broke = isinstance(error, (LaunchError, CollectiveError, CheckpointError, OSError))
    return BROKE if broke else MISTAKE


def message(error: Exception) -> str:
    """One paragraph: what is wrong, and in which line of the user's files."""
    return printable(_message(error))


def _message(error: Exception) -> str:
    notes = " ".join(getattr(error, "__notes__", ()))
    if isinstance(error, (ShardwiseError, OSError)):
        return f"{error} {notes}".rstrip()
    frame = traceback.extract_tb(error.__traceback__)[-1] if error.__traceback__ else None
    where = f" ({frame.filename}:{frame.lineno})" if frame is not None else ""
    text = f"{type(error).__name__}: {error}{where} {notes}".rstrip()
    return f"{text}\nshardwise --debug shows the traceback."


# -- tables ----------------------------------------------------------------------------------


def _table(title: str, *columns: str, numbers: tuple[str, ...] = ()) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def parameters_table(report: StepReport) -> Table:
    table = _table("Parameters", "name", "shape", "placements", numbers=("bytes a rank",))
    for each in report.parameters:
        sizes = sorted(set(each.bytes_per_rank))
        size = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,}–{sizes[-1]:,}"
        table.add_row(each.name, "x".join(map(str, each.shape)), Text(each.placements), size)
    return table


def outputs_table(report: StepReport) -> Table:
    table = _table("Outputs of modules", "module", "kind", "output")
    for each in report.outputs:
        table.add_row(each.module or "(the model)", each.kind, Text(each.text))
    return table


def parity_table(parity: Parity, *, everything: bool = False) -> Table:
    """What differs, or all that was compared."""
    columns = ("what", "name", "verdict")
    table = _table("", *columns, numbers=("largest difference", "of"))
    for each in parity.differences if everything else parity.differing:
        within = each.within(parity.tolerance)
        verdict = each.remark or ("agrees" if within else "differs")
        style = None if within else "red"
        figures = (f"{each.largest:.2e}", f"{each.scale:.2e}")
        table.add_row(each.what, each.name, verdict, *figures, style=style)
    return table


def training_table(runs: Sequence[TrainingParity]) -> Table:
    """A row for each training run: its options, what was compared, and the verdict."""
    table = _table("", "training steps", "compared", "verdict", numbers=("furthest off",))
    for run in runs:
        kinds = dict.fromkeys(each.what for each in run.compared)
        names = {(each.what, each.name) for each in run.compared}
        counts = [f"{sum(what == kind for what, _ in names)} {kind}" for kind in kinds]
        worst = run.worst
        figure = f"{worst.largest / worst.scale:.1e} {worst.name}" if worst is not None else ""
        verdict = {"ok": "agrees", "refused": "refused", "wrong": "differs"}[run.kind]
        text = run.text.partition("\n")[0]  # --json has where it was raised
        said = f"{verdict}: {text}" if text else verdict
        style = None if run.kind == "ok" else "yellow" if run.kind == "refused" else "red"
        words = ", ".join(run.options) or "plain"
        table.add_row(words, ", ".join(counts), Text(said), figure, style=style)
    return table
