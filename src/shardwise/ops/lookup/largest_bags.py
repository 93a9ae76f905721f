"""Bags pooled by maximum, and their gradient.

With sharded rows, ranks agree on the largest entry of each column, then on the first id that has
it: two all-reduces. The gradient goes to that id alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardwise.comm import collectives
from shardwise.core.layout import Layout
from shardwise.core.mesh import Coordinate
from shardwise.core.placements import REPLICATE, SUM, Placement, Shard
from shardwise.dispatch.notation import linear_choices
from shardwise.dispatch.rule import Call, Choice, CollectiveCost, LocalCall, Rule, Table, table
from shardwise.lookup.ids import check_ids, check_offsets, local_rows
from shardwise.ops.lookup import bag_shape
from shardwise.ops.lookup.bag_grads import columns_and_rows
from shardwise.ops.lookup.bag_rules import (
    are_ids_sharded,
    everywhere,
    num_bytes,
    sent,
    shared_axes,
    with_placement,
)
from shardwise.ops.lookup.bag_shape import (
    Bags,
    Optional,
    bag_splits,
    batch_placements,
    packed,
    unpacked,
)
from shardwise.ops.lookup.embedding_rules import table_stays
from shardwise.redistribute.execute import execute
from shardwise.redistribute.search import find_steps
from shardwise.simulation.ranks import each_rank

# -- the bags --------------------------------------------------------------------------------


def largest(
    weight: torch.Tensor, ids: torch.Tensor, offsets: Optional, padding_idx: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest entry of each bag and column, and the id it is of; 0 and -1 for an empty bag."""
    bags = Bags(ids, offsets, None, padding_idx)
    if weight.is_meta:
        shape = (bags.num_bags, weight.shape[1])
        return weight.new_empty(shape), ids.new_empty(shape)
    found = torch.embedding(weight, ids.reshape(-1))
    return _winners(*_segment_max(found, ids.reshape(-1) == padding_idx, bags), ids)


