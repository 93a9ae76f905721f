"""explain: the plan of every call that a function makes on DTensors; the plan cache's hits.

Note [Recording calls]
While a function is explained, the plan cache is replaced by one that records each hit, and the
function that redistributes by one that records each call. Other calls pay nothing for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.comm.watch import watch
from shardwise.core.layout import Layout
from shardwise.core.placements import short
from shardwise.debug.comm_mode import CommDebugMode
from shardwise.debug.events import CommEvent, Place, Places, Traffic, short_kind
from shardwise.dispatch.plan import Entry, cache_counts
from shardwise.dispatch.propagate import CallPlan
from shardwise.dtensor import autograd, tensor
from shardwise.redistribute.steps import Step, cost_s, find_steps

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True, slots=True)
class InputMove:
    """One step for one input. It does not run if an earlier call has left its result."""

    step: Step
    ran: bool
    num_bytes: int

    @property
    def cost_s(self) -> float:
        return cost_s(self.step.source, self.step.target) if self.ran else 0.0


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One call: the layouts of its inputs, how each was moved, and the layouts of its outputs.

    `plan` is the plan that ran; a redistribution or a direct call of a collective has none.
    `events` are the collectives of the call.
    """

    op: str
    inputs: tuple[Layout, ...]
    moves: tuple[tuple[InputMove, ...], ...]
    outputs: tuple[Layout, ...]
    implicit: bool
    place: Place
    events: tuple[CommEvent, ...]
    plan: CallPlan | None

    @property
    def num_bytes(self) -> int:
        """The bytes that each rank sent."""
        return Traffic(self.events).num_bytes

    @property
    def cost_s(self) -> float:
        """Expected seconds of the moves, by the cost model of dispatch."""
        moved_s = sum(move.cost_s for moves in self.moves for move in moves)
        return moved_s + (self.plan.sent_s if self.plan is not None else 0.0)


