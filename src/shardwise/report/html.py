"""Reports as one HTML file without scripts or external files.

Figures carry their numbers as `data-` attributes, and the file has the whole report as JSON in the
element `data`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from shardwise.comm.collectives import show_bytes
from shardwise.debug.events import Traffic, ancestry
from shardwise.debug.visualize import COLOURS, colour, shards_svg
from shardwise.plans import write_text
from shardwise.report.step import ParameterReport, RankMemory, StepReport


@dataclass(frozen=True)
class Flame:
    """Communication of a module as a box below its parent's; `left` and `width` are fractions."""

    path: str
    depth: int
    number: int
    left: float
    width: float
    num_bytes: int
    num_calls: int


def flame(traffic: Traffic) -> tuple[list[Flame], int]:
    """The boxes, and how many rows they take. A parent's bytes include its children's."""
    total = traffic.num_bytes
    if not total:
        return [], 0
    boxes: list[Flame] = []
    paths = list(dict.fromkeys(p for each in traffic.events for p in ancestry(each.module)))

    def add(path: str, depth: int, left: float) -> float:
        inside = traffic.inside(path)
        size = inside.num_bytes
        width = size / total
        boxes.append(Flame(path, depth, len(boxes), left, width, size, len(inside.events)))
        for child in paths:
            if child.rpartition(".")[0] == path and child:
                left += add(child, depth + 1, left)
        return width

    add("", 0, 0.0)
    return boxes, 1 + max(box.depth for box in boxes)


KINDS = ("parameters", "gradients", "optimizer", "activations")
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --soft: #59636e;
  --line: #d1d9e0; --box: #f6f8fa; --parameters: #2f6fb4; --gradients: #d08a1d;
  --optimizer: #7a5cb0; --activations: #3c8f5a; --forward: #2f6fb4; --backward: #b1565b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --soft: #9198a1;
  --line: #3d444d; --box: #161b22; --parameters: #5b9ee6; --gradients: #e0a94a;
  --optimizer: #a88be0; --activations: #5dbd80; --forward: #5b9ee6; --backward: #dd8489; } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 70rem; padding: 1rem; color: var(--ink);
  background: var(--paper); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
p { color: var(--soft); margin: .25rem 0 .75rem }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: .875rem }
th, td { text-align: left; padding: .2rem .75rem .2rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: normal } td.n, th.n { text-align: right }
dl { display: grid; grid-template-columns: fit-content(45%) 1fr; gap: .15rem 1rem }
dt { color: var(--soft) } dd { margin: 0 }
.bar { display: flex; height: 1.4rem; background: var(--box); border-radius: 3px; overflow: hidden }
.rank { display: grid; grid-template-columns: 3.5rem 1fr 6.5rem; gap: .5rem; align-items: center;
  margin: .2rem 0; font-size: .875rem } .rank span:last-child { text-align: right }
.key i { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px;
  margin: 0 .3rem 0 .8rem; vertical-align: -1px }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .75rem }
.card { background: var(--box); border: 1px solid var(--line); border-radius: 6px; padding: .5rem;
  font-size: .75rem } .card svg { width: 100%; height: 5.5rem; display: block; margin-top: .3rem }
.card b { display: block; font-size: .8rem } .card span { color: var(--soft); display: block }
.mesh { display: grid; gap: .3rem; max-width: 32rem }
.mesh span { border-radius: 4px; padding: .3rem; text-align: center; color: #fff;
  font-size: .8rem }
