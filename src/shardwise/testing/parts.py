"""A plain tensor cut into what each rank of a simulated world holds, and put together again.

None of it is a redistribution: what rules are compared with relies on no collective.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.core.box import Box
from shardwise.core.grid import Grid
from shardwise.core.layout import Layout
from shardwise.core.placements import NormPartial, Partial
from shardwise.errors import RankMismatchError
from shardwise.redistribute.execute import in_memory_order
from shardwise.simulation.one_value import same_values
from shardwise.simulation.parts import on_rank
from shardwise.simulation.ranks import one_tensor


def scattered(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A plain tensor laid out; Partial axes get random terms that reduce to it."""
    grid = layout.grid
    axes = [axis for axis, p in enumerate(layout.placements) if p.is_shard()]
    blocks: dict[Any, torch.Tensor] = {}  # by place in the mesh: empty boxes are alike
    held = []
    for rank in grid.ranks:
        coordinate = grid.coordinates[rank]
        place = tuple(coordinate[axis] for axis in axes)
        if place not in blocks:
            blocks[place] = in_memory_order(tensor[layout.box(coordinate).slices], layout)
        held.append(blocks[place])
    local = one_tensor(grid, held, sized=False)
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Partial):
            local = _split_terms(local, placement, axis, grid)
    return local


def _split_terms(local: torch.Tensor, partial: Partial, axis: int, grid: Grid) -> torch.Tensor:
    """Random terms along `axis`, the same in each group of ranks that shares the rest."""
    made: dict[int, torch.Tensor] = {}
    for line in grid.lines(axis):
        terms = _terms(on_rank(local, line[0]), partial, len(line))
        made.update(zip(line, terms, strict=True))
    return one_tensor(grid, [made[rank] for rank in grid.ranks])


def _terms(value: torch.Tensor, partial: Partial, num: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(value.numel())
    noise = [
        torch.empty_like(value).copy_(torch.randint(-3, 4, value.shape, generator=generator))
        for _ in range(num - 1)
    ]
    match partial.reduce_op:
        case "max" if value.dtype is torch.bool:
            return [value, *(value & n for n in noise)]
        case "min" if value.dtype is torch.bool:
            return [value, *(value | n for n in noise)]
        case "max":
            return [value, *(value - n.abs() for n in noise)]
        case "min":
            return [value, *(value + n.abs() for n in noise)]
        case "product":
            factors = [torch.where(n < 0, -1, 1).to(value.dtype) for n in noise]
            return [functools.reduce(torch.mul, factors, value), *factors]
        case "norm":
            assert isinstance(partial, NormPartial), "only a NormPartial is a norm"
            return [value * num ** (-1 / partial.norm_type)] * num
    total = value * num if partial.reduce_op == "avg" else value
    return [*noise, total - sum(noise)] if noise else [total]


def gathered(local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The plain tensor that parts in `layout` stand for."""
    grid = layout.grid
    parts = {rank: on_rank(local, rank) for rank in grid.ranks}
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Partial):
            for line in grid.lines(axis):
                value = _reduced([parts[rank] for rank in line], placement)
                parts.update(dict.fromkeys(line, value))
    blocks: dict[Box, torch.Tensor] = {}
    for rank, part in parts.items():
        first = blocks.setdefault(layout.box(grid.coordinates[rank]), part)
        if first is not part and not same_values(first, part):
            raise RankMismatchError(f"Rank {rank} holds other values of a block than its replicas.")
    whole = parts[grid.ranks[0]].new_empty(layout.shape)
    for box, part in blocks.items():
        whole[box.slices] = part
    return whole


def _reduced(terms: Sequence[torch.Tensor], partial: Partial) -> torch.Tensor:
    match partial.reduce_op:
        case "max":
            return functools.reduce(torch.maximum, terms)
        case "min":
            return functools.reduce(torch.minimum, terms)
        case "product":
            return functools.reduce(torch.mul, terms)
        case "norm":
            assert isinstance(partial, NormPartial), "only a NormPartial is a norm"
            held, order = torch.stack(list(terms)).double(), partial.norm_type
            if order == math.inf:
                return functools.reduce(torch.maximum, terms)
            total = torch.copysign(held.abs() ** order, held).sum(0)
            return torch.copysign(total.abs() ** (1 / order), total).to(terms[0].dtype)
    total = functools.reduce(torch.add, terms)
    return (total / len(terms)).to(total.dtype) if partial.reduce_op == "avg" else total
