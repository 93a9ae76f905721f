"""Bags: rows of a table that are looked up and pooled, by sum, mean or maximum.

Ids come in two forms. Of shape (bags, ids in each), they may be sharded along the bags, and the
result lies like them. In one dim with offsets, where a bag ends is a matter of values: they are
whole on every rank. Sums of the rows that each rank owns add up, so a table whose rows are sharded
gives a Partial; ids that are sharded along the same axis are gathered, the sums reduce-scattered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardwise.comm import collectives
from shardwise.comm.ranks import each_rank
from shardwise.core.grid import Coordinate
from shardwise.core.layout import Layout
from shardwise.core.placements import REPLICATE, SUM, Placement, Shard
from shardwise.redistribute.execute import execute
from shardwise.redistribute.search import find_steps
from shardwise.rules.bag_shape import (
    Optional,
    bag_of,
    bag_splits,
    batch_placements,
    bounds,
    inside_splits,
    linear_inputs,
    num_in_bags,
    packed,
    unpacked,
)
from shardwise.rules.embedding import table_stays
from shardwise.rules.ids import check_ids, has_values, local_rows, owned
from shardwise.rules.notation import linear_choices
from shardwise.rules.rule import Call, Choice, LocalCall, Rule, Sent, Table, table

MODE_SUM, MODE_MEAN, MODE_MAX = 0, 1, 2


def _on_one_device(
    weight: torch.Tensor,
    ids: torch.Tensor,
    offsets: Optional,
    weights: Optional,
    mode: int,
    padding_idx: int,
) -> torch.Tensor:
    edges = bounds(ids, offsets).to(ids.dtype)
    flat = None if weights is None else weights.reshape(-1)
    padding = padding_idx if padding_idx >= 0 else None
    return torch.embedding_bag(
        weight, ids.reshape(-1), edges, False, mode, False, flat, True, padding
    )[0]


# -- sum and mean ----------------------------------------------------------------------------


def pooled(
    weight: torch.Tensor,
    ids: torch.Tensor,
    offsets: Optional,
    weights: Optional,
    mode: int,
    padding_idx: int,
) -> torch.Tensor:
    """The sum or mean of each bag. `offsets` end with the number of ids."""
    if weight.is_meta:
        num_bags = ids.shape[0] if offsets is None else offsets.shape[0] - 1
        return weight.new_empty((num_bags, weight.shape[1]))
    return _on_one_device(weight, ids, offsets, weights, mode, padding_idx)


def _pooled(
    layouts: Sequence[Layout],
    weight: torch.Tensor,
    ids: torch.Tensor,
    offsets: Optional,
    weights: Optional,
    mode: int,
    padding_idx: int,
) -> torch.Tensor:
    table, ids_layout, out = layouts[0], layouts[1], layouts[-1]
    met = [a for a in table.axes_of(0) if ids_layout.placements[a].is_shard()]
    terms = _with(out, met, SUM)
    if met:
        ids, ids_layout = _everywhere(ids, ids_layout, met)
        if weights is not None:
            weights, _ = _everywhere(weights, layouts[-2], met)
    check_ids(ids, ids_layout, table.shape[0])
    compact = has_values(ids) and not ids.is_cuda

    def here(coordinate: Coordinate, weight: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        ids, offsets_, weights_ = unpacked(rest, offsets, weights)
        if not table.axes_of(0):
            return _on_one_device(weight, ids, offsets_, weights_, mode, padding_idx)
        fn = _owned_sums if compact else _masked_sums
        sums = fn(table, coordinate, weight, ids, offsets_, weights_, padding_idx)
        if mode == MODE_MEAN:
            sums = sums / num_in_bags(ids, offsets_, padding_idx).clamp(min=1).unsqueeze(-1)
        return sums.to(weight.dtype)

    sums = each_rank(
        table.grid, here, weight, *packed(ids, offsets, weights), axes=table.axes_of(0)
    )
    return execute(sums, find_steps(terms, out)) if met else sums


def _with(layout: Layout, axes: Sequence[int], placement: Placement) -> Layout:
    placements = list(layout.placements)
    for axis in axes:
        placements[axis] = placement
    return layout.with_placements(tuple(placements))


def _everywhere(
    x: torch.Tensor, layout: Layout, axes: Sequence[int]
) -> tuple[torch.Tensor, Layout]:
    target = _with(layout, axes, REPLICATE)
    return execute(x, find_steps(layout, target)), target


def _owned_sums(
    table: Layout,
    coordinate: Coordinate,
    weight: torch.Tensor,
    ids: torch.Tensor,
    offsets: Optional,
    weights: Optional,
    padding_idx: int,
) -> torch.Tensor:
    """The sums of the owned rows of each bag: torch's op on the ids that this rank owns."""
    edges = bounds(ids, offsets)
    if not weight.shape[0]:
        return weight.new_zeros((edges.shape[0] - 1, weight.shape[1]))
    rows, places = owned(table, coordinate, ids.reshape(-1), padding_idx)
    flat = None if weights is None else weights.reshape(-1)
    if places is not None:
        edges = torch.searchsorted(places, edges)
        flat = None if flat is None else flat.index_select(0, places)
    edges = edges.to(rows.dtype)
    return torch.embedding_bag(weight, rows, edges, False, MODE_SUM, False, flat, True)[0]


