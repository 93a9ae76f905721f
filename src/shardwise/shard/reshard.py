"""Moving the pieces of a tensor from one tiling to another, straight from owner to owner."""

from __future__ import annotations

import functools
from typing import Any

import torch

from shardwise.comm.watch import because
from shardwise.core.box import Box
from shardwise.core.world import world_caches
from shardwise.shard.all_to_all import exchanged
from shardwise.shard.tiling import Tiling
from shardwise.simulation.ranks import each_rank

#: The number of the source's piece, that of the target's, and the box that they share.
Meeting = tuple[int, int, Box]


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
                    if (common := box.box.intersect(wanted.box)) is not None:
                        shared.append((a, b, common))
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
            for a, _, box in pairs.get((rank, receiver), ()):
                parts.append(pieces[a][box.within(boxes[a].box).slices].reshape(-1))
        return torch.cat(parts).view(torch.uint8)

    def unpack(place: Any, arrived: torch.Tensor) -> torch.Tensor:
        rank = grid.ranks[place[0]]
        values = arrived.view(dtype)
        new = target.held(rank, dtype, arrived.device)
        pieces, boxes, at = target.pieces(rank, new), target.on_rank(rank), 0
        for sender in grid.ranks:
            for _, b, box in pairs.get((sender, rank), ()):
                place_in = pieces[b][box.within(boxes[b].box).slices]
                place_in.copy_(values[at : at + box.volume].view(box.sizes))
                at += box.volume
        return new

    counts = [
        [sum(box.volume for *_, box in pairs.get((i, j), ())) for j in grid.ranks]
        for i in grid.ranks
    ]
    with because(what, implicit=False):
        packed = each_rank(grid, pack, held)
        arrived = exchanged(packed, [[n * dtype.itemsize for n in row] for row in counts], grid)
    return each_rank(grid, unpack, arrived)
