"""data_parallel: gradients of replicated parameters, reduced in buckets while backward runs.

Note [Buckets]
Parameters are put into buckets in reverse order, about the order in which backward reaches them. A
bucket whose gradients are all there is sent on its way, never before the buckets in front of it:
all ranks start the same collectives in the same order, whatever they used. At the end of backward
the rest is started, zeros standing for gradients that a rank lacks, and all are awaited. Each
bucket carries one flag per parameter, so a parameter that no rank used keeps no gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import collectives
from shardwise.comm.local_tensor import LocalTensor
from shardwise.comm.ranks import each_rank, localize, one_for_all
from shardwise.comm.watch import because
from shardwise.core.grid import Grid, grid_of
from shardwise.core.placements import REPLICATE
from shardwise.dtensor.gradients import BUCKET_BYTES
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import LayoutError


def data_parallel(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Let the ranks of a mesh axis, each with its own batch, train one module; returns the module.

    After backward, every gradient is that of the mean of the ranks' losses: plain parameters are
    averaged, and DTensors that are replicated over the axis are reduced (their gradients are global
    already; see docs/howto/parallel.md). The reductions run in buckets during backward. Plain
    parameters and buffers start from the values of coordinate `src_data_rank`.

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
    if mesh.ndim != 1:
        raise LayoutError(
            f"data_parallel works along one axis; the mesh has {mesh.ndim}. Give it that axis: "
            'data_parallel(module, mesh["dp"]).'
        )
    if isinstance(getattr(module.__dict__.get("no_sync"), "__self__", None), Reducer):
        raise LayoutError(
            "The module is data-parallel already: a second time would reduce gradients twice."
        )
    line = line_of(mesh)
    if src_data_rank is not None:
        _broadcast(module, line, src_data_rank)
    reducer = Reducer(module, line, bucket_bytes)
    module.no_sync = reducer.no_sync  # type: ignore[assignment]
    return module


@dataclass(frozen=True, slots=True)
class Line:
    """A mesh axis, in the whole mesh that it was taken from; `own` is the axis as a mesh."""

    grid: Grid
    axis: int
    own: Grid

    @property
    def size(self) -> int:
        return self.grid.shape[self.axis]

    def axis_in(self, grid: Grid) -> int | None:
        """The axis of `grid` that this is; None where it has no part in `grid`."""
        if grid is self.grid:
            return self.axis
        return 0 if grid is self.own else None


def line_of(mesh: DeviceMesh) -> Line:
    own = grid_of(mesh)
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    names, asked = root.mesh_dim_names, mesh.mesh_dim_names
    if root is not mesh and names and asked and asked[0] in names:
        return Line(grid_of(root), names.index(asked[0]), own)
    return Line(own, 0, own)


def _broadcast(module: nn.Module, line: Line, source: int) -> None:
    """Plain tensors, and DTensors of other meshes, start alike along the axis."""
    for tensor in (*module.parameters(), *module.buffers()):
        if isinstance(tensor, DTensor):
            if line.axis_in(tensor._layout.grid) is not None:
                continue
            local = tensor._local
        else:
            local = tensor.detach()
        if line.grid.world.simulated and not isinstance(local, LocalTensor):
            continue  # one tensor for all ranks
        with torch.no_grad(), because("data_parallel", implicit=False):
            local.copy_(collectives.broadcast(local, source, line.grid, line.axis))


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters whose gradients travel together; `average` when they are each rank's own."""

    parameters: tuple[nn.Parameter, ...]
    grid: Grid
    axis: int
    average: bool


@dataclass(slots=True)
class Sent:
    """A bucket on its way: the parameters in it, and the flat result."""

    bucket: Bucket
    parameters: list[nn.Parameter]
    flat: torch.Tensor


class Reducer:
    """Reduces the gradients of one module; see Note [Buckets]."""

    def __init__(self, module: nn.Module, line: Line, bucket_bytes: int) -> None:
        self.buckets = make_buckets(module, line, bucket_bytes)
        self.number = {id(p): i for i, b in enumerate(self.buckets) for p in b.parameters}
        self.enabled = True
        self._forget()
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._arrived)
                if bucket.grid.world.simulated and type(parameter.data) is torch.Tensor:
                    parameter.register_hook(_room_per_rank(parameter))
        module.register_forward_pre_hook(lambda *_: self._fresh())

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward reduces nothing."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def _forget(self) -> None:
        self.missing = [{id(p) for p in bucket.parameters} for bucket in self.buckets]
        self.sent: list[Sent] = []
        self.num_started = 0
        self.queued = False

    def _fresh(self) -> None:
        """A backward that raised half-way leaves nothing behind."""
        if self.queued and torch._C._current_graph_task_id() == -1:
            self._forget()

    def _arrived(self, parameter: torch.Tensor) -> None:
        if not self.enabled:
            return
        if not self.queued:
            self.queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self.missing[self.number[id(parameter)]].discard(id(parameter))
        while self.num_started < len(self.buckets) and not self.missing[self.num_started]:
            self._start()

    def _start(self) -> None:
        bucket = self.buckets[self.num_started]
        self.num_started += 1
        members = [p for p in bucket.parameters if _waits(p, bucket)]
        if members:
            with torch.no_grad(), because("data_parallel", implicit=False):
                flat = _flattened(members, bucket)
                flat = collectives.start_all_reduce(flat, "sum", bucket.grid, bucket.axis)
            self.sent.append(Sent(bucket, members, flat))

    def _finish(self) -> None:
        while self.num_started < len(self.buckets):
            self._start()
        sent = self.sent
        self._forget()
        for each in sent:
            with torch.no_grad(), because("data_parallel", implicit=False):
                _put_back(each, collectives.finished(each.flat))


