"""What torch.compile is told of a DTensor besides its local tensor."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.core.grid import Grid
from shardwise.core.layout import Layout, make_layout
from shardwise.core.placements import Placement


@dataclass(frozen=True, slots=True)
class FlatContext:
    """What a compiled graph knows of a DTensor besides its local tensor: all but the sizes.

    Sizes come separately, so that a new batch size does not mean a new graph.
    """

    grid: Grid
    placements: tuple[Placement, ...]
    order: tuple[int, ...]
    dtype: torch.dtype

    def layout(self, shape: Any, stride: Any) -> Layout:
        return make_layout(self.grid, self.placements, shape, stride, self.dtype, self.order)


@functools.cache
def source_digest() -> str:
    """A digest of this package's sources: compiled code of an older version must not be reused."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).resolve().parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
