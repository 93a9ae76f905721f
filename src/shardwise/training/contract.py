"""What is done to the gradient of a parameter, along which mesh axes.

Note [Who reduces a gradient]
Along a data axis the ranks have a batch and a loss of their own, and the gradients wanted are those
of the mean of the losses. How a parameter lies along the axis decides what its gradient is when
backward has made it, and what is left to do:

    the parameter, along a data axis        its gradient            what is done
    a plain tensor                          of this rank's loss     mean over the axis
    a DTensor of a mesh without the axis    of this rank's loss     mean over the axis
    a DTensor, replicated                   global, maybe Partial   sum: in buckets, or when used
    a DTensor, sharded                      global, this shard      nothing
    a table whose backward updates it       of this rank's loss     mean, before the update

Along a tensor axis the ranks have one batch and one loss. The gradient of a DTensor is global; a
plain tensor must be used alike by all ranks of the axis, and its gradient is then the same on all
of them. That is checked in the first backward pass, since a plan does not say how a module uses
its parameters.

Doors only declare: which axes are data axes for the parameters of a module, which axis a style
splits a module along. It does not matter in which order they are called, nor whether one is called
inside a module of another: the data axes of a parameter are those of all doors that reach it, and
of the doors that have other parameters in common with those.
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

#: Where a module keeps the axis along which a style splits it: `{(grid, axis): name of the style}`.
_TENSOR_AXES = "_tensor_axes"


@dataclass(frozen=True, slots=True)
class DataAxes:
    """Axes along which each rank has its own batch.

    With `partials`, gradients that are Partial along them are reduced while backward runs; else
    they stay so until they are used.
    """

    axes: MeshAxes
    partials: bool


@dataclass(frozen=True, slots=True)
class Reduction:
    """Axes along which a gradient is added up where it is Partial, and those of its mean."""

    sums: tuple[Axis, ...]
    means: tuple[Axis, ...]

    @property
    def share(self) -> float:
        """A rank's share of the mean."""
        share = 1.0
        for grid, axis in self.means:
            share /= grid.shape[axis]
        return share


def reduction_of(parameter: torch.Tensor, declared: Sequence[DataAxes]) -> Reduction | None:
    """What is left to do to the gradient of `parameter`; see Note [Who reduces a gradient]."""
    sums: list[Axis] = []
    means: list[Axis] = []
    for each in declared:
        if not isinstance(parameter, DTensor):
            means += each.axes.collectives()
            continue
        grid = parameter._layout.grid
        along, lacking = each.axes.meet(grid)
        if each.partials:
            sums += [(grid, k) for k in along if parameter.placements[k].is_replicate()]
        whole = len(lacking) == len(each.axes.axes)
        means += each.axes.collectives() if whole else [(each.axes.grid, a) for a in lacking]
    # A rank that did not use the parameter cannot tell whether the gradient of another is Partial:
    # beside a mean it stays so, and is added up when it is used.
    found = Reduction(() if distinct(means) else distinct(sums), distinct(means))
    return found if found.sums or found.means else None


def note_tensor_axis(module: nn.Module, grid: Grid, axis: int, style: str) -> None:
    """A style splits the module along this axis."""
    module.__dict__.setdefault(_TENSOR_AXES, {})[grid, axis] = style


def tensor_axes(module: nn.Module) -> dict[Axis, str]:
    """The axes along which styles split the module or a part of it, and a sentence for each."""
    found: dict[Axis, str] = {}
    for path, inner in module.named_modules():
        for (grid, axis), style in inner.__dict__.get(_TENSOR_AXES, {}).items():
            where = f"module {path!r}" if path else "the module"
            found.setdefault((grid, axis), f"{style} splits {where} along it")
    return found


def forbid_both(data: Iterable[MeshAxes], split: dict[Axis, str], door: str) -> None:
    """Raise where ranks would have to have both one batch and several."""
    for axes in data:
        for (grid, axis), reason in split.items():
            if axes.crosses(grid, axis):
                raise LayoutError(
                    f"{door}: axis {grid.axis_name(axis)!r} of {grid!r} cannot be a data axis, on "
                    f"which each rank has its own batch: {reason}, and takes a batch that is the "
                    "same on all of its ranks. Use two axes: a mesh such as "
                    'init_device_mesh(device, (dp, tp), mesh_dim_names=("dp", "tp")), the whole of '
                    'it for parallelize_module (tp may be 1), and mesh["dp"] here.'
                )
