"""shardwise checkpoint: inspect, verify and convert checkpoints."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from shardwise.checkpoint import CheckpointReport, convert, inspect, verify
from shardwise.cli.console import console
from shardwise.errors import printable

#: How many values of a list are shown; the JSON has all.
SHOWN_ITEMS = 4


def run_inspect(path: str, as_json: bool) -> None:
    report = inspect(path)
    if as_json:
        print(json.dumps(asdict(report), indent=2, default=str))
        return
    out = console()
    ranks = f"{report.num_ranks} rank{'s' * (report.num_ranks != 1)}"
    saved_by = "not by shardwise" if report.num_ranks is None else f"by {ranks}"
    checked = "checksums" if report.has_checksums else "no checksums"
    out.print(Text(f"{path}: {report.num_bytes:,} bytes of tensors, saved {saved_by}, {checked}"))
    out.print(_tensors(report))
    out.print(_files(report))
    values = [(name, value) for name, value in _plain(report.state) if name]
    if values:
        table = Table("value", "", title="Plain values", title_justify="left")
        for name, value in values:
            table.add_row(_shown(name), _shown(value))
        out.print(table)


def _shown(text: str) -> Text:
    """Escaped before a table makes room for it."""
    return Text(printable(text))


def _tensors(report: CheckpointReport) -> Table:
    table = Table(title="Tensors", title_justify="left")
    for name in ("name", "dtype", "shape"):
        table.add_column(name, overflow="fold")
    for name in ("chunks", "bytes"):
        table.add_column(name, justify="right")
    for each in report.tensors:
        shape = "x".join(map(str, each.shape)) or "a number"
        chunks, size = f"{len(each.pieces):,}", f"{each.num_bytes:,}"
        table.add_row(_shown(each.name), each.dtype, shape, chunks, size)
    for name, other in report.ties.items():
        table.add_row(_shown(name), _shown(f"is {other}"), "", "", "")
    return table


def _files(report: CheckpointReport) -> Table:
    table = Table(title="Files", title_justify="left")
    table.add_column("name", overflow="fold")
    table.add_column("bytes", justify="right")
    for name, size in report.files.items():
        table.add_row(_shown(name), f"{size:,}")
    return table


def _plain(state: Any, name: str = "") -> list[tuple[str, str]]:
    """The values of a state that are not tensors, by path."""
    if isinstance(state, dict) and name.endswith(".params"):
        state = list(state)  # the parameters of a group of an optimizer
    if isinstance(state, dict):
        rows = [(f"{name}.{key}" if name else str(key), item) for key, item in state.items()]
        return [found for path, item in rows for found in _plain(item, path)]
    if isinstance(state, str) and state.startswith("<tensor "):
        return []
    if isinstance(state, (list, tuple)) and len(state) > SHOWN_ITEMS:
        head = ", ".join(map(repr, state[:SHOWN_ITEMS]))
        return [(name, f"{head}, … {len(state):,} in all")]
    return [(name, repr(state))]


def run_verify(path: str) -> int:
    """0 when all is well, else 1."""
    verdict = verify(path)
    out = console()
    for fault in verdict.faults:
        out.print(Text(fault, style="red"))
    if verdict.ok:
        out.print(Text(f"{path}: {verdict.num_bytes:,} bytes of tensors read, all is well."))
    return int(not verdict.ok)


def run_convert(source: str, target: str, prefix: str, max_file_bytes: int) -> None:
    convert(source, target, prefix=prefix, max_file_bytes=max_file_bytes)
    report = inspect(target)
    whole = f"{len(report.tensors):,} tensors, {report.num_bytes:,} bytes"
    console().print(Text(f"{target}: {whole}."))
