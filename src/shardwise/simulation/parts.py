"""What a tensor is on the ranks present, asked alike in both worlds.

In a real process a tensor is one part: itself. In a simulated world a LocalTensor has a part for
each set of ranks that hold the same, and a plain tensor is the same on every rank. Which rank
holds which part is its roster; it has none where it is one plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.simulation.local_tensor import LocalTensor, from_ranks, sized_copy
from shardwise.simulation.roster import Roster

__all__ = [
    "agreed",
    "copy_per_rank",
    "from_parts",
    "held_like",
    "holds_parts",
    "is_per_rank",
    "on_rank",
    "one_part",
    "parts_of",
    "per_rank",
    "roster_of",
    "sized",
    "sized_copy",
    "unsized",
]


def is_per_rank(x: Any) -> bool:
    """Whether `x` is a tensor with a value for each of several ranks; a plain tensor has one."""
    return type(x) is LocalTensor


def holds_parts(kind: type) -> bool:
    """The same of the type of a tensor."""
    return kind is LocalTensor


def parts_of(x: Any) -> Sequence[torch.Tensor]:
    """The plain tensors behind `x`."""
    return x._parts if type(x) is LocalTensor else (x,)


def one_part(x: Any) -> torch.Tensor:
    """One of them, to ask for what is the same in all."""
    return x._parts[0] if type(x) is LocalTensor else x


def roster_of(x: Any) -> Roster | None:
    """Which rank holds which part."""
    return x._roster if type(x) is LocalTensor else None


def from_parts(
    parts: Sequence[torch.Tensor], roster: Roster | None, sized: bool = False
) -> torch.Tensor:
    """The tensor of these parts; `sized` for use outside a DTensor, where sizes are asked for."""
    return parts[0] if roster is None else LocalTensor(parts, roster, sized)


def per_rank(fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """`fn(x)` on every rank present: once for each part."""
    if type(x) is not LocalTensor:
        return fn(x)
    return LocalTensor([fn(part) for part in x._parts], x._roster, x._sized)


def on_rank(x: Any, rank: int) -> Any:
    """What `rank` holds."""
    return x.on_rank(rank) if type(x) is LocalTensor else x


def agreed(x: torch.Tensor) -> torch.Tensor:
    """The plain tensor that all ranks hold, or an error that says which differ."""
    return x.agreed() if type(x) is LocalTensor else x


def held_like(x: Any, roster: Roster | None) -> Any:
    """The same values, with a part for each part of `roster`."""
    return x.held_like(roster) if type(x) is LocalTensor and roster is not None else x


def copy_per_rank(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A plain tensor as a copy of its own for each rank that `like` has a value for."""
    roster = roster_of(like)
    if roster is None:
        return x.clone()
    copies = [x.clone() for _ in roster.ranks]
    return from_ranks(roster.world, roster.ranks, copies, sized=True)


def sized(x: torch.Tensor) -> torch.Tensor:
    """`x` for use outside a DTensor, where its sizes are asked for and may differ by rank."""
    return LocalTensor(x._parts, x._roster, True) if type(x) is LocalTensor else x


def unsized(x: torch.Tensor) -> torch.Tensor:
    """`x` as a DTensor holds it: sizes come from the layout."""
    return sized_copy(x, False) if type(x) is LocalTensor and x._sized else x
