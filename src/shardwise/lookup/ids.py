"""Ids of a table's rows: range checks, offsets of bags, and which ids a rank owns."""

from __future__ import annotations

from typing import Any

import torch

from shardwise._torch.functions import assert_async
from shardwise.comm import collectives
from shardwise.core.layout import Layout
from shardwise.core.mesh import Coordinate, Grid
from shardwise.errors import BatchError
from shardwise.simulation.parts import one_part, parts_of
from shardwise.simulation.ranks import each_rank


def has_values(x: torch.Tensor) -> bool:
    """Whether the values can be read: not in a traced graph."""
    return type(one_part(x)) is torch.Tensor


def sharded_axes(layout: Layout) -> tuple[int, ...]:
    return tuple(a for a, p in enumerate(layout.placements) if p.is_shard())


def check_ids(ids: torch.Tensor, layout: Layout, num_rows: Any) -> None:
    """An id out of range raises as on one device, on every rank, before anything is looked up.

    Costs one small all-reduce for each axis that shards the ids. On CUDA, and in a traced graph, it
    is an assertion on the device, as in torch's own lookup.
    """
    axes = sharded_axes(layout)
    if type(ids) is torch.Tensor and ids.is_cpu and not axes:  # the same ids on every rank
        if ids.numel():
            low, high = torch.aminmax(ids)
            _raise_outside(int(low), int(high), num_rows)
    elif has_values(ids) and not ids.is_cuda and not ids.is_meta:
        found = widened(id_range(ids, layout), layout.grid, axes)
        raise_out_of_range(found, num_rows)
    else:
        each_rank(layout.grid, _assert_in_range(num_rows), ids, axes=())


def id_range(ids: torch.Tensor, layout: Layout) -> torch.Tensor:
    """`[-lowest, highest]` of each rank's ids, so that a maximum combines ranks."""
    return each_rank(layout.grid, _range, ids, axes=())


def _range(_: Coordinate, ids: torch.Tensor) -> torch.Tensor:
    if not ids.numel():
        return torch.tensor([0, -1], device=ids.device)
    low, high = torch.aminmax(ids)
    return torch.stack([-low, high]).long()


def widened(found: torch.Tensor, grid: Grid, axes: tuple[int, ...]) -> torch.Tensor:
    """The range of the ids of all ranks along `axes`."""
    for axis in axes:
        found = collectives.all_reduce(found, "max", grid, axis)
    return found


def raise_out_of_range(ranges: torch.Tensor, num_rows: int) -> None:
    """Raise IndexError if one of the ranges, in the last dim, exceeds the table."""
    for part in parts_of(ranges):
        negative_low, high = part.view(-1, 2).amax(0).tolist()
        _raise_outside(-negative_low, high, num_rows)


def _raise_outside(low: int, high: int, num_rows: int) -> None:
    if low < 0 or high >= num_rows:
        raise IndexError(
            f"index out of range in a table of {num_rows} rows: ids run from {low} to {high}."
        )


def _assert_in_range(num_rows: Any) -> Any:
    def check(_: Coordinate, ids: torch.Tensor) -> torch.Tensor:
        inside = ((ids >= 0) & (ids < num_rows)).all()
        assert_async(inside, f"index out of range in a table of {num_rows} rows")
        return ids

    return check


def dtype_fault(integers: Any, name: str) -> str | None:
    """What is wrong with ids or offsets that are not integers."""
    dtype = integers.dtype if isinstance(integers, torch.Tensor) else type(integers).__name__
    whole = dtype in (torch.int32, torch.int64)
    return None if whole else f"{name} are int32 or int64, found {dtype}."


def offsets_fault(offsets: torch.Tensor, num_ids: int) -> str | None:
    """What is wrong with where bags begin among `num_ids` ids; waits for the device once.

    >>> offsets_fault(torch.tensor([0, 3, 2]), 5)
    'offsets do not decrease, found 2 after 3 (bag 1).'
    """
    if not offsets.numel():
        return None
    falls = offsets[1:] < offsets[:-1]
    first, last, falling = torch.stack([offsets[0], offsets[-1], falls.any()]).tolist()
    if first != 0:
        return f"the first offset is 0, found {first}."
    if falling:
        at = int(falls.nonzero()[0])
        found, then = offsets[at : at + 2].tolist()
        return f"offsets do not decrease, found {then} after {found} (bag {at})."
    return f"the last offset is {last}, but there are {num_ids} ids." if last > num_ids else None


def check_offsets(offsets: torch.Tensor, num_ids: int) -> None:
    """Offsets that do not fit raise, on every rank: they are replicated, and end with the last bag.

    On CUDA, and in a traced graph, they are not read, as in torch's own op.
    """
    fault = dtype_fault(offsets, "offsets")
    if fault is None and has_values(offsets) and not offsets.is_cuda and not offsets.is_meta:
        for part in parts_of(offsets):
            if part.shape[0] > 1:  # there are bags
                fault = fault or offsets_fault(part, num_ids)
                # Without the end of the last bag, an offset too large is easier to recognise.
                fault = fault and (offsets_fault(part[:-1], num_ids) or fault)
    if fault is not None:
        raise BatchError(f"embedding_bag: {fault}")


def local_rows(
    table: Layout, coordinate: Coordinate, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The local row of each id, and which ids another rank owns (their row is arbitrary)."""
    offset, shape = table.box(coordinate)
    shifted = ids - offset[0]
    row = shifted.clamp(0, shape[0] - 1)
    return row, shifted != row


def owned(
    table: Layout, coordinate: Coordinate, ids: torch.Tensor, padding_idx: int = -1
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The local rows of the ids that this rank owns, and their positions; None for all.

    `ids` is flat. Ids equal to `padding_idx` are left out. The result's size is data-dependent, so
    this is not for traced graphs.
    """
    keep = None
    rows = ids
    if table.axes_of(0):
        if not table.box(coordinate)[1][0]:
            nothing = ids.new_empty(0)
            return nothing, nothing
        rows, foreign = local_rows(table, coordinate, ids)
        keep = foreign.logical_not_()
    if padding_idx >= 0:
        real = ids != padding_idx
        keep = real if keep is None else keep & real
    if keep is None:
        return rows, None
    places = keep.nonzero().squeeze(1)
    return rows.index_select(0, places), places
