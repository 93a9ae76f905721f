"""The mesh of a surrounding `with device_mesh:`."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from shardwise._torch.c10d import mesh_stack
from shardwise.errors import ArgumentError


def current_mesh() -> DeviceMesh:
    stack = mesh_stack()
    if not stack:
        raise ArgumentError("No mesh was given, and there is no surrounding `with device_mesh:`.")
    return stack[-1]
