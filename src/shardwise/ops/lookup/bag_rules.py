"""Bags: rows of a table that are looked up and pooled, by sum or mean; see also largest_bags.

Ids come in two forms. Of shape (bags, ids in each), they may be sharded along the bags, and the
result is sharded like them. In one dim with offsets, they are replicated: where a bag ends is
data-dependent. A row-sharded table gives a Partial, since each rank sums the rows that it owns; ids
that are sharded along the same axis are gathered, and the sums reduce-scattered along the bags.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardwise.core.layout import Layout
from shardwise.core.mesh import Coordinate
from shardwise.core.placements import REPLICATE, SUM, Placement, Shard
from shardwise.dispatch.notation import linear_choices
from shardwise.dispatch.rule import Call, Choice, CollectiveCost, LocalCall, Rule, Table, table
from shardwise.lookup.ids import check_ids, check_offsets, has_values, owned
from shardwise.ops.lookup import bag_shape
from shardwise.ops.lookup.bag_shape import (
    MODE_MEAN,
    MODE_SUM,
    Bags,
    Optional,
    bag_splits,
    batch_placements,
    inside_splits,
    linear_inputs,
    packed,
    unpacked,
)
from shardwise.ops.lookup.embedding_rules import table_stays
from shardwise.redistribute.execute import execute
from shardwise.redistribute.search import find_steps
from shardwise.simulation.ranks import each_rank


def shared_axes(table: Layout, ids: Layout) -> list[int]:
    """The axes that shard both the table's rows and the ids."""
    return [axis for axis in table.axes_of(0) if ids.placements[axis].is_shard()]


def with_placement(layout: Layout, axes: Sequence[int], placement: Placement) -> Layout:
    placements = list(layout.placements)
    for axis in axes:
        placements[axis] = placement
    return layout.with_placements(tuple(placements))


def everywhere(x: torch.Tensor, layout: Layout, axes: Sequence[int]) -> tuple[torch.Tensor, Layout]:
    """`x`, replicated over the axes, and its layout."""
    target = with_placement(layout, axes, REPLICATE)
    return execute(x, find_steps(layout, target)), target


def are_ids_sharded(call: Call) -> bool:
    return bool(call.placed) and call.placed[1].is_shard() and call.inputs[1].ndim == 2


def sent(call: Call, *reductions: str) -> tuple[CollectiveCost, ...]:
    """The costs of gathering ids and their weights, and of reducing the results."""
    gathered = [
        CollectiveCost("all_gather", num_bytes(meta.shape, meta.dtype))
        for meta in call.inputs[1:]
        if meta.ndim == 2
    ]
    out = call.outputs[0]
    results = num_bytes(out.shape, out.dtype)
    return (*gathered, *(CollectiveCost(kind, results) for kind in reductions))


def num_bytes(shape: Sequence[Any], dtype: torch.dtype) -> float:
    return float(math.prod(s if type(s) is int else 1024 for s in shape) * dtype.itemsize)