def _masked_sums(
    table: Layout,
    coordinate: Coordinate,
    weight: torch.Tensor,
    ids: torch.Tensor,
    offsets: Optional,
    weights: Optional,
    padding_idx: int,
) -> torch.Tensor:
    """As `_owned_sums`, with sizes that do not depend on the ids."""
    num_bags = ids.shape[0] if offsets is None else offsets.shape[0] - 1
    if type(weight.shape[0]) is int and weight.shape[0] == 0:
        return weight.new_zeros((num_bags, weight.shape[1]))
    row, skipped = local_rows(table, coordinate, ids)
    if padding_idx >= 0:
        skipped = skipped | (ids == padding_idx)
    found = torch.embedding(weight, row).masked_fill(skipped.unsqueeze(-1), 0)
    if weights is not None:
        found = found * weights.unsqueeze(-1)
    if offsets is None:
        return found.sum(1)
    bag = bag_of(ids, offsets, torch.arange(ids.shape[0], device=ids.device))
    # What stands after the last bag is added to one more, which is left out.
    sums = weight.new_zeros((num_bags + 1, weight.shape[1]))
    return sums.index_add(0, bag, found.to(weight.dtype))[:num_bags]


POOLED = LocalCall(_pooled, together=True)


def _pooled_choices(call: Call) -> Iterator[Choice]:
    return (c for c in _every_pooled_choice(call) if table_stays(call, c))


def _every_pooled_choice(call: Call) -> Iterator[Choice]:
    """Operands: the table, the ids, and where there are any, the offsets and weights."""
    yield Choice(batch_placements(call, (REPLICATE,), REPLICATE), (REPLICATE,), POOLED)
    ids_sharded = bool(call.placed) and call.placed[1].is_shard() and call.inputs[1].ndim == 2
    for sizes in call.splits([(0, 0)]):
        rows = (Shard(0, sizes),)
        if not ids_sharded:
            yield Choice(batch_placements(call, rows, REPLICATE), (SUM,), POOLED)
        for bags in bag_splits(call, 1):
            batch = Shard(0, bags)
            yield Choice(
                batch_placements(call, rows, batch),
                (batch,),
                POOLED,
                sent=_sent(call, "reduce_scatter"),
            )
    for sizes in call.splits([(0, 1)]):
        columns = Shard(1, sizes)
        yield Choice(batch_placements(call, (columns,), REPLICATE), (columns,), POOLED)
    for bags in bag_splits(call, 1):
        batch = Shard(0, bags)
        yield Choice(batch_placements(call, (REPLICATE,), batch), (batch,), POOLED)
    if call.args[4] == MODE_SUM:
        for inside in inside_splits(call, 1):
            yield Choice(batch_placements(call, (REPLICATE,), Shard(1, inside)), (SUM,), POOLED)
    for choice in linear_choices(call, linear_inputs(call)):
        yield Choice(choice.inputs, choice.outputs, POOLED)


def _sent(call: Call, *reductions: str) -> tuple[Sent, ...]:
    """Ids, and their weights, to everyone; then the results."""
    gathered = [
        Sent("all_gather", _num_bytes(meta.shape, meta.dtype))
        for meta in call.inputs[1:]
        if meta.ndim == 2
    ]
    out = call.outputs[0]
    results = _num_bytes(out.shape, out.dtype)
    return (*gathered, *(Sent(kind, results) for kind in reductions))


def _num_bytes(shape: Sequence[Any], dtype: torch.dtype) -> float:
    return float(math.prod(s if type(s) is int else 1024 for s in shape) * dtype.itemsize)


# -- maximum ---------------------------------------------------------------------------------