.flame, .time { position: relative; background: var(--box); border-radius: 3px; overflow: hidden }
.flame div, .time div { position: absolute; height: 1.4rem; font-size: .7rem; line-height: 1.4rem;
  overflow: hidden; white-space: nowrap; text-overflow: ellipsis; padding-left: .25rem;
  border: 1px solid var(--paper); border-radius: 3px; color: #fff }
.time div { padding-left: .1rem; min-width: 1px; border-width: 0 } .time .tick { min-width: 2px }
.lanes { display: grid; grid-template-columns: 6.5rem 1fr; gap: .3rem .5rem; font-size: .8rem;
  align-items: center }
.yes { color: var(--backward) }
"""


def write_html(report: StepReport, path: str | os.PathLike[str]) -> None:
    """Write a report, whole or not at all."""
    write_page(to_html(report), path)


def write_page(text: str, path: str | os.PathLike[str]) -> None:
    write_text(Path(path), text)


def to_html(report: StepReport) -> str:
    return page(report.title, "\n".join(_sections(report)), report.to_json())


def page(title: str, body: str, data: str) -> str:
    """An HTML file; `data` is JSON."""
    escaped = data.replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{STYLE}</style></head><body>
{body}
<script type="application/json" id="data">{escaped}</script>
</body></html>
"""


def _sections(report: StepReport) -> Iterator[str]:
    yield f"<h1>{escape(report.title)}</h1>"
    yield f"<dl>{''.join(_row(n, t) for n, t in report.facts.items())}</dl>"
    yield _section("The mesh", _mesh_text(report), _mesh(report))
    text = "What a rank holds after backward; peak: the most that it holds at once in a step."
    yield _section("Memory of each rank", text, _memory(report))
    text = (
        "One picture per parameter. A shard has the colour of the rank that holds it; grey: "
        "several ranks hold it."
    )
    cards = "".join(map(_card, report.parameters))
    yield _section("Who holds what", text, f'<div class="cards">{cards}</div>')
    text = (
        f"{len(report.collectives):,} collectives, {report.num_bytes:,} bytes from each rank; "
        f"{report.num_implicit:,} implicit. The width of a box is its share of the bytes; "
        "submodules are below their module."
    )
    yield _section("Communication by module", text, _flame(report))
    text = (
        f"{1000 * report.seconds:.1f} ms in this process. A process that plays all ranks computes "
        "for one after the other. A collective is drawn where it began, as wide as its expected "
        "duration."
    )
    yield _section("One step", text, _timeline(report))
    yield _section("Collectives", "", _collectives(report.traffic))
    yield _section("Outputs of modules", "", _outputs(report))


def _section(title: str, text: str, content: str) -> str:
    paragraph = f"<p>{escape(text)}</p>" if text else ""
    return f"<section><h2>{escape(title)}</h2>{paragraph}{content}</section>"


def _row(name: str, text: str) -> str:
    return f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>"


# -- mesh and memory -------------------------------------------------------------------------


def _mesh_text(report: StepReport) -> str:
    axes = " × ".join(f"{name} = {size}" for name, size in report.axes)
    return f"{len(report.ranks)} ranks: {axes}. Ranks along the last axis are side by side."


def _mesh(report: StepReport) -> str:
    width = min(report.axes[-1][1], 8) if report.axes else 1
    cells = "".join(
        f'<span data-rank="{rank}" style="background:{colour(rank)}">rank {rank}</span>'
        for rank in report.ranks
    )
    return f'<div class="mesh" style="grid-template-columns:repeat({width},1fr)">{cells}</div>'


def _memory(report: StepReport) -> str:
    most = max((memory.total for memory in report.memory), default=0) or 1
    key = "".join(f'<i style="background:var(--{kind})"></i>{kind}' for kind in KINDS)
    rows = zip(report.ranks, report.memory, strict=True)
    bars = "".join(_memory_bar(rank, memory, most) for rank, memory in rows)
    return f'<p class="key">{key}</p>{bars}'


def _memory_bar(rank: int, memory: RankMemory, most: int) -> str:
    parts = []
    for kind in KINDS:
        size: int = getattr(memory, kind)
        parts.append(
            f'<i data-rank="{rank}" data-kind="{kind}" data-bytes="{size}" '
            f'title="{kind}: {size:,} bytes" '
            f'style="width:{100 * size / most:.3f}%;background:var(--{kind})"></i>'
        )
    bar = f'<div class="bar">{"".join(parts)}</div>'
    figures = (
        f'{show_bytes(memory.total)}<br><span data-rank="{rank}" data-kind="peak" '
        f'data-bytes="{memory.peak}" title="at most {memory.peak:,} bytes at once in a step">'
        f"peak {show_bytes(memory.peak)}</span>"
    )
    return f'<div class="rank"><span>rank {rank}</span>{bar}<span>{figures}</span></div>'


def _card(parameter: ParameterReport) -> str:
    size = "×".join(map(str, parameter.shape)) or "one number"
    sizes = sorted(set(parameter.bytes_per_rank))
    held = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    return (
        f'<div class="card" data-parameter="{escape(parameter.name)}"><b>'
        f"{escape(parameter.name).replace('.', '.<wbr>')}</b>"
        f"<span>{size} {parameter.dtype}, {escape(parameter.placements)}</span>"
        f"<span>{held} bytes a rank</span>{shards_svg(parameter.shape, parameter.parts)}</div>"
    )


# -- communication ---------------------------------------------------------------------------

_ROW_REM = 1.5


def _flame(report: StepReport) -> str:
    boxes, depth = flame(report.traffic)
    if not boxes:
        return "<p>Nothing is communicated.</p>"
    drawn = "".join(map(_flame_box, boxes))
    return f'<div class="flame" style="height:{depth * _ROW_REM}rem">{drawn}</div>'


def _flame_box(box: Flame) -> str:
    name = box.path.rpartition(".")[2] or "all"
    return (
        f'<div data-module="{escape(box.path)}" data-bytes="{box.num_bytes}" '
        f'title="{escape(box.path or "all")}: {box.num_bytes:,} bytes in {box.num_calls} '
        f'collectives" style="left:{100 * box.left:.3f}%;width:{100 * box.width:.3f}%;'
        f'top:{box.depth * _ROW_REM}rem;background:{COLOURS[box.number % len(COLOURS)]}">'
        f"{escape(name)} {show_bytes(box.num_bytes)}</div>"
    )


def _timeline(report: StepReport) -> str:
    whole = report.seconds or 1.0
    lanes = []
    for phase in ("forward", "backward"):
        spans = [span for span in report.spans if span.phase == phase]
        boxes = "".join(
            f'<div title="{escape(span.module or "outside modules")}: '
            f'{1e6 * (span.stop_s - span.start_s):.0f} µs" '
            f'style="left:{100 * span.start_s / whole:.3f}%;'
            f"width:{100 * (span.stop_s - span.start_s) / whole:.3f}%;"
            f'background:var(--{phase})"></div>'
            for span in spans
        )
        lanes.append((phase, len(spans), boxes))
    ticks = "".join(
        f'<div class="tick" title="{each.kind}, {escape(each.module or "outside modules")}: '
        f'{each.num_bytes:,} bytes, about {1e6 * each.expected_s:.0f} µs" '
        f'style="left:{min(99.8, 100 * each.start_s / whole):.3f}%;'
        f'width:{100 * each.expected_s / whole:.3f}%;background:var(--gradients)"></div>'
        for each in report.collectives
    )
    lanes.append(("collectives", len(report.collectives), ticks))
    rows = "".join(
        f'<span>{name}</span><div class="time" data-lane="{name}" data-number="{number}" '
        f'style="height:1.4rem">{boxes}</div>'
        for name, number, boxes in lanes
    )
    return f'<div class="lanes">{rows}</div>'


def _collectives(traffic: Traffic) -> str:
    found = traffic.rows()
    shown = len(Traffic.COLUMNS) - (not any(row.cells[-1] for row in found))  # lines of code
    rows = [
        table_row(
            (*row.cells[:shown], f"{row.num_calls:,}", f"{row.num_bytes:,}"), 2, marked=row.implicit
        )
        for row in found
    ]
    return html_table((*Traffic.COLUMNS[:shown], "calls", "bytes"), rows, 2)


def _outputs(report: StepReport) -> str:
    rows = [table_row((o.module or "the model", o.kind, o.text)) for o in report.outputs]
    return html_table(("module", "kind", "output"), rows)


def html_table(columns: Sequence[str], rows: Iterable[str], num_numbers: int = 0) -> str:
    head = table_row(columns, num_numbers, tag="th")
    return f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>'


def table_row(
    cells: Sequence[str], num_numbers: int = 0, *, tag: str = "td", marked: bool = False
) -> str:
    """A row of a table; its last `num_numbers` cells are numbers."""
    styles = [""] * (len(cells) - num_numbers) + [' class="n"'] * num_numbers
    pairs = zip(cells, styles, strict=True)
    inside = "".join(f"<{tag}{style}>{escape(cell)}</{tag}>" for cell, style in pairs)
    mark = ' class="yes"' if marked else ""
    return f"<tr{mark}>{inside}</tr>"
