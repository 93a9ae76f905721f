"""Step: a change of one axis's placement. Values only; `moves` runs them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.comm.cost import collective_s, exchange_s, local_s
from shardwise.core.layout import Layout
from shardwise.core.placements import NormPartial, Partial, Placement, Replicate, Shard
from shardwise.core.sizes import Size, chunk_length, lengths, overlaps

#: (placement before, after) -> the kind of step. Other sizes of the same dim: a resplit.
_KINDS: dict[tuple[type, type], str] = {
    (Shard, Replicate): "all_gather",
    (Shard, Shard): "all_to_all",
    (Partial, Replicate): "all_reduce",
    (Partial, Shard): "reduce_scatter",
    (Replicate, Shard): "slice",
    (Replicate, Partial): "to_partial",
}

#: Kinds without communication.
LOCAL_KINDS = frozenset({"slice", "to_partial"})


@dataclass(frozen=True, slots=True)
class Step:
    """One axis changes its placement: `source` before, `target` after."""

    kind: str
    axis: int
    source: Layout
    target: Layout

    @property
    def communicates(self) -> bool:
        return self.kind not in LOCAL_KINDS

    def __str__(self) -> str:
        before, after = self.source.placements[self.axis], self.target.placements[self.axis]
        return (
            f"{self.kind} over axis {self.source.grid.axis_name(self.axis)!r}: {before} -> {after}"
        )


def step_kind(before: Placement, after: Placement) -> str | None:
    """The kind of step between two placements of one axis; None when it takes several."""
    if isinstance(before, Shard) and isinstance(after, Shard) and before.dim == after.dim:
        return "resplit" if before.sizes != after.sizes else None
    if isinstance(before, NormPartial) and isinstance(after, Shard):
        return None  # reduced first: terms are powers only inside the all-reduce
    before_type = Partial if isinstance(before, Partial) else type(before)
    after_type = Partial if isinstance(after, Partial) else type(after)
    return _KINDS.get((before_type, after_type))


def step_cost_s(kind: str, num_ranks: int, bytes_before: float, bytes_after: float) -> float:
    larger = max(bytes_before, bytes_after)
    if kind in LOCAL_KINDS:
        return local_s(bytes_after)
    return collective_s(kind, num_ranks, larger)


def resplit_cost_s(size: int, parts: int, before: Shard, after: Shard, whole_bytes: float) -> float:
    """The cost of the rank that sends or receives most; what a rank keeps costs nothing.

    `whole_bytes` is the size of all shards together.
    """
    splits = lengths(size, parts, before.sizes), lengths(size, parts, after.sizes)
    kept = [row[place] for place, row in enumerate(overlaps(*splits))]
    moved = max(max(a, b) - k for a, b, k in zip(*splits, kept, strict=True))
    return exchange_s(whole_bytes * moved / max(size, 1))


def local_bytes(
    shape: tuple[Size, ...],
    itemsize: int,
    placements: tuple[Placement, ...],
    axis_sizes: tuple[int, ...],
) -> float:
    """The bytes of an average shard; a symbolic size counts as 1024."""
    total = float(itemsize)
    for size in shape:
        total *= size if type(size) is int else 1024
    return total / math.prod(
        n for p, n in zip(placements, axis_sizes, strict=True) if isinstance(p, Shard)
    )


def longest(layout: Layout, axis: int, dim: int) -> Size:
    """The length of the longest shard of `dim` after the split over `axis`."""
    size = layout.shape[dim]
    for other in layout.order:
        placement = layout.placements[other]
        if isinstance(placement, Shard) and placement.dim == dim:
            size = (
                max(placement.sizes)
                if placement.sizes
                else chunk_length(size, layout.grid.shape[other])
            )
        if other == axis:
            break
    return size
