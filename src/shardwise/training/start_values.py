"""Start values of replicas: those of one coordinate along the data axes."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardwise.comm import collectives
from shardwise.comm.watch import because
from shardwise.dtensor.tensor import DTensor
from shardwise.simulation.ranks import is_shared
from shardwise.training.mesh_axes import MeshAxes


def sync_values(tensors: Iterable[torch.Tensor], axes: MeshAxes, source: int) -> None:
    """Broadcast the values of coordinate `source` along the axes.

    Along axes of its own mesh a DTensor is left alone; along others it is a replica, like a plain
    tensor.
    """
    for tensor in tensors:
        along = axes.axes
        if isinstance(tensor, DTensor):
            along = tuple(axes.meet(tensor._layout.grid)[1])
        local = tensor._local if isinstance(tensor, DTensor) else tensor.detach()
        if local.is_meta or is_shared(axes.grid, local):
            continue  # nothing to send, or one tensor for all ranks
        for axis in along:
            with torch.no_grad(), because("data_parallel", implicit=False):
                local.copy_(collectives.broadcast(local, source, axes.grid, axis))
