"""torch.distributed's tables: the world, the groups by name, the stack of `with device_mesh:`."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from shardwise._torch.compat import Missing, Names, Probe

_names = Names()
_NO_SIMULATION = "simulate() fails"

#: The Work of a finished collective.
FakeWork: Any = _names.find(
    "torch._C._distributed_c10d.FakeWork",
    "torch.distributed's own collectives fail in a simulated world",
)
_FakeGroup: Any = _names.find(
    "torch._C._distributed_c10d.FakeProcessGroup", "one rank of a large world cannot be played"
)
HashStore: Any = _names.find("torch._C._distributed_c10d.HashStore", _NO_SIMULATION)
#: Looked up when used: torch's test tools replace it.
_world: Callable[[], Any] = _names.later(
    "torch.distributed.distributed_c10d._world", _NO_SIMULATION
)
_update_default_pg: Any = _names.find(
    "torch.distributed.distributed_c10d._update_default_pg", _NO_SIMULATION
)
_MAKE_GROUP = "_new_process_group_helper"
_make_group: Any = _names.find(
    f"torch.distributed.distributed_c10d.{_MAKE_GROUP}",
    "groups of other backends cannot be made in a simulated world",
    instead=None,
)
_unregister_group: Any = _names.find(
    "torch._C._distributed_c10d._unregister_process_group", _NO_SIMULATION
)
_meshes: Any = _names.find(
    "torch.distributed.device_mesh._mesh_resources", "`with device_mesh:` is not seen"
)
#: The mesh that a submesh was taken from.
root_mesh: Callable[[DeviceMesh], DeviceMesh] = _names.find(
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh",
    "data_parallel() treats a submesh as an unrelated mesh",
    instead=lambda mesh: mesh,
)
#: A rank and its device, as torch writes it.
RemoteDevice: Any = _names.find(
    "torch.distributed.remote_device._remote_device", "sharding specs cannot be parsed"
)
#: Of torch's own DTensor, which only shardwise.interop imports.
strided_shard: Callable[[], Any] = _names.later(
    "torch.distributed.tensor.placement_types._StridedShard",
    "tensors cannot be exchanged with torch's DTensor",
)
#: torch's own sharded tensors and their specs, which torchrec uses for tables.
sharded_tensors: Callable[[], Any] = _names.later(
    "torch.distributed._shard.sharded_tensor", "tables cannot be given to torchrec"
)
sharding_specs: Callable[[], Any] = _names.later(
    "torch.distributed._shard.sharding_spec", "plans cannot be given to torchrec"
)
_LONG_WAITS = "groups of mesh axes wait for torch's default timeout, not for that of the world"
#: torch's defaults, for gloo and for NCCL; a new group does not inherit the timeout of the world.
_DEFAULT_NAMES = ("default_pg_timeout", "default_pg_nccl_timeout")
_torch_defaults = {
    _names.find(f"torch.distributed.distributed_c10d.{name}", _LONG_WAITS, instead=None)
    for name in _DEFAULT_NAMES
} - {None}
_set_timeout: Any = _names.find(
    "torch.distributed.distributed_c10d._set_pg_timeout", _LONG_WAITS, instead=None
)
#: The store of the rendezvous.
default_store: Callable[[], Any] = _names.find(
    "torch.distributed.distributed_c10d._get_default_store",
    "an error of a collective does not say what the other ranks did",
)
#: `register_work(x, work)` has torch's `wait_tensor(x)` wait for `work`, which writes to `x`.
register_work: Any = _names.find(
    "torch._C._distributed_c10d._register_work",
    "collections allocate the memory of large messages anew in each step",
    instead=None,
)
#: Has torch declare its functional collectives as ops.
declare_collectives: Callable[[], Any] = _names.later(
    "torch.distributed._functional_collectives",
    "CommDebugMode counts collectives under other names than torch's does",
    instead=None,
)


def silent_group(rank: int, size: int) -> Any:
    """A group that sends nothing: every other rank seems to send what this one sends."""
    return _FakeGroup._create_internal(rank, size)


def mesh_stack() -> list[DeviceMesh]:
    """The meshes of the surrounding `with device_mesh:`, the innermost last."""
    return _meshes.mesh_stack


def mesh_without_groups(
    device_type: str, ranks: torch.Tensor, axis_names: tuple[str, ...] | None = None
) -> DeviceMesh:
    """A mesh over which nothing is sent: for a rank outside it, or without a process group."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return DeviceMesh(
        device_type, ranks, mesh_dim_names=axis_names, _init_backend=False, _rank=rank
    )


# -- how long a collective waits ------------------------------------------------------------------


def set_default_timeout(timeout: timedelta) -> None:
    """The timeout of all groups that this process makes from now on."""
    for name in _DEFAULT_NAMES:
        setattr(distributed_c10d, name, timeout)


def group_timeout(group: Any) -> timedelta | None:
    """How long a collective of the group waits; None for a backend that does not say."""
    for device in getattr(group, "_device_types", ()):
        with contextlib.suppress(AttributeError, RuntimeError):
            backend = group._get_backend(device)
            return None if isinstance(backend, _FakeGroup) else backend.options._timeout
    return None


def inherit_timeout(group: Any) -> None:
    """Give a group the default group's timeout, unless it was made with its own."""
    timeout = group_timeout(dist.GroupMember.WORLD)
    if timeout is None or _set_timeout is None or group_timeout(group) not in _torch_defaults:
        return
    _set_timeout(timeout, group)


@contextlib.contextmanager
def fresh_c10d() -> Iterator[None]:
    """Set torch.distributed's state aside, and restore it afterwards.

    c10d keeps one world in module-level tables and the names of all groups in one registry. So the
    names of groups made inside continue those made outside, and only they are removed again.
    """
    world = _world()
    for needed in (_update_default_pg, _unregister_group):
        if isinstance(needed, Missing):
            needed()  # raises before anything is changed
    tables = [
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.tags_to_pg,
        world.pg_to_tag,
        world.pg_coalesce_state,
    ]
    kept = [dict(table) for table in tables]
    group, count, excepthook = world.default_pg, world.group_count, sys.excepthook
    for table in tables:
        table.clear()
    _update_default_pg(None)
    try:
        yield
    finally:
        for name in world.pg_names.values():
            _unregister_group(name)
        for table, entries in zip(tables, kept, strict=True):
            table.clear()
            table.update(entries)
        _update_default_pg(group)
        world.group_count = count
        sys.excepthook = excepthook  # init_process_group puts "[rank0]:" before every traceback


@contextlib.contextmanager
def groups_of(backend: str) -> Iterator[None]:
    """Make all groups with this backend, whichever is requested: gloo would wait for processes."""
    before = getattr(distributed_c10d, _MAKE_GROUP, None)

    def make(*args: Any, **options: Any) -> Any:
        asked = inspect.signature(_make_group).bind(*args, **options)
        asked.arguments["backend"] = dist.Backend(backend)
        return _make_group(*asked.args, **asked.kwargs)

    if before is not None:
        setattr(distributed_c10d, _MAKE_GROUP, make)
    try:
        yield
    finally:
        if before is not None:
            setattr(distributed_c10d, _MAKE_GROUP, before)


def probe() -> Probe:
    return _names.probe(_is_set_aside, "simulate() does not restore torch.distributed")


def _is_set_aside() -> bool:
    before = dist.is_initialized()
    with fresh_c10d():
        inside = dist.is_initialized()
        mesh_stack()
    return not inside and dist.is_initialized() == before and bool(_torch_defaults)
