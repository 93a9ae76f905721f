"""Draws of a whole tensor, written to its shards."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardwise.comm.agreement import gather
from shardwise.comm.watch import because
from shardwise.core.layout import Layout, differing_axes
from shardwise.core.mesh import Coordinate, Grid
from shardwise.core.placements import Partial, Shard
from shardwise.errors import RankMismatchError
from shardwise.random.fill import (
    ANY_PROBABILITY,
    Draw,
    DrawnShard,
    Whole,
    fill_exactly,
    fill_quickly,
)
from shardwise.random.generators import generator_digest, generator_kind
from shardwise.random.mode import setting
from shardwise.simulation.parts import on_rank
from shardwise.simulation.ranks import each_rank, localize, parts_with_ranks


def draw_parts(
    layout: Layout, held: torch.Tensor, draw: Draw, operand: torch.Tensor | None = None
) -> None:
    """Write a draw of the whole tensor to the local tensor of a DTensor in `layout`."""
    device = held.device
    if device.type == "meta" or layout.grid.device_type == "meta":
        return  # as on one device: a meta tensor draws nothing
    compare_generators_once(layout.grid, device, draw.generator)
    shards = []
    for coordinates, part, given in parts_of(layout, held, operand):
        neutral = _neutral(layout, coordinates)
        if neutral is not None:
            part.fill_(neutral)
            part = torch.empty_like(part)  # still drawn, so that generators stay in step
        shards.append(DrawnShard(layout.box(coordinates[0])[0], part, given))
    if setting.mode == "fast":
        fill_quickly(shards, draw)
    else:
        fill_exactly(Whole(layout.shape, layout.stride, layout.dtype), shards, draw)


def draw_of(op: Any, args: Sequence[Any], generator: torch.Generator | None) -> Draw:
    """The draw of an op that writes to its first argument."""
    # An integer from a range of 2**32 or more takes two numbers.
    wide = tuple(a for a in args if a is None or (isinstance(a, int) and abs(a) >= 2**31))
    return Draw(
        lambda tensor, _: op(tensor, *args, generator=generator),
        name=(op, wide),
        generator=generator,
    )


def parts_of(
    layout: Layout, held: torch.Tensor, operand: torch.Tensor | None
) -> Iterator[tuple[list[Coordinate], torch.Tensor, torch.Tensor | None]]:
    """Each part of a local tensor, the coordinates of its ranks, and its part of `operand`."""
    for ranks, part in parts_with_ranks(layout.grid, held):
        yield [layout.grid.coordinates[rank] for rank in ranks], part, on_rank(operand, ranks[0])


def _neutral(layout: Layout, coordinates: Sequence[Coordinate]) -> float | None:
    """The neutral element that ranks hold of a Partial draw; None if they hold the values."""
    found = {_neutral_at(layout, coordinate) for coordinate in coordinates}
    if len(found) > 1:
        raise RankMismatchError(
            f"A draw into {layout!r} gives its values to one rank and {found - {None}} to the "
            "others, but these ranks share one tensor. Give each its own: "
            "LocalTensor.per_rank(lambda rank: x.clone())."
        )
    return found.pop()


def _neutral_at(layout: Layout, coordinate: Coordinate) -> float | None:
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Partial) and coordinate[axis]:
            if placement.reduce_op == "sum":
                return 0.0
            if placement.reduce_op == "product":
                return 1.0
    return None


def new_parts(layout: Layout, device: torch.device) -> torch.Tensor:
    """An uninitialised local tensor for a DTensor in `layout`."""
    order = layout.memory_order or tuple(range(layout.ndim))
    inverse = sorted(range(layout.ndim), key=lambda i: order[i])

    def here(coordinate: Coordinate) -> torch.Tensor:
        shape = layout.local_shape(coordinate)
        part = torch.empty([shape[d] for d in order], dtype=layout.dtype, device=device)
        # No needless view: inductor fails on a view whose gradient is None.
        return part.permute(inverse) if inverse != sorted(inverse) else part

    return localize(layout.grid, each_rank(layout.grid, here, axes=differing_axes([layout])))


# -- generators ------------------------------------------------------------------------------------

#: Per mesh, the kinds of generators that were compared at a first draw.
_compared: weakref.WeakKeyDictionary[Grid, set[str]] = weakref.WeakKeyDictionary()


def compare_generators_once(
    grid: Grid, device: torch.device, generator: torch.Generator | None
) -> None:
    """Compare generators at the first draw on a mesh, once per kind of generator."""
    kind, kinds = generator_kind(device, generator), _compared.setdefault(grid, set())
    if kind not in kinds:
        compare_generators(grid, device, generator, "the first random draw on a mesh")
        kinds.add(kind)


def compare_generators(
    grid: Grid, device: torch.device, generator: torch.Generator | None, cause: str
) -> None:
    """Raise on every rank of the mesh unless all generators are in one state."""
    state = generator_digest(device, generator)
    with because(cause, implicit=False, always=True):
        found = gather(grid, cause, lambda _: [state]).flatten().tolist()
    groups: dict[int, list[int]] = defaultdict(list)
    for rank, number in zip(grid.ranks, found, strict=True):
        groups[number].append(rank)
    if len(groups) > 1:
        states = "; ".join(f"one on ranks {ranks}" for ranks in groups.values())
        raise RankMismatchError(
            f"The {generator_kind(device, generator)} are in {len(groups)} different states: "
            f"{states}. Ranks that draw from different states would hold shards of different "
            "tensors. Call torch.manual_seed(seed) with the same seed on every rank, and draw what "
            "only one rank needs from a torch.Generator of its own."
        )


# -- while torch.compile traces: the whole is drawn, and sliced ------------------------------------


def sliced(whole: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The local tensor of a DTensor in `layout`, from a whole tensor on every rank."""

    def here(coordinate: Coordinate) -> torch.Tensor:
        return _slice(whole, layout, coordinate).clone()

    return localize(layout.grid, each_rank(layout.grid, here, axes=differing_axes([layout])))


def _slice(whole: torch.Tensor, layout: Layout, coordinate: Coordinate) -> torch.Tensor:
    """The shard of `whole` at a coordinate, as a view."""
    offset, shape = layout.box(coordinate)
    for dim in sorted({p.dim for p in layout.placements if isinstance(p, Shard)}):
        whole = whole.narrow(dim, offset[dim], shape[dim])
    return whole


def assembled(layout: Layout, held: torch.Tensor) -> torch.Tensor:
    """A whole tensor with the shards held here; any probability will do elsewhere."""
    whole = model_of(layout, held.device, held.dtype).fill_(ANY_PROBABILITY)
    for coordinates, part, _ in parts_of(layout, held, None):
        _slice(whole, layout, coordinates[0]).copy_(part)
    return whole


def model_of(
    layout: Layout, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """An uninitialised whole tensor with one device's strides."""
    return torch.empty_strided(
        layout.shape, layout.stride, dtype=dtype or layout.dtype, device=device
    )
