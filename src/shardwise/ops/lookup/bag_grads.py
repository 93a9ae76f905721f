"""The gradients of lookups and pooled bags, of table and weights; bags pooled by maximum."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwise.comm import collectives
from shardwise.core.layout import Layout
from shardwise.core.mesh import Coordinate
from shardwise.core.placements import REPLICATE, SUM, Placement, Shard
from shardwise.dispatch.rule import (
    Call,
    Choice,
    CollectiveCost,
    LocalCall,
    Rule,
    Table,
    linear_choices,
    table,
)
from shardwise.lookup.ids import check_ids, check_offsets, has_values, local_rows, owned
from shardwise.ops.lookup import bag_rules
from shardwise.ops.lookup.bag_rules import (
    MODE_MEAN,
    MODE_SUM,
    Bags,
    Optional,
    bag_splits,
    batch_placements,
    everywhere,
    inside_splits,
    linear_inputs,
    num_bytes,
    pooled,
    shared_axes,
    table_choices,
    with_placement,
)
from shardwise.ops.lookup.embedding_rules import (
    SparseRows,
    picked_rows,
    times,
)
from shardwise.redistribute.execute import execute
from shardwise.redistribute.steps import find_steps
from shardwise.simulation.ranks import each_rank

aten = torch.ops.aten
# Without the Python method around it, which takes a microsecond.
_dense_backward = aten.embedding_dense_backward.default._op
#: Up to this many ids, torch's CPU kernel is faster than the calls that replace it.
_FEW_IDS = 64

# -- the table -------------------------------------------------------------------------------


def pooled_grad(
    grad: torch.Tensor,
    ids: torch.Tensor,
    offsets: Optional,
    weights: Optional,
    num_rows: int,
    mode: int,
    padding_idx: int,
    by_freq: bool,
    sparse: bool,
) -> Any:
    """The gradient of the table; with `sparse`, on DTensors, as one SparseRows."""
    if grad.is_meta:
        whole = grad.new_empty((num_rows, grad.shape[1]))
    else:
        bags = Bags(ids, offsets, weights, padding_idx)
        whole = _on_one_device(grad, bags, num_rows, mode, by_freq)
    return (whole,) if sparse else whole


def _on_one_device(
    grad: torch.Tensor, bags: Bags, num_rows: int, mode: int, by_freq: bool
) -> torch.Tensor:
    ids, offsets, weights, padding_idx = bags
    with torch.enable_grad():
        table = grad.new_zeros((num_rows, grad.shape[1])).requires_grad_()
        if not by_freq:
            out = pooled(table, ids, offsets, weights, mode, padding_idx)
            return torch.autograd.grad(out, table, grad)[0]
        # Torch's CPU bags divide by the count of another row (2.11 to 2.13); its embedding
        # divides by the right count.
        rows = torch.embedding(table, ids.reshape(-1), padding_idx, True)
        if weights is not None:
            rows = rows * weights.reshape(-1, 1)
        out = grad.new_zeros(grad.shape).index_add(0, bags.bag_of(bags.places), rows)
        if mode == MODE_MEAN:
            out = out / bags.sizes()
        return torch.autograd.grad(out, table, grad)[0]


def _pooled_grad(
    layouts: Sequence[Layout],
    grad: torch.Tensor,
    ids: torch.Tensor,
    offsets: Optional,
    weights: Optional,
    num_rows: int,
    mode: int,
    padding_idx: int,
    by_freq: bool,
    sparse: bool,
) -> Any:
    table = layouts[-1]

    def here(coordinate: Coordinate, grad: torch.Tensor, ids: torch.Tensor, *rest: Optional) -> Any:
        bags = Bags(ids, rest[0], rest[1], padding_idx)
        if bag_rules.take_grad(grad) and not by_freq:
            return _fused_grad(table, coordinate, grad, bags, mode, sparse)
        compute = _row_grads if sparse else _dense_grad
        return compute(table, coordinate, grad, bags, mode, by_freq)

    found = each_rank(table.grid, here, grad, ids, offsets, weights, axes=table.axes_of(0))
    return (SparseRows(table, *found),) if sparse else found


def table_grad(
    layouts: Sequence[Layout],
    grad: torch.Tensor,
    ids: torch.Tensor,
    num_rows: int,
    padding_idx: int,
    by_freq: bool,
    sparse: bool = False,
) -> Any:
    """The gradient of a table whose rows were looked up: of bags of one id each."""
    table = layouts[-1]
    # Torch's CPU kernel takes several times as long as adding rows, except for few ids. The CUDA
    # kernel adds in a fixed order, and the compiler knows it.
    few = type(ids) is torch.Tensor and ids.numel() <= _FEW_IDS
    by_kernel = not sparse and (few or ids.is_cuda or not has_values(ids))
    compute = _row_grads if sparse else _dense_grad

    def here(coordinate: Coordinate, grad: torch.Tensor, ids: torch.Tensor) -> Any:
        if by_kernel:
            return _grad_by_kernel(table, coordinate, grad, ids, padding_idx, by_freq)
        bags = Bags(ids.reshape(-1), None, None, padding_idx)
        flat = grad.reshape(ids.numel(), grad.shape[-1])
        return compute(table, coordinate, flat, bags, MODE_SUM, by_freq)

    found = each_rank(table.grid, here, grad, ids, axes=table.axes_of(0))
    return (SparseRows(table, *found),) if sparse else found


def _fused_grad(
    table: Layout, coordinate: Coordinate, grad: torch.Tensor, bags: Bags, mode: int, sparse: bool
) -> Any:
    if sparse:
        rows, places = _owned_places(table, coordinate, bags, grad.shape[0])
        places = bags.places if places is None else places
        return bag_rules.row_grads(grad, bags, rows, places, mode)
    (first_row, _), (num_rows, _) = table.box(coordinate)
    return bag_rules.table_grad(grad, bags, first_row, num_rows, mode)


def _dense_grad(
    table: Layout, coordinate: Coordinate, grad: torch.Tensor, bags: Bags, mode: int, by_freq: bool
) -> torch.Tensor:
    """The gradient of the rows that this rank owns; no other row is materialised."""
    if not has_values(bags.ids) or bags.ids.is_cuda:
        return _masked_grad(table, coordinate, grad, bags, mode, by_freq)
    rows, values = _row_grads(table, coordinate, grad, bags, mode, by_freq)
    shape = (table.local_shape(coordinate)[0], grad.shape[1])
    return values.new_zeros(shape).index_add_(0, rows, values)


def _row_grads(
    table: Layout, coordinate: Coordinate, grad: torch.Tensor, bags: Bags, mode: int, by_freq: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that this rank owns, maybe with repeats, and the gradient of each."""
    if not has_values(bags.ids):
        return _traced_grads(table, coordinate, grad, bags, mode, by_freq)
    rows, places = _owned_places(table, coordinate, bags, grad.shape[0])
    values = grad
    if places is not None:
        bag = bags.bag_of(places)
        values = grad.index_select(0, bag)
        if bags.weights is not None:
            values = values * bags.weights.reshape(-1).index_select(0, places).unsqueeze(-1)
        if mode == MODE_MEAN:
            values = values / bags.sizes()[bag]
    if by_freq:
        values = values / times(rows).unsqueeze(-1)
    return rows, values.to(grad.dtype)


