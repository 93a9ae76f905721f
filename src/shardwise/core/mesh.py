"""Grid: a device mesh in one world, interned.

Note [Ranks outside a mesh]
A program that uses a part of the ranks is one program: it runs on all of them. On a rank outside
the mesh, a DTensor has its global shape and layout, and an empty local tensor. Calls are planned as
elsewhere, but nothing is sent or computed. Only a value that Python asks for (`item`, `tolist`) is
not there, and raises.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise._torch.c10d import mesh_stack, mesh_without_groups
from shardwise._torch.dispatch import outside_modes
from shardwise.core.world import World, absent_world, current_world
from shardwise.errors import ArgumentError, WorldError

Coordinate = tuple[int, ...]


class Grid:
    """The ranks of a mesh, its axes, and the coordinate of each rank. Compared by identity.

    Two equal meshes of one world share a grid; equal meshes of two worlds never do.
    """

    __slots__ = (
        "__weakref__",
        "axis_names",
        "coordinate",
        "coordinates",
        "device_type",
        "group_names",
        "hides_writes",
        "lends",
        "mesh",
        "num_writes",
        "outside",
        "ranks",
        "shape",
        "world",
    )

    def __init__(self, mesh: DeviceMesh, world: World) -> None:
        shape, ranks = _shape_and_ranks(mesh)
        self.mesh = mesh
        self.world = world
        self.device_type: str = mesh.device_type
        self.shape: tuple[int, ...] = shape
        self.axis_names: tuple[str, ...] | None = mesh.mesh_dim_names
        self.ranks: tuple[int, ...] = ranks
        places = itertools.product(*map(range, self.shape))
        self.coordinates: dict[int, Coordinate] = dict(zip(self.ranks, places, strict=True))
        #: The coordinate of this process; None in a simulated world and on ranks outside the mesh.
        self.coordinate = None if world.simulated else self.coordinates.get(world.rank)
        #: Whether no rank of this process is in the mesh. See Note [Ranks outside a mesh].
        self.outside = not world.simulated and self.coordinate is None
        #: Filled by comm: the name of the process group of each axis.
        self.group_names: list[str | None] = [None] * len(self.shape)
        #: How often tensors of the mesh were written to, and whether some share memory without
        #: sharing torch's version counter; the same on every rank. See Note [Snapshots follow].
        self.num_writes = 0
        self.hides_writes = False
        #: Whether `to_local` has handed out memory of tensors here: autograd may have saved it.
        self.lends = False

    @property
    def num_axes(self) -> int:
        return len(self.shape)

    def axis_name(self, axis: int) -> str:
        return self.axis_names[axis] if self.axis_names else str(axis)

    def lines(self, axis: int) -> list[list[int]]:
        """The groups of ranks that differ only in their coordinate along `axis`."""
        # Plain Python: this may run first while torch.compile traces, where tensors have no values.
        groups: dict[Coordinate, list[int]] = {}
        for rank, place in self.coordinates.items():
            groups.setdefault((*place[:axis], *place[axis + 1 :]), []).append(rank)
        return list(groups.values())

    def __deepcopy__(self, memo: Any) -> Grid:
        return self  # one object per value

    def __reduce__(self) -> Any:
        return grid_like, (self.device_type, self.shape, self.ranks, self.axis_names)

    def __repr__(self) -> str:
        if not self.axis_names:
            return f"mesh {self.shape}"
        axes = ", ".join(f"{n}={s}" for n, s in zip(self.axis_names, self.shape, strict=True))
        return f"mesh ({axes})"


# By identity: torch compares meshes of two worlds as equal.
_seen: dict[int, tuple[weakref.ref[DeviceMesh], Grid]] = {}


def grid_of(mesh: DeviceMesh) -> Grid:
    """The grid of `mesh` in the current world."""
    seen = _seen.get(id(mesh))
    if seen is not None and seen[0]() is mesh:
        if not seen[1].world.alive:
            world = current_world()
            raise WorldError(
                f"{seen[1]!r} belongs to {seen[1].world}, but the current one is {world}. "
                "Make the mesh again after torch.distributed is initialised."
            )
        return seen[1]
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentError(
            f"A DeviceMesh is needed, found {type(mesh).__name__}: make one with "
            "init_device_mesh('cpu', (4,))."
        )
    world = current_world()
    shape, ranks = _shape_and_ranks(mesh)
    if max(ranks) >= world.size:
        raise WorldError(
            f"The mesh names rank {max(ranks)}, but the world has {world.size} ranks "
            f"(0 to {world.size - 1}). Make a smaller mesh, or start more processes."
        )
    key = (mesh.device_type, mesh.mesh_dim_names, shape, ranks)
    grid = world.grids.get(key)
    if grid is None:
        grid = world.grids[key] = Grid(mesh, world)
    number = id(mesh)
    _seen[number] = (weakref.ref(mesh, lambda _: _seen.pop(number, None)), grid)
    return grid


def grid_like(
    device_type: str,
    shape: tuple[int, ...],
    ranks: tuple[int, ...],
    axis_names: tuple[str, ...] | None,
) -> Grid:
    """The grid of the current world with these values; makes its mesh if there is none yet.

    Without a process group, the grid is one of a world that is not there.
    """
    if not dist.is_initialized():
        world = absent_world(max(ranks) + 1)
        key = (device_type, axis_names, shape, ranks)
        if key not in world.grids:
            mesh = mesh_without_groups(device_type, torch.tensor(ranks).view(shape), axis_names)
            world.grids[key] = Grid(mesh, world)
        found: Grid = world.grids[key]
        return found
    world = current_world()
    grid: Grid | None = world.grids.get((device_type, axis_names, shape, ranks))
    if grid is not None:
        return grid
    if max(ranks) >= world.size:
        raise WorldError(
            f"A mesh {shape} of ranks {list(ranks)} is needed, but the world has {world.size} "
            "ranks. Load it in a world of as many, or save full_tensor() of each tensor."
        )
    if not world.simulated and len(ranks) != world.size:
        # Other ranks would have to make it at the same time, and may be doing something else.
        raise WorldError(
            f"There is no mesh {shape} of ranks {list(ranks)} on {device_type!r} yet, with axes "
            f"{axis_names}, and the world has {world.size} ranks. Make it on all ranks first: "
            "init_device_mesh(...) of the whole world, and mesh[...] for a part of it; and use it "
            "once: shardwise.zeros(1, device_mesh=mesh)."
        )
    mesh = DeviceMesh(device_type, torch.tensor(ranks).view(shape), mesh_dim_names=axis_names)
    return grid_of(mesh)


def _shape_and_ranks(mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
    # torch keeps the ranks in a tensor, and torch.export would record that it is read.
    with outside_modes():
        tensor: Any = mesh.mesh
        return tuple(tensor.shape), tuple(tensor.flatten().tolist())


def current_mesh() -> DeviceMesh:
    """The mesh of the surrounding `with device_mesh:`."""
    stack = mesh_stack()
    if not stack:
        raise ArgumentError("No mesh was given, and there is no surrounding `with device_mesh:`.")
    return stack[-1]
