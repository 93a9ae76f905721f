"""How torch.compile takes a DTensor apart: plain tensors, and a value that says what they are.

Note [Part names]
In a simulated world a DTensor is taken apart down to the parts of its LocalTensor, which halves the
sizes that the compiler has to track. The names of the parts carry their number, `_part0of2`: torch
describes a parameter and its `.grad` by one set of names when the names of one are all among those
of the other, but a gradient that is Partial has more parts than a replicated parameter.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.comm.local_tensor import LocalTensor
from shardwise.comm.ranks import rank_values
from shardwise.comm.roster import Roster
from shardwise.core.grid import Grid
from shardwise.core.layout import Layout, make_layout
from shardwise.core.placements import Placement
from shardwise.core.world import world_caches


@dataclass(frozen=True, slots=True)
class FlatContext:
    """What a compiled graph knows of a DTensor besides its tensors: all but the sizes.

    Sizes come separately, so that a new batch size does not mean a new graph.
    """

    grid: Grid
    placements: tuple[Placement, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    #: Which rank holds which part; None in a real process.
    roster: Roster | None

    def layout(self, shape: Any, stride: Any) -> Layout:
        return make_layout(self.grid, self.placements, shape, stride, self.dtype, self.order)

    def restored(
        self, inner: dict[str, torch.Tensor], shape: Any, stride: Any
    ) -> tuple[torch.Tensor, Layout]:
        """The local tensor out of its parts, and its layout."""
        parts = tuple(inner.values())
        local = parts[0] if self.roster is None else LocalTensor(parts, self.roster)
        layout = self.layout(shape, stride)
        if layout.symbolic and _ties_sizes(local, layout):
            layout = self.layout(shape, stride)
        return local, layout


def _ties_sizes(local: torch.Tensor, layout: Layout) -> bool:
    """Tell the compiler what pieces of known size say about a symbolic whole; whether they did.

    A piece of size 0 or 1 has no symbol. What follows for the whole must be known before the first
    op: torch loses the size of an output that turns out to be constant later on.
    """
    tied = False
    for coordinate, part in rank_values(layout.grid, local):
        for expected, found in zip(layout.local_shape(coordinate), part.shape, strict=True):
            if type(expected) is not int and type(found) is int:
                tied = bool(expected == found) or tied
    return tied


def flattened(x: Any) -> tuple[list[str], FlatContext]:
    """The names of attributes of a DTensor that hold its plain tensors, and all else."""
    local, layout = x._local, x._layout
    names, roster = ["_local"], None
    if isinstance(local, LocalTensor):
        names, roster = _part_names(type(x), len(local._parts)), local._roster
    return names, (_context if layout.symbolic else _cached_context)(layout, roster)


def _context(layout: Layout, roster: Roster | None) -> FlatContext:
    return FlatContext(layout.grid, layout.placements, layout.order, layout.dtype, roster)


#: Every call of compiled code takes each of its DTensors apart, several times.
_cached_context = functools.lru_cache(maxsize=4096)(_context)
world_caches.append(_cached_context.cache_clear)


@functools.cache
def _part_names(cls: type, num_parts: int) -> list[str]:
    """See Note [Part names]. Each is a property of `cls` from now on.

    A `__getattr__` would do, but torch.compile does not read other attributes of such a class.
    """
    names = [f"_part{number}of{num_parts}" for number in range(num_parts)]
    for number, name in enumerate(names):
        setattr(cls, name, _part(number))
    return names


def _part(number: int) -> property:
    def read(x: Any) -> torch.Tensor:
        return x._local._parts[number]

    def write(x: Any, part: torch.Tensor) -> None:
        """torch puts a copy in place of a gradient's part that lies otherwise than it expected."""
        parts = list(x._local._parts)
        parts[number] = part
        x._local = LocalTensor(parts, x._local._roster)

    return property(read, write)


@functools.cache
def source_digest() -> str:
    """A digest of this package's sources: compiled code of an older version must not be reused."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).resolve().parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
