"""Run a function of plain tensors on every rank present, differentiable.

`each_rank` works below autograd. A user's own code with data-dependent loops needs plain tensors
and autograd: here a LocalTensor is unbound into the tensors of its ranks, and the results are
joined again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.core.mesh import Coordinate, Grid
from shardwise.core.untraced import UntracedFunction
from shardwise.simulation.local_tensor import LocalTensor
from shardwise.simulation.ranks import localize, my_coordinate, one_for_all, one_tensor


def on_plain_ranks(
    grid: Grid, fn: Callable[..., torch.Tensor], *tensors: torch.Tensor
) -> torch.Tensor:
    """`fn(coordinate, *tensors)` on every rank present, each with plain tensors."""
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
