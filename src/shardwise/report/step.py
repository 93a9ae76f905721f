"""StepReport: one training step as data: collectives, outputs, and the memory of each rank."""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise._torch.dispatch import TorchDispatchMode
from shardwise._torch.functions import tree_leaves
from shardwise.comm.collectives import collective_s
from shardwise.core.box import Box
from shardwise.core.mesh import grid_of
from shardwise.core.placements import short
from shardwise.debug import CommDebugMode
from shardwise.debug.events import CommEvent, Place, Traffic, short_kind
from shardwise.debug.visualize import HeldBox, holder_map
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import LayoutError
from shardwise.simulation.ranks import is_per_rank, on_rank, parts_of


@dataclass(frozen=True)
class Span:
    """A time span in which one module ran."""

    module: str
    phase: str
    start_s: float
    stop_s: float


class Timeline(CommDebugMode):
    """Records when each collective began, and for which module each op ran.

    Times are those of this process. A process that plays all ranks computes for one after another,
    and sends nothing; `expected_s` is the time of a collective by the cost model.
    """

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []
        self.spans: list[Span] = []
        self._begin = 0.0
        self._open: Place | None = None

    def __enter__(self) -> CommDebugMode:
        super().__enter__()
        self.times, self.spans = [], []
        self._begin, self._open = time.perf_counter(), None
        return self

    def _now(self) -> float:
        return time.perf_counter() - self._begin

    def _note(self, event: CommEvent) -> None:
        super()._note(event)
        self.times.append(self._now())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        start = self._now()
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._ran(self._places.now(), start, self._now())

    def _ran(self, place: Place, start: float, stop: float) -> None:
        """Ops that follow each other in one module are one span."""
        before = self._open
        if before is not None and (before.module, before.phase) == (place.module, place.phase):
            self.spans[-1] = replace(self.spans[-1], stop_s=stop)
        else:
            self.spans.append(Span(place.module, place.phase, start, stop))
        self._open = place


