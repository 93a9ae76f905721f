"""CommDebugMode: counts the collectives that run inside it, whoever issues them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.comm.local_tensor import LocalTensor
from shardwise.core.world import current_world
from shardwise.dtensor.tensor import DTensor

_native = torch.ops._c10d_functional
_public = torch.ops.c10d_functional
_in_place = torch.ops.c10d

#: The op that runs -> the key under which torch counts it.
_COUNTED: dict[Any, Any] = {
    _native.all_reduce: _public.all_reduce,
    _native.all_reduce_coalesced: _public.all_reduce_coalesced,
    _native.all_gather_into_tensor: _public.all_gather_into_tensor,
    _native.all_gather_into_tensor_coalesced: _public.all_gather_into_tensor_coalesced,
    _native.reduce_scatter_tensor: _public.reduce_scatter_tensor,
    _native.reduce_scatter_tensor_coalesced: _public.reduce_scatter_tensor_coalesced,
    _native.all_to_all_single: _public.all_to_all_single,
    _native.broadcast: _public.broadcast,
}
_COUNTED |= {
    getattr(_in_place, name): getattr(_in_place, name)
    for name in (
        "allreduce_",
        "allreduce_coalesced_",
        "allgather_",
        "_allgather_base_",
        "allgather_into_tensor_coalesced_",
        "reduce_scatter_",
        "_reduce_scatter_base_",
        "reduce_scatter_tensor_coalesced_",
        "alltoall_",
        "alltoall_base_",
        "broadcast_",
        "scatter_",
        "gather_",
        "reduce_",
    )
    if hasattr(_in_place, name)
}


@dataclass(frozen=True, slots=True)
class CommEvent:
    """One collective: what ran, along which mesh axis, and how many bytes each rank put in."""

    kind: str
    axis: str | None
    num_bytes: int


class CommDebugMode(TorchDispatchMode):
    """Counts collectives, as torch's mode of this name does, and their bytes.

    >>> import shardwise, torch
    >>> from shardwise.debug import CommDebugMode
    >>> with shardwise.simulate(4), CommDebugMode() as comm:
    ...     mesh = shardwise.init_device_mesh("cpu", (4,))
    ...     x = shardwise.ones(8, device_mesh=mesh, placements=[shardwise.Shard(0)])
    ...     _ = x.full_tensor()
    >>> comm.get_total_counts(), comm.get_total_bytes()
    (1, 8)
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[CommEvent] = []
        self._counts: Counter[Any] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> CommDebugMode:
        self.events.clear()
        self._counts.clear()
        return super().__enter__()

    def get_total_counts(self) -> int:
        """How many collectives ran."""
        return sum(self._counts.values())

    def get_comm_counts(self) -> dict[Any, int]:
        """How many of each kind, keyed as torch does: `torch.ops.c10d_functional.all_reduce`."""
        return defaultdict(int, self._counts)

    def get_total_bytes(self) -> int:
        """The bytes that each rank put into collectives."""
        return sum(event.num_bytes for event in self.events)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if DTensor in types:
            # Its own dispatch comes next, with this mode still on.
            return NotImplemented
        packet = func._overloadpacket
        counted = _COUNTED.get(packet)
        if counted is not None:
            self._counts[counted] += 1
            self.events.append(_event(packet, args))
        if LocalTensor in types:
            return NotImplemented
        return func(*args, **(kwargs or {}))


def _event(packet: Any, args: tuple[Any, ...]) -> CommEvent:
    group = next((a for a in reversed(args) if isinstance(a, str)), None)
    axis = current_world().axis_names.get(group) if group is not None else None
    return CommEvent(packet.__name__, axis, sum(map(_num_bytes, _tensors(args[0]))))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _num_bytes(tensor: torch.Tensor) -> int:
    """The bytes on one rank; every collective of this library has the same on all."""
    part = tensor._parts[0] if isinstance(tensor, LocalTensor) else tensor
    return math.prod(part.shape) * part.element_size()
