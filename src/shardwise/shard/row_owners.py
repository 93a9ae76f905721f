"""Which rank holds which row of a table that is cut by rows."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch

from shardwise.core.world import world_caches
from shardwise.shard.tiling import Tiling


@dataclass(frozen=True, slots=True)
class RowOwners:
    """Rows, numbered anew where blocks do not follow the order of ranks.

    By their numbers, rank 0 of the group has the first rows, rank 1 the next, and so on.
    """

    #: The first number of each rank, and one past the last.
    bounds: tuple[int, ...]
    #: One past the last row of each block in the order of rows, and what to add to its rows. Empty
    #: where the numbers of rows are the rows.
    ends: tuple[int, ...] = ()
    shifts: tuple[int, ...] = ()

    def numbered(self, rows: torch.Tensor) -> torch.Tensor:
        if not self.shifts:
            return rows
        block = torch.bucketize(rows, rows.new_tensor(self.ends), right=True)
        return rows + rows.new_tensor(self.shifts)[block]

    def owners(self, numbers: torch.Tensor) -> torch.Tensor:
        """The place in the group of the rank that holds each row."""
        return torch.bucketize(numbers, numbers.new_tensor(self.bounds[1:]), right=True)


def wire_dtype(num_rows: int) -> torch.dtype:
    """What the numbers of rows are sent as."""
    return torch.int32 if num_rows < 2**31 else torch.int64


@functools.lru_cache(maxsize=512)
def row_owners(tiling: Tiling) -> RowOwners:
    assert tiling.blocks is not None, "a table that is looked up has one block per rank"
    stretches = [tiling.blocks.stretches[rank] for rank in tiling.grid.ranks]
    bounds = (0, *itertools.accumulate(length for _, length in stretches))
    if tiling.natural:
        return RowOwners(bounds)
    by_row = sorted(
        (start + length, bound - start)
        for (start, length), bound in zip(stretches, bounds, strict=False)
        if length
    )
    ends, shifts = zip(*by_row, strict=True)
    return RowOwners(bounds, ends, shifts)


world_caches.append(row_owners.cache_clear)
