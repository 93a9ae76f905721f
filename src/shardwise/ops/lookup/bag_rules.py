"""Bags: rows of a table that are looked up and pooled, by sum, mean or maximum; their gradients.

Ids come in two forms. Of shape (bags, ids in each), they may be sharded along the bags, and the
result is sharded like them. In one dim with offsets, they are replicated: where a bag ends is
data-dependent. A row-sharded table gives a Partial, since each rank sums the rows that it owns; ids
that are sharded along the same axis are gathered, and the sums reduce-scattered along the bags.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwise.comm import collectives
from shardwise.core.layout import Layout
from shardwise.core.mesh import Coordinate
from shardwise.core.placements import REPLICATE, SUM
from shardwise.dispatch.rule import (
    Call,
    Choice,
    CollectiveCost,
    LocalCall,
    Rule,
    Table,
    parse,
    pattern_choices,
    table,
)
from shardwise.lookup.ids import check_ids, check_offsets
from shardwise.ops.lookup import rank_bags
from shardwise.ops.lookup.embedding_rules import (
    SparseRows,
    back,
    everywhere,
    first_row,
    gradient_choices,
    lookup_choices,
    shared_axes,
    table_stays,
)
from shardwise.ops.lookup.rank_bags import (
    MODE_MEAN,
    Bags,
    Optional,
    pooled,
    pooled_grad,
    row_grads,
    sample_grad,
)
from shardwise.simulation.ranks import each_rank

# -- sums and means --------------------------------------------------------------------------


def _pooled(
    layouts: Sequence[Layout],
    weight: torch.Tensor,
    ids: torch.Tensor,
    offsets: Optional,
    weights: Optional,
    *options: int,
) -> torch.Tensor:
    table, out = layouts[0], layouts[-1]
    met = shared_axes(table, layouts[1])
    ids, ids_layout = everywhere(ids, layouts[1], met)
    if weights is not None:
        weights, _ = everywhere(weights, layouts[-2], met)
    _check(table, ids, ids_layout, offsets)

    def here(coordinate: Coordinate, *tensors: Any) -> torch.Tensor:
        return pooled(*tensors, *options, first_row(table, coordinate))

    sums = each_rank(table.grid, here, weight, ids, offsets, weights, axes=table.axes_of(0))
    return back(sums, met, SUM, out)


def _check(table: Layout, ids: torch.Tensor, ids_layout: Layout, offsets: Optional) -> None:
    check_ids(ids, ids_layout, table.shape[0])
    if offsets is not None:
        check_offsets(offsets, ids.shape[0])


POOLED = LocalCall(_pooled, collective=True)


def _is_square(call: Call) -> bool:
    """Whether each bag has as many ids: there are no offsets then."""
    return call.inputs[1].ndim == 2


def _pooled_choices(call: Call) -> Iterator[Choice]:
    """Operands: the table, the ids, and where there are any, the offsets and weights."""
    line, linear = "[v] d, [n], [e], [n] -> [b] d", ((0,), (3,))
    if _is_square(call):
        line, linear = f"[v] d, b {_inside(call, 5)}, b l -> b d", ((0,), (2,))
    together = _gathered(call, CollectiveCost("reduce_scatter", _num_bytes(call.outputs[0])))
    return lookup_choices(call, line, POOLED, SUM, linear=linear, together=together)


def _inside(call: Call, mode: int) -> str:
    """The letter of the ids in a bag: those of a mean stay together."""
    return "[l]" if call.args[mode] == MODE_MEAN else "l"


def _gathered(call: Call, *after: CollectiveCost) -> tuple[CollectiveCost, ...]:
    """The collectives where ids are sharded like rows: theirs, and those of their bags."""
    batch = [meta for meta in call.inputs[1:] if meta.ndim == 2]
    return (*(CollectiveCost("all_gather", _num_bytes(meta)) for meta in batch), *after)


def _num_bytes(meta: Any, dtype: torch.dtype | None = None) -> float:
    sizes = (size if type(size) is int else 1024 for size in meta.shape)
    return float(math.prod(sizes) * (dtype or meta.dtype).itemsize)


# -- their gradients -------------------------------------------------------------------------


def sparse_pooled_grad(grad: torch.Tensor, *batch: Any) -> tuple[Any]:
    """As `pooled_grad`; on DTensors, one SparseRows."""
    return (pooled_grad(grad, *batch),)


def _pooled_grad(
    layouts: Sequence[Layout],
    grad: torch.Tensor,
    ids: torch.Tensor,
    offsets: Optional,
    weights: Optional,
    padding_idx: int,
    num_rows: int,
    *options: Any,
    sparse: bool = False,
) -> Any:
    table, compute = layouts[-1], row_grads if sparse else pooled_grad

    def here(coordinate: Coordinate, *tensors: Any) -> Any:
        mine = table.local_shape(coordinate)[0]
        return compute(*tensors, padding_idx, mine, *options, first_row(table, coordinate))

    found = each_rank(table.grid, here, grad, ids, offsets, weights, axes=table.axes_of(0))
    return (SparseRows(table, *found),) if sparse else found


POOLED_GRAD = LocalCall(_pooled_grad, collective=True)
SPARSE_POOLED_GRAD = LocalCall(functools.partial(_pooled_grad, sparse=True), collective=True)


def _pooled_grad_choices(call: Call) -> Iterator[Choice]:
    """Operands: the gradient of the bags, the ids, and where there are any, offsets and weights."""
    line, linear = "[b] d, [n], [e], [n] -> v d", ((0,), (3,))
    if _is_square(call):
        line, linear = f"b d, b {_inside(call, 6)}, b l -> v d", ((0,), (2,))
    local = POOLED_GRAD if call.op is pooled_grad else SPARSE_POOLED_GRAD
    return gradient_choices(call, line, local, linear=linear, by_freq=call.args[7])


def _sample_grad(coordinate: Coordinate, layouts: Sequence[Layout], *args: Any) -> torch.Tensor:
    return sample_grad(*args, first_row(layouts[-2], coordinate))


SAMPLE_GRAD = LocalCall(_sample_grad, per_rank=True)


def _sample_grad_choices(call: Call) -> Iterator[Choice]:
    """Operands: the gradient of the bags, the ids, the offsets if there are any, and the table."""
    line = "b d, b l, v d -> b l" if _is_square(call) else "[b] d, [n], [e], v d -> [n]"
    table = len(call.inputs) - 1
    for choice in table_stays(pattern_choices(parse(line), call, ((0,), (table,))), call, table):
        yield replace(choice, local=SAMPLE_GRAD)


# -- bags pooled by maximum ----------------------------------------------------------------------
# With sharded rows, ranks agree on the largest entry of each column, then on the first id that has
# it: two all-reduces. The gradient goes to that id alone.


def largest(
    weight: torch.Tensor, ids: torch.Tensor, offsets: Optional, padding_idx: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest entry of each bag and column, and the id it is of; 0 and -1 for an empty bag."""
    bags = Bags(ids, offsets, None, padding_idx)
    return _winners(*rank_bags.largest(weight, bags, None), ids)


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
    table, (out, won) = layouts[0], layouts[-2:]
    grid, row_axes = table.grid, table.axes_of(0)
    met = shared_axes(table, layouts[1])
    ids, ids_layout = everywhere(ids, layouts[1], met)
    _check(table, ids, ids_layout, offsets)

    def here(
        coordinate: Coordinate, weight: torch.Tensor, ids: torch.Tensor, offsets: Optional
    ) -> Any:
        bags = Bags(ids, offsets, None, padding_idx)
        return rank_bags.largest(weight, bags, first_row(table, coordinate))

    best, place = each_rank(grid, here, weight, ids, offsets, axes=row_axes)
    if row_axes:
        best, place = _agreed(table, best, place, ids)
    values, ids_won = each_rank(grid, lambda _, *t: _winners(*t), best, place, ids, axes=())
    return back(values, met, REPLICATE, out), back(ids_won, met, REPLICATE, won)


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
    """Operands: the table, the ids, and perhaps offsets."""
    line = "[v] d, b [l] -> b d, b d" if _is_square(call) else "[v] d, [n], [e] -> [b] d, [b] d"
    agreed = tuple(
        CollectiveCost("all_reduce", _num_bytes(call.outputs[0], dtype))
        for dtype in (None, torch.int64)
    )
    together = _gathered(call, *agreed)
    return lookup_choices(
        call, line, LARGEST, REPLICATE, linear=(), alone=agreed, together=together
    )


