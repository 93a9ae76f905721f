"""How torch.compile takes a row-sparse gradient apart: row numbers, values, and how they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core.layout import Layout
from shardwise.dtensor.flat import FlatContext, context_of, part_names
from shardwise.simulation.parts import from_parts, roster_of
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
        parts = list(inner.values())
        num = 1 if self.roster is None else self.roster.num_parts
        return from_parts(parts[:num], self.roster), from_parts(parts[num:], self.values.roster)


def flattened_rows(
    cls: Any, layout: Layout, rows: torch.Tensor, values: torch.Tensor, coalesced: bool
) -> tuple[list[str], RowContext]:
    """The names of attributes of a RowSparse that hold its plain tensors, and all else."""
    held, roster = roster_of(values), roster_of(rows)
    names = ["_rows", "_local"]
    if held is not None and roster is not None:
        names = part_names(roster.num_parts, cls, "_rows", "_rows")
        names = names + part_names(held.num_parts, cls)
    return names, RowContext(context_of(layout, held), roster, coalesced)
