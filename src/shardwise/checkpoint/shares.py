"""Who writes what: each piece once, by one of the ranks that hold it, evenly in bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwise.core.box import Box, why_not_tiled
from shardwise.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class HeldBoxes:
    """What a rank tells of a tensor: the whole, and the blocks that it holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class ChunkToWrite:
    """A piece that has found its writer."""

    name: str
    dtype: torch.dtype
    box: Box

    @property
    def num_bytes(self) -> int:
        return self.box.volume * self.dtype.itemsize


def share_out(held: Sequence[Mapping[str, HeldBoxes]]) -> list[list[ChunkToWrite]]:
    """The pieces that each rank writes. The same on every rank, since all get the same tables."""
    holders: dict[str, dict[Box, list[int]]] = {}
    wholes: dict[str, tuple[int, HeldBoxes]] = {}
    for rank, table in enumerate(held):
        for name, mine in table.items():
            first_rank, first = wholes.setdefault(name, (rank, mine))
            if (first.shape, first.dtype) != (mine.shape, mine.dtype):
                raise CheckpointError(
                    f"Ranks disagree on {name}: {first.dtype} of shape {first.shape} on rank "
                    f"{first_rank}, {mine.dtype} of shape {mine.shape} on rank {rank}."
                )
            boxes = holders.setdefault(name, {})
            for box in mine.boxes:
                if rank not in boxes.setdefault(box, []):
                    boxes[box].append(rank)
    shares = []
    for name, boxes in holders.items():
        whole = wholes[name][1]
        why = why_not_tiled(list(boxes), whole.shape)
        if why is not None:
            raise CheckpointError(f"The ranks do not hold {name} as pieces of one tensor: {why}.")
        # A tensor without elements has one piece nevertheless, so that its dtype is kept.
        full = [box for box in boxes if box.volume] or list(boxes)[:1]
        shares += [(ChunkToWrite(name, whole.dtype, box), boxes[box]) for box in full]
    return _balanced(shares, len(held))


def _balanced(
    shares: Sequence[tuple[ChunkToWrite, list[int]]], num_ranks: int
) -> list[list[ChunkToWrite]]:
    loads = [0] * num_ranks
    mine: list[list[tuple[int, ChunkToWrite]]] = [[] for _ in range(num_ranks)]
    # Pieces with one holder first, then the largest: what can go anywhere fills the gaps.
    order = sorted(
        range(len(shares)), key=lambda i: (len(shares[i][1]) > 1, -shares[i][0].num_bytes, i)
    )
    for i in order:
        share, ranks = shares[i]
        writer = min(ranks, key=lambda r: (loads[r], r))
        loads[writer] += share.num_bytes
        mine[writer].append((i, share))
    return [[share for _, share in sorted(row, key=lambda pair: pair[0])] for row in mine]
