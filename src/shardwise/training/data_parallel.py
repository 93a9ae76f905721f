"""data_parallel: replicas of one module, each rank with its own batch."""

from __future__ import annotations

import contextlib

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.agreement import agreeing
from shardwise.dtensor.autograd import BUCKET_BYTES
from shardwise.errors import LayoutError
from shardwise.training.contract import (
    DataAxes,
    check_axes_differ,
    describe_trained,
    mesh_axes,
    sync_values,
    tensor_axes,
)
from shardwise.training.reducer import declare, declared_module


def data_parallel(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Train one module on the ranks of a mesh, each with its own batch; returns the module.

    All axes of `mesh` are data axes: `mesh["dp"]`, `mesh["rep", "shard"]`, or a flattened one.
    After backward, every gradient is that of the mean of the ranks' losses, for plain parameters,
    DTensors and tables alike; see docs/concepts/gradients.md. Reductions run in buckets during
    backward. Parameters and buffers start from the values of coordinate `src_data_rank`.

    It may be called before or after other front doors, on a module inside a data-parallel one, and
    again for another axis. Parameters that are unfrozen or added later are reduced as well.

    A rank outside the mesh calls this too; its module is left as it is.

    `with module.no_sync():` accumulates local gradients; the next backward outside of it reduces
    the sum.

    >>> import shardwise, torch
    >>> from shardwise.parallel import data_parallel
    >>> with shardwise.simulate(2):
    ...     mesh = shardwise.init_device_mesh("cpu", (2,))
    ...     model = data_parallel(torch.nn.Linear(3, 1, bias=False), mesh)
    ...     batch = shardwise.LocalTensor.per_rank(lambda rank: torch.full((4, 3), float(rank)))
    ...     model(batch).mean().backward()
    >>> model.weight.grad                   # the mean of 0 and 1
    tensor([[0.5000, 0.5000, 0.5000]])
    """
    axes = mesh_axes(mesh)
    if axes.given.outside:
        module.no_sync = contextlib.nullcontext  # type: ignore[assignment]
        return module
    with agreeing(axes.given, "data_parallel") as request:
        request.append(f"bucket_bytes={bucket_bytes}, src_data_rank={src_data_rank}")
        request += describe_trained(module)
        sizes = [axes.grid.shape[axis] for axis in axes.axes]
        if src_data_rank is not None and not 0 <= src_data_rank < min(sizes):
            raise LayoutError(
                f"data_parallel: src_data_rank={src_data_rank} is not a coordinate on every axis "
                f"of {axes.given!r}."
            )
        check_axes_differ([axes], tensor_axes(module), "data_parallel")
        declared = declared_module(module)
        if declared is not None and DataAxes(axes, True) in declared.data_axes:
            raise LayoutError(
                "The module is data-parallel already: a second time would reduce gradients twice."
            )
    declared = declare(
        module, DataAxes(axes, True), bucket_bytes=bucket_bytes, source=src_data_rank
    )
    if src_data_rank is not None:
        sync_values((*module.parameters(), *module.buffers()), axes, src_data_rank)
    module.no_sync = declared.no_sync  # type: ignore[assignment]
    return module
