"""The ranks that are present: one in a real process, all of them in a simulated world.

Code that would ask "which rank am I" maps a function over the ranks present instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.core.grid import Coordinate, Grid
from shardwise.errors import ArgumentError, UnsupportedError, WorldError
from shardwise.simulation.local_tensor import (
    LocalTensor,
    from_ranks,
    resolved,
    shared_roster,
    wrap_results,
)
from shardwise.simulation.one_value import same_values
from shardwise.simulation.rank_int import rank_int
from shardwise.simulation.roster import grouped

__all__ = [
    "each_rank",
    "each_ranks_counts",
    "localize",
    "my_coordinate",
    "one_for_all",
    "rank_values",
    "split_row",
]


def my_coordinate(grid: Grid) -> Coordinate:
    """Where this process stands in a mesh of the real world."""
    if grid.coordinate is None:
        raise WorldError(
            f"Rank {grid.world.rank} is not in {grid!r} of ranks {list(grid.ranks)}: only ranks of "
            "the mesh hold its tensors. Use the tensor on those ranks only, or a mesh of all ranks."
        )
    return grid.coordinate


def localize(grid: Grid, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as a DTensor of `grid` holds it: a LocalTensor in a simulated world."""
    if not grid.world.simulated:
        if isinstance(tensor, LocalTensor):
            raise WorldError(
                "A LocalTensor belongs to a simulated world, but the mesh is of a real one."
            )
        if grid.coordinate is None:
            my_coordinate(grid)  # says so
        return resolved(tensor)
    if not isinstance(tensor, LocalTensor):
        return LocalTensor((resolved(tensor),), shared_roster(grid.world, grid.ranks))
    if tensor._roster.world is not grid.world:
        raise WorldError(f"The LocalTensor is of {tensor._roster.world}, the mesh of {grid.world}.")
    if tensor.ranks == grid.ranks:
        return tensor
    missing = sorted(set(grid.ranks) - set(tensor.ranks))
    if missing:
        raise ArgumentError(f"The LocalTensor has no value for ranks {missing} of {grid!r}.")
    return from_ranks(grid.world, grid.ranks, [tensor.on_rank(r) for r in grid.ranks])


def one_for_all(tensor: torch.Tensor, *, equal: bool = False) -> torch.Tensor:
    """The plain tensor where all ranks hold the same values, else `tensor` itself.

    What torch.compile traces has no values; there `equal` says whether they are the same.
    """
    parts = getattr(tensor, "_parts", None)
    if parts is None:
        return tensor
    if type(parts[0]) is not torch.Tensor:
        if equal or len(parts) == 1:
            return parts[0]
        raise UnsupportedError(
            "The gradient of a plain tensor differs between the ranks of a simulated world, and "
            "compiled code cannot return it. Give from_local() a LocalTensor, one tensor per rank."
        )
    if any(not same_values(part, parts[0]) for part in parts[1:]):
        return tensor
    return parts[0]


def each_rank(
    grid: Grid,
    fn: Callable[..., Any],
    *tensors: torch.Tensor,
    axes: Sequence[int] | None = None,
) -> Any:
    """`fn(coordinate, *tensors)` on every rank present.

    `axes` names the axes of the coordinate that `fn` looks at: ranks that agree in those and hold
    the same tensors share one result.
    """
    if not grid.world.simulated:
        return fn(my_coordinate(grid), *tensors)
    looked_at = range(grid.num_axes) if axes is None else axes
    keys = []
    for place, rank in enumerate(grid.ranks):
        coordinate = grid.coordinates[rank]
        keys.append(
            (
                tuple(coordinate[a] for a in looked_at),
                tuple(t._roster.index[place] for t in tensors if type(t) is LocalTensor),
            )
        )
    roster, firsts = grouped(grid.world, grid.ranks, keys)
    results = []
    for place in firsts:
        rank = grid.ranks[place]
        here = [t._parts[t._roster.index[place]] if type(t) is LocalTensor else t for t in tensors]
        results.append(fn(grid.coordinates[rank], *here))
    return wrap_results(results, roster, getattr(fn, "__name__", "a value per rank"))


def each_ranks_counts(grid: Grid, fn: Callable[[Coordinate], Sequence[int]]) -> list[Any]:
    """`fn(coordinate)`, some numbers, on every rank present: RankInts where ranks differ."""
    if not grid.world.simulated:
        return list(fn(my_coordinate(grid)))
    columns = zip(*(fn(grid.coordinates[rank]) for rank in grid.ranks), strict=True)
    return [rank_int(grid.world, grid.ranks, column) for column in columns]


def rank_values(grid: Grid, tensor: torch.Tensor) -> list[tuple[Coordinate, torch.Tensor]]:
    """`(coordinate, local tensor)` of each rank present."""
    if not grid.world.simulated:
        return [(my_coordinate(grid), tensor)]
    if not isinstance(tensor, LocalTensor):
        return [(c, tensor) for c in grid.coordinates.values()]
    return [(grid.coordinates[r], tensor.on_rank(r)) for r in grid.ranks]


def split_row(
    grid: Grid, row: torch.Tensor, like: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Views of `row` with the shapes of `like`, one after the other, and what is left of it.

    Ranks that share a row share the views, whatever they hold in `like`: views of one memory that
    counted as several would be written once for each.
    """
    shapes: dict[Coordinate, list[torch.Size]] = {}
    for tensor in like:
        for coordinate, part in rank_values(grid, tensor):
            shapes.setdefault(coordinate, []).append(part.shape)

    def split(coordinate: Coordinate, here: torch.Tensor) -> list[torch.Tensor]:
        mine = shapes.get(coordinate, [])
        sizes = [shape.numel() for shape in mine]
        *pieces, rest = here.split([*sizes, here.numel() - sum(sizes)])
        return [*(piece.view(shape) for piece, shape in zip(pieces, mine, strict=True)), rest]

    *views, rest = each_rank(grid, split, row, axes=())
    return views, rest
