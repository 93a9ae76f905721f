"""One sample in one layout: what is run there, and compared with one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from shardwise.core.layout import Layout
from shardwise.core.placements import REPLICATE
from shardwise.dtensor.autograd import gradient_layout
from shardwise.dtensor.create import distribute_tensor
from shardwise.dtensor.tensor import DTensor
from shardwise.testing.op_sweep.alone import Alone, doubled, gradients, placed
from shardwise.testing.op_sweep.compare import compare, gathered
from shardwise.testing.op_sweep.lay_out import laid_out
from shardwise.testing.op_sweep.table import Sample
from shardwise.testing.op_sweep.ways import Way


class Cases:
    """A sample laid out in one way: the op, its gradients, and the forms that write."""

    def __init__(
        self,
        alone: Alone,
        way: Way,
        mesh: DeviceMesh,
        number: int,
        through: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda fn: fn,
    ) -> None:
        """`number` is that of the way; what is run is what `through` makes of the op."""
        self._alone, self._way, self._mesh, self._number = alone, way, mesh, number
        self._through = through
        #: What `forward` got, and the leaves that want a gradient.
        self._result: Any = None
        self._leaves: list[torch.Tensor] = []
        #: kind -> the tensors that were compared, as one device would hold them
        self.found: dict[str, list[Any]] = {}

    def each(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """The kinds of cases that one device runs, and what plays them, `forward` first."""
        alone = self._alone
        yield "forward", self.forward
        if alone.grads is not None:
            yield "backward", self.backward
        if alone.entry.get_inplace() is not None and alone.can_write():
            yield "inplace", self.inplace
        if alone.entry.supports_out and not alone.random and alone.takes_out():
            yield "out", self.out

    def forward(self) -> None:
        alone = self._alone
        self._result, self._leaves = self._run(alone.sample)
        if alone.without_values:
            self._result = torch.zeros_like(self._result)

        self.found["forward"] = gathered(self._result)
        compare(
            self.found["forward"],
            alone.result,
            lambda: (self.in_double("forward"), alone.double()[0]),
        )

    def backward(self) -> None:
        alone = self._alone
        self.found["backward"] = self._grads(self._result, self._leaves)
        compare(
            self.found["backward"],
            alone.grads or [],
            lambda: (self.in_double("backward"), alone.double()[1] or []),
        )

    def in_double(self, kind: str) -> list[Any]:
        """What `forward` or `backward` finds in double precision."""
        result, leaves = self._run(doubled(self._alone.sample))
        return gathered(result) if kind == "forward" else self._grads(result, leaves)

    def inplace(self) -> None:
        alone = self._alone
        with torch.no_grad():
            args, kwargs, _ = self._spread(alone.sample)
            torch.default_generator.manual_seed(0)
            result = self._through(alone.entry.get_inplace())(*args, **kwargs)
        self.found["inplace"] = gathered(result)
        compare(self.found["inplace"], [alone.written], None)
        compare(gathered(args[0]), [alone.written], None)

    def out(self) -> None:
        alone = self._alone
        with torch.no_grad():
            args, kwargs, _ = self._spread(alone.sample)
            targets = tree_map(_blank, self._result)
            torch.default_generator.manual_seed(0)
            self._through(alone.entry.op)(*args, **kwargs, out=targets)
        self.found["out"] = gathered(targets)
        compare(self.found["out"], alone.result, None)

    def _spread(self, sample: Sample) -> tuple[Any, Any, list[torch.Tensor]]:
        placements = iter(self._way.placements)
        return placed(sample, lambda t: laid_out(t, self._mesh, next(placements)))

    def _run(self, sample: Sample) -> tuple[Any, list[torch.Tensor]]:
        args, kwargs, leaves = self._spread(sample)
        torch.default_generator.manual_seed(0)
        return self._through(self._alone.entry.op)(*args, **kwargs), leaves

    def _grads(self, result: Any, leaves: list[torch.Tensor]) -> list[Any]:
        differentiable = self._alone.sample.differentiable(result)
        return gathered(gradients(differentiable, leaves, self._like))

    def _like(self, grad: torch.Tensor, result: Any) -> torch.Tensor:
        # Half of the cases bring gradients that lie like the result, half whole ones.
        layout: Layout = gradient_layout(result._layout)
        where = layout.placements if self._number % 2 else [REPLICATE] * len(layout.placements)
        return distribute_tensor(grad, layout.grid.mesh, where, src_data_rank=None)


def _blank(leaf: Any) -> Any:
    """A tensor to write a result to; it lies like the result, and whole where that is Partial."""
    if not isinstance(leaf, DTensor):
        return leaf
    layout = gradient_layout(leaf._layout)
    blank = torch.zeros(leaf.shape, dtype=leaf.dtype)
    return distribute_tensor(blank, layout.grid.mesh, layout.placements, src_data_rank=None)
