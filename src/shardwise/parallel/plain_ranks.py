"""Run a function of plain tensors on every rank present, differentiable.

`comm.ranks.each_rank` works below autograd. Code that is a user's own, and that loops over what the
values say, needs plain tensors and autograd: here a LocalTensor is taken apart into the tensors of
its ranks, and what the ranks give is put together again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from shardwise.comm.local_tensor import LocalTensor, from_ranks
from shardwise.comm.ranks import localize, my_coordinate
from shardwise.core.grid import Coordinate, Grid
from shardwise.core.untraced import UntracedFunction


def on_plain_ranks(
    grid: Grid, fn: Callable[..., torch.Tensor], *tensors: torch.Tensor
) -> torch.Tensor:
    """`fn(coordinate, *tensors)` on every rank present, each with plain tensors."""
    if not grid.world.simulated:
        return fn(my_coordinate(grid), *tensors)
    apart = [_TakeApart.apply(localize(grid, tensor), grid) for tensor in tensors]
    found = []
    for place, rank in enumerate(grid.ranks):
        coordinate: Coordinate = grid.coordinates[rank]
        found.append(fn(coordinate, *(parts[place] for parts in apart)))
    return _PutTogether.apply(grid, *found)


def _together(grid: Grid, parts: Any) -> LocalTensor:
    return from_ranks(grid.world, grid.ranks, [part.detach() for part in parts], sized=True)


class _TakeApart(UntracedFunction):
    @staticmethod
    def forward(ctx: Any, tensor: LocalTensor, grid: Grid) -> tuple[torch.Tensor, ...]:
        ctx.grid = grid
        return tuple(tensor.on_rank(rank).detach() for rank in grid.ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _together(ctx.grid, grads), None


class _PutTogether(UntracedFunction):
    @staticmethod
    def forward(ctx: Any, grid: Grid, *parts: torch.Tensor) -> LocalTensor:
        ctx.grid = grid
        return _together(grid, parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        local: Any = localize(ctx.grid, grad)
        return None, *(local.on_rank(rank) for rank in ctx.grid.ranks)
