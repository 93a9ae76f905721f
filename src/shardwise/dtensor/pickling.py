"""DTensors in pickles and in torch.distributed.checkpoint.

A pickle keeps the mesh by value, since its world may be gone. torch.distributed.checkpoint asks a
tensor for its chunks and for the memory of a chunk; in a simulated world the chunks of all ranks
are offered. It is imported when it asks: it brings torch's own DTensor along.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from shardwise.core.layout import Layout, make_layout, normalize
from shardwise.core.mesh import grid_like
from shardwise.core.placements import short
from shardwise.errors import LayoutError, UnsupportedError
from shardwise.simulation import pickling
from shardwise.simulation.ranks import rank_values


def packed(local: torch.Tensor, layout: Layout) -> tuple[Any, Any, Any]:
    return (
        pickling.packed(local),
        layout.grid.identity,
        (layout.placements, layout.order, layout.shape, layout.stride, layout.dtype),
    )


def unpacked(tensor: Any, mesh: Any, layout: Any) -> tuple[torch.Tensor, Layout]:
    """The tensor in the current world: all ranks' shards if it is simulated, else one.

    Raises unless the shards are those that the layout says.
    """
    pickling.check_world(tensor, both=True)
    grid = grid_like(*mesh)
    placements, order, shape, stride, dtype = layout
    if len(stride) != len(shape) or any(type(n) is not int or n < 0 for n in (*shape, *stride)):
        raise LayoutError(f"The file has a tensor of shape {shape} with strides {stride}.")
    placements = normalize(placements, shape, grid, order)
    found = make_layout(grid, placements, shape, stride, dtype, order)
    return checked_local(tensor, found), found


def checked_local(held: Any, layout: Layout) -> torch.Tensor:
    """The local tensors of a file; raises unless they are those of the layout."""
    grid = layout.grid
    if held[0] == "simulated":
        _, parts, ranks, index = held
        known = len(index) == len(ranks) and all(0 <= place < len(parts) for place in index)
        if not known or not set(grid.ranks) <= set(ranks):
            raise LayoutError(
                f"The file has {len(parts)} tensors of ranks {list(ranks)[:8]}, which are not "
                f"those of the mesh, {list(grid.ranks)[:8]}."
            )
    local = pickling.unpacked(held, grid)
    for coordinate, part in rank_values(grid, local):
        expected = layout.local_shape(coordinate)
        if grid.world.absent:  # the file does not say whose shard it is
            shapes = [layout.local_shape(each) for each in grid.places]
            expected = tuple(part.shape) if tuple(part.shape) in shapes else expected
        if (tuple(part.shape), part.dtype) != (expected, layout.dtype):
            raise LayoutError(
                f"The file contradicts itself: at {coordinate}, {layout} has {layout.dtype} of "
                f"shape {expected}, and the tensor that is there is {part.dtype} of shape "
                f"{tuple(part.shape)}."
            )
    return local


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
