"""ModuleBoundary: tensors enter and leave a parallel module.

Note [Axes of a parallel module]
A style shards along one mesh axis, the tensor axis: the one named "tp", else the last. The others
are data axes: parameters are replicated over them, and a plain tensor that enters is the rank's own
shard of the batch, `Shard(0)` over each of them. A DTensor that enters keeps its placements there.

Note [Each rank's own loss]
Plain tensors that differ over the data axes belong to a rank and to its loss; a DTensor's gradient
is global, that of the mean of the ranks' losses, as with torch's DDP. So the gradient of a plain
output is divided by n, the number of ranks along the data axes, and that of a plain input is
multiplied by n. A loss that is itself a DTensor is the global one, and nothing is scaled.

In a second derivative, the gradient of a plain input is n times the global one, and belongs to its
rank: what flows back to it is divided by n on its way in, and the factor n cancels that. So `Scale`
multiplies a gradient, and passes a gradient of that gradient unchanged.

Note [Branches overlap]
A style's collective is awaited when its result is first read: it overlaps with a branch that does
not need the result, forward and backward. Until then a plain output is `comm.pending.Pending`, and
so is the gradient of a plain input. The gradient of a leaf is awaited at once: users read it. In a
simulated world collectives are synchronous, and in compiled code the compiler decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.pending import Pending, later
from shardwise.core.mesh import Grid, grid_of
from shardwise.core.placements import REPLICATE, Placement, Shard
from shardwise.core.sizes import lengths
from shardwise.core.untraced import UntracedFunction
from shardwise.dtensor import autograd
from shardwise.dtensor.compile import is_traced
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import ArgumentError, LayoutError, ShardwiseError

TENSOR_AXIS = "tp"


def tensor_axis(mesh: DeviceMesh) -> int:
    """The axis that styles shard along; see Note [Axes of a parallel module]."""
    names = mesh.mesh_dim_names
    return names.index(TENSOR_AXIS) if names and TENSOR_AXIS in names else mesh.ndim - 1


@dataclass(frozen=True, slots=True)
class ModuleBoundary:
    """A mesh, its tensor axis, and the path of a parallel module.

    Pickling keeps the mesh by value; loading finds an equal one in the current world.
    """

    mesh: DeviceMesh
    axis: int
    path: str = ""

    def __deepcopy__(self, memo: Any) -> ModuleBoundary:
        return self  # a mesh stands for processes, which are not copied

    def __reduce__(self) -> Any:
        return _boundary_on, (grid_of(self.mesh), self.axis, self.path)

    @property
    def where(self) -> str:
        return f"Module {self.path!r}" if self.path else "The root module"

    @property
    def num_losses(self) -> int:
        """The number of ranks along the data axes, each with its own loss."""
        return self.mesh.size() // self.mesh.size(self.axis)

    def parameter_placements(self, placement: Placement) -> list[Placement]:
        """`placement` over the tensor axis, replicated over the others."""
        placements: list[Placement] = [REPLICATE] * self.mesh.ndim
        placements[self.axis] = placement
        return placements

    def batch_placements(self, placement: Placement) -> list[Placement]:
        """`placement` over the tensor axis, the batch sharded over the others."""
        placements: list[Placement] = [Shard(0)] * self.mesh.ndim
        placements[self.axis] = placement
        return placements

    def sized(self, placement: Placement, size: int) -> Placement:
        """A shard of a dim whose global size is known: shards may then be uneven."""
        if not isinstance(placement, Shard) or placement.sizes is not None:
            return placement
        return Shard(placement.dim, lengths(size, self.mesh.size(self.axis), None))

    def enter(
        self, x: Any, given: Placement, wanted: Placement, name: str = "the input"
    ) -> DTensor:
        """`x` as a DTensor with the placement `wanted`. A plain `x` has the placement `given`."""
        if not isinstance(x, DTensor):
            if not isinstance(x, torch.Tensor):
                raise ArgumentError(
                    f"{self.where}: {name} has a layout, {given}, but is not a tensor: found "
                    f"{type(x).__name__}. Give it the layout None to leave it unchanged."
                )
            self._refuse_transformed(x, name)
            x = self._from_local(x, given, name)
            if wanted == given:
                return x
        return self.move(x, wanted, name)

    def _from_local(self, x: torch.Tensor, given: Placement, name: str) -> DTensor:
        try:
            made = DTensor.from_local(
                x, self.mesh, self.batch_placements(given), async_op=not x.is_leaf
            )
        except ShardwiseError as error:
            raise LayoutError(
                f"{self.where}: {name} is a plain tensor and each rank's part of {given}, but does "
                f"not fit it. {error}"
            ) from error
        # Scaled before the gradient's collective: after it, scaling would wait for it.
        return self._scaled(made, self.num_losses)

    def move(self, x: DTensor, wanted: Placement, name: str = "the output") -> DTensor:
        """`x` with another placement over the tensor axis, differentiable."""
        placements = list(x.placements)
        if placements[self.axis] == wanted:
            return x
        placements[self.axis] = wanted
        try:
            return x.redistribute(placements=placements, async_op=True)
        except ShardwiseError as error:
            raise LayoutError(
                f"{self.where}: {name} cannot be brought to {wanted}. {error}"
            ) from error

    def leave(self, x: Any, wanted: Placement, local: bool, name: str = "the output") -> Any:
        """`x` moved to `wanted`, as a plain tensor when `local`."""
        if not isinstance(x, DTensor):
            if isinstance(x, torch.Tensor):
                self._refuse_transformed(x, name)
            raise ArgumentError(
                f"{self.where}: {name} should be a DTensor, found {type(x).__name__}: "
                "a plain tensor met only plain tensors inside the module."
            )
        if not local:
            return self.move(x, wanted, name)
        return _later(self.move(self._scaled(x, 1 / self.num_losses), wanted, name))

    def to_local(self, x: DTensor, grads: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's shard, for its own loss; see Note [Each rank's own loss].

        `grads` are the placements of its gradient, where those are not the shard's.
        """
        scaled = self._scaled(x, 1 / self.num_losses)
        return _later(scaled) if grads is None else scaled.to_local(grad_placements=grads)

    def _refuse_transformed(self, x: torch.Tensor, name: str) -> None:
        if not is_traced():
            autograd.refuse_transformed(x, f"{self.where}, {name}")

    def _scaled(self, x: DTensor, factor: float) -> DTensor:
        """`x`, with its gradient scaled; see Note [Each rank's own loss]."""
        return Scale.apply(x, 1.0, float(factor)) if factor != 1 and x.requires_grad else x


