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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import collectives
from shardwise.comm.local_tensor import LocalTensor
from shardwise.comm.watch import because
from shardwise.core.untraced import untraced
from shardwise.dtensor.gradients import BUCKET_BYTES
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import LayoutError
from shardwise.parallel.buckets import Bucket, flattened, make_buckets, put_back, waits
from shardwise.parallel.line import Line, line_of


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


@dataclass(slots=True)
class Sent:
    """A bucket on its way: the parameters in it, and the flat result."""

    bucket: Bucket
    parameters: list[nn.Parameter]
    flat: torch.Tensor


class Reducer:
    """Reduces the gradients of one module; see Note [Buckets]."""

    def __init__(self, module: nn.Module, line: Line, bucket_bytes: int) -> None:
        self._watch(make_buckets(module, line, bucket_bytes))
        module.register_forward_pre_hook(self._fresh)

    def _watch(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets
        self.number = {id(p): i for i, b in enumerate(buckets) for p in b.parameters}
        self.enabled = True
        self._forget()
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._arrived)
                if bucket.grid.world.simulated and type(parameter.data) is torch.Tensor:
                    parameter.register_hook(_room_per_rank(parameter))

    # A copy of the module comes with a copy of this; hooks of parameters are not copied.

    def __getstate__(self) -> list[Bucket]:
        return self.buckets

    def __setstate__(self, buckets: list[Bucket]) -> None:
        self._watch(buckets)

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

    def _fresh(self, *_: Any) -> None:
        """A backward that raised half-way leaves nothing behind."""
        if self.queued and torch._C._current_graph_task_id() == -1:
            self._forget()

    @untraced
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
        members = [p for p in bucket.parameters if waits(p, bucket)]
        if members:
            with torch.no_grad(), because("data_parallel", implicit=False):
                flat = flattened(members, bucket)
                flat = collectives.start_all_reduce(flat, "sum", bucket.grid, bucket.axis)
            self.sent.append(Sent(bucket, members, flat))

    @untraced
    def _finish(self) -> None:
        while self.num_started < len(self.buckets):
            self._start()
        sent = self.sent
        self._forget()
        for each in sent:
            with torch.no_grad(), because("data_parallel", implicit=False):
                put_back(each.parameters, each.bucket, collectives.finished(each.flat))


def _room_per_rank(parameter: nn.Parameter) -> Callable[[torch.Tensor], None]:
    """A hook for simulated worlds: gradients of many ranks cannot be added to one plain tensor."""

    @untraced
    def spread(grad: torch.Tensor) -> None:
        held = parameter.grad
        if isinstance(grad, LocalTensor) and type(held) is torch.Tensor:
            parameter.grad = LocalTensor.per_rank(lambda _: held.clone(), grad.ranks)

    return spread
