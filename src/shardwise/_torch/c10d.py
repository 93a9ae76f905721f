"""torch.distributed's tables: the world, the groups by name, the stack of `with device_mesh:`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise._torch.compat import Missing, Names, Probe

_names = Names()
_NO_SIMULATION = "simulate() fails"

#: The Work of a finished collective.
FakeWork: Any = _names.find(
    "torch._C._distributed_c10d.FakeWork",
    "torch.distributed's own collectives fail in a simulated world",
)
HashStore: Any = _names.find("torch._C._distributed_c10d.HashStore", _NO_SIMULATION)
#: Looked up when used: torch's test tools replace it.
_world: Callable[[], Any] = _names.later(
    "torch.distributed.distributed_c10d._world", _NO_SIMULATION
)
_update_default_pg: Any = _names.find(
    "torch.distributed.distributed_c10d._update_default_pg", _NO_SIMULATION
)
_unregister_group: Any = _names.find(
    "torch._C._distributed_c10d._unregister_process_group", _NO_SIMULATION
)
_meshes: Any = _names.find(
    "torch.distributed.device_mesh._mesh_resources", "`with device_mesh:` is not seen"
)
_root_mesh: Any = _names.find(
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh",
    "data_parallel() takes a sub-mesh for a mesh of its own",
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
_functional_collectives: Callable[[], Any] = _names.later(
    "torch.distributed._functional_collectives",
    "CommDebugMode counts collectives under other names than torch's does",
    instead=None,
)


def declare_collectives() -> None:
    """Have torch declare its functional collectives as ops."""
    _functional_collectives()


def mesh_stack() -> list[DeviceMesh]:
    """The meshes of the surrounding `with device_mesh:`, the innermost last."""
    return _meshes.mesh_stack


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that a sub-mesh was taken from."""
    return _root_mesh(mesh)


@contextlib.contextmanager
def fresh_c10d() -> Iterator[None]:
    """Set torch.distributed's state aside, and restore it afterwards.

    c10d keeps one world in module-level tables and the names of all groups in one registry, so
    names of groups made inside continue those outside, and only they are removed again.
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


def probe() -> Probe:
    return _names.probe(_is_set_aside, "simulate() does not restore torch.distributed")


def _is_set_aside() -> bool:
    before = dist.is_initialized()
    with fresh_c10d():
        inside = dist.is_initialized()
        mesh_stack()
    return not inside and dist.is_initialized() == before
