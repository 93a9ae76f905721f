"""Lookups: each rank's own ids, pooled or not, in a table of which it holds a block.

Rows are pooled where they are, so a bag travels as one row. Where that is impossible (the maximum
over rows that several ranks hold, gradients scaled by frequency), the rows go home and are pooled
there. Either way the numbers are those of one device that holds the whole table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm.ranks import each_rank, localize
from shardwise.comm.watch import because
from shardwise.errors import ArgumentError, UnsupportedError
from shardwise.shard import bags
from shardwise.shard.own_batch import (
    Exchange,
    Flat,
    OwnBatch,
    all_gather_uneven,
    announced,
    blocks_for,
)
from shardwise.shard.pooling import (
    Divide,
    Pool,
    columns_of,
    pooled_columns,
    pooled_rows,
    rows_of,
    same,
    scaled_by_frequency,
)
from shardwise.shard.renorm import renorm
from shardwise.shard.tensor import ShardedTensor
from shardwise.shard.tiling import Blocks

MODES = ("sum", "mean", "max")


def embedding(
    input: torch.Tensor,
    weight: ShardedTensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """`F.embedding` for each rank's own plain ids."""
    what, ids = "F.embedding", input
    blocks = blocks_for(weight, what)
    dim = blocks.dim
    padding_idx = _row(padding_idx, weight, what)
    _refuse_sparse(what, sparse)
    grid = weight._tiling.grid

    def describe(mine: torch.Tensor) -> tuple[Sequence[int], str | None]:
        fault = bags.fault_of_ids(mine)
        return [mine.numel(), *_range(mine, fault)], fault

    counts, lows, highs = _columns(announced(grid, what, describe, ids))
    _check_range(what, weight, lows, highs)
    flat = each_rank(grid, lambda _, mine: mine.reshape(-1).long(), ids)
    everyones = _gathered(what, weight, blocks, flat, counts, max_norm, norm_type)

    def finish(rows: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
        if scale_grad_by_freq:
            rows = scaled_by_frequency(rows, mine.reshape(-1))
        return rows.view(*mine.shape, rows.shape[-1])

    exchange = Exchange(
        what,
        weight._tiling,
        blocks,
        local=functools.partial(rows_of if dim == 0 else columns_of, padding_idx=padding_idx),
        finish=finish,
        joined=dim == 1,
        num_columns=weight._tiling.shape[1],
        num_rows=counts,
        travels=(),
        grad_reduction=weight.grad_reduction,
    )
    return OwnBatch.apply(weight, exchange, (everyones,), (ids,))


def embedding_bag(
    input: torch.Tensor,
    weight: ShardedTensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> torch.Tensor:
    """`F.embedding_bag` for each rank's own plain bags."""
    what = "F.embedding_bag"
    blocks = blocks_for(weight, what)
    padding_idx = _row(padding_idx, weight, what)
    _check_mode(mode, per_sample_weights, scale_grad_by_freq, sparse)
    batch = _bag_batch(what, weight, input, offsets, per_sample_weights, include_last_offset)
    everyones = _gathered(what, weight, blocks, batch.ids, batch.num_ids, max_norm, norm_type)
    weights = () if per_sample_weights is None else (per_sample_weights,)
    own = (batch.ids, batch.lengths)
    make = functools.partial(
        Exchange,
        what,
        weight._tiling,
        blocks,
        joined=blocks.dim == 1,
        num_columns=weight._tiling.shape[1],
        grad_reduction=weight.grad_reduction,
    )
    if scale_grad_by_freq or (mode == "max" and blocks.dim == 0):
        exchange = make(
            local=rows_of if blocks.dim == 0 else columns_of,
            finish=Pool(mode, padding_idx, scale_grad_by_freq),
            num_rows=batch.num_ids,
            travels=(None,) * len(weights),
        )
        return OwnBatch.apply(weight, exchange, (everyones,), own, *weights)
    grid = weight._tiling.grid
    with because(what, implicit=False):
        lengths = all_gather_uneven(localize(grid, batch.lengths), batch.num_bags, grid)
    pooled: Callable[..., torch.Tensor] = pooled_rows if blocks.dim == 0 else pooled_columns
    exchange = make(
        local=functools.partial(pooled, mode=mode, padding_idx=padding_idx),
        finish=Divide(padding_idx) if mode == "mean" and blocks.dim == 0 else same,
        num_rows=batch.num_bags,
        travels=(batch.num_ids,) * len(weights),
    )
    flat = [Flat.apply(w, grid) for w in weights]
    return OwnBatch.apply(weight, exchange, (everyones, lengths), own, *flat)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Each rank's bags: ids and lengths of its own, and how many of both each rank has."""

    ids: torch.Tensor
    lengths: torch.Tensor
    num_ids: tuple[int, ...]
    num_bags: tuple[int, ...]


def _bag_batch(
    what: str,
    weight: ShardedTensor,
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    include_last_offset: bool,
) -> _Batch:
    """The batch in one form, checked on every rank."""
    grid = weight._tiling.grid
    given = [x for x in (ids, offsets, weights) if x is not None]

    def named(mine: Sequence[torch.Tensor]) -> tuple[Any, Any, Any]:
        left = iter(mine)
        x, o, w = (None if x is None else next(left) for x in (ids, offsets, weights))
        return x, o, w

    def describe(*mine: torch.Tensor) -> tuple[Sequence[int], str | None]:
        x, o, w = named(mine)
        fault = bags.fault_of(x, o, w, include_last_offset)
        num_bags = 0 if fault else bags.lengths_of(x, o, include_last_offset).numel()
        return [x.numel(), num_bags, *_range(x, fault)], fault

    num_ids, num_bags, lows, highs = _columns(announced(grid, what, describe, *given))
    _check_range(what, weight, lows, highs)

    def canonical(_: Any, *mine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, o, _ = named(mine)
        return x.reshape(-1).long(), bags.lengths_of(x, o, include_last_offset)

    flat, lengths = each_rank(grid, canonical, *given)
    return _Batch(flat, lengths, num_ids, num_bags)


def _gathered(
    what: str,
    weight: ShardedTensor,
    blocks: Blocks,
    flat: torch.Tensor,
    counts: tuple[int, ...],
    max_norm: float | None,
    norm_type: float,
) -> torch.Tensor:
    """All ranks' ids; the rows that they name are shortened to `max_norm`."""
    grid = weight._tiling.grid
    with because(what, implicit=False):
        everyones = all_gather_uneven(localize(grid, flat), counts, grid)
        if max_norm is not None:
            renorm(weight, blocks, everyones, max_norm, norm_type)
    return everyones


# -- arguments -----------------------------------------------------------------------------------


def _columns(rows: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return list(zip(*rows, strict=True))


def _range(ids: torch.Tensor, fault: str | None) -> tuple[int, int]:
    """The lowest and the highest id of a batch without a fault."""
    if fault is not None or not ids.numel():
        return 0, -1
    low, high = torch.stack(torch.aminmax(ids)).tolist()
    return low, high


def _check_range(
    what: str, weight: ShardedTensor, lows: tuple[int, ...], highs: tuple[int, ...]
) -> None:
    """An id out of range raises on every rank, before any id is sent."""
    num_rows = weight._tiling.shape[0]
    for rank, low, high in zip(weight._tiling.grid.ranks, lows, highs, strict=True):
        if low < 0 or high >= num_rows:
            raise IndexError(
                f"{what}: index out of range in a table of {num_rows} rows: the ids of rank {rank} "
                f"run from {low} to {high}."
            )


def _row(padding_idx: int | None, weight: ShardedTensor, what: str) -> int | None:
    num_rows = weight._tiling.shape[0]
    if padding_idx is None:
        return None
    if not -num_rows <= padding_idx < num_rows:
        raise ArgumentError(
            f"{what}: padding_idx={padding_idx} is no row of a table of {num_rows} rows."
        )
    return padding_idx % num_rows


def _refuse_sparse(what: str, sparse: bool) -> None:
    if sparse:
        raise UnsupportedError(
            f"{what} of a ShardedTensor has no sparse gradients: the gradient is as large as this "
            "rank's block. Use sparse=False."
        )


def _check_mode(
    mode: str, weights: torch.Tensor | None, scale_grad_by_freq: bool, sparse: bool
) -> None:
    what = "F.embedding_bag"
    _refuse_sparse(what, sparse)
    if mode not in MODES:
        raise ArgumentError(f"{what}: mode is one of {', '.join(MODES)}; found {mode!r}.")
    if weights is not None and mode != "sum":
        raise UnsupportedError(f"{what}: per_sample_weights go with mode='sum', found {mode!r}.")
    if mode == "max" and scale_grad_by_freq:
        raise ArgumentError(f"{what}: mode='max' has no scale_grad_by_freq, as in torch.")