def expected_s(event: CommEvent, num_ranks: int) -> float:
    """The expected seconds of a collective; an unknown kind counts as an all-reduce."""
    kind = short_kind(event.kind)
    if kind not in ("all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        kind = "all_reduce"
    larger = event.num_bytes * (num_ranks if kind == "all_gather" else 1)
    return collective_s(kind, num_ranks, larger)


@dataclass(frozen=True)
class ParameterReport:
    """One parameter: its placements, and which ranks hold which shard."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    placements: str
    parts: tuple[HeldBox, ...]
    bytes_per_rank: tuple[int, ...]


@dataclass(frozen=True)
class OutputReport:
    """A module's output: a shape and placements, or the shapes of each rank's own tensor."""

    module: str
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Collective(CommEvent):
    """One collective of the step."""

    start_s: float
    expected_s: float


@dataclass
class StepReport:
    """One training step of a sharded model."""

    title: str
    axes: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]
    parameters: list[ParameterReport] = field(default_factory=list)
    outputs: list[OutputReport] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    memory: list[RankMemory] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    seconds: float = 0.0
    #: Further figures to show, in order.
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def traffic(self) -> Traffic:
        return Traffic(self.collectives)

    @property
    def num_bytes(self) -> int:
        """The bytes that each rank sent."""
        return self.traffic.num_bytes

    @property
    def num_implicit(self) -> int:
        return self.traffic.num_implicit

    def kinds(self) -> dict[str, tuple[int, int]]:
        """Per kind of collective, how many and how many bytes."""
        return self.traffic.kinds()

    def to_dict(self) -> dict[str, Any]:
        content = asdict(self)
        kinds = {k: {"calls": n, "bytes": size} for k, (n, size) in self.kinds().items()}
        return {
            "format": "shardwise step 1",
            "totals": self.traffic.totals(),
            "kinds": kinds,
            **content,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)


class Outputs:
    """Records the output of each module; a context manager."""

    def __init__(self, module: nn.Module) -> None:
        self.found: dict[str, OutputReport] = {}
        self._module = module
        self._hooks: list[Any] = []

    def __enter__(self) -> Outputs:
        for name, inner in self._module.named_modules():
            kind = type(inner).__name__
            self._hooks.append(inner.register_forward_hook(self._hook(name, kind)))
        return self

    def __exit__(self, *exc: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook(self, name: str, kind: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            texts = [_text(leaf) for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            shown = texts[:3] + ["…"] * (len(texts) > 3)
            self.found[name] = OutputReport(name, kind, ", ".join(shown) or "no tensor")

        return note


def _text(tensor: torch.Tensor) -> str:
    if isinstance(tensor, DTensor):
        return f"{_size(tensor.shape)} {short(tensor.placements)}"
    parts = parts_of(tensor)
    sizes = list(dict.fromkeys(_size(part.shape) for part in parts))
    held = "same on all ranks" if len(parts) == 1 else "differs by rank"
    return f"{' | '.join(sizes)} ({held})"


def _size(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def report_step(
    title: str,
    module: nn.Module,
    mesh: DeviceMesh,
    forward: Callable[[], torch.Tensor],
    update: Callable[[], None],
    state: Callable[[], Iterable[torch.Tensor]],
) -> StepReport:
    """Take one step and report it: `forward` returns the loss, `update` changes parameters.

    `state` lists the tensors of the optimizer. Of several processes each reports its own rank's
    memory, and all ranks' shards of parameters; without values, those of its own rank only.
    """
    grid = grid_of(mesh)
    ranks = tuple(sorted(grid.coordinates)) if grid.world.has_values else grid.world.present
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    saved = SavedTensors(module.parameters(), ranks)
    alone = len(grid.world.present) == 1
    live = LiveMemory(ranks, [*module.parameters(), *module.buffers()], alone=alone)
    with Timeline() as timeline, Outputs(module) as outputs, live:
        with saved.listen():
            loss = forward()
        if loss.dim():
            raise LayoutError(f"A loss is one number, found a tensor of shape {tuple(loss.shape)}.")
        loss.backward()
        before_update = live.peak
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        gradient_bytes = [sum_on(gradients, rank) for rank in ranks]
        update()
    assert isinstance(timeline, Timeline), "entered above"
    report = StepReport(title, tuple(zip(names, mesh.shape, strict=True)), ranks)
    report.seconds = max((span.stop_s for span in timeline.spans), default=0.0)
    report.spans = timeline.spans
    report.outputs = list(outputs.found.values())
    report.parameters = [parameter_report(name, p, ranks) for name, p in module.named_parameters()]
    sizes = dict(report.axes)
    for event, start in zip(timeline.events, timeline.times, strict=True):
        num_ranks = sizes.get(event.axis or "", len(grid.ranks))
        cost = expected_s(event, num_ranks)
        report.collectives.append(Collective(**asdict(event), start_s=start, expected_s=cost))
    kept = list(state())
    for rank, gradient, activations in zip(ranks, gradient_bytes, saved.bytes, strict=True):
        parameters = sum_on(module.parameters(), rank)
        memory = RankMemory(parameters, gradient, sum_on(kept, rank), activations)
        memory.peak = max(before_update[rank] + memory.optimizer, live.peak[rank])
        report.memory.append(memory)
    return report


def parameter_report(name: str, tensor: torch.Tensor, ranks: Sequence[int]) -> ParameterReport:
    if isinstance(tensor, DTensor):
        layout = tensor._layout
        if len(ranks) < len(layout.grid.ranks):
            boxes = {rank: layout.box(layout.grid.coordinates[rank]).spans for rank in ranks}
            parts = tuple(HeldBox(spans, (rank,)) for rank, spans in boxes.items())
        else:
            parts = tuple(HeldBox(*each) for each in holder_map(layout).holders.items())
        placements = short(tensor.placements)
    else:
        parts, placements = (HeldBox(Box.whole(tensor.shape).spans, tuple(ranks)),), "on each rank"
    return ParameterReport(
        name,
        tuple(tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        placements,
        parts,
        tuple(bytes_on(tensor, rank) for rank in ranks),
    )


# -- memory --------------------------------------------------------------------------------------
# Memory of each rank: parameters, gradients, optimizer state, activations, and the peak.


@dataclass
class RankMemory:
    """Bytes on one rank. `activations` are what forward saves for backward.

    `peak` is the most that is alive at once in a step, with optimizer state from the start.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    peak: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


def bytes_on(tensor: torch.Tensor, rank: int) -> int:
    """The bytes of a tensor on a rank; a plain one is whole on each."""
    if isinstance(tensor, DTensor):
        layout = tensor._layout
        coordinate = layout.grid.coordinates.get(rank)
        if coordinate is None:
            return 0
        return layout.box(coordinate).volume * layout.dtype.itemsize
    part = on_rank(tensor, rank)
    if part.layout is not torch.strided:
        return sum(bytes_on(inner, rank) for inner in _inside(part))
    return part.numel() * part.element_size()


def _inside(tensor: Any) -> list[torch.Tensor]:
    """The plain tensors of a sparse or jagged one."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout is torch.jagged:
        return [tensor.values(), tensor.offsets()]
    return []


def sum_on(tensors: Iterable[torch.Tensor], rank: int) -> int:
    return sum(bytes_on(tensor, rank) for tensor in tensors)


class SavedTensors:
    """Adds up the bytes that autograd saves and holds, each tensor once, without parameters.

    Parameters that `fully_shard` gathers are saved too, but freed after forward.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], ranks: Sequence[int]) -> None:
        self.bytes = [0] * len(ranks)
        self._ranks = ranks
        self._known = {place for p in parameters for place in _places(p)}
        self._saved: list[tuple[weakref.ref[Any], list[int]]] = []

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._note, lambda x: x):
            yield
        for ref, sizes in self._saved:
            storage = ref()
            if storage is not None and storage.nbytes():
                self.bytes = [total + size for total, size in zip(self.bytes, sizes, strict=True)]

    def _note(self, tensor: Any) -> Any:
        places = _places(tensor)
        if places and not self._known.issuperset(places):
            self._known.update(places)
            storage = next(part for part in _local_parts(tensor) if part.numel()).untyped_storage()
            sizes = [bytes_on(tensor, rank) for rank in self._ranks]
            self._saved.append((weakref.ref(storage), sizes))
        return tensor


