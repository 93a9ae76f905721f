"""data_parallel: ranks with a batch each train one module."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.dtensor.gradients import BUCKET_BYTES
from shardwise.errors import LayoutError
from shardwise.training.contract import DataAxes, forbid_both, tensor_axes
from shardwise.training.mesh_axes import mesh_axes
from shardwise.training.reducer import declare, door_of
from shardwise.training.start_values import start_alike


def data_parallel(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Let the ranks of a mesh, each with its own batch, train one module; returns the module.

    All axes of `mesh` are data axes: `mesh["dp"]`, `mesh["rep", "shard"]`, or a flattened one.
    After backward, every gradient is that of the mean of the ranks' losses, whatever the parameter
    is: plain, a DTensor, a table; see docs/concepts/gradients.md. The reductions run in buckets
    during backward. Parameters and buffers start from the values of coordinate `src_data_rank`.

    It may be called before or after other doors, on a module inside a data-parallel one, and once
    more for another axis. Parameters that are unfrozen or added later are reduced as well.

    `with module.no_sync():` leaves gradients as each rank has them, to accumulate; the next
    backward outside of it reduces the sum.

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
    forbid_both([axes], tensor_axes(module), "data_parallel")
    door = door_of(module)
    if door is not None and DataAxes(axes, True) in door.declared:
        raise LayoutError(
            "The module is data-parallel already: a second time would reduce gradients twice."
        )
    door = declare(module, DataAxes(axes, True), bucket_bytes=bucket_bytes, source=src_data_rank)
    if src_data_rank is not None:
        start_alike((*module.parameters(), *module.buffers()), axes, src_data_rank)
    module.no_sync = door.no_sync  # type: ignore[assignment]
    return module
