"""CommEvent: one collective that ran, with its module, line and phase; Traffic: many, added up.

Note [Modules without hooks]
torch.compile would trace hooks on modules and guard on them, so entering a mode would recompile the
model. The running modules are found on the Python stack instead. In backward they are not on it.
There the running autograd node has a sequence number, and forward has recorded the module and the
line that made the nodes with that number.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise._torch.autograd import current_node, in_backward, next_node_number
from shardwise._torch.c10d import declare_collectives
from shardwise._torch.frames import line_outside, running_modules
from shardwise.comm.watch import watch
from shardwise.core.world import World, current_world
from shardwise.simulation.ranks import one_part

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class Place:
    """A module's path ("" outside modules and in the outermost), `file.py:12`, and the phase."""

    module: str
    line: str | None
    phase: str


class Places:
    """Tells the place of what runs now, if `mark` is called at each op."""

    def __init__(self) -> None:
        #: The modules that were called from outside any module, with their paths.
        self.roots: list[tuple[str, nn.Module]] = []
        # By id; the module is kept, or another could get its id.
        self._paths: dict[int, tuple[nn.Module, str]] = {}
        self._thread = threading.get_ident()
        # Nodes below `_numbers[i]`, and not below the one before, were made for `_makers[i]`.
        self._numbers = [next_node_number()]
        self._makers: list[tuple[str | None, str | None]] = [(None, None)]
        #: Whether the place that `now` returned last is in a module, or in the backward of one.
        self.inside = False

    def mark(self) -> None:
        """Record the module and line that made the autograd nodes since the last call."""
        if threading.get_ident() != self._thread:
            return  # sequence numbers are per thread
        number = next_node_number()
        if number == self._numbers[-1] and torch.is_grad_enabled():
            return
        maker = self._maker()
        if maker == self._makers[-1]:
            self._numbers[-1] = number
        elif number > self._numbers[-1]:
            self._numbers.append(number)
            self._makers.append(maker)

    def now(self) -> Place:
        """The place of what runs now."""
        phase = "backward" if in_backward() else "forward"
        path, line = self._maker()
        self.inside = path is not None
        return Place(path or "", line, phase)

    def name(self, path: str) -> str:
        """Torch's name for a module: the class of the outermost one, then the path in it."""
        for prefix, root in self.roots:
            if not prefix and not any(p and _is_below(path, p) for p, _ in self.roots):
                return _join(type(getattr(root, "_orig_mod", root)).__name__, path)
        return path

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """All modules that ran, and those inside them, with their paths."""
        for prefix, root in self.roots:
            for name, module in root.named_modules():
                yield _join(prefix, name), module

    # -- modules -----------------------------------------------------------------------------

    def _maker(self) -> tuple[str | None, str | None]:
        """The path of the running module, None outside modules, and the line.

        In backward, the module and line whose forward made the running node.
        """
        running = running_modules()
        if running:
            return self._path(running), self._line()
        node = current_node()
        path, line = (None, None) if node is None else self._maker_of_node(node)
        return path, line or self._line()

    def _path(self, running: list[nn.Module]) -> str:
        if id(running[0]) not in self._paths or id(running[-1]) not in self._paths:
            self._learn(running)
        return self._paths[id(running[0])][1]

    def _learn(self, running: list[nn.Module]) -> None:
        outer: str | None = None
        for module in reversed(running):
            if id(module) not in self._paths:
                self._add_root(module, outer)
            outer = self._paths[id(module)][1]

    def _add_root(self, module: nn.Module, outer: str | None) -> None:
        """A module that no known one contains; `outer` is the path of its caller."""
        inside = {id(inner) for inner in module.modules()}
        self.roots = [(path, root) for path, root in self.roots if id(root) not in inside]
        prefix = ""
        if self.roots:
            taken = {path for path, _ in self.roots}
            name = _join(outer or "", type(module).__name__)
            numbered = (f"{name}_{number}" for number in range(1, len(taken) + 1))
            prefix = name if name not in taken else next(n for n in numbered if n not in taken)
        self.roots.append((prefix, module))
        for name, inner in module.named_modules():
            self._paths[id(inner)] = inner, _join(prefix, name)

    def _maker_of_node(self, node: Any) -> tuple[str | None, str | None]:
        variable = getattr(node, "variable", None)
        if variable is None:
            place = bisect_right(self._numbers, node._sequence_nr())
            return self._makers[place] if place < len(self._makers) else (None, None)
        # AccumulateGrad has no number; it belongs to the module of its parameter.
        for path, module in self.modules():
            if any(p is variable for p in module._parameters.values()):
                return path, None
        return None, None

    # -- lines -------------------------------------------------------------------------------

    def _line(self) -> str | None:
        line = line_outside()
        if line is None and threading.get_ident() != self._thread:
            # Backward on a device's thread: the line is where the program waits for it.
            line = line_outside(self._thread)
        return line


def _is_below(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}.")


def _join(prefix: str, name: str) -> str:
    """A path, without torch.compile's wrapper."""
    parts = [p for p in (*prefix.split("."), *name.split(".")) if p and p != "_orig_mod"]
    return ".".join(parts)