def largest_grad(
    grad: torch.Tensor, won: torch.Tensor, num_rows: int, first_row: int | None = None
) -> torch.Tensor:
    """The gradient of the table: that of a bag's column goes to the id that had the largest."""
    found = grad.new_zeros((num_rows, grad.shape[1]))
    if type(num_rows) is int and num_rows == 0:
        return found
    shifted = won if first_row is None else won - first_row
    row = shifted.clamp(0, num_rows - 1)
    return found.scatter_add(0, row.long(), grad.masked_fill((shifted != row) | (won < 0), 0))


def _largest_grad(
    coordinate: Coordinate,
    layouts: Sequence[Layout],
    grad: torch.Tensor,
    won: torch.Tensor,
    num_rows: int,
) -> torch.Tensor:
    table = layouts[-1]
    num_rows = table.local_shape(coordinate)[0]
    return largest_grad(grad, won, num_rows, first_row(table, coordinate))


LARGEST_GRAD = LocalCall(_largest_grad, per_rank=True)


def _largest_grad_choices(call: Call) -> Iterator[Choice]:
    """Operands: the gradient of the bags, and the ids that had the largest."""
    return gradient_choices(call, "b d, b d -> v d", LARGEST_GRAD, by_freq=False)


RULES: Table = table(
    ((pooled,), Rule(_pooled_choices, "v d, b ... -> b d")),
    ((pooled_grad, sparse_pooled_grad), Rule(_pooled_grad_choices, "b d, b ... -> v d")),
    ((sample_grad,), Rule(_sample_grad_choices, "b d, b ..., v d -> b ...")),
    ((largest,), Rule(_largest_choices, "v d, b ... -> b d, b d")),
    ((largest_grad,), Rule(_largest_grad_choices, "b d, b d -> v d")),
)
