"""RowState: one number per row of a table whose columns lie on some of the ranks.

Each of those ranks has the numbers of all rows, and all have the same. No layout of a DTensor says
that, so checkpoints see the pieces themselves: the whole, on each rank that has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowState:
    """The state of a table, one number per row; see Note [Pieces] in `checkpoint.pieces`."""

    shape: tuple[int, int]
    dtype: torch.dtype
    #: The ranks present that hold columns, and their memory.
    holders: Sequence[tuple[int, torch.Tensor]]

    def __checkpoint_pieces__(self) -> list[tuple[int, tuple[int, int], torch.Tensor]]:
        return [(rank, (0, 0), numbers) for rank, numbers in self.holders]