def _boundary_on(grid: Grid, axis: int, path: str) -> ModuleBoundary:
    return ModuleBoundary(grid.mesh, axis, path)


def _later(x: DTensor) -> torch.Tensor:
    """`x.to_local()`, which may be pending; see Note [Branches overlap]."""
    # In compiled code the compiler decides when to wait.
    if is_traced() or type(x._local) is not Pending:
        return x.to_local()
    if torch.is_grad_enabled() and x.requires_grad:
        return autograd.to_local(x, autograd.gradient_layout(x._layout), True)
    return later(x._local)


class Scale(UntracedFunction):
    """The tensor times one number, its gradient times another.

    Not the derivative of a product: one number is for tensors, the other for gradients, and they
    swap in each derivative. See Note [Each rank's own loss].
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float, of_gradient: float) -> torch.Tensor:
        ctx.factors = of_gradient, factor
        return x.view_as(x) if factor == 1 else x * factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return Scale.apply(grad, *ctx.factors), None, None


def one_per_tensor(layouts: Any, argument: str) -> tuple[Placement | None, ...]:
    """Layouts as users pass them, one placement or a sequence, as a tuple."""
    given = (layouts,) if layouts is None or isinstance(layouts, Placement) else layouts
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ArgumentError(f"{argument} takes placements, found {layouts!r}.")
    for layout in given:
        if layout is not None and not isinstance(layout, Placement):
            raise ArgumentError(f"{argument} takes placements or None, found {layout!r}.")
    return tuple(given)
