"""MeshAxes: some axes of a mesh, and the corresponding axes of another mesh.

A front door gets `mesh["dp"]`, `mesh["rep", "shard"]`, a flattened axis or another mesh; a
parameter may be on the whole mesh, on a submesh, or on another mesh of the same ranks. All of these
have ranks in common, so axes are compared by their ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from shardwise._torch.c10d import root_mesh
from shardwise.core.mesh import Grid, grid_like, grid_of
from shardwise.errors import LayoutError

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

    @property
    def names(self) -> str:
        return ", ".join(repr(self.grid.axis_name(a)) for a in self.axes)

    def each(self) -> list[Axis]:
        return [(self.grid, axis) for axis in self.axes]

    def collectives(self) -> list[Axis]:
        """The axes of collectives over all of them: a flattened axis takes one collective."""
        if len(self.axes) < 2 or self.given.num_axes > 1:
            return self.each()
        return [(self.given, 0) if len(self.given.submeshes) == 1 else _joined(self)]

    def crosses(self, grid: Grid, axis: int) -> bool:
        """Whether some ranks differ both along these axes and along that one."""
        other = ranks_along(grid, axis)
        return any(len(other & ranks_along(self.grid, a)) > 1 for a in self.axes)

    def meet(self, grid: Grid) -> tuple[list[int], list[int]]:
        """The axes of `grid` that run along these axes, and those of these that `grid` lacks."""
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
    """The ranks that differ from the first one present along `axis` alone."""
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
