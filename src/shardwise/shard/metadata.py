"""What is told of a sharded tensor: its pieces, and what they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from shardwise.errors import ArgumentError, LayoutError
from shardwise.shard.device import RankDevice
from shardwise.shard.spec import ShardMetadata


@dataclass(frozen=True, slots=True)
class Shard:
    """One piece of a tensor, and which piece it is."""

    tensor: torch.Tensor
    metadata: ShardMetadata

    def __post_init__(self) -> None:
        if not isinstance(self.metadata, ShardMetadata):
            raise ArgumentError(f"A shard's metadata is a ShardMetadata, found {self.metadata!r}.")
        if tuple(self.tensor.shape) != self.metadata.shard_sizes:
            raise LayoutError(
                f"The tensor of a shard has shape {tuple(self.tensor.shape)}, its metadata says "
                f"{self.metadata.shard_sizes}."
            )

    @staticmethod
    def from_tensor_and_offsets(
        tensor: torch.Tensor, shard_offsets: Sequence[int], rank: int
    ) -> Shard:
        """The piece of `rank` that starts at `shard_offsets`.

        >>> Shard.from_tensor_and_offsets(torch.ones(2), [4], rank=1).metadata
        ShardMetadata(shard_offsets=(4,), shard_sizes=(2,), placement=rank:1/cpu)
        """
        place = RankDevice(rank, tensor.device)
        return Shard(tensor, ShardMetadata(shard_offsets, tuple(tensor.shape), place))


@dataclass(frozen=True, slots=True)
class TensorProperties:
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    memory_format: torch.memory_format = torch.contiguous_format
    pin_memory: bool = False

    @staticmethod
    def create_from_tensor(tensor: torch.Tensor) -> TensorProperties:
        """What a whole tensor is made of.

        >>> TensorProperties.create_from_tensor(torch.ones(2, dtype=torch.int32)).dtype
        torch.int32
        """
        return TensorProperties(tensor.dtype, tensor.layout, tensor.requires_grad)


@dataclass(frozen=True, slots=True)
class ShardedTensorMetadata:
    """All pieces of a tensor, on all ranks, in the order of its spec."""

    shards_metadata: Sequence[ShardMetadata] = ()
    size: torch.Size = field(default_factory=torch.Size)
    tensor_properties: TensorProperties = field(default_factory=TensorProperties)
