"""An Explanation as text and as a table for terminals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardwise.core.layout import Layout
from shardwise.core.placements import short

if TYPE_CHECKING:
    from rich.console import Group

    from shardwise.debug.explain import Explanation, InputMove, PlannedCall


#: A longer line sticks out; it does not push the others to the right.
_MAX_WIDTH = 60


def as_text(explanation: Explanation) -> str:
    calls = explanation.calls
    op_width = max((len(call.op) for call in calls), default=0)
    layouts = [_layouts(call) for call in calls]
    width = min(max(map(len, layouts), default=0), _MAX_WIDTH)
    lines = []
    phase = None
    for number, (call, text) in enumerate(zip(calls, layouts, strict=True), start=1):
        if call.place.phase != phase:
            phase = call.place.phase
            lines.append(phase)
        lines.append(f"{number:3}  {call.op:{op_width}}  {text:{width}}  {_where(call)}".rstrip())
        lines += [f"       {line}" for line in _details(call)]
    return "\n".join([*lines, _totals(explanation)])


def as_table(explanation: Explanation) -> Group:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text  # placements in brackets would be taken for markup

    table = Table(title="Calls on DTensors", title_justify="left")
    table.add_column("", justify="right")
    for name in ("op", "layouts, and what moves", "at"):
        table.add_column(name, overflow="fold")
    table.add_column("bytes", justify="right")
    phase = None
    for number, call in enumerate(explanation.calls, start=1):
        if call.place.phase != phase:
            phase = call.place.phase
            table.add_row("", Text(phase, style="bold"))
        text = Text("\n".join([_layouts(call), *_details(call)]))
        num_bytes = f"{call.num_bytes:,}" if call.num_bytes else ""
        style = "yellow" if call.implicit else None
        table.add_row(str(number), Text(call.op), text, Text(_where(call)), num_bytes, style=style)
    return Group(table, Text(_totals(explanation)))


def _layouts(call: PlannedCall) -> str:
    if not call.inputs:
        return "called directly" if call.events and call.events[0].op is None else ""
    return f"{_listed(call.inputs)} -> {_listed(call.outputs)}"


def _listed(layouts: Sequence[Layout]) -> str:
    return ", ".join(map(layout_text, layouts)) or "()"


def layout_text(layout: Layout) -> str:
    """Shape, placements, and the order of axes where it is not the usual one."""
    shape = "x".join(map(str, layout.shape)) or "scalar"
    order = "" if layout.in_default_order else f" order {layout.order}"
    return f"{shape} {short(layout.placements)}{order}"


def _details(call: PlannedCall) -> Iterator[str]:
    """A line for each move, and for each collective that belongs to no move."""
    num_shown = 0
    for number, moves in enumerate(call.moves):
        name = f"input {number}: " if len(call.inputs) > 1 else ""
        for move in moves:
            yield f"{name}{_move(move, call)}"
            num_shown += move.ran and move.step.communicates
    for event in call.events[num_shown:]:
        axis = f" over {event.axis!r}" if event.axis is not None else ""
        yield f"{event.kind}{axis}, {event.num_bytes:,} bytes{_marked(event.implicit)}"


def _move(move: InputMove, call: PlannedCall) -> str:
    step = move.step
    before, after = (
        short([layout.placements[step.axis]])[1:-1] for layout in (step.source, step.target)
    )
    text = f"{step.kind} over {step.source.grid.axis_name(step.axis)!r}, {before} -> {after}"
    if not move.ran:
        return f"{text}, done by an earlier call"
    if not step.communicates:
        return f"{text}, local"
    return f"{text}, {move.num_bytes:,} bytes, about {_duration(move.cost_s)}" + _marked(
        call.implicit
    )


def _marked(implicit: bool) -> str:
    return " (implicit)" if implicit else ""


def _where(call: PlannedCall) -> str:
    return "  ".join(part for part in (call.place.line, call.place.module) if part)


def _totals(explanation: Explanation) -> str:
    events = explanation.events
    implicit = sum(event.implicit for event in events)
    return (
        f"{_number(len(explanation), 'call')}, {_number(len(events), 'collective')} "
        f"({implicit} implicit), {explanation.num_bytes:,} bytes per rank, "
        f"about {_duration(explanation.cost_s)}"
    )


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _duration(seconds: float) -> str:
    """
    >>> _duration(2.5e-05), _duration(0.0125)
    ('25.0 µs', '12.5 ms')
    """
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
