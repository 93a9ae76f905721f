"""CommDebugMode: counts the collectives that run inside it and tells the cause of each."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch.dispatch import TorchDispatchMode
from shardwise.comm.watch import watch
from shardwise.core.placements import Placement, short
from shardwise.debug.events import (
    COUNTED,
    PACKETS,
    CommEvent,
    Places,
    Traffic,
    ancestry,
    event_of_call,
    make_event,
)
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import ShardwiseError
from shardwise.simulation.collectives import COLLECTIVE
from shardwise.simulation.ranks import holds_parts

if TYPE_CHECKING:
    from rich.table import Table

_plain_dispatch = torch.Tensor.__torch_dispatch__


def _is_made_of_others(kind: type) -> bool:
    """Whether ops on such a tensor dispatch to ops on others, which may be collectives."""
    return not holds_parts(kind) and kind.__torch_dispatch__ is not _plain_dispatch  # type: ignore[attr-defined]


class CommDebugMode(TorchDispatchMode):
    """Counts collectives, as torch's mode of this name does, and says where each comes from.

    It can be used several times, and starts afresh each time. With torch.compile it sees the
    collectives that compiled code runs, not those that are traced.

    >>> import shardwise, torch
    >>> from shardwise.debug import CommDebugMode
    >>> with shardwise.simulate(4), CommDebugMode() as comm:
    ...     mesh = shardwise.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    ...     x = shardwise.ones(8, device_mesh=mesh, placements=[shardwise.Shard(0)])
    ...     _ = x.full_tensor()
    >>> comm.get_total_counts(), comm.get_total_bytes()
    (1, 8)
    >>> event = comm.events[0]
    >>> event.kind, event.axis, event.op, event.implicit
    ('all_gather_into_tensor', 'tp', 'redistribute', False)
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.events: list[CommEvent] = []
        # Torch's name of the module of each event; "" outside modules.
        self._names: list[str] = []
        self._places = Places()
        self._active = False
        # Whether an op runs that is counted already, with all that it calls.
        self._counting = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile work inside this mode, which then sees the compiled code run."""
        return True

    def __enter__(self) -> CommDebugMode:
        if self._active:
            raise ShardwiseError(
                "This CommDebugMode is active already and would count everything twice. Nest "
                "another CommDebugMode() instead."
            )
        self.events, self._names = [], []
        self._places = Places()
        super().__enter__()
        self._active = True
        watch.watchers += 1
        watch.listeners.append(self._played)
        watch.update()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._active = False
        watch.watchers -= 1
        watch.listeners.remove(self._played)
        watch.update()
        super().__exit__(*exc)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self._places.mark()
        packet = getattr(func, "_overloadpacket", None)
        if packet in COUNTED and DTensor not in types and not watch.announced:
            self._note(event_of_call(packet, args, kwargs or {}, self._places.now()))
            self._counting = True
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self._counting = False
        if packet in watch.kernels:
            return self._run_inside(watch.kernels[packet], args, kwargs or {})
        if len(args) > 1 and getattr(args[1], "_overloadpacket", None) in watch.kernels:
            # The compiler's call of an op with effects: an ordering token, the op, its arguments.
            return args[0], self._run_inside(args[1], args[2:], kwargs or {})
        if packet is COLLECTIVE:
            sent, kind, group_name = args
            self._note(make_event(kind, sent, group_name, self._places.now()))
        if any(map(_is_made_of_others, types)):
            # Its own __torch_dispatch__ comes next, with this mode still on.
            return NotImplemented
        return func(*args, **(kwargs or {}))

    def _run_inside(self, fn: Any, args: Any, kwargs: Any) -> Any:
        """Run `fn` with this mode on again: torch turns it off during dispatch."""
        super().__enter__()
        try:
            return fn(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)

    def _played(self, kind: str, sent: Any, group_name: str) -> None:
        """Called for each collective of a simulated world, also for an op that was counted."""
        if not self._counting:
            self._note(make_event(kind, sent, group_name, self._places.now()))

    def _note(self, event: CommEvent) -> None:
        self.events.append(event)
        self._names.append(self._places.name(event.module) if self._places.inside else "")

    # -- totals ------------------------------------------------------------------------------

    def get_total_counts(self) -> int:
        """How many collectives ran."""
        return len(self.events)

    def get_comm_counts(self) -> dict[Any, int]:
        """How many of each kind, keyed as torch does: `torch.ops.c10d_functional.all_reduce`."""
        return defaultdict(int, Counter(PACKETS[event.kind] for event in self.events))

    @property
    def comm_counts(self) -> dict[Any, int]:
        """The same, under the name of torch's attribute."""
        return self.get_comm_counts()

    def get_total_bytes(self) -> int:
        """The bytes that each rank sent."""
        return Traffic(self.events).num_bytes

    # -- modules -----------------------------------------------------------------------------

    @property
    def comm_module_counts(self) -> dict[str, dict[str, dict[Any, int]]]:
        """Per module and phase, how many of each kind, the modules inside it included.

        Modules are named as by torch, by the class of the outermost one and the path in it:
        `MLP.net1`. "Global" stands for everything that ran. Only modules that communicate are
        listed.
        """
        return {
            name: {
                phase: defaultdict(int, {PACKETS[kind]: n for kind, n in kinds.items()})
                for phase, kinds in phases.items()
            }
            for name, phases in Traffic(self.events).by_module(self._names).items()
        }

    @property
    def advanced_module_tracker(self) -> ModuleTable:
        """The modules, in the dicts of torch's tracker of this name."""
        table = ModuleTable()
        for path, module in self._places.modules():
            table.add(self._places.name(path), module)
        return table

    def get_parameter_info(self) -> dict[str, dict[str, torch.nn.Parameter]]:
        """For each module that ran or is inside one that ran, by name: its own parameters."""
        return self.advanced_module_tracker.module_parameters_dict

    def get_sharding_info(self) -> dict[str, tuple[Placement, ...]]:
        """The placements of each parameter that is a DTensor, by name.

        >>> import shardwise, torch
        >>> from shardwise.debug import CommDebugMode
        >>> with shardwise.simulate(2):
        ...     mesh = shardwise.init_device_mesh("cpu", (2,))
        ...     model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
        ...     _ = shardwise.distribute_module(model, mesh)
        ...     with CommDebugMode() as comm:
        ...         _ = model(shardwise.ones(2, 4, device_mesh=mesh))
        >>> comm.get_sharding_info()
        {'Sequential.0.weight': (Replicate(),)}
        """
        return self.advanced_module_tracker.sharding_dict

    # -- reports -----------------------------------------------------------------------------

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """One indented line per module: its communication in forward and in backward.

        With a `noise_level` above 0, each collective has a line below its module.
        """
        paths = [path for path, _ in self._places.modules()]
        return Traffic(self.events).tracing_table(paths, each_event=noise_level > 0)

    def to_json(self) -> str:
        """Events and totals as JSON."""
        traffic, sharding = Traffic(self.events), self.get_sharding_info()
        kinds = {kind: calls for kind, (calls, _) in traffic.kinds().items()}
        content = {
            "totals": {**traffic.totals(), "kinds": kinds},
            "modules": traffic.by_module(self._names),
            "sharding": {name: short(placements) for name, placements in sharding.items()},
            "events": [asdict(event) for event in self.events],
        }
        return json.dumps(content, indent=2)

    def log_comm_debug_tracing_table_to_file(
        self, file_name: str = "comm_mode_log.txt", noise_level: int = 3
    ) -> None:
        """Write the tracing table to a file."""
        text = self.generate_comm_debug_tracing_table(noise_level)
        Path(file_name).write_text(text + "\n", encoding="utf-8")

    def generate_json_dump(
        self, file_name: str = "comm_mode_log.json", noise_level: int = 3
    ) -> None:
        """Write `to_json()` to a file: all of it, whatever the `noise_level`."""
        Path(file_name).write_text(self.to_json() + "\n", encoding="utf-8")

    def log(self) -> None:
        """Print a table: which collectives ran where, how often, with how many bytes, and why."""
        from rich.console import Console

        Console().print(self)

    def __rich__(self) -> Table:
        return Traffic(self.events).__rich__()


