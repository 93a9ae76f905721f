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

Along a tensor axis the ranks share one batch and one loss. The gradient of a DTensor is global. All
ranks must use a plain tensor in the same way, so that its gradient is equal on all of them. The
first backward pass checks that, since a plan does not say how a module uses its parameters.

Front doors only declare: the data axes of a module's parameters, and the axis that a style shards a
module along. Neither their order nor the nesting of their modules matters: a parameter has the data
axes of all declared modules that contain it, and of those that share other parameters with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise._torch.c10d import root_mesh
from shardwise.comm import collectives
from shardwise.comm.watch import because
from shardwise.core.mesh import Grid, grid_like, grid_of
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import LayoutError
from shardwise.simulation.ranks import is_shared

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
    """The axes along which a Partial gradient is summed, and the axes of a mean."""

    sums: tuple[Axis, ...]
    means: tuple[Axis, ...]

    @property
    def share(self) -> float:
        """A rank's share of the mean: 1 over the number of ranks."""
        return 1 / math.prod(grid.shape[axis] for grid, axis in self.means)


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

    Along tensor axes all ranks must use it in the same way, like a plain tensor.
    """
    parameter.__dict__[_OWN] = own


def is_used_alike(parameter: torch.Tensor) -> bool:
    """Whether all ranks of a tensor axis must use a parameter in the same way: a plain tensor."""
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


def describe_trained(module: nn.Module) -> list[str]:
    """Which parameters are frozen, as lines that ranks compare; in order of their names."""
    return sorted(f"{n} is frozen" for n, p in module.named_parameters() if not p.requires_grad)


def check_axes_differ(data: Iterable[MeshAxes], split: dict[Axis, str], caller: str) -> None:
    """Raise if an axis would be both a data axis and a tensor axis."""
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


# -- mesh axes -----------------------------------------------------------------------------------
# MeshAxes: some axes of a mesh, and the corresponding axes of another mesh.
#
# A front door gets `mesh["dp"]`, `mesh["rep", "shard"]`, a flattened axis or another mesh; a
# parameter may be on the whole mesh, on a submesh, or on another mesh of the same ranks. All of
# these have ranks in common, so axes are compared by their ranks.


#: One axis of one mesh: what a collective runs along.
Axis = tuple[Grid, int]


@dataclass(frozen=True, slots=True)
class MeshAxes:
    """Axes of the mesh `grid`; `given` is the mesh that named them."""

    grid: Grid
    axes: tuple[int, ...]
    given: Grid

    @property
    def size(self) -> int:
        return math.prod(self.grid.shape[a] for a in self.axes)

    def collectives(self) -> list[Axis]:
        """The axes of collectives over all of them: a flattened axis takes one collective."""
        if len(self.axes) < 2 or self.given.num_axes > 1:
            return [(self.grid, axis) for axis in self.axes]
        return [(self.given, 0) if len(self.given.submeshes) == 1 else _joined(self)]

    def crosses(self, grid: Grid, axis: int) -> bool:
        """Whether some ranks differ both along these axes and along that one."""
        other = ranks_along(grid, axis)
        return any(len(other & ranks_along(self.grid, a)) > 1 for a in self.axes)

    def meet(self, grid: Grid) -> tuple[list[int], list[int]]:
        """The axes of `grid` that run along these axes, and the ones of these that `grid` lacks."""
        here = set(self.grid.ranks).intersection(grid.world.present)
        if not here <= set(grid.ranks):
            raise LayoutError(
                f"A parameter is on {grid!r} of ranks {list(grid.ranks)}, which lacks some of "
                f"ranks {sorted(here)} of {self.grid!r}. Take both from one mesh, the first one "
                'as mesh["axis"].'
            )
        if grid is self.grid:
            return list(self.axes), []
        lines = [ranks_along(grid, k) for k in range(grid.num_axes)]
        along: set[int] = set()
        lacking = []
        for axis in self.axes:
            mine = ranks_along(self.grid, axis)
            if len(mine) == 1:
                continue
            whole = [k for k, line in enumerate(lines) if mine <= line]
            parts = [k for k, line in enumerate(lines) if len(line & mine) > 1]
            if whole:
                along.update(whole)
            elif not parts:
                lacking.append(axis)
            elif math.prod(len(lines[k]) for k in parts) == len(mine):
                along.update(parts)
            else:
                raise LayoutError(
                    f"A parameter is on {grid!r} of ranks {list(grid.ranks)}, which has some of "
                    f"the ranks along axis {self.grid.axis_name(axis)!r} of {self.grid!r} in "
                    "common. Take both from one mesh."
                )
        return sorted(along), lacking


def mesh_axes(mesh: DeviceMesh) -> MeshAxes:
    """All axes of `mesh`, as axes of its root mesh."""
    given = grid_of(mesh)
    root = root_mesh(mesh)
    grid = given if root is mesh else grid_of(root)
    axes = _named(grid, given) or _spanned(grid, given.submeshes[0])
    if axes is None:
        grid, axes = given, tuple(range(given.num_axes))
    return MeshAxes(grid, axes, given)


def ranks_along(grid: Grid, axis: int) -> frozenset[int]:
    """The ranks that differ from the first one present only along `axis`."""
    here = grid.ranks[0] if grid.coordinate is None else grid.world.rank
    return frozenset(next(line for line in grid.lines(axis) if here in line))


def distinct(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """Without axes of one rank, and without those whose ranks are all along another axis."""
    found: list[tuple[frozenset[int], Axis]] = []
    for axis in sorted(axes, key=lambda axis: -axis[0].shape[axis[1]]):
        ranks = ranks_along(*axis)
        if len(ranks) > 1 and not any(ranks <= seen for seen, _ in found):
            found.append((ranks, axis))
    return tuple(axis for _, axis in found)


def _named(grid: Grid, given: Grid) -> tuple[int, ...] | None:
    """The axes of `grid` with the names of `given`; ranks cannot identify an axis of size 1."""
    if grid is given:
        return tuple(range(grid.num_axes))
    names, asked = grid.axis_names, given.axis_names
    if names is None or asked is None or not set(asked) <= set(names):
        return None
    return tuple(names.index(name) for name in asked)


def _spanned(grid: Grid, ranks: Sequence[int]) -> tuple[int, ...] | None:
    """The axes of `grid` along which `ranks` differ, if `ranks` fill them."""
    if not set(ranks) <= set(grid.ranks):
        return None
    places = [grid.coordinates[rank] for rank in ranks]
    axes = tuple(a for a in range(grid.num_axes) if len({place[a] for place in places}) > 1)
    return axes if math.prod(grid.shape[a] for a in axes) == len(ranks) else None


def _joined(found: MeshAxes) -> Axis:
    """The axes flattened to one, in a mesh of all ranks."""
    grid, first = found.grid, found.axes
    others = tuple(a for a in range(grid.num_axes) if a not in first)
    shape = (found.size, *(grid.shape[a] for a in others))
    places = {place: rank for rank, place in grid.coordinates.items()}
    order = sorted(places, key=lambda place: tuple(place[a] for a in (*first, *others)))
    names = None
    if grid.axis_names is not None and found.given.axis_names is not None:
        names = (found.given.axis_names[0], *(grid.axis_names[a] for a in others))
    return grid_like(grid.device_type, shape, tuple(places[p] for p in order), names), 0


# -- start values --------------------------------------------------------------------------------
# Start values of replicas: those of one coordinate along the data axes.


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