def _segment_max(
    found: torch.Tensor, skipped: torch.Tensor, bags: Bags
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest value of each bag and column, and its first position.

    `found` has one row for each of the flat ids. A bag without rows is -inf, with the number of ids
    as position.
    """
    num_ids, num_bags, places = found.shape[0], bags.num_bags, bags.places
    bag = bags.bag_of(places).clamp(max=num_bags)
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
    met = shared_axes(table, ids_layout)
    if met:
        ids, ids_layout = everywhere(ids, ids_layout, met)
    check_ids(ids, ids_layout, table.shape[0])
    if offsets is not None:
        check_offsets(offsets, ids.shape[0])

    def here(coordinate: Coordinate, weight: torch.Tensor, *rest: torch.Tensor) -> Any:
        return _rows_here(table, coordinate, weight, unpacked(rest, offsets, None, padding_idx))

    best, place = each_rank(grid, here, weight, *packed(ids, offsets), axes=row_axes)
    if row_axes:
        best, place = _agreed(table, best, place, ids)
    results = each_rank(grid, lambda _, *t: _winners(*t), best, place, ids, axes=())
    if not met:
        return results
    steps = [find_steps(with_placement(lo, met, REPLICATE), lo) for lo in (out, won)]
    values, ids_won = (execute(r, s) for r, s in zip(results, steps, strict=True))
    return values, ids_won


def _rows_here(
    table: Layout, coordinate: Coordinate, weight: torch.Tensor, bags: Bags
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_segment_max`, among the rows that this rank owns."""
    if bag_shape.take_table(weight):
        return bag_shape.largest(weight, bags, table.box(coordinate)[0][0])
    flat = bags.ids.reshape(-1)
    skipped = flat == bags.padding_idx
    if not table.axes_of(0):
        found = torch.embedding(weight, flat)
    elif type(weight.shape[0]) is int and weight.shape[0] == 0:
        found, skipped = weight.new_zeros((flat.shape[0], weight.shape[1])), flat == flat
    else:
        row, foreign = local_rows(table, coordinate, flat)
        found, skipped = torch.embedding(weight, row), skipped | foreign
    return _segment_max(found, skipped, bags)


def _agreed(
    table: Layout, mine: torch.Tensor, place: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of all ranks' entries, and its first position."""

    def stands(_: Coordinate, best: torch.Tensor, mine: torch.Tensor, *rest: Any) -> torch.Tensor:
        return torch.where(best == mine, rest[0], rest[1].numel())

    best = mine
    for axis in table.axes_of(0):
        best = collectives.all_reduce(best, "max", table.grid, axis)
    place = each_rank(table.grid, stands, best, mine, place, ids, axes=())
    for axis in table.axes_of(0):
        place = collectives.all_reduce(place, "min", table.grid, axis)
    return best, place


LARGEST = LocalCall(_largest, collective=True)


def _largest_choices(call: Call) -> Iterator[Choice]:
    return (c for c in _every_largest_choice(call) if table_stays(call, c))


def _every_largest_choice(call: Call) -> Iterator[Choice]:
    """Operands: the table, the ids, and perhaps offsets."""

    def choice(
        first: Placement, batch: Placement, out: Placement, *moved: CollectiveCost
    ) -> Choice:
        return Choice(batch_placements(call, (first,), batch), (out, out), LARGEST, sent=moved)

    yield choice(REPLICATE, REPLICATE, REPLICATE)
    out = call.outputs[0]
    results = [
        CollectiveCost("all_reduce", num_bytes(out.shape, out.dtype)),
        CollectiveCost("all_reduce", num_bytes(out.shape, torch.int64)),
    ]
    for sizes in call.splits([(0, 0)]):
        if not are_ids_sharded(call):
            yield choice(Shard(0, sizes), REPLICATE, REPLICATE, *results)
        for bags in bag_splits(call, 1):
            moved = (*sent(call), *results)
            yield choice(Shard(0, sizes), Shard(0, bags), Shard(0, bags), *moved)
    for sizes in call.splits([(0, 1)]):
        yield choice(Shard(1, sizes), REPLICATE, Shard(1, sizes))
    for bags in bag_splits(call, 1):
        yield choice(REPLICATE, Shard(0, bags), Shard(0, bags))


# -- their gradient --------------------------------------------------------------------------


def largest_grad(grad: torch.Tensor, won: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The gradient of the table: that of a bag's column goes to the id that had the largest."""
    found = grad.new_zeros((num_rows, grad.shape[1]))
    if grad.is_meta:
        return found
    return found.scatter_add_(0, won.clamp(min=0).long(), grad.masked_fill(won < 0, 0))


def _largest_grad(
    layouts: Sequence[Layout], grad: torch.Tensor, won: torch.Tensor, num_rows: int
) -> torch.Tensor:
    table = layouts[-1]

    def here(coordinate: Coordinate, grad: torch.Tensor, won: torch.Tensor) -> torch.Tensor:
        found = grad.new_zeros((table.local_shape(coordinate)[0], grad.shape[1]))
        if type(found.shape[0]) is int and found.shape[0] == 0:
            return found
        row, foreign = local_rows(table, coordinate, won)
        return found.scatter_add(0, row.long(), grad.masked_fill(foreign | (won < 0), 0))

    return each_rank(table.grid, here, grad, won, axes=table.axes_of(0))


LARGEST_GRAD = LocalCall(_largest_grad, collective=True)


def _largest_grad_choices(call: Call) -> Iterator[Choice]:
    """Operands: the gradient of the bags, and the ids that had the largest."""
    yield Choice((REPLICATE, REPLICATE), (REPLICATE,), LARGEST_GRAD)
    for columns, out in columns_and_rows(call):
        yield Choice((columns, columns), (out,), LARGEST_GRAD)
    for bags in call.splits([(0, 0), (1, 0)]):
        yield Choice((Shard(0, bags), Shard(0, bags)), (SUM,), LARGEST_GRAD)
    for choice in linear_choices(call, ((0,),)):
        yield Choice(choice.inputs, choice.outputs, LARGEST_GRAD)


RULES: Table = table(
    ((largest,), Rule(_largest_choices, "v d, b ... -> b d, b d")),
    ((largest_grad,), Rule(_largest_grad_choices, "b d, b d -> v d")),
)
