"""How torch.compile takes a row-sparse gradient apart: row numbers, values, and how they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core.layout import Layout
from shardwise.dtensor.flat import FlatContext, context_of, part_names
from shardwise.simulation.local_tensor import LocalTensor
from shardwise.simulation.roster import Roster


@dataclass(frozen=True, slots=True)
class RowContext:
    """What a compiled graph knows of a RowSparse besides its tensors: all but the sizes."""

    #: Of the values.
    values: FlatContext
    #: Which rank holds which row numbers; None in a real process.
    roster: Roster | None
    coalesced: bool

    def restored(self, inner: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The row numbers and values out of their parts."""
        parts, held = list(inner.values()), self.values.roster
        if self.roster is None or held is None:
            return parts[0], parts[1]
        num = self.roster.num_parts
        return LocalTensor(parts[:num], self.roster), LocalTensor(parts[num:], held)


def flattened_rows(
    cls: Any, layout: Layout, rows: torch.Tensor, values: torch.Tensor, coalesced: bool
) -> tuple[list[str], RowContext]:
    """The names of attributes of a RowSparse that hold its plain tensors, and all else."""
    if not isinstance(values, LocalTensor):
        return ["_rows", "_local"], RowContext(context_of(layout, None), None, coalesced)
    assert isinstance(rows, LocalTensor), "rows and values are of one world"
    names = part_names(len(rows._parts), cls, "_rows", "_rows")
    names = names + part_names(len(values._parts), cls)
    return names, RowContext(context_of(layout, values._roster), rows._roster, coalesced)
