"""What a CommDebugMode has seen, as text, as JSON and as a table for terminals."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from shardwise.core.placements import Placement, short
from shardwise.debug.events import CommEvent

if TYPE_CHECKING:
    from rich.table import Table


def ancestry(path: str) -> Iterator[str]:
    """A module's path and those of the modules around it, outermost first.

    >>> list(ancestry("layers.0.net1"))
    ['layers', 'layers.0', 'layers.0.net1']
    """
    parts = path.split(".") if path else []
    for length in range(1, len(parts) + 1):
        yield ".".join(parts[:length])


def is_inside(path: str, outer: str) -> bool:
    """Whether a module is `outer` or lies in it; all lie in ""."""
    return not outer or path == outer or path.startswith(f"{outer}.")


def module_counts(events: Iterable[CommEvent]) -> dict[str, dict[str, Counter[str]]]:
    """Per module path and phase, how many of each kind; "Global" stands for everything."""
    counts: dict[str, dict[str, Counter[str]]] = {}
    for event in events:
        for path in ("Global", *ancestry(event.module)):
            phases = counts.setdefault(path, {"forward": Counter(), "backward": Counter()})
            phases[event.phase][event.kind] += 1
    return counts


def tracing_table(events: Sequence[CommEvent], paths: Iterable[str], *, each_event: bool) -> str:
    """One line per module, indented by depth; parents' totals include their children's."""
    known = dict.fromkeys(p for path in paths for p in ancestry(path))
    known |= dict.fromkeys(p for event in events for p in ancestry(event.module))
    lines = []
    for path in ["", *_depth_first(known)]:
        indent = "  " * (path.count(".") + 1 if path else 0)
        inside = [event for event in events if is_inside(event.module, path)]
        lines.append((f"{indent}{path.rpartition('.')[2] or 'Global'}", _phases(inside)))
        if each_event:
            own = [event for event in events if event.module == path]
            lines += [(f"{indent}  * {event.kind}", describe(event)) for event in own]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:{width}}  {text}".rstrip() for name, text in lines)


def _depth_first(paths: Iterable[str]) -> list[str]:
    """Children right below their parents, otherwise in the order given."""
    order: dict[str, int] = {}
    for path in paths:
        order.setdefault(path, len(order))
    return sorted(order, key=lambda path: [order[p] for p in ancestry(path)])


def _phases(events: Sequence[CommEvent]) -> str:
    texts = []
    for phase in ("forward", "backward"):
        found = [event for event in events if event.phase == phase]
        if found:
            kinds = Counter(event.kind for event in found)
            counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            texts.append(f"{phase}: {counts} ({num_bytes(found):,} bytes)")
    return "   ".join(texts)


def describe(event: CommEvent) -> str:
    """One collective on one line.

    >>> describe(CommEvent("all_reduce", "tp", 1024, "aten.mm.default", line="a.py:3"))
    "over 'tp', 1,024 bytes, forward, for aten.mm.default at a.py:3"
    """
    axis = f"over {event.axis!r}, " if event.axis is not None else ""
    cause = f", for {event.op}" if event.op is not None else ""
    implicit = " (implicit)" if event.implicit else ""
    line = f" at {event.line}" if event.line is not None else ""
    return f"{axis}{event.num_bytes:,} bytes, {event.phase}{cause}{implicit}{line}"


def num_bytes(events: Iterable[CommEvent]) -> int:
    return sum(event.num_bytes for event in events)


def to_json(events: Sequence[CommEvent], sharding: Mapping[str, tuple[Placement, ...]]) -> str:
    totals = {
        "collectives": len(events),
        "implicit": sum(event.implicit for event in events),
        "bytes": num_bytes(events),
        "kinds": Counter(event.kind for event in events),
    }
    content = {
        "totals": totals,
        "modules": module_counts(events),
        "sharding": {name: short(placements) for name, placements in sharding.items()},
        "events": [asdict(event) for event in events],
    }
    return json.dumps(content, indent=2)


def rich_table(events: Sequence[CommEvent]) -> Table:
    """Alike collectives share a row."""
    from rich.table import Table

    table = Table(title="Communication, per rank", title_justify="left", show_footer=True)
    table.add_column("module", "all", overflow="fold")
    for name in ("phase", "collective", "axis", "because of", "at"):
        table.add_column(name, overflow="fold")
    table.add_column("calls", f"{len(events):,}", justify="right")
    table.add_column("bytes", f"{num_bytes(events):,}", justify="right")
    rows: dict[tuple[str, ...], list[CommEvent]] = {}
    for event in events:
        because = event.op or "a direct call"
        because += " (implicit)" if event.implicit else ""
        row = (event.module, event.phase, event.kind, event.axis or "", because, event.line or "")
        rows.setdefault(row, []).append(event)
    for cells, alike in rows.items():
        style = "yellow" if alike[0].implicit else None
        table.add_row(*cells, f"{len(alike):,}", f"{num_bytes(alike):,}", style=style)
    return table
