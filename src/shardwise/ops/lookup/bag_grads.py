"""The gradients of pooled bags: of the table, and of the per-sample weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardwise.core.layout import Layout
from shardwise.core.mesh import Coordinate
from shardwise.core.placements import REPLICATE, SUM, Placement, Shard
from shardwise.dispatch.notation import linear_choices
from shardwise.dispatch.rule import Call, Choice, LocalCall, Rule, Table, table
from shardwise.lookup.ids import has_values, owned
from shardwise.ops.lookup import bag_shape
from shardwise.ops.lookup.bag_rules import pooled
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
from shardwise.ops.lookup.embedding_rules import SparseRows, grad_of_rows, picked_rows, times
from shardwise.simulation.ranks import each_rank

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
    if sparse:
        compute: Any = _owned_grads if has_values(ids) else _traced_grads
    else:
        compute = _dense_grad

    def here(coordinate: Coordinate, grad: torch.Tensor, *rest: torch.Tensor) -> Any:
        bags = unpacked(rest, offsets, weights, padding_idx)
        return compute(table, coordinate, grad, bags, mode, by_freq)

    operands = packed(grad, ids, offsets, weights)
    found = each_rank(table.grid, here, *operands, axes=table.axes_of(0))
    return (SparseRows(table, *found),) if sparse else found


def _dense_grad(
    table: Layout, coordinate: Coordinate, grad: torch.Tensor, bags: Bags, mode: int, by_freq: bool
) -> torch.Tensor:
    """The gradient of the rows that this rank owns."""
    if bag_shape.take_grad(grad) and not by_freq:
        (first_row, _), (num_rows, _) = table.box(coordinate)
        return bag_shape.table_grad(grad, bags, first_row, num_rows, mode)
    if not has_values(bags.ids) or bags.ids.is_cuda:
        return _masked_grad(table, coordinate, grad, bags, mode, by_freq)
    rows, values = _owned_grads(table, coordinate, grad, bags, mode, by_freq)
    shape = (table.local_shape(coordinate)[0], grad.shape[1])
    return values.new_zeros(shape).index_add_(0, rows, values)


def _owned_grads(
    table: Layout, coordinate: Coordinate, grad: torch.Tensor, bags: Bags, mode: int, by_freq: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that this rank owns, maybe with repeats, and the gradient of each."""
    rows, places = owned(table, coordinate, bags.ids.reshape(-1), bags.padding_idx)
    if places is None:
        places = bags.places
    bag = bags.bag_of(places)
    if bags.offsets is not None and bag.numel() and int(bag[-1]) >= grad.shape[0]:
        inside = (bag < grad.shape[0]).nonzero().squeeze(1)
        rows, places, bag = rows[inside], places[inside], bag[inside]
    if bag_shape.take_grad(grad) and not by_freq:
        return bag_shape.row_grads(grad, bags, rows, places, mode)
    values = grad.index_select(0, bag)
    if bags.weights is not None:
        values = values * bags.weights.reshape(-1).index_select(0, places).unsqueeze(-1)
    if mode == MODE_MEAN:
        values = values / bags.sizes()[bag]
    if by_freq:
        values = values / times(rows).unsqueeze(-1)
    return rows, values.to(grad.dtype)


def _masked_grad(
    table: Layout, coordinate: Coordinate, grad: torch.Tensor, bags: Bags, mode: int, by_freq: bool
) -> torch.Tensor:
    """As `_dense_grad`, without data-dependent sizes."""
    num_rows = table.local_shape(coordinate)[0]
    if any(type(size) is int and size == 0 for size in (num_rows, grad.shape[1])):
        return grad.new_zeros((num_rows, grad.shape[1]))
    row, skipped, values = _values_of_ids(table, coordinate, grad, bags, mode)
    if by_freq:
        counts = torch.zeros(num_rows, dtype=grad.dtype, device=grad.device)
        counts = counts.index_add(0, row.reshape(-1), (~skipped).reshape(-1).to(grad.dtype))
        values = values / counts[row].clamp(min=1).unsqueeze(-1)
    return grad_of_rows(values, row, skipped, num_rows)


