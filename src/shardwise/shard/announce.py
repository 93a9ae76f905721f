"""Ranks tell each other what they bring, before any of it is sent.

A batch that does not fit on one rank is an error on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.comm.consent import gather_rows, gather_texts
from shardwise.core.grid import Grid
from shardwise.errors import LayoutError
from shardwise.simulation.parts import on_rank
from shardwise.simulation.ranks import each_rank


def announced(
    grid: Grid,
    what: str,
    describe: Callable[..., tuple[Sequence[int], str | None]],
    *tensors: torch.Tensor,
) -> list[tuple[int, ...]]:
    """How much each rank brings, as `describe(*its tensors)` counts it, by rank.

    `describe` also says what is wrong with a batch, if anything: every rank hears of it and raises.
    """
    faults: dict[int, str] = {}

    def row(place: Any, *mine: torch.Tensor) -> torch.Tensor:
        counts, fault = describe(*mine)
        if fault is not None:
            faults[grid.ranks[place[0]]] = fault
        return torch.tensor([fault is not None, *counts])

    mine = each_rank(grid, row, *tensors)
    rows = gather_rows(grid, what, lambda rank: on_rank(mine, rank)).tolist()
    raise_faults(grid, what, [flag for flag, *_ in rows], faults)
    return [tuple(counts) for _, *counts in rows]


def raise_faults(grid: Grid, what: str, flags: Sequence[int], faults: dict[int, str]) -> None:
    """Raise where some rank has a fault; `faults` are those of the ranks present."""
    wrong = [rank for rank, flag in zip(grid.ranks, flags, strict=True) if flag]
    if not wrong:
        return
    texts = gather_texts(grid, what, lambda rank: faults.get(rank, ""))
    said = "; ".join(
        f"rank {rank}: {text}" for rank, text in zip(grid.ranks, texts, strict=True) if text
    )
    raise LayoutError(f"{what}: the ranks {wrong} bring a batch that does not fit. {said}")


def range_of(ids: torch.Tensor, fault: str | None) -> tuple[int, int]:
    """The lowest and the highest id of a batch without a fault."""
    if fault is not None or not ids.numel():
        return 0, -1
    low, high = torch.stack(torch.aminmax(ids)).tolist()
    return low, high


def check_range(
    grid: Grid, what: str, num_rows: int, lows: Sequence[int], highs: Sequence[int]
) -> None:
    """An id out of range raises on every rank, before any id is sent."""
    for rank, low, high in zip(grid.ranks, lows, highs, strict=True):
        if low < 0 or high >= num_rows:
            raise IndexError(
                f"{what}: index out of range in a table of {num_rows} rows: the ids of rank {rank} "
                f"run from {low} to {high}."
            )
