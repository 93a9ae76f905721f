"""Meshes as text, and the layouts of a call's operands: tensors scattered to them, and gathered."""

from __future__ import annotations

import functools
import math
import random
import re
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.core.box import Box
from shardwise.core.layout import Layout
from shardwise.core.mesh import Grid
from shardwise.core.placements import REPLICATE, NormPartial, Partial, Placement, short
from shardwise.dtensor.create import distribute_tensor
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import ArgumentError, RankMismatchError
from shardwise.redistribute.execute import in_memory_order
from shardwise.simulation.ranks import each_rank, on_rank, one_tensor
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
    # Eight terms must add up to a multiple of 1/32 exactly, in any order.
    unit = 0.25 if value.dtype is torch.bfloat16 else 1
    noise = [
        torch.empty_like(value).copy_(unit * torch.randint(-3, 4, value.shape, generator=generator))
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


def random_of(key: str) -> random.Random:
    return random.Random(zlib.crc32(key.encode()))


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


# -- mesh ----------------------------------------------------------------------------------------
# Mesh: the axes of a mesh as text, before there is a world.


TENSOR_AXIS = "tp"

#: Up to a million ranks along an axis.
_SIZE = re.compile(r"[1-9][0-9]{0,5}")


@dataclass(frozen=True)
class Mesh:
    """The names and sizes of a mesh's axes, before there is a world.

    >>> Mesh.parse("dp=2,tp=4")
    Mesh(names=('dp', 'tp'), sizes=(2, 4))
    >>> Mesh.parse("4")
    Mesh(names=('tp',), sizes=(4,))
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def parse(text: str) -> Mesh:
        names, sizes = [], []
        for part in text.split(","):
            name, equals, size = part.strip().rpartition("=")
            right = _SIZE.fullmatch(size) is not None and (not equals or name.isidentifier())
            if not right:
                raise ArgumentError(f"A mesh is written dp=2,tp=4 or 4; found {text!r}.")
            names.append(name or TENSOR_AXIS)
            sizes.append(int(size))
        if len(set(names)) < len(names):
            raise ArgumentError(f"Each axis of a mesh has a unique name; found {text!r}.")
        return Mesh(tuple(names), tuple(sizes))

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes)

    def num_parts(self, axes: Collection[str]) -> int:
        """The number of parts of a batch that is split along some axes."""
        return math.prod(s for n, s in zip(self.names, self.sizes, strict=True) if n in axes)

    def part_of(self, rank: int, axes: Collection[str]) -> int:
        """The number of a rank's part.

        >>> [Mesh.parse("dp=2,tp=2").part_of(rank, ["dp"]) for rank in range(4)]
        [0, 0, 1, 1]
        """
        part, weight = 0, 1
        for name, size in zip(reversed(self.names), reversed(self.sizes), strict=True):
            rank, coordinate = divmod(rank, size)
            if name in axes:
                part, weight = part + weight * coordinate, weight * size
        return part

    def make(self) -> DeviceMesh:
        """The mesh in the current world."""
        return init_device_mesh("cpu", self.sizes, mesh_dim_names=self.names)

    def __str__(self) -> str:
        return ", ".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True))
