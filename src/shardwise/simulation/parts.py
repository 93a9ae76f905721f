"""The parts of a tensor on the ranks present, with one API for both worlds.

In a real process a tensor has one part: itself. In a simulated world a LocalTensor has a part for
each set of ranks that share a tensor, and a roster that says which rank has which. A plain tensor
is the same on every rank, and has no roster.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.simulation.local_tensor import LocalTensor, from_ranks, sized_copy
from shardwise.simulation.roster import Roster

__all__ = [
    "LENT",
    "agreed",
    "copy_per_rank",
    "count_write",
    "from_parts",
    "held_like",
    "holds_parts",
    "is_per_rank",
    "lent",
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
    """Whether `x` has a value for each of several ranks."""
    return type(x) is LocalTensor


def holds_parts(kind: type) -> bool:
    """`is_per_rank`, given the type of a tensor."""
    return kind is LocalTensor


def parts_of(x: Any) -> Sequence[torch.Tensor]:
    """The plain tensors of `x`."""
    return x._parts if type(x) is LocalTensor else (x,)


def one_part(x: Any) -> torch.Tensor:
    """One of them, to read what is the same in all."""
    return x._parts[0] if type(x) is LocalTensor else x


def roster_of(x: Any) -> Roster | None:
    """Which rank holds which part."""
    return x._roster if type(x) is LocalTensor else None


def from_parts(parts: Sequence[torch.Tensor], roster: Roster | None) -> torch.Tensor:
    """The tensor of these parts."""
    return parts[0] if roster is None else LocalTensor(parts, roster)


def per_rank(fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """`fn(x)` on every rank present; called once per part."""
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
    """A copy of `x` for each rank of `like`."""
    roster = roster_of(like)
    if roster is None:
        return x.clone()
    copies = [on_rank(x, rank).clone() for rank in roster.ranks]
    sized = x._sized if type(x) is LocalTensor else True
    return from_ranks(roster.world, roster.ranks, copies, sized)


def sized(x: torch.Tensor) -> torch.Tensor:
    """`x` for use outside a DTensor, where its sizes are read and may differ between ranks."""
    return LocalTensor(x._parts, x._roster, True) if type(x) is LocalTensor else x


#: The attribute of a local tensor of which something was lent: weak references to aliases that do
#: not share its version counter.
LENT = "_lent"


def lent(x: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """An alias of `x` outside autograd, for use outside a DTensor.

    `count_write(base)` counts on it: `base` is `x`, or what `x` is a view or a snapshot of.
    """
    alias = sized_copy(x, True)
    known = [ref for ref in base.__dict__.get(LENT, ()) if ref() is not None]
    base.__dict__[LENT] = [*known, weakref.ref(alias)]
    return alias


def count_write(x: torch.Tensor) -> None:
    """Count a write on `x`, its parts and what was `lent` of it, for autograd."""
    tensors = [*parts_of(x), *(ref() for ref in x.__dict__[LENT])]
    known = [t for t in tensors if type(t) in (torch.Tensor, LocalTensor) and not t.is_inference()]
    torch.autograd.graph.increment_version(known)


def unsized(x: torch.Tensor) -> torch.Tensor:
    """`x` as a DTensor holds it: sizes come from the layout."""
    return sized_copy(x, False) if type(x) is LocalTensor and x._sized else x
