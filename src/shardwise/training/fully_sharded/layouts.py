"""Where parameters go: the mesh and axis that shard them, their buffers, and their layouts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from shardwise.core.layout import contiguous_stride, make_layout, shard_with
from shardwise.core.mesh import Grid
from shardwise.core.placements import REPLICATE, Placement, Shard
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import LayoutError
from shardwise.simulation.ranks import present
from shardwise.training.fully_sharded.buffer import FlatBuffer
from shardwise.training.fully_sharded.members import Member, ShardAxes
from shardwise.training.fully_sharded.packing import pack, rows_of, rows_per_chunk, split_dim
from shardwise.training.mesh_axes import MeshAxes, ranks_along


def find_place(module: nn.Module, axes: MeshAxes) -> ShardAxes:
    """Where the parameters go: to the mesh of the module's DTensors, or else to the given one.

    What ranks hold may differ between parallel submeshes (a shard of a plan). So with several of
    them it is the whole mesh, in which every rank has a coordinate of its own.
    """
    if axes.given.num_axes == 1 and len(axes.axes) > 1:  # a flattened axis
        ((grid, axis),) = axes.collectives()
        return ShardAxes(grid, axis, ())
    *others, axis = axes.axes
    for parameter in module.parameters():
        if isinstance(parameter, DTensor) and parameter._layout.grid is not axes.given:
            grid = parameter._layout.grid
            along = [MeshAxes(axes.grid, (a,), axes.given).meet(grid)[0] for a in axes.axes]
            if all(
                len(each) == 1 and ranks_along(grid, each[0]) == ranks_along(axes.grid, a)
                for each, a in zip(along, axes.axes, strict=True)
            ):
                *first, (last,) = along
                return ShardAxes(grid, last, tuple(a for each in first for a in each))
            return ShardAxes(axes.grid, axis, tuple(others))
    if axes.given is axes.grid or len(present(axes.grid)) > 1:
        return ShardAxes(axes.grid, axis, tuple(others))
    last = axes.given.num_axes - 1
    return ShardAxes(axes.given, last, tuple(range(last)))


def axes_along(place: ShardAxes, grid: Grid) -> list[int]:
    """The axes of `grid` that together have the ranks of the axis that shards."""
    along = MeshAxes(place.grid, (place.axis,), place.grid).meet(grid)[0]
    if along and math.prod(grid.shape[axis] for axis in along) != place.parts:
        raise LayoutError(
            f"fully_shard: a parameter is on {grid!r} of ranks {list(grid.ranks)}, which has other "
            f"ranks than axis {place.grid.axis_name(place.axis)!r} of {place.grid!r}. Take both "
            "from one mesh."
        )
    return along


def can_shard(parameter: torch.Tensor, place: ShardAxes) -> bool:
    if parameter.dim() == 0 or parameter.numel() == 0:
        return False
    if not isinstance(parameter, DTensor):
        return True
    along = axes_along(place, parameter._layout.grid)
    return all(parameter._layout.placements[axis].is_replicate() for axis in along)


def make_buffers(found: list[Member], place: ShardAxes) -> list[FlatBuffer]:
    """Buffers of parameters of one dtype and device; those with shapes of their own are alone."""
    alike: dict[Any, list[Member]] = {}
    made = []
    for member in found:
        ranks = member.whole.grid.ranks if member.whole is not None else present(place.grid)
        shapes = {member.whole_shape(rank) for rank in ranks}
        if len(shapes) == 1:
            kind = (member.layout.dtype, member.parameter.device)
            alike.setdefault(kind, []).append(member)
        else:
            member.dim = split_dim(max(shapes, key=math.prod), place.parts)
            member.layout = _sharded(member, None, place)
            made.append(FlatBuffer(place.grid, place.axis, [member], [0], None))
    for members in alike.values():
        rank = present(place.grid)[0]
        wholes = [member.whole_shape(rank) for member in members]
        for packing in pack(wholes, place.parts):
            for number, offset in packing.offsets.items():
                member = members[number]
                member.dim = packing.dims[number]
                num_rows, row = rows_of(wholes[number], member.dim)
                sizes = rows_per_chunk(offset, num_rows, row, packing.length, place.parts)
                member.layout = _sharded(member, tuple(sizes), place)
            inside = [members[number] for number in packing.offsets]
            offsets = list(packing.offsets.values())
            made.append(FlatBuffer(place.grid, place.axis, inside, offsets, packing.length))
    return made


def _sharded(member: Member, sizes: tuple[int, ...] | None, place: ShardAxes) -> Any:
    """The layout of a member's shards: rows of what is local while it is gathered."""
    whole, shape = member.whole, member.layout.shape
    grid, axis = place.grid, place.axis
    placements: list[Placement] = [REPLICATE] * grid.num_axes
    if whole is not None:
        along = axes_along(place, whole.grid)
        if len(along) == 1:
            grid, (axis,) = whole.grid, along
            placements = list(whole.placements)
        else:  # the axis is one of another mesh, or a flattened one
            for k, placement in enumerate(whole.placements):
                if k not in along and whole.grid.shape[k] > 1:
                    placements[_axis_like(whole.grid, k, grid)] = placement
    if sizes is None:
        placements[axis] = Shard(member.dim)
    else:
        placements[axis] = shard_with(member.dim, sizes, sum(sizes), place.parts)
        assert shape[member.dim] % sum(sizes) == 0, "other axes split the dim evenly"
    order = (*(a for a in range(grid.num_axes) if a != axis), axis)
    if whole is not None and grid is whole.grid:
        order = (*(a for a in whole.order if a != axis), axis)
    return make_layout(
        grid, tuple(placements), shape, contiguous_stride(shape), member.layout.dtype, order
    )


def _axis_like(grid: Grid, axis: int, other: Grid) -> int:
    """The axis of `other` along the same ranks."""
    ranks = ranks_along(grid, axis)
    for k in range(other.num_axes):
        if ranks_along(other, k) == ranks:
            return k
    raise LayoutError(
        f"fully_shard: a parameter is on {grid!r} of ranks {list(grid.ranks)}, and axis "
        f"{grid.axis_name(axis)!r} is not an axis of {other!r}. Take both meshes from one."
    )
