"""CommEvent: one collective that ran, made from the call of its op."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwise._torch.c10d import declare_collectives
from shardwise.comm.watch import watch
from shardwise.core.world import World, current_world
from shardwise.debug.places import Place
from shardwise.simulation.parts import one_part

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
