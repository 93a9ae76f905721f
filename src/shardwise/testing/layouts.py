"""The layouts in which a call is run: tensors scattered to them, and gathered."""

from __future__ import annotations

import functools
import itertools
import math
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.box import Box
from shardwise.core.layout import Layout
from shardwise.core.mesh import Grid
from shardwise.core.placements import (
    REPLICATE,
    SUM,
    NormPartial,
    Partial,
    Placement,
    Shard,
    short,
)
from shardwise.dtensor.create import distribute_tensor
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import RankMismatchError
from shardwise.redistribute.execute import in_memory_order
from shardwise.simulation.parts import on_rank
from shardwise.simulation.ranks import each_rank, one_tensor
from shardwise.simulation.roster import same_values


def scatter(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A plain tensor laid out; Partial axes get random terms that reduce to it."""
    grid = layout.grid
    axes = [axis for axis, p in enumerate(layout.placements) if p.is_shard()]
    shards: dict[Any, torch.Tensor] = {}  # by coordinates along the sharded axes
    of_ranks = []
    for rank in grid.ranks:
        coordinate = grid.coordinates[rank]
        key = tuple(coordinate[axis] for axis in axes)
        if key not in shards:
            shards[key] = in_memory_order(tensor[layout.box(coordinate).slices], layout)
        of_ranks.append(shards[key])
    local = one_tensor(grid, of_ranks, sized=False)
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


def gather(local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The plain tensor that shards in `layout` stand for."""
    grid = layout.grid
    shards = {rank: on_rank(local, rank) for rank in grid.ranks}
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Partial):
            for line in grid.lines(axis):
                value = _reduced([shards[rank] for rank in line], placement)
                shards.update(dict.fromkeys(line, value))
    boxes: dict[Box, torch.Tensor] = {}
    for rank, shard in shards.items():
        first = boxes.setdefault(layout.box(grid.coordinates[rank]), shard)
        if first is not shard and not same_values(first, shard):
            raise RankMismatchError(f"Rank {rank} holds other values of a shard than its replicas.")
    whole = shards[grid.ranks[0]].new_empty(layout.shape)
    for box, shard in boxes.items():
        whole[box.slices] = shard
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
            norms, order = torch.stack(list(terms)).double(), partial.norm_type
            if order == math.inf:
                return functools.reduce(torch.maximum, terms)
            total = torch.copysign(norms.abs() ** order, norms).sum(0)
            return torch.copysign(total.abs() ** (1 / order), total).to(terms[0].dtype)
    total = functools.reduce(torch.add, terms)
    return (total / len(terms)).to(total.dtype) if partial.reduce_op == "avg" else total


#: The term of each coordinate along a Partial axis, in multiples of the tensor. Any two neighbours
#: add up without rounding, and no function that is not linear gives the same sum.
_TERMS = {2: (2, -1), 4: (-1, 2, 1, -1)}


def laid_out(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    order: tuple[int, ...] | None = None,
) -> DTensor:
    """The tensor in these placements, Partial ones included, with its axes in any order."""
    whole = tensor.detach().clone().resolve_conj().resolve_neg()
    reduced = [REPLICATE if isinstance(p, Partial) else p for p in placements]
    sharded = distribute_tensor(whole, mesh, reduced, src_data_rank=None)
    if order is not None:
        layout = sharded._layout.with_placements(sharded.placements, order)
        # Scattered here, not redistributed: a redistribution may itself be wrong.
        shards = scatter(whole, layout)
        local = each_rank(layout.grid, lambda _, shard: shard.clone(), shards, axes=())
        sharded = DTensor._wrap(local, layout)
    partial = [axis for axis, p in enumerate(placements) if isinstance(p, Partial)]
    if not partial:
        return sharded
    if not all(placements[axis].is_partial("sum") for axis in partial):
        layout = sharded._layout.with_placements(tuple(placements))
        return DTensor._wrap(scatter(whole, layout), layout)

    def term(coordinate: Any, part: torch.Tensor) -> torch.Tensor:
        terms = [_TERMS[mesh.shape[axis]][coordinate[axis]] for axis in partial]
        factor = torch.tensor(terms, dtype=part.real.dtype).prod()
        first = all(coordinate[axis] == 0 for axis in partial)
        return torch.where(part.isfinite(), part * factor, part if first else 0)

    layout = sharded._layout
    local = each_rank(layout.grid, term, sharded._local)
    return DTensor._wrap(local, layout.with_placements(tuple(placements), layout.order))


T = TypeVar("T")
Pick = Callable[[Sequence[T], int], list[T]]


