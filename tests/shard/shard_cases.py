"""Specs and batches that several tests of sharded tensors share."""

import torch

from shardwise import LocalTensor
from shardwise.shard import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata


def chunks(dim, *ranks):
    return ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in ranks])


def stretches(dim, shape, sizes):
    """One block per rank, in the order of ranks, of these lengths."""
    boxes, at = [], 0
    for rank, length in enumerate(sizes):
        offsets, box = [0] * len(shape), list(shape)
        offsets[dim], box[dim] = at, length
        boxes.append(ShardMetadata(offsets, box, f"rank:{rank}/cpu"))
        at += length
    return EnumerableShardingSpec(boxes)


def tiles(shape):
    """Two by two tiles, uneven, on ranks that do not follow their order."""
    (rows, columns), boxes = shape, []
    for number, (top, height) in enumerate([(0, 2), (2, rows - 2)]):
        for left, width in [(0, columns - 1), (columns - 1, 1)]:
            rank = [3, 0, 2, 0][2 * number + (left > 0)]
            boxes.append(ShardMetadata([top, left], [height, width], f"rank:{rank}/cpu"))
    return EnumerableShardingSpec(boxes)


#: Ways to cut a table of 11 by 6: even or not, in any order, on few ranks and several times.
TABLE_SPECS = {
    "rows": chunks(0, 0, 1, 2, 3),
    "rows permuted": chunks(0, 2, 0, 3, 1),
    "rows on two ranks": chunks(0, 3, 1),
    "rows twice a rank": chunks(0, 0, 0, 1, 1, 2, 2, 3, 3),
    "rows by size": stretches(0, (11, 6), (0, 9, 0, 2)),
    "columns": chunks(1, 0, 1, 2, 3),
    "columns permuted": chunks(-1, 3, 2, 1, 0),
    "columns by size": stretches(1, (11, 6), (1, 0, 4, 1)),
    "one rank": chunks(0, 2),
}


def per_rank(fn):
    """`fn(rank, generator)` on each rank of a simulated world of four."""
    return LocalTensor.per_rank(lambda rank: fn(rank, torch.Generator().manual_seed(100 + rank)))
