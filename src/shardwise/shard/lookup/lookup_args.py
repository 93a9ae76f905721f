"""The arguments of a lookup: the table with its options, and the ranks' bags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core.mesh import Grid
from shardwise.errors import UnsupportedError
from shardwise.shard.lookup import bags
from shardwise.shard.tensor import ShardedTensor
from shardwise.shard.tiling import DimSplit


def split_of(weight: ShardedTensor, what: str) -> DimSplit:
    """How a weight is split; raises where a local batch cannot use it."""
    tiling = weight._tiling
    if tiling.split is None or len(tiling.shape) != 2:
        raise UnsupportedError(
            f"{what} needs a weight of two dims, split along one of them with one shard per rank; "
            f"found shape {tiling.shape} and {tiling.spec}. Use reshard(spec) first."
        )
    return tiling.split


@dataclass(frozen=True, slots=True)
class Lookup:
    """A table and the options of a lookup, checked."""

    what: str
    weight: ShardedTensor
    split: DimSplit
    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    #: Whether a row's gradient is divided by its frequency in the rank's batch.
    by_frequency: bool
    #: Whether the table's gradient holds only the rows that were looked up.
    sparse: bool

    @property
    def grid(self) -> Grid:
        return self.weight._tiling.grid

    @property
    def num_rows(self) -> int:
        return self.weight._tiling.shape[0]

    def options(self) -> dict[str, Any]:
        """The options under the names of torch's functions, as constants."""
        return {
            "padding_idx": None if self.padding_idx is None else int(self.padding_idx),
            "max_norm": None if self.max_norm is None else float(self.max_norm),
            "norm_type": float(self.norm_type),
            "scale_grad_by_freq": self.by_frequency,
            "sparse": bool(self.sparse),
        }


@dataclass(frozen=True, slots=True)
class LocalBags:
    """One rank's bags as flat ids and a length per bag; both empty where there is a fault."""

    ids: torch.Tensor
    lengths: torch.Tensor
    fault: str | None


@dataclass(frozen=True, slots=True)
class BagBatch:
    """The bags of all ranks present, in any form that `F.embedding_bag` takes."""

    ids: torch.Tensor
    offsets: torch.Tensor | None
    weights: torch.Tensor | None
    include_last_offset: bool
    mode: str

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that differ between ranks; `of_rank` takes one rank's."""
        return [x for x in (self.ids, self.offsets, self.weights) if x is not None]

    def of_rank(self, mine: Sequence[torch.Tensor]) -> LocalBags:
        left = iter(mine)
        ids = next(left)
        offsets = None if self.offsets is None else next(left)
        weights = None if self.weights is None else next(left)
        fault = bags.batch_fault(ids, offsets, weights, self.include_last_offset)
        if fault is not None:
            nothing = torch.empty(0, dtype=torch.int64, device=ids.device)
            return LocalBags(nothing, nothing, fault)
        lengths = bags.lengths_of(ids, offsets, self.include_last_offset)
        return LocalBags(ids.reshape(-1).long(), lengths, None)
