"""What a pickled DTensor consists of: worlds come and go, so a mesh is kept by value."""

from __future__ import annotations

import math
from typing import Any

import torch

from shardwise.core.layout import Layout, make_layout
from shardwise.core.mesh import grid_like
from shardwise.core.placements import short
from shardwise.errors import UnsupportedError
from shardwise.simulation import pickling
from shardwise.simulation.ranks import rank_values


def packed(local: torch.Tensor, layout: Layout) -> tuple[Any, Any, Any]:
    grid = layout.grid
    mesh = (grid.device_type, grid.shape, grid.ranks, grid.axis_names)
    return (
        pickling.packed(local),
        mesh,
        (layout.placements, layout.order, layout.shape, layout.stride, layout.dtype),
    )


def unpacked(tensor: Any, mesh: Any, layout: Any) -> tuple[torch.Tensor, Layout]:
    """The tensor in the world of now. What was played has every rank's part; a process only one."""
    pickling.check_world(tensor, both=True)
    grid = grid_like(*mesh)
    placements, order, global_shape, stride, dtype = layout
    found = make_layout(grid, placements, global_shape, stride, dtype, order)
    return pickling.unpacked(tensor, grid), found


# DTensors in checkpoints of torch.distributed.checkpoint.
#
# That package asks a tensor for the chunks that it holds and for the memory of a chunk. It is
# imported when it asks, never before: importing it brings torch's own DTensor along. In a
# simulated world the chunks of all ranks are offered.

Chunk = tuple[tuple[int, ...], torch.Tensor]


def held_chunks(local: torch.Tensor, layout: Layout) -> list[Chunk]:
    """The offset and the memory of each block on the ranks present, every block once."""
    if any(p.is_partial() for p in layout.placements):
        raise UnsupportedError(
            f"A tensor that is {short(layout.placements)} has terms, not chunks: redistribute() it "
            "to Shard or Replicate before it is saved or loaded."
        )
    chunks: dict[tuple[int, ...], torch.Tensor] = {}
    for coordinate, part in rank_values(layout.grid, local):
        # A block is known by its offset, and one without elements begins where another does.
        if part.numel() or not math.prod(layout.shape):
            chunks.setdefault(layout.box(coordinate)[0], part)
    return list(chunks.items())


def write_items(name: str, local: torch.Tensor, layout: Layout) -> list[Any]:
    """What torch.distributed.checkpoint is to write of a tensor."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties(dtype=layout.dtype)
    size = torch.Size(layout.shape)
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
        )
        for chunk in chunk_list(local, layout)
    ]


def chunk_list(local: torch.Tensor, layout: Layout) -> list[Any]:
    """The blocks that are here, as torch.distributed.checkpoint describes them."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(offsets=torch.Size(offset), sizes=part.shape)
        for offset, part in held_chunks(local, layout)
    ]


def chunk_memory(local: torch.Tensor, layout: Layout, index: Any) -> torch.Tensor:
    """The memory of the block that `index` names."""
    chunks = held_chunks(local, layout)
    if index.offset is None and len(chunks) == 1:
        return chunks[0][1]
    for offset, part in chunks:
        if index.offset is not None and tuple(index.offset) == offset:
            return part
    raise UnsupportedError(f"No rank here has a block of {index.fqn} at {index.offset}.")