def evenly(every: Sequence[T], limit: int) -> list[T]:
    """At most `limit` entries, evenly spaced, the first among them."""
    if len(every) <= limit:
        return list(every)
    return [every[i * len(every) // limit] for i in range(limit)]


def middles(every: Sequence[T], limit: int) -> list[T]:
    """At most `limit`, from the middle of equal ranges: the first entries are often trivial."""
    if len(every) <= limit:
        return list(every)
    return [every[(2 * i + 1) * len(every) // (2 * limit)] for i in range(limit)]


def draw(every: Sequence[T], limit: int, key: str) -> list[T]:
    """At most `limit`, drawn at random; the same key draws the same, in every process."""
    return list(every) if limit >= len(every) else random_of(key).sample(every, limit)


def random_of(key: str) -> random.Random:
    return random.Random(zlib.crc32(key.encode()))


RANKS = 4
ONE_AXIS, TWO_AXES, THREE_AXES = (4,), (2, 2), (2, 2, 2)


@dataclass(frozen=True)
class OperandLayouts:
    """A mesh and the placements of each tensor of a sample."""

    mesh: tuple[int, ...]
    placements: tuple[tuple[Placement, ...], ...]
    #: The axes from the outermost split to the innermost, where that is not their own order.
    order: tuple[int, ...] | None = None

    def __str__(self) -> str:
        order = "" if self.order is None else f" in order {self.order}"
        return f"mesh {self.mesh}{order}: {', '.join(map(short, self.placements))}"


def ways(
    tensors: Sequence[torch.Tensor], limit: int, pick: Pick[OperandLayouts] = evenly
) -> list[OperandLayouts]:
    """At most `limit`: replicated, sharded alike, differently, unevenly, Partial, on two axes."""
    return pick(list(dict.fromkeys(w for w in _every(tensors) if _fits(w, tensors))), limit)


def further_ways(tensors: Sequence[torch.Tensor], num: int, key: str) -> list[OperandLayouts]:
    """`num` layouts on two and three axes in any order, drawn at random by `key`."""
    every = dict.fromkeys(w for w in _in_any_order(tensors) if _fits(w, tensors))
    return draw(list(every), num, key)


def _in_any_order(tensors: Sequence[torch.Tensor]) -> Iterator[OperandLayouts]:
    last = max(t.dim() for t in tensors) - 1
    for mesh in (TWO_AXES, THREE_AXES):
        num_axes = len(mesh)
        patterns = itertools.product(("first", "last", "sum", "whole"), repeat=num_axes)
        orders = list(itertools.permutations(range(num_axes)))
        for pattern, order, apart in itertools.product(patterns, orders, (False, True)):
            if pattern.count("whole") == num_axes:
                continue
            placements = []
            for number, tensor in enumerate(tensors):
                turn = number % num_axes if apart else 0
                turned = pattern[turn:] + pattern[:turn]
                placements.append(tuple(_placement(tensor, word, last) for word in turned))
            yield OperandLayouts(mesh, tuple(placements), None if order == orders[0] else order)


def _placement(tensor: torch.Tensor, word: str, last: int) -> Placement:
    match word:
        case "first":
            return _shard(tensor, 0)
        case "last":
            return _shard(tensor, last)
        case "sum":
            return _sum(tensor)
    return REPLICATE


def _fits(way: OperandLayouts, tensors: Sequence[torch.Tensor]) -> bool:
    return all(
        not p.is_partial() or t.is_floating_point() or t.is_complex()
        for placements, t in zip(way.placements, tensors, strict=True)
        for p in placements
    )


def _every(tensors: Sequence[torch.Tensor]) -> Iterator[OperandLayouts]:
    num, most_dims = len(tensors), max(t.dim() for t in tensors)
    yield _one(REPLICATE for _ in tensors)
    for dim in range(most_dims):
        yield _one(_shard(t, dim) for t in tensors)
    if num > 1:
        for dim in range(tensors[0].dim()):
            yield _one(_shard(t, dim) if i == 0 else REPLICATE for i, t in enumerate(tensors))
        for dim in range(max(t.dim() for t in tensors[1:])):
            yield _one(_shard(t, dim) if i else REPLICATE for i, t in enumerate(tensors))
        for shift in range(most_dims):
            yield _one(_shard(t, (i + shift) % max(t.dim(), 1)) for i, t in enumerate(tensors))
    yield _one(_sum(t) if i == 0 else REPLICATE for i, t in enumerate(tensors))
    if num > 1:
        yield _one(map(_sum, tensors))
        yield _one(_sum(t) if i else _shard(t, 0) for i, t in enumerate(tensors))
    for dim in {0, most_dims - 1} - {-1}:
        yield _one(_uneven(t, dim, first=True) for t in tensors)
        yield _one(_uneven(t, dim, first=False) for t in tensors)
    last = most_dims - 1
    yield _two((_shard(t, 0), _shard(t, last)) for t in tensors)
    yield _two((_shard(t, last), _shard(t, last)) for t in tensors)
    yield _two((_sum(t), _shard(t, 0)) for t in tensors)


def _one(placements: Iterable[Placement]) -> OperandLayouts:
    return OperandLayouts(ONE_AXIS, tuple((p,) for p in placements))


def _two(placements: Iterable[tuple[Placement, Placement]]) -> OperandLayouts:
    return OperandLayouts(TWO_AXES, tuple(placements))


def _shard(tensor: torch.Tensor, dim: int) -> Placement:
    return Shard(dim) if 0 <= dim < tensor.dim() else REPLICATE


def _sum(tensor: torch.Tensor) -> Placement:
    return SUM if tensor.is_floating_point() or tensor.is_complex() else REPLICATE


def _uneven(tensor: torch.Tensor, dim: int, *, first: bool) -> Placement:
    """Everything on the first rank, or a single entry there and the rest on the last."""
    if not 0 <= dim < tensor.dim():
        return REPLICATE
    size = tensor.shape[dim]
    if first or size < 2:
        return Shard(dim, (size, 0, 0, 0))
    return Shard(dim, (1, 0, 0, size - 1))