def _local_parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    return parts_of(tensor._local if isinstance(tensor, DTensor) else tensor)


def _places(tensor: torch.Tensor) -> list[int]:
    """The storages of a tensor, on each rank that this process plays."""
    return [
        part.untyped_storage()._cdata
        for part in _local_parts(tensor)
        if part.layout is torch.strided and part.numel()
    ]


class LiveMemory(TorchDispatchMode):
    """The most bytes alive at once on each rank: operands and results of ops, while referenced.

    Temporary memory inside an op is not counted. Ops on one rank's part of a tensor make tensors of
    that rank; a tensor that never meets a tensor of a rank is not counted either.
    """

    def __init__(
        self, ranks: Sequence[int], tensors: Iterable[torch.Tensor], *, alone: bool
    ) -> None:
        """`tensors` exist already; `alone` where this process is one rank, which holds all."""
        super().__init__()
        self.peak = dict.fromkeys(ranks, 0)
        self._ranks = frozenset(ranks)
        self._orphans = self._ranks if alone else frozenset[int]()
        #: By id, each storage and the share of it that each rank holds.
        self._live: dict[int, tuple[weakref.ref[Any], dict[int, float]]] = {}
        self._hold([*tensors], self._ranks)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        taken = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        returned = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        storages = [id(x.untyped_storage()) for x in taken if _is_one(x)]
        known = [frozenset(self._live[key][1]) for key in storages if key in self._live]
        by = frozenset.intersection(*known) if known else self._orphans
        self._hold([*taken, *returned], by)
        held = dict.fromkeys(self._ranks, 0.0)
        # A copy: a storage that is freed meanwhile leaves the table.
        for ref, shares in list(self._live.values()):
            storage = ref()
            num_bytes = storage.nbytes() if storage is not None else 0
            for rank, share in shares.items():
                held[rank] += num_bytes * share
        self.peak = {rank: max(most, round(held[rank])) for rank, most in self.peak.items()}
        return result

    def _hold(self, tensors: list[torch.Tensor], ranks: frozenset[int]) -> None:
        """Note tensors; `ranks` hold those that do not say themselves who holds them."""
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                tensor, holders = tensor._local, self._ranks
            else:
                holders = self._ranks if is_per_rank(tensor) else ranks
            held: dict[int, dict[int, torch.Tensor]] = {}
            for rank in holders:
                part = on_rank(tensor, rank)
                if _is_dense(part):
                    held.setdefault(id(part.untyped_storage()), {})[rank] = part
            for key, parts in held.items():
                if key not in self._live:
                    self._live[key] = self._shares(key, parts)

    def _shares(
        self, key: int, parts: dict[int, torch.Tensor]
    ) -> tuple[weakref.ref[Any], dict[int, float]]:
        """Parts of several ranks may be views of one storage: each rank then holds its share."""
        storage = next(iter(parts.values())).untyped_storage()
        split = len({id(part) for part in parts.values()}) > 1
        shares = {
            rank: part.numel() * part.element_size() / max(1, storage.nbytes()) if split else 1.0
            for rank, part in parts.items()
        }
        return weakref.ref(storage, lambda _: self._live.pop(key, None)), shares


def _is_one(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and _is_dense(tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and bool(tensor.numel())


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The state that an optimizer keeps."""
    return [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    ]
