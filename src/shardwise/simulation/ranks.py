"""The ranks present: one in a real process, all of them in a simulated world.

Code that depends on the rank is a function mapped over the ranks present.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from shardwise.core.mesh import Coordinate, Grid
from shardwise.core.untraced import UntracedFunction
from shardwise.core.world import current_world
from shardwise.errors import ArgumentError, UnsupportedError, WorldError
from shardwise.simulation.local_tensor import (
    LocalTensor,
    from_ranks,
    resolved,
    shared_roster,
    wrap_results,
)
from shardwise.simulation.parts import one_part, roster_of
from shardwise.simulation.rank_int import rank_int
from shardwise.simulation.roster import Roster, grouped, make_roster, same_values

__all__ = [
    "by_rank",
    "counts_per_rank",
    "each_rank",
    "is_shared",
    "localize",
    "my_coordinate",
    "no_values",
    "numbers_per_rank",
    "on_every_rank",
    "once_for_all",
    "one_for_all",
    "one_tensor",
    "own_roster",
    "part_per_rank",
    "parts_with_ranks",
    "present",
    "rank_call",
    "rank_values",
    "split_row",
]


def present(grid: Grid) -> tuple[int, ...]:
    """The ranks of a mesh in this process: one, none outside it, or all in a simulated world."""
    if grid.world.simulated:
        return grid.ranks
    return () if grid.outside else grid.world.present


def my_coordinate(grid: Grid) -> Coordinate:
    """The coordinate of this process in a mesh of a real world."""
    if grid.coordinate is None:
        raise WorldError(
            f"Rank {grid.world.rank} is not in {grid!r} of ranks {list(grid.ranks)}: only ranks of "
            "the mesh hold values of its tensors. Ask for them on those ranks only, or use a mesh "
            "of all ranks."
        )
    return grid.coordinate


def no_values(grid: Grid, dtype: torch.dtype, device: Any = None) -> torch.Tensor:
    """The local tensor on a rank outside the mesh; see Note [Ranks outside a mesh]."""
    return torch.empty(0, dtype=dtype, device=grid.device_type if device is None else device)


def localize(grid: Grid, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as a DTensor of `grid` holds it: a LocalTensor in a simulated world."""
    if not grid.world.simulated:
        if isinstance(tensor, LocalTensor):
            raise WorldError(
                "A LocalTensor belongs to a simulated world, but the mesh is of a real one."
            )
        if grid.outside:
            return no_values(grid, tensor.dtype, tensor.device)
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
    """One plain tensor if all ranks hold the same values, else `tensor` itself.

    Traced tensors have no values; there `equal` says whether they are the same.
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

    `axes` are the axes of the coordinate that `fn` uses: ranks that agree in those and hold the
    same tensors share one result.
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


def by_rank(grid: Grid, fn: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """`fn(rank, *tensors)` on every rank present.

    As `each_rank`, for what differs between ranks of one coordinate; see Note [Parallel submeshes].
    """
    if not grid.world.simulated:
        my_coordinate(grid)  # raises where there is none
        return fn(grid.world.rank, *tensors)
    parts = [part_per_rank(grid, tensor) for tensor in tensors]
    rows = zip(grid.ranks, *parts, strict=True)
    return from_ranks(grid.world, grid.ranks, [fn(*row) for row in rows])


def rank_call(
    grid: Grid,
    make: Callable[[Coordinate], Callable[..., Any]],
    axes: Sequence[int] | None = None,
) -> Callable[..., Any]:
    """A function that runs `make(coordinate)` on every rank present; made once for each.

    It takes what the made functions take: tensors, also in lists, and anything else. `axes` is as
    in `each_rank`.
    """
    if not grid.world.simulated:
        return make(my_coordinate(grid))
    made: dict[Coordinate, Callable[..., Any]] = {}

    def mapped(*operands: Any, **kwargs: Any) -> Any:
        tensors, rest = _partition(operands)

        def here(coordinate: Coordinate, *parts: torch.Tensor) -> Any:
            fn = made.get(coordinate)
            if fn is None:
                fn = made[coordinate] = make(coordinate)
            return fn(*_filled(iter(parts), rest), **kwargs)

        return each_rank(grid, here, *tensors, axes=axes)

    return mapped


_HOLE = object()


def _partition(operands: Sequence[Any]) -> tuple[list[torch.Tensor], list[Any]]:
    """The tensors, also those in lists, and the operands with holes in their places."""
    tensors: list[torch.Tensor] = []
    rest: list[Any] = []
    for operand in operands:
        if isinstance(operand, torch.Tensor):
            tensors.append(operand)
            rest.append(_HOLE)
        elif isinstance(operand, (list, tuple)):
            inner, kept = _partition(operand)
            tensors += inner
            rest.append(kept if inner else operand)
        else:
            rest.append(operand)
    return tensors, rest


def _filled(remaining: Iterator[torch.Tensor], rest: Sequence[Any]) -> list[Any]:
    return [
        next(remaining) if r is _HOLE else _filled(remaining, r) if isinstance(r, list) else r
        for r in rest
    ]


def once_for_all(grid: Grid, fn: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """`fn` of values that are equal on all ranks, called once: all ranks get the result."""
    return localize(grid, fn(*map(one_part, args), **kwargs))


def on_every_rank(fn: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """`fn(rank)` on every rank present of the current world."""
    world = current_world()
    return LocalTensor.per_rank(fn) if world.simulated else fn(world.rank)


def counts_per_rank(grid: Grid, fn: Callable[[Coordinate], Sequence[int]]) -> list[Any]:
    """The numbers `fn(coordinate)` of every rank present: RankInts where ranks differ."""
    return numbers_per_rank(grid, [fn(grid.coordinates[rank]) for rank in present(grid)])


def numbers_per_rank(grid: Grid, rows: Sequence[Sequence[int]]) -> list[Any]:
    """A row of numbers per rank present as one list: RankInts where ranks differ."""
    if not grid.world.simulated:
        my_coordinate(grid)  # raises where there is none
        return list(rows[0])
    return [rank_int(grid.world, grid.ranks, column) for column in zip(*rows, strict=True)]


def part_per_rank(grid: Grid, x: torch.Tensor) -> list[torch.Tensor]:
    """What each rank present holds; a plain tensor is the same on every rank."""
    if not isinstance(x, LocalTensor):
        return [x] * len(present(grid))
    if not grid.world.simulated:
        raise WorldError("A LocalTensor belongs to a simulated world, the mesh to a real one.")
    missing = sorted(set(grid.ranks) - set(x.ranks))
    if missing:
        raise ArgumentError(f"The LocalTensor has no value for ranks {missing} of {grid!r}.")
    return [x.on_rank(rank) for rank in grid.ranks]


def one_tensor(grid: Grid, parts: Sequence[torch.Tensor], *, sized: bool = True) -> torch.Tensor:
    """The tensor whose value on each rank present is the item of `parts`."""
    if not grid.world.simulated:
        return parts[0]
    return from_ranks(grid.world, grid.ranks, parts, sized)


def rank_values(grid: Grid, tensor: torch.Tensor) -> list[tuple[Coordinate, torch.Tensor]]:
    """`(coordinate, local tensor)` of each rank present."""
    places = [grid.coordinates[rank] for rank in present(grid)]
    return list(zip(places, part_per_rank(grid, tensor), strict=True))


def parts_with_ranks(grid: Grid, x: torch.Tensor) -> list[tuple[Sequence[int], torch.Tensor]]:
    """Each part of a tensor, and the ranks present that hold it."""
    if not isinstance(x, LocalTensor):
        return [(present(grid), x)]
    return [(x._roster.ranks_of(number), part) for number, part in enumerate(x._parts)]


def own_roster(grid: Grid) -> Roster | None:
    """The roster with one part per rank; None in a real process."""
    if not grid.world.simulated:
        return None
    return make_roster(grid.world, grid.ranks, tuple(range(len(grid.ranks))))


def is_shared(grid: Grid, x: torch.Tensor) -> bool:
    """Whether one tensor stands for all ranks', so that nothing has to be sent."""
    return grid.world.simulated and roster_of(x) is None