def pooled(
    weight: torch.Tensor,
    ids: torch.Tensor,
    offsets: Optional,
    weights: Optional,
    mode: int,
    padding_idx: int,
) -> torch.Tensor:
    """The sum or mean of each bag. `offsets` end with the number of ids."""
    bags = Bags(ids, offsets, weights, padding_idx)
    if weight.is_meta:
        return weight.new_empty((bags.num_bags, weight.shape[1]))
    return _on_one_device(weight, bags, mode)


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
    met = shared_axes(table, ids_layout)
    if met:
        ids, ids_layout = everywhere(ids, ids_layout, met)
        if weights is not None:
            weights, _ = everywhere(weights, layouts[-2], met)
    check_ids(ids, ids_layout, table.shape[0])
    if offsets is not None:
        check_offsets(offsets, ids.shape[0])

    def here(coordinate: Coordinate, weight: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        bags = unpacked(rest, offsets, weights, padding_idx)
        return _rows_here(table, coordinate, weight, bags, mode)

    operands = packed(ids, offsets, weights)
    sums = each_rank(table.grid, here, weight, *operands, axes=table.axes_of(0))
    return execute(sums, find_steps(with_placement(out, met, SUM), out)) if met else sums


# -- a rank's terms of the bags --------------------------------------------------------------


def _rows_here(
    table: Layout, coordinate: Coordinate, weight: torch.Tensor, bags: Bags, mode: int
) -> torch.Tensor:
    """The sum, or the term of the mean, of the rows that this rank owns."""
    if bag_shape.take_table(weight):
        return bag_shape.sums(weight, bags, table.box(coordinate)[0][0], mode)
    if not table.axes_of(0):
        return _on_one_device(weight, bags, mode)
    compact = has_values(bags.ids) and not bags.ids.is_cuda
    sums = (_owned_sums if compact else _masked_sums)(table, coordinate, weight, bags)
    return (sums / bags.sizes() if mode == MODE_MEAN else sums).to(weight.dtype)


def _on_one_device(weight: torch.Tensor, bags: Bags, mode: int) -> torch.Tensor:
    edges = bags.bounds.to(bags.ids.dtype)
    flat = None if bags.weights is None else bags.weights.reshape(-1)
    padding = bags.padding_idx if bags.padding_idx >= 0 else None
    return torch.embedding_bag(
        weight, bags.ids.reshape(-1), edges, False, mode, False, flat, True, padding
    )[0]


def _owned_sums(
    table: Layout, coordinate: Coordinate, weight: torch.Tensor, bags: Bags
) -> torch.Tensor:
    """The sums of the owned rows of each bag, by torch's op on the owned ids."""
    if not weight.shape[0]:
        return weight.new_zeros((bags.num_bags, weight.shape[1]))
    edges = bags.bounds
    rows, places = owned(table, coordinate, bags.ids.reshape(-1), bags.padding_idx)
    flat = None if bags.weights is None else bags.weights.reshape(-1)
    if places is not None:
        edges = torch.searchsorted(places, edges)
        flat = None if flat is None else flat.index_select(0, places)
    edges = edges.to(rows.dtype)
    return torch.embedding_bag(weight, rows, edges, False, MODE_SUM, False, flat, True)[0]


def _masked_sums(
    table: Layout, coordinate: Coordinate, weight: torch.Tensor, bags: Bags
) -> torch.Tensor:
    """As `_owned_sums`, without data-dependent sizes."""
    if type(weight.shape[0]) is int and weight.shape[0] == 0:
        return weight.new_zeros((bags.num_bags, weight.shape[1]))
    row, skipped = bags.rows(table, coordinate)
    found = torch.embedding(weight, row).masked_fill(skipped.unsqueeze(-1), 0)
    if bags.weights is not None:
        found = found * bags.weights.unsqueeze(-1)
    if bags.offsets is None:
        return found.sum(1)
    # Ids after the last bag are added to an extra one, which is dropped.
    sums = weight.new_zeros((bags.num_bags + 1, weight.shape[1]))
    return sums.index_add(0, bags.bag_of(bags.places), found.to(weight.dtype))[: bags.num_bags]


# -- the rule --------------------------------------------------------------------------------

POOLED = LocalCall(_pooled, collective=True)


def _pooled_choices(call: Call) -> Iterator[Choice]:
    return (c for c in _every_pooled_choice(call) if table_stays(call, c))


def _every_pooled_choice(call: Call) -> Iterator[Choice]:
    """Operands: the table, the ids, and where there are any, the offsets and weights."""
    yield Choice(batch_placements(call, (REPLICATE,), REPLICATE), (REPLICATE,), POOLED)
    for sizes in call.splits([(0, 0)]):
        rows = (Shard(0, sizes),)
        if not are_ids_sharded(call):
            yield Choice(batch_placements(call, rows, REPLICATE), (SUM,), POOLED)
        for bags in bag_splits(call, 1):
            batch = Shard(0, bags)
            yield Choice(
                batch_placements(call, rows, batch),
                (batch,),
                POOLED,
                sent=sent(call, "reduce_scatter"),
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


RULES: Table = table(((pooled,), Rule(_pooled_choices, "v d, b ... -> b d")))