def largest(
    weight: torch.Tensor, ids: torch.Tensor, offsets: Optional, padding_idx: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest entry of each bag and column, and the id it is of; 0 and -1 for an empty bag."""
    num_bags = ids.shape[0] if offsets is None else offsets.shape[0] - 1
    if weight.is_meta:
        shape = (num_bags, weight.shape[1])
        return weight.new_empty(shape), ids.new_empty(shape)
    skipped = ids.reshape(-1) == padding_idx
    found = torch.embedding(weight, ids.reshape(-1))
    best, place = _segment_max(found, skipped, ids, offsets, num_bags)
    return _winners(best, place, ids)


def _segment_max(
    found: torch.Tensor, skipped: torch.Tensor, ids: torch.Tensor, offsets: Optional, num_bags: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest value of each bag and column, and the first place that has it.

    `found` has one row for each of the flat ids. A bag that has none is -inf, its place the number
    of ids.
    """
    num_ids = found.shape[0]
    places = torch.arange(num_ids, device=ids.device)
    bag = bag_of(ids, offsets, places).clamp(max=num_bags)
    lowest = -math.inf
    found = found.masked_fill(skipped.unsqueeze(-1), lowest)
    index = bag.unsqueeze(-1).expand(-1, found.shape[1])
    best = found.new_full((num_bags + 1, found.shape[1]), lowest)
    best = best.scatter_reduce(0, index, found, "amax")
    mine = (found == best.index_select(0, bag)) & ~skipped.unsqueeze(-1)
    candidates = torch.where(mine, places.unsqueeze(-1), num_ids)
    first = candidates.new_full(best.shape, num_ids).scatter_reduce(0, index, candidates, "amin")
    return best[:num_bags], first[:num_bags]


def _winners(
    best: torch.Tensor, place: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    flat = ids.reshape(-1)
    empty = place == flat.shape[0]
    padded = torch.nn.functional.pad(flat, (0, 1), value=-1)
    return best.masked_fill(empty, 0), padded[place]


def _largest(
    layouts: Sequence[Layout],
    weight: torch.Tensor,
    ids: torch.Tensor,
    offsets: Optional,
    padding_idx: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    table, ids_layout, out, won = layouts[0], layouts[1], layouts[-2], layouts[-1]
    grid, row_axes = table.grid, table.axes_of(0)
    met = [a for a in row_axes if ids_layout.placements[a].is_shard()]
    if met:
        ids, ids_layout = _everywhere(ids, ids_layout, met)
    check_ids(ids, ids_layout, table.shape[0])

    def here(coordinate: Coordinate, weight: torch.Tensor, *rest: torch.Tensor) -> Any:
        ids, offsets_, _ = unpacked(rest, offsets, None)
        flat = ids.reshape(-1)
        skipped = flat == padding_idx
        if not row_axes:
            found = torch.embedding(weight, flat)
        elif type(weight.shape[0]) is int and weight.shape[0] == 0:
            found, skipped = weight.new_zeros((flat.shape[0], weight.shape[1])), flat == flat
        else:
            row, foreign = local_rows(table, coordinate, flat)
            found, skipped = torch.embedding(weight, row), skipped | foreign
        num_bags = ids.shape[0] if offsets_ is None else offsets_.shape[0] - 1
        return _segment_max(found, skipped, ids, offsets_, num_bags)

    def stands(_: Coordinate, best: torch.Tensor, mine: torch.Tensor, *rest: Any) -> torch.Tensor:
        return torch.where(best == mine, rest[0], rest[1].numel())

    best, place = each_rank(grid, here, weight, *packed(ids, offsets), axes=row_axes)
    if row_axes:
        mine = best
        for axis in row_axes:
            best = collectives.all_reduce(best, "max", grid, axis)
        place = each_rank(grid, stands, best, mine, place, ids, axes=())
        for axis in row_axes:
            place = collectives.all_reduce(place, "min", grid, axis)
    results = each_rank(grid, lambda _, *t: _winners(*t), best, place, ids, axes=())
    if not met:
        return results
    steps = [find_steps(_with(lo, met, REPLICATE), lo) for lo in (out, won)]
    values, ids_won = (execute(r, s) for r, s in zip(results, steps, strict=True))
    return values, ids_won


LARGEST = LocalCall(_largest, together=True)


def _largest_choices(call: Call) -> Iterator[Choice]:
    return (c for c in _every_largest_choice(call) if table_stays(call, c))


def _every_largest_choice(call: Call) -> Iterator[Choice]:
    """Operands: the table, the ids, and the offsets where there are any."""

    def choice(first: Placement, batch: Placement, out: Placement, *sent: Sent) -> Choice:
        return Choice(batch_placements(call, (first,), batch), (out, out), LARGEST, sent=sent)

    yield choice(REPLICATE, REPLICATE, REPLICATE)
    out = call.outputs[0]
    results = [
        Sent("all_reduce", _num_bytes(out.shape, out.dtype)),
        Sent("all_reduce", _num_bytes(out.shape, torch.int64)),
    ]
    ids_sharded = bool(call.placed) and call.placed[1].is_shard() and call.inputs[1].ndim == 2
    for sizes in call.splits([(0, 0)]):
        if not ids_sharded:
            yield choice(Shard(0, sizes), REPLICATE, REPLICATE, *results)
        for bags in bag_splits(call, 1):
            sent = (*_sent(call), *results)
            yield choice(Shard(0, sizes), Shard(0, bags), Shard(0, bags), *sent)
    for sizes in call.splits([(0, 1)]):
        yield choice(Shard(1, sizes), REPLICATE, Shard(1, sizes))
    for bags in bag_splits(call, 1):
        yield choice(REPLICATE, Shard(0, bags), Shard(0, bags))


RULES: Table = table(
    ((pooled,), Rule(_pooled_choices, "v d, b ... -> b d")),
    ((largest,), Rule(_largest_choices, "v d, b ... -> b d, b d")),
)
