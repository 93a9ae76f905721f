"""Draws of a whole tensor, written to its shards, and `rng`, which says how."""

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
from shardwise.errors import ArgumentError, RankMismatchError
from shardwise.random.fill import (
    ANY_PROBABILITY,
    Draw,
    DrawnShard,
    Whole,
    fill_exactly,
    fill_quickly,
    generator_digest,
    generator_kind,
)
from shardwise.simulation.parts import on_rank
from shardwise.simulation.ranks import each_rank, localize, no_values, parts_with_ranks

_MODES = ("exact", "fast")


class _Setting:
    """Process-wide, since backward may run on other threads."""

    __slots__ = ("mode",)

    def __init__(self) -> None:
        self.mode = "exact"


setting = _Setting()


class rng:
    """Set how DTensors draw random numbers, from now on or for a `with` block.

    `"exact"`, the default: the values that one device would draw, whatever the mesh and placements;
    each rank draws the whole tensor and keeps its shard. `"fast"`: each rank draws only its shard,
    from a seed that depends on the generator and the shard's box. Runs with the same seed, mesh and
    placements repeat, but the values are not one device's and depend on the placements. Compiled
    code draws exactly in both modes.

    >>> import shardwise, torch
    >>> with shardwise.simulate(2), shardwise.rng("fast"):
    ...     mesh = shardwise.init_device_mesh("cpu", (2,))
    ...     _ = torch.manual_seed(0)
    ...     x = shardwise.rand(4, device_mesh=mesh, placements=[shardwise.Shard(0)])
    ...     _ = torch.manual_seed(0)
    ...     again = shardwise.rand(4, device_mesh=mesh, placements=[shardwise.Shard(0)])
    >>> torch.equal(x.to_local().on_rank(1), again.to_local().on_rank(1))
    True
    """

    def __init__(self, mode: str) -> None:
        if mode not in _MODES:
            raise ArgumentError(f"rng() takes 'exact' or 'fast', found {mode!r}.")
        self._before = setting.mode
        setting.mode = mode

    def __enter__(self) -> rng:
        return self

    def __exit__(self, *exc: Any) -> None:
        setting.mode = self._before


def draw_parts(
    layout: Layout, held: torch.Tensor, draw: Draw, operand: torch.Tensor | None = None
) -> None:
    """Write a draw of the whole tensor to the local tensor of a DTensor in `layout`."""
    device = held.device
    if device.type == "meta" or layout.grid.device_type == "meta":
        return  # as on one device: a meta tensor draws nothing
    if layout.grid.outside:
        shards = [_nothing_of(layout, device)]  # so that generators stay in step
    else:
        compare_generators_once(layout.grid, device, draw.generator)
        shards = _own_shards(layout, held, operand)
    if setting.mode == "fast":
        fill_quickly(shards, draw)
    else:
        fill_exactly(Whole(layout.shape, layout.stride, layout.dtype), shards, draw)


def _nothing_of(layout: Layout, device: torch.device) -> DrawnShard:
    """The shard of a rank outside the mesh."""
    shape = (0,) * layout.ndim
    operand = torch.full(shape, ANY_PROBABILITY, device=device)
    return DrawnShard(shape, torch.empty(shape, dtype=layout.dtype, device=device), operand)


def _own_shards(
    layout: Layout, held: torch.Tensor, operand: torch.Tensor | None
) -> list[DrawnShard]:
    shards = []
    for coordinates, part, given in parts_of(layout, held, operand):
        neutral = _neutral(layout, coordinates)
        if neutral is not None:
            part.fill_(neutral)
            part = torch.empty_like(part)  # still drawn, so that generators stay in step
        shards.append(DrawnShard(layout.box(coordinates[0])[0], part, given))
    return shards


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
    if layout.grid.outside:
        return no_values(layout.grid, layout.dtype, device)
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
    for rank, number in zip(grid.submeshes[0], found, strict=True):
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