class Explanation(Sequence[PlannedCall]):
    """The calls of a function in order, its `result`, and totals; printed, a report."""

    def __init__(self, calls: Sequence[PlannedCall], result: Any) -> None:
        self.calls = tuple(calls)
        self.result = result

    def __len__(self) -> int:
        return len(self.calls)

    def __getitem__(self, index: Any) -> Any:
        return self.calls[index]

    @property
    def events(self) -> list[CommEvent]:
        return [event for call in self.calls for event in call.events]

    @property
    def num_bytes(self) -> int:
        """The bytes that each rank sent."""
        return Traffic(self.events).num_bytes

    @property
    def cost_s(self) -> float:
        return sum(call.cost_s for call in self.calls)

    def __str__(self) -> str:
        return as_text(self)

    def __rich__(self) -> Group:
        return as_table(self)


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Run `fn(*args, **kwargs)` once and report what each call on DTensors did.

    >>> import shardwise, torch
    >>> from shardwise.debug import explain
    >>> with shardwise.simulate(4):
    ...     mesh = shardwise.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    ...     x = shardwise.ones(64, 4, device_mesh=mesh, placements=[shardwise.Shard(0)])
    ...     w = shardwise.ones(4, 4, device_mesh=mesh, placements=[shardwise.Shard(0)])
    ...     print(explain(torch.mm, x, w))  # doctest: +ELLIPSIS
    forward
      1  aten.mm.default  64x4 [S(0)], 4x4 [S(0)] -> 64x4 [S(0)]  ...
           input 1: all_gather over 'tp', S(0) -> R, 16 bytes, about 20.0 µs (implicit)
    1 call, 1 collective (1 implicit), 16 bytes per rank, about 20.0 µs
    """
    notes = _Notes()
    with _noting(notes):
        result = fn(*args, **kwargs)
    return Explanation(list(_calls(notes.noted)), result)


@dataclass(frozen=True, slots=True)
class _Redistribution:
    source: Layout
    target: Layout


class _Notes(list[Any]):
    """Stands in for `watch.notes`: adds to each note the place it comes from."""

    def __init__(self) -> None:
        super().__init__()
        self.places = Places()
        self.noted: list[tuple[Any, Place]] = []

    def append(self, note: Any) -> None:
        self.noted.append((note, self.places.now()))


class _Listener(CommDebugMode):
    """Adds collectives to the notes, and shows each op to their `places`."""

    def __init__(self, notes: _Notes) -> None:
        super().__init__()
        self._notes = notes

    def __enter__(self) -> CommDebugMode:
        super().__enter__()
        self._places = self._notes.places
        return self

    def _note(self, event: CommEvent) -> None:
        if watch.notes is self._notes:
            self._notes.append(event)


class _NotingTable:
    """Stands in for the plan cache where calls look it up; notes hits (planning notes misses)."""

    def __init__(self, table: dict[Any, Entry], notes: _Notes) -> None:
        self.table, self._notes = table, notes

    def get(self, key: Any) -> Entry | None:
        entry = self.table.get(key)
        if entry is not None:
            self._notes.append(entry)
        return entry


_move = autograd.move


@contextlib.contextmanager
def _noting(notes: _Notes) -> Iterator[None]:
    def noting_move(x: Any, target: Layout, **options: Any) -> Any:
        notes.append(_Redistribution(x._layout, target))
        return _move(x, target, **options)

    outer = watch.notes, tensor._entries, autograd.move
    looked_up: Any = tensor._entries
    table = looked_up.table if isinstance(looked_up, _NotingTable) else looked_up
    watch.notes = notes
    tensor._entries = _NotingTable(table, notes)  # type: ignore[assignment]
    autograd.move = noting_move
    watch.update()
    try:
        with _Listener(notes):
            yield
    finally:
        watch.notes, tensor._entries, autograd.move = outer
        watch.update()
        if isinstance(watch.notes, _Notes):  # one explanation inside another
            watch.notes.noted += notes.noted


# -- from notes to calls ---------------------------------------------------------------------


def _calls(noted: Sequence[tuple[Any, Place]]) -> Iterator[PlannedCall]:
    """Calls: a note and the events after it that it caused."""
    at = 0
    while at < len(noted):
        note, place = noted[at]
        at += 1
        op = _op_of(note)
        events = []
        if isinstance(note, CommEvent):
            events.append(note)
        while op is not None and at < len(noted):
            following = noted[at][0]
            if not isinstance(following, CommEvent) or following.op != op:
                break
            events.append(following)
            at += 1
        yield _call(note, place, op, tuple(events))


def _op_of(note: Any) -> str | None:
    if isinstance(note, CommEvent):
        return note.op
    if isinstance(note, _Redistribution):
        return "redistribute"
    op = note.plan.op
    return str(op) if hasattr(op, "_schema") else op.__name__


def _call(note: Any, place: Place, op: str | None, events: tuple[CommEvent, ...]) -> PlannedCall:
    plan: CallPlan | None = None
    inputs: tuple[Layout, ...] = ()
    steps: tuple[tuple[Step, ...], ...] = ()
    outputs: tuple[Layout, ...] = ()
    if isinstance(note, _Redistribution):
        inputs, outputs = (note.source,), (note.target,)
        steps = (find_steps(note.source, note.target),)
    elif isinstance(note, Entry):
        plan = note.plan
        outputs = plan.outputs
        steps = plan.steps or ((),) * len(plan.inputs)
        inputs = tuple(s[0].source if s else at for s, at in zip(steps, plan.inputs, strict=True))
    return PlannedCall(
        op=op or events[0].kind,
        inputs=inputs,
        moves=_moves(steps, events),
        outputs=outputs,
        implicit=any(event.implicit for event in events),
        place=place,
        events=events,
        plan=plan,
    )


def _moves(
    steps: Sequence[Sequence[Step]], events: Sequence[CommEvent]
) -> tuple[tuple[InputMove, ...], ...]:
    """Each step with the bytes it sent; events are in the order of steps."""
    left = list(events)

    def move(step: Step) -> InputMove:
        if not step.communicates:
            return InputMove(step, ran=True, num_bytes=0)
        kind = "all_to_all" if step.kind == "resplit" else step.kind
        if left and short_kind(left[0].kind) == kind:
            return InputMove(step, ran=True, num_bytes=left.pop(0).num_bytes)
        return InputMove(step, ran=False, num_bytes=0)

    return tuple(tuple(map(move, each)) for each in steps)


# -- as text and as a table ------------------------------------------------------------------

#: Longer lines do not widen the column.
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
            yield f"{name}{_move_text(move, call)}"
            num_shown += move.ran and move.step.communicates
    for event in call.events[num_shown:]:
        axis = f" over {event.axis!r}" if event.axis is not None else ""
        yield f"{event.kind}{axis}, {event.num_bytes:,} bytes{_marked(event.implicit)}"


def _move_text(move: InputMove, call: PlannedCall) -> str:
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
    traffic = Traffic(explanation.events)
    return (
        f"{_number(len(explanation), 'call')}, {_number(len(traffic.events), 'collective')} "
        f"({traffic.num_implicit} implicit), {traffic.num_bytes:,} bytes per rank, "
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


# -- the plan cache ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Calls of this process with a cached plan, calls that were planned, plans in the cache, and
    how many it may hold before all are dropped."""

    hits: int
    misses: int
    size: int
    limit: int


def cache_stats() -> CacheStats:
    """Hits and misses of the plan cache so far. A steady training loop must not add misses.

    >>> import shardwise
    >>> from shardwise.debug import cache_stats
    >>> with shardwise.simulate(2):
    ...     mesh = shardwise.init_device_mesh("cpu", (2,))
    ...     x = shardwise.ones(4, device_mesh=mesh, placements=[shardwise.Shard(0)])
    ...     before = cache_stats()
    ...     for _ in range(10):
    ...         x = x + x
    ...     after = cache_stats()
    >>> after.misses - before.misses, after.hits - before.hits, after.size - before.size
    (1, 9, 1)
    """
    return CacheStats(*cache_counts())