declare_collectives()  # as ops, which are counted below


@dataclass(frozen=True, slots=True)
class CommEvent:
    """One collective: its kind, its mesh axis, how many bytes each rank sent, and why.

    `op` is what caused it; None for a direct call of the collective, or of compiled code.
    `implicit` says that dispatch inserted it. `module` is the path of the module that it ran for,
    `line` the line of the program that led to it.
    """

    kind: str
    axis: str | None
    num_bytes: int
    op: str | None = None
    module: str = ""
    line: str | None = None
    phase: str = "forward"
    implicit: bool = False


def _packets() -> Iterator[tuple[Any, Any]]:
    """The op packet that runs, and the one under which torch counts it."""
    native, public, in_place = (
        torch.ops._c10d_functional,
        torch.ops.c10d_functional,
        torch.ops.c10d,
    )
    for name in (
        "all_reduce",
        "all_reduce_coalesced",
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
        "all_to_all_single",
        "broadcast",
    ):
        # Inductor's variants write to an existing tensor.
        for variant in (name, f"{name}_", f"{name}_out"):
            if hasattr(native, variant):
                yield getattr(native, variant), getattr(public, name, getattr(native, name))
    for name in (*_SENT_FIRST, *_SENT_SECOND):
        if hasattr(in_place, name):
            yield getattr(in_place, name), getattr(in_place, name)


#: torch.distributed's own ops, by the position of what a rank sends. A rank that is not the source
#: of a scatter sends nothing; what it receives is counted there.
_SENT_FIRST = ("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "scatter_")
_SENT_SECOND = (
    "allgather_",
    "allgather_coalesced_",
    "_allgather_base_",
    "allgather_into_tensor_coalesced_",
    "reduce_scatter_",
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "gather_",
)

#: The op packet that runs -> the one under which torch counts it.
COUNTED: dict[Any, Any] = dict(_packets())
#: The kind of an event -> the op packet under which torch counts it.
PACKETS: dict[str, Any] = {packet.__name__: packet for packet in COUNTED.values()}


def event_of_call(
    packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], place: Place
) -> CommEvent:
    """The event of a call of a counted packet."""
    sent = args[1 if packet.__name__ in _SENT_SECOND else 0]
    group_name = _group_name((*args, *kwargs.values()))
    return make_event(COUNTED[packet].__name__, sent, group_name, place)


def make_event(kind: str, sent: Any, group_name: str | None, place: Place) -> CommEvent:
    """The event of a collective that sends the tensors in `sent`."""
    cause = watch.cause
    return CommEvent(
        kind=kind,
        axis=_axis(group_name),
        num_bytes=sum(map(_num_bytes, _tensors(sent))),
        op=cause.op if cause is not None else None,
        module=place.module,
        line=place.line,
        phase=place.phase,
        implicit=cause is not None and cause.implicit,
    )


def _group_name(values: Iterable[Any]) -> str | None:
    """The process group among a call's arguments: a name, a group, or a group boxed for an op."""
    found: str | None = None
    for value in values:
        if isinstance(value, dist.ProcessGroup):
            return value.group_name
        if isinstance(value, str):
            found = value  # the last string is the group, the one before it the reduction
        elif isinstance(value, torch.ScriptObject) and hasattr(dist.ProcessGroup, "unbox"):
            try:
                return dist.ProcessGroup.unbox(value).group_name
            except RuntimeError:  # a boxed ReduceOp
                continue
    return found


def _axis(group_name: str | None) -> str | None:
    if group_name is None or not dist.is_initialized():
        return None
    world = current_world()
    if group_name not in world.axis_names:
        _learn_axes(world)
    return world.axis_names.get(group_name)


def _learn_axes(world: World) -> None:
    """Ask the known meshes for their groups, which others may use before this library does."""
    for grid in world.grids.values():
        for axis in range(grid.num_axes):
            with contextlib.suppress(RuntimeError):  # a mesh without groups
                name = grid.mesh.get_group(axis).group_name
                world.axis_names.setdefault(name, grid.axis_name(axis))


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, (list, tuple)):
        return itertools.chain.from_iterable(map(_tensors, value))
    return ()


def _num_bytes(tensor: torch.Tensor) -> int:
    """The bytes on one rank; every collective of this library has the same on all."""
    part = one_part(tensor)
    return math.prod(part.shape) * part.element_size()


# -- traffic -------------------------------------------------------------------------------------
# Traffic: collectives that ran, added up, grouped and shown.
#
# `CommDebugMode`, `explain`, the report of a step and its page all count and group here.


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
        """The collectives of a module, including the modules inside it; "" includes everything."""
        return Traffic(event for event in self.events if not path or _is_below(event.module, path))

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
            cells[2] = short_kind(cells[2])
            cause = f"{cause}\n{line}" if line else cause
            table.add_row(*map(Text, (*cells, cause)), *figures, style=style)
        return table


def short_kind(kind: str) -> str:
    """The kind of a collective without the endings of torch's ops.

    >>> [short_kind(kind) for kind in ("all_gather_into_tensor", "all_to_all_single", "all_reduce")]
    ['all_gather', 'all_to_all', 'all_reduce']
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