def make_buckets(module: nn.Module, line: Line, bucket_bytes: int) -> list[Bucket]:
    """Parameters in reverse order, in buckets of one dtype, mesh and kind."""
    buckets: list[Bucket] = []
    room: dict[Any, tuple[int, list[nn.Parameter]]] = {}
    for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
        kind = _kind(parameter, line)
        if kind is None or line.size == 1:
            continue
        key = (parameter.dtype, parameter.device, *kind)
        left, members = room.get(key, (0, []))
        size = parameter.numel() * parameter.element_size()
        if size > left and members:
            buckets.append(Bucket(tuple(members), *kind))
            left, members = 0, []
        members.append(parameter)
        room[key] = ((left or bucket_bytes) - size, members)
    return [*buckets, *(Bucket(tuple(m), *key[2:]) for key, (_, m) in room.items())]


def _kind(parameter: torch.Tensor, line: Line) -> tuple[Grid, int, bool] | None:
    """Grid and axis to reduce over, and whether to average; None when there is nothing to do."""
    if not isinstance(parameter, DTensor):
        return line.grid, line.axis, True
    grid = parameter._layout.grid
    axis = line.axis_in(grid)
    if axis is not None:
        return (grid, axis, False) if parameter.placements[axis].is_replicate() else None
    if grid.world.simulated:
        raise LayoutError(
            f"A parameter is on {grid!r} of ranks {list(grid.ranks)}: the part of the mesh that "
            "rank 0 sees. A simulated world has all ranks: give parallelize_module the whole mesh."
        )
    return line.grid, line.axis, True


def _room_per_rank(parameter: nn.Parameter) -> Callable[[torch.Tensor], None]:
    """A hook for simulated worlds: gradients of many ranks cannot be added to one plain tensor."""

    def spread(grad: torch.Tensor) -> None:
        held = parameter.grad
        if isinstance(grad, LocalTensor) and type(held) is torch.Tensor:
            parameter.grad = LocalTensor.per_rank(lambda _: held.clone(), grad.ranks)

    return spread


def _waits(parameter: torch.Tensor, bucket: Bucket) -> bool:
    """Whether there is something to reduce: a DTensor's gradient may be whole already."""
    grad = parameter.grad
    if bucket.average or grad is None:
        return True
    return isinstance(grad, DTensor) and grad.placements[bucket.axis].is_partial()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local if isinstance(tensor, DTensor) else tensor


def _flattened(members: Sequence[nn.Parameter], bucket: Bucket) -> torch.Tensor:
    """All gradients and the flags in one row; each rank's share of the mean where they are own."""
    flags = [float(p.grad is not None) for p in members]
    parts = [
        torch.zeros_like(_local(p)) if p.grad is None else _local(p.grad).detach() for p in members
    ]
    share = 1 / bucket.grid.shape[bucket.axis] if bucket.average else 1.0

    def flatten(_: Any, *here: torch.Tensor) -> torch.Tensor:
        row = torch.cat([*(part.reshape(-1) for part in here), here[0].new_tensor(flags)])
        return row if share == 1 else row.mul_(share)

    held = [localize(bucket.grid, part) for part in parts]
    return each_rank(bucket.grid, flatten, *held, axes=())


def _put_back(sent: Sent, flat: torch.Tensor) -> None:
    shapes = [localize(sent.bucket.grid, _local(p).detach()) for p in sent.parameters]

    def unflatten(_: Any, row: torch.Tensor, *here: torch.Tensor) -> list[torch.Tensor]:
        pieces = row.split([*(part.numel() for part in here), len(here)])
        views = [piece.view(part.shape) for piece, part in zip(pieces, here, strict=False)]
        return [*views, pieces[-1]]

    *pieces, flags = each_rank(sent.bucket.grid, unflatten, flat, *shapes, axes=())
    for number, (parameter, piece) in enumerate(zip(sent.parameters, pieces, strict=True)):
        if parameter.grad is None and not one_for_all(flags)[number]:
            continue  # no rank used it
        _set_gradient(parameter, piece, sent.bucket)


def _set_gradient(parameter: nn.Parameter, piece: torch.Tensor, bucket: Bucket) -> None:
    if not isinstance(parameter, DTensor):
        parameter.grad = one_for_all(piece) if type(parameter.data) is torch.Tensor else piece
        return
    grad: Any = parameter.grad
    layout = parameter._layout if grad is None else grad._layout
    if not bucket.average:
        placements = list(layout.placements)
        placements[bucket.axis] = REPLICATE
        layout = layout.with_placements(tuple(placements))
    parameter.grad = DTensor.wrap(piece, layout)
