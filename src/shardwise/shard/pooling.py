"""What a rank computes for everybody's ids, and what it does with the rows that came home.

Everything here runs on one rank's plain tensors, under torch's own autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from shardwise.shard import bags
from shardwise.shard.tiling import Stretch

# -- what one rank computes for everybody's ids ------------------------------------------------


def rows_of(
    stretch: Stretch, block: torch.Tensor, ids: torch.Tensor, *, padding_idx: int | None = None
) -> torch.Tensor:
    """A row per id: its own where it is this rank's, else zeros."""
    start, num_rows = stretch
    if not block.numel():
        return block.new_zeros(ids.numel(), block.shape[1])
    row = (ids - start).clamp(0, num_rows - 1)
    foreign = row != ids - start
    padding = None
    if padding_idx is not None and start <= padding_idx < start + num_rows:
        padding = padding_idx - start
    return F.embedding(row, block, padding).masked_fill(foreign.unsqueeze(1), 0)


def columns_of(
    stretch: Stretch, block: torch.Tensor, ids: torch.Tensor, *, padding_idx: int | None = None
) -> torch.Tensor:
    """This rank's columns of the row of each id."""
    if not block.numel():
        return block.new_zeros(ids.numel(), block.shape[1])
    return F.embedding(ids, block, padding_idx)


def pooled_rows(
    stretch: Stretch,
    block: torch.Tensor,
    ids: torch.Tensor,
    lengths: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    mode: str,
    padding_idx: int | None,
) -> torch.Tensor:
    """The sum of each bag over the rows that this rank holds; a mean is divided at home."""
    start, num_rows = stretch
    owned = (ids >= start) & (ids < start + num_rows)
    if padding_idx is not None:
        owned &= ids != padding_idx
    bag = torch.repeat_interleave(lengths)
    kept = owned.nonzero().squeeze(1)
    counts = torch.bincount(bag[kept], minlength=lengths.numel())
    if weights is not None:
        weights = weights[kept]
    return bags.lookup(block, ids[kept] - start, counts, "sum", weights)


def pooled_columns(
    stretch: Stretch,
    block: torch.Tensor,
    ids: torch.Tensor,
    lengths: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    mode: str,
    padding_idx: int | None,
) -> torch.Tensor:
    """This rank's columns of each pooled bag."""
    return bags.lookup(block, ids, lengths, mode, weights, padding_idx)


# -- what a rank does with the rows that came home ----------------------------------------------


def same(rows: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return rows.view_as(rows)


class Divide:
    """Sums to means: the padding id does not count, and an empty bag stays zero."""

    def __init__(self, padding_idx: int | None) -> None:
        self.padding_idx = padding_idx

    def __call__(
        self, rows: torch.Tensor, ids: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        if self.padding_idx is not None:
            bag = torch.repeat_interleave(lengths)
            lengths = torch.bincount(bag[ids != self.padding_idx], minlength=lengths.numel())
        return rows / lengths.clamp(min=1).unsqueeze(1).to(rows.dtype)


class Pool:
    """Rows to bags."""

    def __init__(self, mode: str, padding_idx: int | None, by_frequency: bool) -> None:
        self.mode, self.padding_idx, self.by_frequency = mode, padding_idx, by_frequency

    def __call__(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.by_frequency:
            rows = scaled_by_frequency(rows, ids)
        flat = None if weights is None else weights.reshape(-1)
        return bags.pool(rows, ids, lengths, self.mode, flat, self.padding_idx)


def scaled_by_frequency(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The rows; their gradient divided by how often this rank's batch names the id."""
    if not ids.numel():
        return rows
    _, which, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    return ScaleRows.apply(rows, 1 / counts[which].to(rows.dtype).unsqueeze(1))


class ScaleRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(factor)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (factor,) = ctx.saved_tensors
        return grad * factor, None
