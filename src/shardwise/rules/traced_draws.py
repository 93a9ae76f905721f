"""Draws while torch.compile traces: the whole is drawn, and cut.

What no rank reads of it is the compiler's to leave out.
"""

from __future__ import annotations

import torch

from shardwise.core.grid import Coordinate
from shardwise.core.layout import Layout
from shardwise.core.placements import Shard
from shardwise.random.fill import ANY_PROBABILITY
from shardwise.rules.draws import parted_axes, parts_of
from shardwise.simulation.ranks import each_rank, localize


def sliced(whole: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The parts of a tensor that all ranks have."""

    def here(coordinate: Coordinate) -> torch.Tensor:
        return _cut(whole, layout, coordinate).clone()

    return localize(layout.grid, each_rank(layout.grid, here, axes=parted_axes(layout)))


def _cut(whole: torch.Tensor, layout: Layout, coordinate: Coordinate) -> torch.Tensor:
    """The part of `whole` that lies at a coordinate, as a view."""
    offset, shape = layout.box(coordinate)
    for dim in sorted({p.dim for p in layout.placements if isinstance(p, Shard)}):
        whole = whole.narrow(dim, offset[dim], shape[dim])
    return whole


def assembled(layout: Layout, held: torch.Tensor) -> torch.Tensor:
    """A whole tensor with the parts that are held here; between them, any probability will do."""
    whole = model_of(layout, held.device, held.dtype).fill_(ANY_PROBABILITY)
    for coordinates, part, _ in parts_of(layout, held, None):
        _cut(whole, layout, coordinates[0]).copy_(part)
    return whole


def model_of(
    layout: Layout, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A whole tensor, of any values, that lies in memory as one device has it."""
    return torch.empty_strided(
        layout.shape, layout.stride, dtype=dtype or layout.dtype, device=device
    )
