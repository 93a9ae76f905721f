"""What a lookup wants: the table with its options, and the bags that a rank brings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core.mesh import Grid
from shardwise.shard.lookup import bags
from shardwise.shard.tensor import ShardedTensor
from shardwise.shard.tiling import Blocks


@dataclass(frozen=True, slots=True)
class Lookup:
    """A table and what is asked of it, checked."""

    what: str
    weight: ShardedTensor
    blocks: Blocks
    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    #: Whether gradients are divided by how often a rank's batch names their row.
    by_frequency: bool
    #: Whether the table's gradient holds only the rows that were looked up.
    sparse: bool

    @property
    def grid(self) -> Grid:
        return self.weight._tiling.grid

    @property
    def num_rows(self) -> int:
        return self.weight._tiling.shape[0]

    def check_range(self, lows: Sequence[int], highs: Sequence[int]) -> None:
        """Raise where the ids of a rank, from low to high, leave the table; the same on all."""
        for rank, low, high in zip(self.grid.ranks, lows, highs, strict=True):
            if low < 0 or high >= self.num_rows:
                raise IndexError(
                    f"{self.what}: index out of range in a table of {self.num_rows} rows: the ids "
                    f"of rank {rank} run from {low} to {high}."
                )

    def options(self) -> dict[str, Any]:
        """What torch's functions call the options of a lookup, as constants."""
        return {
            "padding_idx": None if self.padding_idx is None else int(self.padding_idx),
            "max_norm": None if self.max_norm is None else float(self.max_norm),
            "norm_type": float(self.norm_type),
            "scale_grad_by_freq": self.by_frequency,
            "sparse": bool(self.sparse),
        }


@dataclass(frozen=True, slots=True)
class OwnBags:
    """One rank's bags in one form: a row of ids and a length per bag; both empty with a fault."""

    ids: torch.Tensor
    lengths: torch.Tensor
    fault: str | None


@dataclass(frozen=True, slots=True)
class BagBatch:
    """Bags in any form that `F.embedding_bag` takes, of all ranks present."""

    ids: torch.Tensor
    offsets: torch.Tensor | None
    weights: torch.Tensor | None
    include_last_offset: bool
    mode: str

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What differs between ranks; `of_rank` takes one rank's."""
        return [x for x in (self.ids, self.offsets, self.weights) if x is not None]

    def of_rank(self, mine: Sequence[torch.Tensor]) -> OwnBags:
        left = iter(mine)
        ids = next(left)
        offsets = None if self.offsets is None else next(left)
        weights = None if self.weights is None else next(left)
        fault = bags.fault_of(ids, offsets, weights, self.include_last_offset)
        if fault is not None:
            nothing = torch.empty(0, dtype=torch.int64, device=ids.device)
            return OwnBags(nothing, nothing, fault)
        lengths = bags.lengths_of(ids, offsets, self.include_last_offset)
        return OwnBags(ids.reshape(-1).long(), lengths, None)