def _owned_places(
    table: Layout, coordinate: Coordinate, bags: Bags, num_bags: int
) -> tuple[torch.Tensor, Optional]:
    """The local rows of the ids that count, and their positions; None for all, each a bag."""
    rows, places = owned(table, coordinate, bags.ids.reshape(-1), bags.padding_idx)
    if places is None:
        if bags.single:
            return rows, None
        places = bags.places
    if bags.offsets is not None and places.numel() and int(bags.bag_of(places[-1:])) >= num_bags:
        inside = (bags.bag_of(places) < num_bags).nonzero().squeeze(1)
        rows, places = rows[inside], places[inside]
    return rows, places


def _masked_grad(
    table: Layout, coordinate: Coordinate, grad: torch.Tensor, bags: Bags, mode: int, by_freq: bool
) -> torch.Tensor:
    """As `_dense_grad`, without data-dependent sizes."""
    num_rows = table.local_shape(coordinate)[0]
    if any(type(size) is int and size == 0 for size in (num_rows, grad.shape[1])):
        return grad.new_zeros((num_rows, grad.shape[1]))  # torch's kernel fails on CUDA
    row, skipped, values = _values_of_ids(table, coordinate, grad, bags, mode)
    return _grad_of_values(values, row, skipped, num_rows, by_freq)


