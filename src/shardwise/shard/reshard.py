"""Moving the pieces of a tensor from one tiling to another, straight from owner to owner."""

from __future__ import annotations

import functools
from typing import Any

import torch

from shardwise.comm.watch import because
from shardwise.core.world import world_caches
from shardwise.shard.all_to_all import exchanged
from shardwise.shard.spec import Shape, overlap
from shardwise.shard.tiling import Tiling, box_of
from shardwise.simulation.ranks import each_rank

#: The number of the source's piece, that of the target's, and the box that they share.
Meeting = tuple[int, int, Shape, Shape]


@functools.lru_cache(maxsize=512)
def meetings(source: Tiling, target: Tiling) -> dict[tuple[int, int], list[Meeting]]:
    """For each pair of ranks, what the first has that the second wants, in one fixed order."""
    found: dict[tuple[int, int], list[Meeting]] = {}
    ranks = source.grid.ranks
    boxes = {rank: (source.on_rank(rank), target.on_rank(rank)) for rank in ranks}
    for sender in ranks:
        for receiver in ranks:
            shared = []
            for a, box in enumerate(boxes[sender][0]):
                for b, wanted in enumerate(boxes[receiver][1]):
                    if (common := overlap(box, wanted)) is not None:
                        shared.append((a, b, *common))
            if shared:
                found[sender, receiver] = shared
    return found


world_caches.append(meetings.cache_clear)


def move_pieces(held: torch.Tensor, source: Tiling, target: Tiling, what: str) -> torch.Tensor:
    """What each rank holds of `target`, out of what each holds of `source`: one all-to-all.

    Bytes are sent, so any dtype will do.
    """
    grid, dtype = source.grid, held.dtype
    pairs = meetings(source, target)

    def pack(place: Any, mine: torch.Tensor) -> torch.Tensor:
        rank = grid.ranks[place[0]]
        pieces, boxes = source.pieces(rank, mine), source.on_rank(rank)
        parts = [mine.new_empty(0)]
        for receiver in grid.ranks:
            for a, _, offsets, sizes in pairs.get((rank, receiver), ()):
                at = _within(offsets, boxes[a].shard_offsets)
                parts.append(box_of(pieces[a], at, sizes).reshape(-1))
        return torch.cat(parts).view(torch.uint8)

    def unpack(place: Any, arrived: torch.Tensor) -> torch.Tensor:
        rank = grid.ranks[place[0]]
        values = arrived.view(dtype)
        new = target.held(rank, dtype, arrived.device)
        pieces, boxes, at = target.pieces(rank, new), target.on_rank(rank), 0
        for sender in grid.ranks:
            for _, b, offsets, sizes in pairs.get((sender, rank), ()):
                place_in = box_of(pieces[b], _within(offsets, boxes[b].shard_offsets), sizes)
                place_in.copy_(values[at : at + place_in.numel()].view(sizes))
                at += place_in.numel()
        return new

    counts = [[_num_values(pairs.get((i, j), ())) for j in grid.ranks] for i in grid.ranks]
    with because(what, implicit=False):
        packed = each_rank(grid, pack, held)
        arrived = exchanged(packed, [[n * dtype.itemsize for n in row] for row in counts], grid)
    return each_rank(grid, unpack, arrived)


def _within(offsets: Shape, start: Any) -> Shape:
    return tuple(o - s for o, s in zip(offsets, start, strict=True))


def _num_values(shared: Any) -> int:
    total = 0
    for *_, sizes in shared:
        count = 1
        for size in sizes:
            count *= size
        total += count
    return total
