"""A sample in a simulated world: its tensors as plans want them, and what comes of a plan."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.box import Box
from shardwise.core.layout import Layout, make_layout, normalize
from shardwise.core.mesh import Grid, grid_of
from shardwise.core.placements import (
    REDUCE_OPS,
    REPLICATE,
    NormPartial,
    Partial,
    Placement,
    Shard,
    short,
)
from shardwise.dispatch.local_call import local_call
from shardwise.dispatch.propagate import CallPlan, every_plan
from shardwise.dispatch.rule import Call, Rule, TensorMeta
from shardwise.dispatch.schema import Positional, plain_op
from shardwise.errors import RankMismatchError
from shardwise.redistribute.execute import in_memory_order
from shardwise.simulation.one_value import same_values
from shardwise.simulation.parts import on_rank
from shardwise.simulation.ranks import one_tensor
from shardwise.testing.sample import SampleAlone

# A plain tensor cut into what each rank of a simulated world holds, and put together again.
#
# None of it is a redistribution: what rules are compared with relies on no collective.


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


#: Terms in which an input may lie; norms are for inputs without negative values only.
_PARTIALS: tuple[Partial, ...] = (*map(Partial, REDUCE_OPS), NormPartial())


class Played:
    """The sample in a simulated world: its tensors are cut once for each layout."""

    def __init__(self, alone: SampleAlone, grid: Grid) -> None:
        self._alone, self._grid = alone, grid
        schema = getattr(alone.call.op, "_schema", None)
        self._written = schema is not None and schema.is_mutable
        self._parts: dict[tuple[int, Layout], torch.Tensor] = {}

    def plans(self, rule: Rule) -> Iterator[CallPlan]:
        """The plans of every combination, from layouts that bring every kind of split in."""
        call, wish = self._alone.call, self._alone.sample.wish
        starts = itertools.product(
            _starting_layouts(self._alone, self._grid), list(_wishes(wish, call, self._grid))
        )
        return every_plan(rule, call, starts)

    def parts(self, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        """The sample's tensors as `layouts` say."""
        found = []
        for number, (tensor, layout) in enumerate(zip(self._alone.tensors, layouts, strict=True)):
            if (number, layout) not in self._parts:
                self._parts[number, layout] = scattered(tensor.clone(), layout)
            part = self._parts[number, layout]
            found.append(part.clone() if self._written else part)
        return found

    def why_wrong(self, plan: CallPlan) -> str:
        """Empty when the plan gives one device's result."""
        alone = self._alone
        op = alone.sample.op
        spelled = op if isinstance(op, Positional) else None
        found = alone.run(self.parts(plan.inputs), local_call(plain_op(op), plan, spelled))
        if not plan.outputs:
            return "" if found == alone.result else f"{found} instead of {alone.result}"
        asked = zip(
            alone.places(), alone.asked(found), alone.asked(alone.result), plan.outputs, strict=True
        )
        for number, part, whole, layout in asked:
            if number in alone.sample.unread:
                continue
            if why := difference(part, whole, layout) or _other_memory(part, layout):
                return f"output {number} {why}"
        return ""


def grid_of_shape(shape: tuple[int, ...]) -> Grid:
    return grid_of(DeviceMesh("cpu", torch.arange(math.prod(shape)).view(shape)))


def _starting_layouts(alone: SampleAlone, grid: Grid) -> Iterator[list[Layout]]:
    call = alone.call
    whole = [layout_of(meta, (REPLICATE,) * grid.num_axes, grid) for meta in call.inputs]
    yield whole
    for number, meta in enumerate(call.inputs):
        is_norm = _could_be_norms(alone.tensors[number])
        for term in _PARTIALS if is_norm else _PARTIALS[:-1]:
            partial = list(whole)
            partial[number] = layout_of(meta, (term,) * grid.num_axes, grid)
            yield partial
        for dim, size in enumerate(meta.shape):
            for axis, parts in enumerate(grid.shape):
                placements: list[Placement] = [REPLICATE] * grid.num_axes
                # Everything on one coordinate, and all but one entry on the last.
                for sizes in ((size, *[0] * (parts - 1)), (*_ones(size, parts),)):
                    placements[axis] = Shard(dim, sizes)
                    started = list(whole)
                    started[number] = layout_of(meta, tuple(placements), grid)
                    yield started
        if grid.num_axes > 1 and meta.ndim:
            inner_first = list(whole)
            inner_first[number] = make_layout(
                grid,
                (Shard(0),) * grid.num_axes,
                meta.shape,
                meta.stride,
                meta.dtype,
                tuple(reversed(range(grid.num_axes))),
            )
            yield inner_first


def _could_be_norms(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and bool((tensor >= 0).all())


def _ones(size: int, parts: int) -> list[int]:
    """Sizes that start with ones: uneven the other way round than chunks are."""
    ones = [min(1, size)] * (parts - 1)
    return [*ones, size - sum(ones)] if size >= sum(ones) else [size] + [0] * (parts - 1)


def layout_of(meta: TensorMeta, placements: tuple[Placement, ...], grid: Grid) -> Layout:
    normal = normalize(placements, meta.shape, grid)
    return make_layout(grid, normal, meta.shape, meta.stride, meta.dtype)


def _wishes(wish: Sequence[Placement], call: Call, grid: Grid) -> Iterator[Layout | None]:
    if not wish:
        yield None
        return
    for placements in itertools.product(wish, repeat=grid.num_axes):
        yield layout_of(call.outputs[0], placements, grid)


def difference(part: Any, whole: torch.Tensor, layout: Layout) -> str:
    """How `part`, laid out so, is not `whole`; empty where it is."""
    for rank, coordinate in layout.grid.coordinates.items():
        here = part.on_rank(rank)
        if tuple(here.shape) != layout.local_shape(coordinate):
            return f"has shape {tuple(here.shape)} on rank {rank}"
        if here.dtype != whole.dtype:
            return f"is {here.dtype} instead of {whole.dtype} on rank {rank}"
    together = gathered(part, layout)
    rtol, atol = _tolerances(whole.dtype)
    if not torch.allclose(together, whole, rtol=rtol, atol=atol, equal_nan=True):
        return f"differs by {(together - whole).abs().max().item():.3g}"
    return ""


def _tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """Four units in the last place where that is more than what sums of float32 need."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 1e-4, 1e-5
    eps = torch.finfo(dtype).eps
    return max(1e-4, 4 * eps), max(1e-5, 4 * eps)


def _other_memory(part: Any, layout: Layout) -> str:
    """How dims lie in another order in memory than `layout` promises: then a view would fail."""
    for rank in layout.grid.ranks:
        here = part.on_rank(rank)
        long = [d for d in range(here.dim()) if here.shape[d] > 1 and layout.stride[d]]
        promised = sorted(long, key=lambda d: -layout.stride[d])
        found = [here.stride(d) for d in promised]
        if here.numel() and found != sorted(found, reverse=True):
            return f"has strides {here.stride()} on rank {rank}, the whole {layout.stride}"
    return ""


def in_words(layouts: Sequence[Layout]) -> tuple[str, ...]:
    return tuple(short(layout.placements) for layout in layouts)
