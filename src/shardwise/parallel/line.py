"""Line: one axis of a mesh, also where it was taken out of a larger mesh."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.grid import Grid, grid_of


@dataclass(frozen=True, slots=True)
class Line:
    """A mesh axis, in the whole mesh that it was taken from; `own` is the axis as a mesh."""

    grid: Grid
    axis: int
    own: Grid

    @property
    def size(self) -> int:
        return self.grid.shape[self.axis]

    def axis_in(self, grid: Grid) -> int | None:
        """The axis of `grid` that this is; None where it has no part in `grid`."""
        if grid is self.grid:
            return self.axis
        return 0 if grid is self.own else None


def line_of(mesh: DeviceMesh) -> Line:
    own = grid_of(mesh)
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    names, asked = root.mesh_dim_names, mesh.mesh_dim_names
    if root is not mesh and names and asked and asked[0] in names:
        return Line(grid_of(root), names.index(asked[0]), own)
    return Line(own, 0, own)
