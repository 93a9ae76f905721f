"""Grid: a device mesh in one world, interned.

Note [Ranks outside a mesh]
If a mesh contains only some of the ranks, all ranks still run the same program. On a rank outside
the mesh, a DTensor has its global shape and layout, and an empty local tensor. Calls are planned as
on other ranks, but nothing is sent or computed. Only reading a value into Python (`item`, `tolist`)
raises.

Note [Parallel submeshes]
On each rank, `mesh["dev"]` of a mesh (host, dev) is the submesh of the ranks on its host: a program
makes as many submeshes as there are hosts, and a process is in one of them. A simulated world plays
all ranks, so there the grid of `mesh["dev"]` stands for all of them. Then one rank of each submesh
has a given coordinate: the layout of a tensor is the same in every submesh, its values may differ.
Collectives run within each submesh.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh as _init_device_mesh

from shardwise._torch.c10d import mesh_stack, mesh_without_groups, root_mesh
from shardwise._torch.dispatch import outside_modes
from shardwise.core.world import World, absent_world, current_world
from shardwise.errors import ArgumentError, LayoutError, WorldError

Coordinate = tuple[int, ...]


class Grid:
    """The ranks of a mesh, its axes, and the coordinate of each rank. Compared by identity.

    Two equal meshes of one world share a grid; equal meshes of two worlds never do.
    """

    def __init__(
        self, mesh: DeviceMesh, world: World, shape: tuple[int, ...], ranks: tuple[int, ...]
    ) -> None:
        """`ranks` are those of all parallel submeshes, one after another."""
        self.mesh = mesh
        self.world = world
        self.device_type: str = mesh.device_type
        self.shape: tuple[int, ...] = shape
        self.axis_names: tuple[str, ...] | None = mesh.mesh_dim_names
        #: All coordinates, those along the last axis first.
        self.places: list[Coordinate] = list(itertools.product(*map(range, shape)))
        #: The ranks of each submesh, in the order of `places`; see Note [Parallel submeshes].
        self.submeshes = _batched(ranks, len(self.places))
        #: The ranks of the mesh; those of several submeshes in the order of the world.
        self.ranks: tuple[int, ...] = ranks if len(self.submeshes) == 1 else tuple(sorted(ranks))
        at = dict(zip(ranks, self.places * len(self.submeshes), strict=True))
        self.coordinates: dict[int, Coordinate] = {rank: at[rank] for rank in self.ranks}
        #: The coordinate of this process; None in a simulated world and on ranks outside the mesh.
        self.coordinate = None if world.simulated else self.coordinates.get(world.rank)
        #: Whether no rank of this process is in the mesh. See Note [Ranks outside a mesh].
        self.outside = not world.simulated and self.coordinate is None
        #: Filled by comm: the name of the process group of each axis.
        self.group_names: list[str | None] = [None] * len(self.shape)
        #: Filled by comm: the names of the groups of each axis that send gradients alone.
        self.gradient_groups: list[list[str]] = [[] for _ in self.shape]
        #: How often tensors of the mesh were written to, and whether some share memory without
        #: sharing torch's version counter; the same on every rank. See Note [Snapshots follow].
        self.num_writes = 0
        self.hides_writes = False
        #: Whether `to_local` has handed out memory of tensors here: autograd may have saved it.
        self.lends = False

    @property
    def num_axes(self) -> int:
        return len(self.shape)

    @property
    def num_ranks(self) -> int:
        """How many ranks the mesh has: as many as coordinates."""
        return math.prod(self.shape)

    @property
    def identity(self) -> tuple[str, tuple[int, ...], tuple[int, ...], tuple[str, ...] | None]:
        """What `grid_like` takes: plain data that says which grid of a world this is."""
        ranks = tuple(itertools.chain.from_iterable(self.submeshes))
        return self.device_type, self.shape, ranks, self.axis_names

    def axis_name(self, axis: int) -> str:
        return self.axis_names[axis] if self.axis_names else str(axis)

    def lines(self, axis: int) -> list[list[int]]:
        """The groups of ranks that differ only in their coordinate along `axis`."""
        # Plain Python: this may run first while torch.compile traces, where tensors have no values.
        groups: dict[tuple[int, Coordinate], list[int]] = {}
        for number, submesh in enumerate(self.submeshes):
            for rank in submesh:
                place = self.coordinates[rank]
                groups.setdefault((number, (*place[:axis], *place[axis + 1 :])), []).append(rank)
        return list(groups.values())

    def __deepcopy__(self, memo: Any) -> Grid:
        return self  # one object per value

    def __reduce__(self) -> Any:
        return grid_like, self.identity

    def __repr__(self) -> str:
        if not self.axis_names:
            return f"mesh {self.shape}"
        axes = ", ".join(f"{n}={s}" for n, s in zip(self.axis_names, self.shape, strict=True))
        return f"mesh ({axes})"


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: tuple[str, ...] | None = None,
    backend_override: dict[int | str, Any] | None = None,
) -> DeviceMesh:
    """torch's `init_device_mesh`; if there are too few ranks, the error says what to do.

    >>> import shardwise
    >>> with shardwise.simulate(4):
    ...     shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")).shape
    (2, 2)
    """
    asked = f"init_device_mesh({device_type!r}, {mesh_shape!r})"
    try:
        shape = tuple(map(operator.index, mesh_shape))
    except TypeError:
        problem = f"{asked}: a shape is a tuple of whole numbers, such as (2, 4)."
        raise ArgumentError(problem) from None
    if any(n < 1 for n in shape):
        raise LayoutError(f"{asked}: each axis of a mesh has at least one rank.")
    needed = math.prod(shape)
    if dist.is_initialized():
        found = dist.get_world_size()
    else:  # torch starts the world that torchrun has prepared
        found = int(os.environ.get("WORLD_SIZE", "0")) if "RANK" in os.environ else 0
    if needed > found:
        having = f"the world has {found}" if found else "this process is in no world"
        raise WorldError(
            f"{asked} is a mesh of {needed} rank{'s' * (needed > 1)}, and {having}. Start "
            f"{'more' if found else 'one'}: `with shardwise.simulate({needed}):` plays the ranks "
            f"in this process, `torchrun --nproc-per-node {needed} program.py` starts processes."
        )
    return _init_device_mesh(
        device_type, shape, mesh_dim_names=mesh_dim_names, backend_override=backend_override
    )


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
    if world.simulated:
        ranks = _of_all_submeshes(mesh, ranks)
    if max(ranks) >= world.size:
        raise WorldError(
            f"The mesh names rank {max(ranks)}, but the world has {world.size} ranks "
            f"(0 to {world.size - 1}). Make a smaller mesh, or start more processes."
        )
    key = (mesh.device_type, mesh.mesh_dim_names, shape, ranks)
    grid = world.grids.get(key)
    if grid is None:
        grid = world.grids[key] = Grid(mesh, world, shape, ranks)
    return _remember(mesh, grid)


def grid_like(
    device_type: str,
    shape: tuple[int, ...],
    ranks: tuple[int, ...],
    axis_names: tuple[str, ...] | None,
) -> Grid:
    """The grid of the current world with this `identity`; makes its mesh if there is none yet.

    Without a process group, the grid belongs to an absent world (`absent_world`).
    """
    num = math.prod(shape)
    if num < 1 or not ranks or len(ranks) % num:
        raise LayoutError(f"Ranks {list(ranks)} do not form meshes of shape {shape}.")
    world = current_world() if dist.is_initialized() else absent_world(max(ranks) + 1)
    if not world.simulated and not world.absent:
        own = [each for each in _batched(ranks, num) if world.rank in each]
        ranks = own[0] if own else ranks[:num]
    key = (device_type, axis_names, shape, ranks)
    grid: Grid | None = world.grids.get(key)
    if grid is not None:
        return grid
    first = torch.tensor(ranks[:num]).view(shape)
    if world.absent:
        mesh = mesh_without_groups(device_type, first, axis_names)
        return world.grids.setdefault(key, Grid(mesh, world, shape, ranks))
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
    mesh = DeviceMesh(device_type, first, mesh_dim_names=axis_names)
    return _remember(mesh, world.grids.setdefault(key, Grid(mesh, world, shape, ranks)))


def _remember(mesh: DeviceMesh, grid: Grid) -> Grid:
    number = id(mesh)
    _seen[number] = (weakref.ref(mesh, lambda _: _seen.pop(number, None)), grid)
    return grid


def _batched(ranks: Sequence[int], size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(ranks[at : at + size]) for at in range(0, len(ranks), size))


def _shape_and_ranks(mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
    # torch keeps the ranks in a tensor, and torch.export would record that it is read.
    with outside_modes():
        tensor: Any = mesh.mesh
        return tuple(tensor.shape), tuple(tensor.flatten().tolist())


def _of_all_submeshes(mesh: DeviceMesh, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks of a submesh, and then those of the submeshes parallel to it.

    Parallel are those with other coordinates along the axes of the root mesh that the submesh does
    not have.
    """
    root = root_mesh(mesh)
    shape, all_ranks = _shape_and_ranks(root)
    places = dict(zip(all_ranks, itertools.product(*map(range, shape)), strict=True))
    if root is mesh or not set(ranks) <= set(places):
        return ranks
    mine = [places[rank] for rank in ranks]
    own = [axis for axis in range(len(shape)) if len({place[axis] for place in mine}) > 1]
    if math.prod(shape[axis] for axis in own) != len(ranks):
        return ranks  # a part of an axis
    submeshes: dict[Coordinate, dict[Coordinate, int]] = {}
    for rank, place in places.items():
        at = tuple(place[axis] for axis in own)
        elsewhere = tuple(n for axis, n in enumerate(place) if axis not in own)
        submeshes.setdefault(elsewhere, {})[at] = rank
    order = [tuple(place[axis] for axis in own) for place in mine]
    found = [tuple(submesh[at] for at in order) for submesh in submeshes.values()]
    found.sort(key=lambda each: each != ranks)  # its own first
    return tuple(itertools.chain.from_iterable(found))


def current_mesh() -> DeviceMesh:
    """The mesh of the surrounding `with device_mesh:`."""
    stack = mesh_stack()
    if not stack:
        raise ArgumentError("No mesh was given, and there is no surrounding `with device_mesh:`.")
    return stack[-1]
