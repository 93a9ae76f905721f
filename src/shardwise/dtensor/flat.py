"""How torch.compile takes a DTensor apart: plain tensors, and a value that says what they are.

Note [Part names]
In a simulated world a DTensor is taken apart down to the parts of its LocalTensor, which halves the
sizes that the compiler has to track. The names of the parts carry their number, `_part0of2`: torch
describes a parameter and its `.grad` by one set of names when the names of one are all among those
of the other, but a gradient that is Partial has more parts than a replicated parameter.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.core.chunks import splits_evenly, surely_equal
from shardwise.core.grid import Coordinate, Grid
from shardwise.core.layout import Layout, make_layout
from shardwise.core.placements import Placement, Shard
from shardwise.core.sources import source_digest
from shardwise.core.world import world_caches
from shardwise.simulation.parts import from_parts, parts_of, roster_of
from shardwise.simulation.ranks import rank_values
from shardwise.simulation.roster import Roster

#: How many layouts a context remembers.
_MAX_KNOWN = 64


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class FlatContext:
    """What a compiled graph knows of a DTensor besides its tensors: all but the sizes.

    Sizes come separately, so that a new batch size does not mean a new graph. Equal ones are one
    object: guards compare two of these for each input of each call, and identity needs no Python.
    """

    grid: Grid
    placements: tuple[Placement, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    #: Which rank holds which part; None in a real process.
    roster: Roster | None
    #: Layouts by shape and stride: every run of compiled code asks for those of its outputs.
    known: dict[Any, Layout] = field(default_factory=dict, repr=False)

    def __deepcopy__(self, memo: Any) -> FlatContext:
        return self  # one object per value

    def __reduce__(self) -> Any:
        return make_context, (self.grid, self.placements, self.order, self.dtype, self.roster)

    def layout(self, shape: Any, stride: Any) -> Layout:
        try:
            found = self.known.get((shape, stride))
        except TypeError:  # a symbolic int has no hash
            return self._made(shape, stride)
        if found is None:
            if len(self.known) >= _MAX_KNOWN:
                self.known.clear()
            found = self.known[shape, stride] = self._made(shape, stride)
        return found

    def _made(self, shape: Any, stride: Any) -> Layout:
        return make_layout(self.grid, self.placements, shape, stride, self.dtype, self.order)

    def restored(
        self, inner: dict[str, torch.Tensor], shape: Any, stride: Any
    ) -> tuple[torch.Tensor, Layout]:
        """The local tensor out of its parts, and its layout."""
        local = from_parts(tuple(inner.values()), self.roster)
        layout = self.layout(shape, stride)
        if layout.symbolic and _ties_sizes(local, layout):
            layout = self.layout(shape, stride)
        return local, layout


_interned: weakref.WeakValueDictionary[Any, FlatContext] = weakref.WeakValueDictionary()


def make_context(
    grid: Grid,
    placements: tuple[Placement, ...],
    order: tuple[int, ...],
    dtype: torch.dtype,
    roster: Roster | None,
) -> FlatContext:
    """The one context with these values."""
    key = (grid, placements, order, dtype, roster)
    try:
        found = _interned.get(key)
    except TypeError:  # a placement that remembers a symbolic size has no hash
        return FlatContext(*key)
    return _interned.setdefault(key, FlatContext(*key)) if found is None else found


def _ties_sizes(local: torch.Tensor, layout: Layout) -> bool:
    """Tell the compiler what pieces of known size say about a symbolic whole; whether they did.

    A piece of size 0 or 1 has no symbol, and explicit sizes are numbers. What follows for the whole
    must be known before the first op: torch loses the size of an output that turns out to be
    constant later on.
    """
    tied = False
    for placement in layout.placements:
        if isinstance(placement, Shard) and placement.sizes is not None:
            size = layout.shape[placement.dim]
            tied = (type(size) is not int and bool(size == sum(placement.sizes))) or tied
    values = rank_values(layout.grid, local)
    for dim in range(layout.ndim):
        pieces = [part.shape[dim] for _, part in values]
        tied = _ties_dim(layout, dim, [coordinate for coordinate, _ in values], pieces) or tied
    return tied


def _ties_dim(
    layout: Layout, dim: int, coordinates: Sequence[Coordinate], pieces: Sequence[Any]
) -> bool:
    """Where one symbol stands for the pieces of all ranks, the whole is a multiple of it.

    Otherwise all that follows would be computed with both, and compared. Where pieces have symbols
    of their own, a graph may serve sizes that divide and sizes that do not.
    """
    size, first = layout.shape[dim], pieces[0]
    num_pieces = math.prod(layout.grid.shape[axis] for axis in layout.axes_of(dim))
    # A process knows its own piece only.
    alike = len(pieces) > 1 or (type(first) is int and splits_evenly(size, num_pieces))
    alike = alike and all(surely_equal(first, other) for other in pieces)
    if type(size) is not int and num_pieces > 1 and alike:
        return bool(size == num_pieces * first)
    tied = False
    for coordinate, found in zip(coordinates, pieces, strict=True):
        if (type(size) is int) != (type(found) is int):
            tied = bool(layout.local_shape(coordinate)[dim] == found) or tied
    return tied


#: The names of the tensors of a DTensor in a real process.
LOCAL = ["_local"]
#: What a DTensor in a real process is taken apart into, by layout: names and context. Emptied when
#: full, and with the world.
plain_parts: dict[Layout, tuple[list[str], FlatContext]] = {}


def flattened(x: Any) -> tuple[list[str], FlatContext]:
    """The names of attributes of a DTensor that hold its plain tensors, and all else."""
    local, layout = x._local, x._layout
    roster = roster_of(local)
    if roster is None:
        return plain_parts.get(layout) or _plain(layout)
    cls: Any = type(x)
    return part_names(roster.num_parts, cls), context_of(layout, roster)


def _plain(layout: Layout) -> tuple[list[str], FlatContext]:
    parts = LOCAL, _context(layout, None)
    if not layout.symbolic:
        if len(plain_parts) >= _MAX_CONTEXTS:
            plain_parts.clear()
        plain_parts[layout] = parts
    return parts


def context_of(layout: Layout, roster: Roster | None) -> FlatContext:
    return (_context if layout.symbolic else _cached_context)(layout, roster)


def _context(layout: Layout, roster: Roster | None) -> FlatContext:
    return make_context(layout.grid, layout.placements, layout.order, layout.dtype, roster)


_MAX_CONTEXTS = 4096
_cached_context = functools.lru_cache(maxsize=_MAX_CONTEXTS)(_context)
world_caches += [_cached_context.cache_clear, plain_parts.clear]


@functools.cache
def part_names(num_parts: int, cls: Any, held: str = "_local", prefix: str = "_part") -> list[str]:
    """See Note [Part names]. Each is a property of `cls` from now on, of the parts of `held`.

    A `__getattr__` would do, but torch.compile does not read other attributes of such a class.
    """
    names = [f"{prefix}{number}of{num_parts}" for number in range(num_parts)]
    for number, name in enumerate(names):
        setattr(cls, name, _part(number, held))
    return names


def _part(number: int, held: str) -> property:
    def read(x: Any) -> torch.Tensor:
        return parts_of(getattr(x, held))[number]

    def write(x: Any, part: torch.Tensor) -> None:
        """torch puts a copy in place of a gradient's part that lies otherwise than it expected."""
        local = getattr(x, held)
        parts = list(parts_of(local))
        parts[number] = part
        setattr(x, held, from_parts(parts, roster_of(local)))

    return property(read, write)


def stable_hash(local: Any, layout: Layout, requires_grad: bool) -> str:
    """What torch's compile caches need to know of a DTensor, and of the code behind it."""
    roster = roster_of(local)
    return repr(
        (
            [str(s) for s in layout.shape],
            [str(s) for s in layout.stride],
            layout.dtype,
            layout.placements,
            layout.order,
            layout.grid.shape,
            layout.grid.ranks,
            layout.grid.world.rank,
            requires_grad,
            [tuple(map(str, part.shape)) for part in parts_of(local)],
            (roster.ranks, roster.index) if roster else None,
            source_digest(),
        )
    )
