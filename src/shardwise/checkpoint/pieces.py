"""The pieces of a tensor: the shards that the ranks present hold.

Note [Pieces]
To a checkpoint a tensor is a set of pieces: a rank, an offset in the global tensor, and a plain
tensor that shares its memory. An object with a shape and a dtype takes part through a method
`__checkpoint_pieces__()` that returns a list of (rank, offset, tensor), with any number of pieces
per rank and any tiling. In a simulated world the pieces of all ranks are present.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core.box import Box
from shardwise.core.placements import Replicate, short
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import CheckpointError
from shardwise.simulation.parts import agreed, on_rank, roster_of
from shardwise.simulation.ranks import present, rank_values


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor on one rank; `tensor` shares its memory."""

    rank: int
    offset: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def box(self) -> Box:
        return Box(self.offset, tuple(self.tensor.shape))


@dataclass(frozen=True, slots=True)
class Pieces:
    """A global tensor, and the pieces of it that ranks of this process hold."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Sequence[Piece]


def pieces_of(value: Any, name: str, present: Sequence[int]) -> Pieces:
    """The pieces of a tensor on the ranks present; a plain tensor is whole on each of them."""
    own = getattr(value, "__checkpoint_pieces__", None)
    if own is not None:
        found = [Piece(rank, tuple(offset), part.detach()) for rank, offset, part in own()]
        return Pieces(tuple(value.shape), value.dtype, found)
    if isinstance(value, DTensor):
        return _of_dtensor(value, name)
    plain = value.detach()
    roster = roster_of(plain)
    ranks = present if roster is None else roster.ranks
    held = [(rank, on_rank(plain, rank)) for rank in ranks]
    plain = agreed(plain)
    if plain.layout is not torch.strided or plain.is_meta:
        raise CheckpointError(
            f"{name} is not a dense tensor with memory: {plain.layout}, meta or so."
        )
    start = (0,) * plain.dim()
    return Pieces(tuple(plain.shape), plain.dtype, [Piece(r, start, t) for r, t in held])


def is_partial(value: Any) -> bool:
    """Whether ranks hold terms of a sum, not shards."""
    return type(value) is DTensor and any(p.is_partial() for p in value.placements)


def reduced(value: Any) -> Any:
    """The tensor with its Partial placements reduced: optimizer state made from such a gradient."""
    if not is_partial(value):
        return value
    placements = [Replicate() if p.is_partial() else p for p in value.placements]
    return value.detach().redistribute(placements=placements, order=value._layout.order)


def _of_dtensor(value: DTensor, name: str) -> Pieces:
    layout = value._layout
    if any(p.is_partial() for p in layout.placements):
        raise CheckpointError(
            f"{name} is {short(layout.placements)}: its ranks hold terms of a sum, not parts. "
            "redistribute() it to Shard or Replicate first."
        )
    if value.is_meta:
        raise CheckpointError(f"{name} is on the meta device and has no values.")
    whole: Any = value.detach()
    local = whole.to_local()
    found = []
    for rank, (coordinate, part) in zip(
        present(layout.grid), rank_values(layout.grid, local), strict=True
    ):
        found.append(Piece(rank, layout.box(coordinate)[0], part))
    return Pieces(layout.shape, layout.dtype, found)
