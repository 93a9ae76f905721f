"""The mesh of a surrounding `with device_mesh:`."""

from __future__ import annotations

from torch.distributed import device_mesh as torch_mesh
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import ArgumentError


def current_mesh() -> DeviceMesh:
    stack = torch_mesh._mesh_resources.mesh_stack
    if not stack:
        raise ArgumentError("No mesh was given, and there is no surrounding `with device_mesh:`.")
    return stack[-1]
