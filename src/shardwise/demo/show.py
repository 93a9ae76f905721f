"""What the demo shows: a progress bar, and a short report."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from shardwise.demo import training
from shardwise.demo.training import TrainingRun, largest_difference
from shardwise.report.step import StepReport
from shardwise.report.tables import kinds_table, memory_table

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
