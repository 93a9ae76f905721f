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


def flattened(local: torch.Tensor, layout: Layout) -> tuple[list[str], FlatContext]:
    """The names under which `part_named` gives the plain tensors of `local`, and all else."""
    roster = None
    names = ["_local"]
    if isinstance(local, LocalTensor):
        roster, num = local._roster, len(local._parts)
        names = [f"_part{number}of{num}" for number in range(num)]
    return names, FlatContext(layout.grid, layout.placements, layout.order, layout.dtype, roster)


def part_named(local: torch.Tensor, name: str) -> torch.Tensor | None:
    """The part of a LocalTensor that goes by this name; see Note [Part names]."""
    if not name.startswith("_part") or not isinstance(local, LocalTensor):
        return None
    number, _, num = name[5:].partition("of")
    if not number.isdigit() or num != str(len(local._parts)):
        return None
    return local._parts[int(number)]


@functools.cache
def source_digest() -> str:
    """A digest of this package's sources: compiled code of an older version must not be reused."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).resolve().parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
