"""The reduction of a parameter's gradient: which collective along which mesh axes.

Note [Who reduces a gradient]
Along a data axis each rank has its own batch and loss, and the gradient is that of the mean of the
losses. The placement of a parameter along the axis decides what its gradient is after backward, and
what is left to do:

    the parameter, along a data axis        its gradient            what is done
    a plain tensor                          of this rank's loss     mean over the axis
    a DTensor of a mesh without the axis    of this rank's loss     mean over the axis
    a DTensor, replicated                   global, maybe Partial   sum: in buckets, or when used
    a DTensor, sharded                      global, this shard      nothing
    a table whose backward updates it       of this rank's loss     mean, before the update

Along a tensor axis the ranks have one batch and one loss. The gradient of a DTensor is global. All
ranks must use a plain tensor alike, so that its gradient is equal on all of them. The first
backward pass checks that, since a plan does not say how a module uses its parameters.

Front doors only declare: the data axes of a module's parameters, and the axis that a style shards a
module along. Their order does not matter, nor whether their modules are nested: a parameter has the
data axes of all declared modules that it is in, and of those that share other parameters with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.core.mesh import Grid
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import LayoutError
from shardwise.training.mesh_axes import Axis, MeshAxes, distinct

#: The attribute of a module with its tensor axes: `{(grid, axis): name of the style}`.
_TENSOR_AXES = "_tensor_axes"
#: The attribute of a sharded parameter that was a plain tensor.
_OWN = "_own_gradient"


@dataclass(frozen=True, slots=True)
class DataAxes:
    """Axes along which each rank has its own batch.

    With `partials`, gradients that are Partial along them are reduced during backward; else when
    they are used.
    """

    axes: MeshAxes
    partials: bool


@dataclass(frozen=True, slots=True)
class Reduction:
    """Axes along which a Partial gradient is summed, and those along which it is averaged."""

    sums: tuple[Axis, ...]
    means: tuple[Axis, ...]

    @property
    def share(self) -> float:
        """A rank's share of the mean: 1 over the number of ranks."""
        share = 1.0
        for grid, axis in self.means:
            share /= grid.shape[axis]
        return share


def reduction_of(parameter: torch.Tensor, declared: Sequence[DataAxes]) -> Reduction | None:
    """The reduction that a parameter's gradient still needs; see Note [Who reduces a gradient]."""
    sums: list[Axis] = []
    means: list[Axis] = []
    for each in declared:
        if not isinstance(parameter, DTensor):
            means += each.axes.collectives()
            continue
        grid = parameter._layout.grid
        along, lacking = each.axes.meet(grid)
        if each.partials:
            placed = parameter._layout.placements
            sums += [(grid, k) for k in along if placed[k].is_replicate()]
        whole = len(lacking) == len(each.axes.axes)
        means += each.axes.collectives() if whole else [(each.axes.grid, a) for a in lacking]
    # A rank that did not use the parameter cannot know whether another rank's gradient is Partial:
    # beside a mean it stays Partial, and is summed when it is used.
    found = Reduction(() if distinct(means) else distinct(sums), distinct(means))
    return found if found.sums or found.means else None


def note_own_gradient(parameter: torch.Tensor, own: bool) -> None:
    """Record whether a sharded parameter has gradients of its rank's own loss.

    Along tensor axes it is to be used as a plain tensor is: alike on all ranks.
    """
    parameter.__dict__[_OWN] = own


def is_used_alike(parameter: torch.Tensor) -> bool:
    """Whether all ranks of a tensor axis have to use a parameter alike: a plain tensor."""
    return not isinstance(parameter, DTensor) or parameter.__dict__.get(_OWN, False)


def note_tensor_axis(module: nn.Module, grid: Grid, axis: int, style: str) -> None:
    """Record that a style shards the module along this axis."""
    module.__dict__.setdefault(_TENSOR_AXES, {})[grid, axis] = style


def tensor_axes(module: nn.Module) -> dict[Axis, str]:
    """The tensor axes of the module and its submodules, and the reason for each."""
    found: dict[Axis, str] = {}
    for path, inner in module.named_modules():
        for (grid, axis), style in inner.__dict__.get(_TENSOR_AXES, {}).items():
            where = f"module {path!r}" if path else "the module"
            found.setdefault((grid, axis), f"{style} shards {where} along it")
    return found


def forbid_both(data: Iterable[MeshAxes], split: dict[Axis, str], caller: str) -> None:
    """Raise where an axis would be both a data axis and a tensor axis."""
    for axes in data:
        for (grid, axis), reason in split.items():
            if axes.crosses(grid, axis):
                raise LayoutError(
                    f"{caller}: axis {grid.axis_name(axis)!r} of {grid!r} cannot be a data axis, "
                    f"on which each rank has its own batch: {reason}, and takes a batch that is "
                    "the same on all of its ranks. Use two axes: a mesh such as "
                    'init_device_mesh(device, (dp, tp), mesh_dim_names=("dp", "tp")), the whole of '
                    'it for parallelize_module (tp may be 1), and mesh["dp"] here.'
                )