def _grad_by_kernel(
    table: Layout,
    coordinate: Coordinate,
    grad: torch.Tensor,
    ids: torch.Tensor,
    padding_idx: int,
    by_freq: bool,
) -> torch.Tensor:
    """As `_masked_grad` of bags of one id each, with ids of any shape."""
    num_rows = table.local_shape(coordinate)[0]
    if any(type(size) is int and size == 0 for size in (num_rows, grad.shape[-1])):
        return grad.new_zeros((num_rows, grad.shape[-1]))
    if not table.axes_of(0):
        return _dense_backward(grad, ids, num_rows, padding_idx, by_freq)
    row, skipped = local_rows(table, coordinate, ids)
    if padding_idx >= 0:
        skipped = skipped | (ids == padding_idx)
    return _grad_of_values(grad, row, skipped, num_rows, by_freq)


def _grad_of_values(
    values: torch.Tensor, row: torch.Tensor, skipped: torch.Tensor, num_rows: int, by_freq: bool
) -> torch.Tensor:
    """The sum of values by row; skipped ones add nothing."""
    if by_freq:
        counts = torch.zeros(num_rows, dtype=values.dtype, device=values.device)
        counts = counts.index_add(0, row.reshape(-1), (~skipped).reshape(-1).to(values.dtype))
        values = values / counts[row].clamp(min=1).unsqueeze(-1)
    # Skipped ids become the padding index, which needs no copy of the gradient.
    if not values.is_cuda:
        return _dense_backward(values, row.masked_fill(skipped, -1), num_rows, -1, False)
    # On CUDA the padding index must be a row: an extra one.
    row = row.masked_fill(skipped, num_rows)
    return _dense_backward(values, row, num_rows + 1, num_rows, False)[:num_rows]


