"""Traffic: collectives that ran, added up, grouped and shown.

`CommDebugMode`, `explain`, the report of a step and its page all count and group here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.debug.events import CommEvent

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class TrafficRow:
    """Similar collectives: the cells of `Traffic.COLUMNS`, how many, and their bytes."""

    cells: tuple[str, ...]
    implicit: bool
    num_calls: int
    num_bytes: int


class Traffic:
    """A sequence of collectives, per rank."""

    COLUMNS = ("module", "phase", "collective", "axis", "because of", "at")

    def __init__(self, events: Iterable[CommEvent]) -> None:
        self.events = tuple(events)

    @property
    def num_bytes(self) -> int:
        """The bytes that each rank sent."""
        return sum(event.num_bytes for event in self.events)

    @property
    def num_implicit(self) -> int:
        return sum(event.implicit for event in self.events)

    def totals(self) -> dict[str, int]:
        sums = {"collectives": len(self.events), "implicit": self.num_implicit}
        return {**sums, "bytes": self.num_bytes}

    def kinds(self) -> dict[str, tuple[int, int]]:
        """Per kind of collective, how many and how many bytes."""
        found: dict[str, tuple[int, int]] = {}
        for event in self.events:
            calls, size = found.get(event.kind, (0, 0))
            found[event.kind] = calls + 1, size + event.num_bytes
        return dict(sorted(found.items()))

    def rows(self) -> list[TrafficRow]:
        """Similar collectives share a row."""
        alike: dict[tuple[str, ...], list[CommEvent]] = {}
        for event in self.events:
            cause = (event.op or "a direct call") + (" (implicit)" if event.implicit else "")
            cells = (event.module, event.phase, event.kind, event.axis or "", cause)
            alike.setdefault((*cells, event.line or ""), []).append(event)
        return [
            TrafficRow(cells, events[0].implicit, len(events), Traffic(events).num_bytes)
            for cells, events in alike.items()
        ]

    def inside(self, path: str) -> Traffic:
        """What a module sent, the modules inside it included; all is inside ""."""
        return Traffic(
            event
            for event in self.events
            if not path or event.module == path or event.module.startswith(f"{path}.")
        )

    def by_module(self, names: Sequence[str]) -> dict[str, dict[str, Counter[str]]]:
        """Per module and phase, how many of each kind; `names` has the module of each event.

        "Global" stands for everything.
        """
        counts: dict[str, dict[str, Counter[str]]] = {
            "Global": {"forward": Counter(), "backward": Counter()}
        }
        for event, name in zip(self.events, names, strict=True):
            for path in ("Global", *ancestry(name)):
                phases = counts.setdefault(path, {"forward": Counter(), "backward": Counter()})
                phases[event.phase][event.kind] += 1
        return counts

    def tracing_table(self, paths: Iterable[str], *, each_event: bool) -> str:
        """One line per module, indented by depth; parents' totals include their children's."""
        known = [p for path in paths for p in ancestry(path)]
        known += [p for event in self.events for p in ancestry(event.module)]
        lines = []
        for path in ["", *_depth_first(known)]:
            indent = "  " * (path.count(".") + 1 if path else 0)
            name = f"{indent}{path.rpartition('.')[2] or 'Global'}"
            lines.append((name, self.inside(path)._phases()))
            if each_event:
                own = [event for event in self.events if event.module == path]
                lines += [(f"{indent}  * {event.kind}", describe(event)) for event in own]
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:{width}}  {text}".rstrip() for name, text in lines)

    def _phases(self) -> str:
        texts = []
        for phase in ("forward", "backward"):
            found = Traffic(event for event in self.events if event.phase == phase)
            if found.events:
                counts = ", ".join(f"{calls} {kind}" for kind, (calls, _) in found.kinds().items())
                texts.append(f"{phase}: {counts} ({found.num_bytes:,} bytes)")
        return "   ".join(texts)

    def __rich__(self) -> Table:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text  # a name in brackets would be taken for markup

        table = Table(title="Communication, per rank", title_justify="left", show_footer=True)
        table.box = SIMPLE_HEAD  # with the line below its op, 80 columns are enough
        for name in self.COLUMNS[:-1]:
            whole = name in ("phase", "collective", "axis")
            footer = "all" if name == "module" else ""
            table.add_column(name, footer, overflow="fold", no_wrap=whole)
        table.add_column("calls", f"{len(self.events):,}", justify="right")
        table.add_column("bytes", f"{self.num_bytes:,}", justify="right")
        for row in self.rows():
            style = "yellow" if row.implicit else None
            figures = f"{row.num_calls:,}", f"{row.num_bytes:,}"
            *cells, cause, line = row.cells
            cells[2] = _short(cells[2])
            cause = f"{cause}\n{line}" if line else cause
            table.add_row(*map(Text, (*cells, cause)), *figures, style=style)
        return table


def _short(kind: str) -> str:
    """
    >>> _short("all_gather_into_tensor"), _short("reduce_scatter_tensor"), _short("all_reduce")
    ('all_gather', 'reduce_scatter', 'all_reduce')
    """
    return kind.removesuffix("_single").removesuffix("_tensor").removesuffix("_into")


def ancestry(path: str) -> Iterator[str]:
    """A module's path and those of the modules around it, outermost first.

    >>> list(ancestry("layers.0.net1"))
    ['layers', 'layers.0', 'layers.0.net1']
    """
    parts = path.split(".") if path else []
    for length in range(1, len(parts) + 1):
        yield ".".join(parts[:length])


def _depth_first(paths: Iterable[str]) -> list[str]:
    """Children right below their parents, otherwise in the order given."""
    order = {path: number for number, path in enumerate(dict.fromkeys(paths))}
    return sorted(order, key=lambda path: [order[p] for p in ancestry(path)])


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