def split_row(
    grid: Grid, row: torch.Tensor, like: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Consecutive views of `row` with the shapes of `like`, and the rest of it.

    Ranks that share a row share the views, whatever they hold in `like`: one memory must not be
    written once per rank.
    """
    columns = [part_per_rank(grid, tensor) for tensor in like]
    made: dict[int, list[torch.Tensor]] = {}
    rows = part_per_rank(grid, row)
    for place, here in enumerate(rows):
        if id(here) not in made:
            mine = [column[place].shape for column in columns]
            sizes = [shape.numel() for shape in mine]
            *flat, rest = here.split([*sizes, here.numel() - sum(sizes)])
            made[id(here)] = [*(x.view(shape) for x, shape in zip(flat, mine, strict=True)), rest]
    found = zip(*(made[id(here)] for here in rows), strict=True)
    *views, rest = (one_tensor(grid, column, sized=False) for column in found)
    return views, rest


# -- under autograd --------------------------------------------------------------------------


def on_plain_ranks(
    grid: Grid, fn: Callable[..., torch.Tensor], *tensors: torch.Tensor
) -> torch.Tensor:
    """`fn(coordinate, *tensors)` on every rank present, each with plain tensors; differentiable.

    `each_rank` works below autograd. A user's own code with data-dependent loops needs plain
    tensors and autograd: a LocalTensor is unbound into those of its ranks, and joined again.
    """
    if not grid.world.simulated:
        return fn(my_coordinate(grid), *tensors)
    unbound = [_Unbind.apply(tensor, grid) for tensor in tensors]
    found = []
    for place, rank in enumerate(grid.ranks):
        coordinate: Coordinate = grid.coordinates[rank]
        found.append(fn(coordinate, *(parts[place] for parts in unbound)))
    return _Join.apply(grid, False, *found)


class _Unbind(UntracedFunction):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, ...]:
        ctx.grid, ctx.plain = grid, not isinstance(tensor, LocalTensor)
        local: Any = localize(grid, tensor)
        return tuple(local.on_rank(rank).detach() for rank in grid.ranks)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _Join.apply(ctx.grid, ctx.plain, *grads), None


class _Join(UntracedFunction):
    """With `plain`, one plain tensor if all ranks hold the same."""

    @staticmethod
    def forward(ctx: Any, grid: Grid, plain: bool, *parts: torch.Tensor) -> torch.Tensor:
        ctx.grid = grid
        joined = one_tensor(grid, [part.detach() for part in parts])
        return one_for_all(joined) if plain else joined

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, None, *_Unbind.apply(grad, ctx.grid)
