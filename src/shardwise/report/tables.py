"""Reports as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from shardwise.comm.collectives import show_bytes
from shardwise.report.parity import Parity, TrainingParity
from shardwise.report.step import StepReport


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


def parity_table(parity: Parity) -> Table:
    """The tensors that differ."""
    columns = ("what", "name", "verdict")
    table = _table("", *columns, numbers=("largest difference", "of"))
    for each in parity.differing:
        figures = (f"{each.largest:.2e}", f"{each.scale:.2e}")
        table.add_row(each.what, each.name, each.remark or "differs", *figures, style="red")
    return table


#: What `testing.training` compares, where its word says too little in a table.
_COMPARED = {"left": "of the other copy", "loaded": "loaded by one device"}


def training_table(runs: Sequence[TrainingParity]) -> Table:
    """A row for each training run: its options, what was compared, and the verdict."""
    table = _table("", "training steps", "compared", "verdict", numbers=("largest difference",))
    for run in runs:
        kinds = dict.fromkeys(each.what for each in run.compared)
        names = {(each.what, each.name) for each in run.compared}
        counts = [
            f"{sum(what == kind for what, _ in names)} {_COMPARED.get(kind, kind)}"
            for kind in kinds
        ]
        worst = run.worst
        figure = f"{worst.largest / worst.scale:.1e} {worst.name}" if worst is not None else ""
        verdict = {"ok": "agrees", "refused": "refused", "wrong": "differs"}[run.kind]
        text = run.text.partition("\n")[0]  # --json has where it was raised
        shown = f"{verdict}: {text}" if text else verdict
        style = None if run.kind == "ok" else "yellow" if run.kind == "refused" else "red"
        words = ", ".join(run.options) or "plain"
        table.add_row(words, ", ".join(counts), Text(shown), figure, style=style)
    return table


def memory_table(report: StepReport) -> Table:
    columns = ("rank", "parameters", "gradients", "optimizer", "activations", "all", "peak")
    table = _table("Memory per rank", numbers=columns)
    for rank, memory in zip(report.ranks, report.memory, strict=True):
        figures = (memory.parameters, memory.gradients, memory.optimizer, memory.activations)
        table.add_row(str(rank), *map(show_bytes, (*figures, memory.total, memory.peak)))
    return table


def kinds_table(report: StepReport) -> Table:
    title = "Communicated in one step, per rank"
    table = Table(title=title, title_justify="left", show_footer=True)
    table.add_column("collective", "all")
    table.add_column("calls", f"{len(report.collectives):,}", justify="right")
    table.add_column("bytes", f"{report.num_bytes:,}", justify="right")
    for kind, (count, size) in report.kinds().items():
        table.add_row(kind, f"{count:,}", f"{size:,}")
    return table