def _values_of_ids(
    table: Layout, coordinate: Coordinate, grad: torch.Tensor, bags: Bags, mode: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each id: its local row, whether it is skipped here, and its gradient."""
    row, skipped = bags.rows(table, coordinate)
    if mode == MODE_MEAN:
        grad = grad / bags.sizes()
    if bags.offsets is None:
        length = bags.ids.shape[1:]
        values = grad.unsqueeze(1).expand(-1, *length, -1) if length else grad
    else:
        bag = bags.bag_of(bags.places)
        skipped = skipped | (bag >= grad.shape[0])
        values = grad[bag.clamp(max=grad.shape[0] - 1)]
    if bags.weights is not None:
        values = values * bags.weights.unsqueeze(-1)
    return row, skipped, values


def _traced_grads(
    table: Layout, coordinate: Coordinate, grad: torch.Tensor, bags: Bags, mode: int, by_freq: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_row_grads`, in a traced graph."""
    ids, num_columns = bags.ids.reshape(-1), grad.shape[1]
    if not table.box(coordinate)[1][0]:
        return ids[:0], grad.new_empty((0, num_columns))
    row, skipped, values = _values_of_ids(table, coordinate, grad, bags, mode)
    all_count = not table.axes_of(0) and bags.padding_idx < 0 and bags.offsets is None
    keep = None if all_count else ~skipped.reshape(-1)
    values = values.reshape(ids.shape[0], num_columns).to(grad.dtype)
    return picked_rows(keep, row.reshape(-1), values, by_freq)


POOLED_GRAD = LocalCall(_pooled_grad, collective=True)
TABLE_GRAD = LocalCall(table_grad, collective=True)


def _pooled_grad_choices(call: Call) -> Iterator[Choice]:
    """Operands: the gradient of the bags, the ids, and where there are any, offsets and weights."""
    batches = []
    if not call.args[7]:  # with scale_grad_by_freq a rank would need the counts of all ranks
        splits = [Shard(0, bags) for bags in bag_splits(call, 1)]
        batches = [batch_placements(call, (batch,), batch) for batch in splits]
        if call.args[5] == MODE_SUM:
            insides = [Shard(1, inside) for inside in inside_splits(call, 1)]
            batches += [batch_placements(call, (REPLICATE,), inside) for inside in insides]
    whole = batch_placements(call, (REPLICATE,), REPLICATE)
    return grad_choices(call, POOLED_GRAD, whole, batches, linear_inputs(call))


def lookup_grad_choices(call: Call, local: LocalCall, by_freq: bool) -> Iterator[Choice]:
    """Operands: the gradient of the rows that were looked up, and the ids."""
    batches = []
    if not by_freq:
        for dim in range(call.inputs[1].ndim):
            batches += [(Shard(dim, s), Shard(dim, s)) for s in call.splits([(0, dim), (1, dim)])]
    return grad_choices(call, local, (REPLICATE, REPLICATE), batches, ((0,),))


def _table_grad_choices(call: Call) -> Iterator[Choice]:
    sizes = call.inputs[1].shape
    few = all(type(size) is int for size in sizes) and math.prod(sizes) <= _FEW_IDS
    for choice in lookup_grad_choices(call, TABLE_GRAD, call.args[4]):
        rows_sharded = choice.outputs[0].is_shard(0)
        yield choice if rows_sharded or not few else replace(choice, local=None)


def grad_choices(
    call: Call,
    local: LocalCall,
    whole: tuple[Placement, ...],
    batches: Sequence[tuple[Placement, ...]],
    linear: Sequence[tuple[int, ...]],
    *,
    by_column: bool = False,
) -> Iterator[Choice]:
    """The gradient of a table, from operands that are `whole`, or sharded as one of `batches`.

    The first is the gradient of what was looked up; with `by_column` all have its columns.
    """
    yield Choice(whole, (REPLICATE,), local)
    wanted = call.wanted[0] if call.wanted else None
    last = call.inputs[0].ndim - 1
    columns = call.splits([(0, last)])
    if isinstance(wanted, Shard) and wanted.dim == 0:
        yield Choice(whole, (wanted,), local)
    elif isinstance(wanted, Shard) and wanted.sizes not in columns:
        columns.append(wanted.sizes)
    for sizes in columns:
        split = Shard(last, sizes)
        others = (split,) * (len(whole) - 1) if by_column else whole[1:]
        yield Choice((split, *others), (Shard(1, sizes),), local)
    for batch in batches:
        yield Choice(batch, (SUM,), local)
    for choice in linear_choices(call, linear):
        yield Choice(choice.inputs, choice.outputs, local)


# -- the per-sample weights ------------------------------------------------------------------


def sample_grad(
    grad: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    offsets: Optional,
    padding_idx: int,
) -> torch.Tensor:
    """The gradient of the per-sample weights: each row's dot product with its bag's gradient."""
    if grad.is_meta:
        return grad.new_empty(ids.shape)
    with torch.enable_grad():
        weights = grad.new_ones(ids.shape).requires_grad_()
        out = pooled(weight.detach(), ids, offsets, weights, MODE_SUM, padding_idx)
        (found,) = torch.autograd.grad(out, weights, grad)
    return found


def _sample_grad(
    layouts: Sequence[Layout],
    grad: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    offsets: Optional,
    padding_idx: int,
) -> torch.Tensor:
    table = layouts[1]

    def here(
        coordinate: Coordinate, grad: torch.Tensor, weight: torch.Tensor, *batch: Any
    ) -> torch.Tensor:
        bags = Bags(batch[0], batch[1], None, padding_idx)
        return _along_rows(table, coordinate, grad, weight, bags)

    return each_rank(table.grid, here, grad, weight, ids, offsets, axes=table.axes_of(0))


def _along_rows(
    table: Layout, coordinate: Coordinate, grad: torch.Tensor, weight: torch.Tensor, bags: Bags
) -> torch.Tensor:
    """The dot products of the rows that this rank owns with their bags' gradients."""
    if bag_rules.take_table(weight):
        return bag_rules.sample_grad(grad, weight, bags, table.box(coordinate)[0][0])
    if type(weight.shape[0]) is int and weight.shape[0] == 0:
        return grad.new_zeros(bags.ids.shape)
    row, skipped = bags.rows(table, coordinate)
    if bags.offsets is None:
        upstream = grad.unsqueeze(1)
    else:
        bag = bags.bag_of(bags.places)
        skipped = skipped | (bag >= grad.shape[0])
        # An extra bag for ids after the last.
        upstream = torch.nn.functional.pad(grad, (0, 0, 0, 1))[bag]
    along = (torch.embedding(weight, row) * upstream).sum(-1)
    return along.masked_fill(skipped, 0)


SAMPLE_GRAD = LocalCall(_sample_grad, collective=True)


def _sample_grad_choices(call: Call) -> Iterator[Choice]:
    """Operands: the gradient of the bags, the table, the ids, and the offsets if there are any."""
    for choice in _every_sample_grad_choice(call):
        if not call.placed or not call.placed[1].is_shard() or choice.inputs[1] == call.placed[1]:
            yield choice


def _every_sample_grad_choice(call: Call) -> Iterator[Choice]:
    def choice(grad: Placement, weight: Placement, ids: Placement, out: Placement) -> Choice:
        return Choice(batch_placements(call, (grad, weight), ids), (out,), SAMPLE_GRAD)

    yield choice(REPLICATE, REPLICATE, REPLICATE, REPLICATE)
    for sizes in call.splits([(1, 0)]):
        yield choice(REPLICATE, Shard(0, sizes), REPLICATE, SUM)
    for sizes in call.splits([(0, 1), (1, 1)]):
        yield choice(Shard(1, sizes), Shard(1, sizes), REPLICATE, SUM)
    for bags in bag_splits(call, 2):
        yield choice(Shard(0, bags), REPLICATE, Shard(0, bags), Shard(0, bags))
    for inside in inside_splits(call, 2):
        yield choice(REPLICATE, REPLICATE, Shard(1, inside), Shard(1, inside))
    for linear in linear_choices(call, ((0,), (1,))):
        yield Choice(linear.inputs, linear.outputs, SAMPLE_GRAD)


# -- bags pooled by maximum ----------------------------------------------------------------------
# With sharded rows, ranks agree on the largest entry of each column, then on the first id that has
# it: two all-reduces. The gradient goes to that id alone.


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

    def here(coordinate: Coordinate, weight: torch.Tensor, *batch: Any) -> Any:
        bags = Bags(batch[0], batch[1], None, padding_idx)
        return _rows_here(table, coordinate, weight, bags)

    best, place = each_rank(grid, here, weight, ids, offsets, axes=row_axes)
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
    if bag_rules.take_table(weight):
        return bag_rules.largest(weight, bags, table.box(coordinate)[0][0])
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
    """Operands: the table, the ids, and perhaps offsets."""
    out = call.outputs[0]
    agreed = tuple(
        CollectiveCost("all_reduce", num_bytes(out.shape, dtype))
        for dtype in (out.dtype, torch.int64)
    )
    return table_choices(call, LARGEST, REPLICATE, alone=agreed, together=agreed)


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
    batches = [(Shard(0, bags), Shard(0, bags)) for bags in call.splits([(0, 0), (1, 0)])]
    whole = (REPLICATE, REPLICATE)
    return grad_choices(call, LARGEST_GRAD, whole, batches, ((0,),), by_column=True)


RULES: Table = table(
    ((aten.embedding_dense_backward.default,), Rule(_table_grad_choices, "... d, ... -> v d")),
    ((pooled_grad,), Rule(_pooled_grad_choices, "b d, b ... -> v d")),
    ((sample_grad,), Rule(_sample_grad_choices, "b d, v d, b ... -> b ...")),
    ((largest,), Rule(_largest_choices, "v d, b ... -> b d, b d")),
    ((largest_grad,), Rule(_largest_grad_choices, "b d, b d -> v d")),
)