class ModuleTable:
    """The information of torch's module tracker, by names of modules."""

    def __init__(self) -> None:
        self.module_helper_dict: dict[str, dict[str, Any]] = {"Global": {"depth": 0}}
        self.module_parents_dict: dict[str, set[str]] = {"Global": set()}
        self.parent_dict: dict[str, list[str]] = {}
        self.module_parameters_dict: dict[str, dict[str, torch.nn.Parameter]] = {}
        self.sharding_dict: dict[str, tuple[Placement, ...]] = {}

    def add(self, name: str, module: torch.nn.Module) -> None:
        """Add a module; those around it come first."""
        around = [outer for outer in ancestry(name) if outer in self.module_helper_dict]
        kind = str(type(module)).strip("<>")
        about: dict[str, Any] = {"module_type": kind, "depth": len(around) + 1}
        self.module_helper_dict[name] = about
        self.module_parents_dict[name] = {"Global", *around, name}
        self.parent_dict.setdefault(around[-1] if around else "Global", []).append(name)
        own = dict(module.named_parameters(recurse=False))
        if own:
            self.module_parameters_dict[name] = own
        for key, parameter in own.items():
            if isinstance(parameter, DTensor):
                self.sharding_dict[f"{name}.{key}"] = parameter.placements
                about.setdefault("parameters", {})[key] = str(parameter.placements)
