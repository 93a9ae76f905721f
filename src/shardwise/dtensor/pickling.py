"""DTensors in pickles and in torch.distributed.checkpoint.

A pickle keeps the mesh by value, since its world may be gone. torch.distributed.checkpoint asks a
tensor for its chunks and for the memory of a chunk; in a simulated world the chunks of all ranks
are offered. It is imported when it asks: it brings torch's own DTensor along.
"""

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
    """The tensor in the current world: all ranks' shards if it is simulated, else one."""
    pickling.check_world(tensor, both=True)
    grid = grid_like(*mesh)
    placements, order, global_shape, stride, dtype = layout
    found = make_layout(grid, placements, global_shape, stride, dtype, order)
    return pickling.unpacked(tensor, grid), found


Chunk = tuple[tuple[int, ...], torch.Tensor]


def local_chunks(local: torch.Tensor, layout: Layout) -> list[Chunk]:
    """The offset and the memory of each chunk on the ranks present, without repeats."""
    if any(p.is_partial() for p in layout.placements):
        raise UnsupportedError(
            f"A tensor that is {short(layout.placements)} has terms, not chunks: redistribute() it "
            "to Shard or Replicate before saving or loading."
        )
    chunks: dict[tuple[int, ...], torch.Tensor] = {}
    for coordinate, part in rank_values(layout.grid, local):
        # Chunks are identified by offset; an empty one has the offset of another.
        if part.numel() or not math.prod(layout.shape):
            chunks.setdefault(layout.box(coordinate)[0], part)
    return list(chunks.items())


def write_items(name: str, local: torch.Tensor, layout: Layout) -> list[Any]:
    """The write items of a tensor for torch.distributed.checkpoint."""
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
    """The metadata of the local chunks for torch.distributed.checkpoint."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(offsets=torch.Size(offset), sizes=part.shape)
        for offset, part in local_chunks(local, layout)
    ]


def chunk_memory(local: torch.Tensor, layout: Layout, index: Any) -> torch.Tensor:
    """The memory of the chunk that `index` names."""
    chunks = local_chunks(local, layout)
    if index.offset is None and len(chunks) == 1:
        return chunks[0][1]
    for offset, part in chunks:
        if index.offset is not None and tuple(index.offset) == offset:
            return part
    raise UnsupportedError(f"No rank here holds a chunk of {index.fqn} at {index.offset}.")