def _values_of_ids(
    table: Layout, coordinate: Coordinate, grad: torch.Tensor, bags: Bags, mode: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each id: its local row, whether it is skipped here, and its gradient."""
    row, skipped = bags.rows(table, coordinate)
    if mode == MODE_MEAN:
        grad = grad / bags.sizes()
    if bags.offsets is None:
        values = grad.unsqueeze(1).expand(-1, bags.ids.shape[1], -1)
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
    """As `_owned_grads`, in a traced graph."""
    ids, num_columns = bags.ids.reshape(-1), grad.shape[1]
    if not table.box(coordinate)[1][0]:
        return ids[:0], grad.new_empty((0, num_columns))
    row, skipped, values = _values_of_ids(table, coordinate, grad, bags, mode)
    all_count = not table.axes_of(0) and bags.padding_idx < 0 and bags.offsets is None
    keep = None if all_count else ~skipped.reshape(-1)
    values = values.reshape(ids.shape[0], num_columns).to(grad.dtype)
    return picked_rows(keep, row.reshape(-1), values, by_freq)


POOLED_GRAD = LocalCall(_pooled_grad, collective=True)


def _pooled_grad_choices(call: Call) -> Iterator[Choice]:
    """Operands: the gradient of the bags, the ids, and where there are any, offsets and weights."""
    whole = batch_placements(call, (REPLICATE,), REPLICATE)
    yield Choice(whole, (REPLICATE,), POOLED_GRAD)
    for columns, out in columns_and_rows(call):
        yield Choice((columns, *whole[1:]), (out,), POOLED_GRAD)
    if not call.args[7]:  # with scale_grad_by_freq a rank would need the counts of all ranks
        for bags in bag_splits(call, 1):
            batch = Shard(0, bags)
            yield Choice(batch_placements(call, (batch,), batch), (SUM,), POOLED_GRAD)
        if call.args[5] == MODE_SUM:
            for inside in inside_splits(call, 1):
                yield Choice(
                    batch_placements(call, (REPLICATE,), Shard(1, inside)), (SUM,), POOLED_GRAD
                )
    for choice in linear_choices(call, linear_inputs(call)):
        yield Choice(choice.inputs, choice.outputs, POOLED_GRAD)


def columns_and_rows(call: Call) -> Iterator[tuple[Placement, Placement]]:
    """Placements of the bags' gradient, and of the table's gradient without a reduction."""
    wanted = call.wanted[0] if call.wanted else None
    splits = call.splits([(0, 1)])
    if isinstance(wanted, Shard) and wanted.dim == 0:
        yield REPLICATE, wanted
    elif isinstance(wanted, Shard) and wanted.sizes not in splits:
        splits.append(wanted.sizes)
    for sizes in splits:
        yield Shard(1, sizes), Shard(1, sizes)


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
        coordinate: Coordinate, grad: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor
    ) -> torch.Tensor:
        bags = unpacked(rest, offsets, None, padding_idx)
        return _along_rows(table, coordinate, grad, weight, bags)

    return each_rank(table.grid, here, grad, weight, *packed(ids, offsets), axes=table.axes_of(0))


def _along_rows(
    table: Layout, coordinate: Coordinate, grad: torch.Tensor, weight: torch.Tensor, bags: Bags
) -> torch.Tensor:
    """The dot products of the rows that this rank owns with their bags' gradients."""
    if bag_shape.take_table(weight):
        return bag_shape.sample_grad(grad, weight, bags, table.box(coordinate)[0][0])
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


RULES: Table = table(
    ((pooled_grad,), Rule(_pooled_grad_choices, "b d, b ... -> v d")),
    ((sample_grad,), Rule(_sample_grad_choices, "b d, v d, b ... -> b ...")),
)
