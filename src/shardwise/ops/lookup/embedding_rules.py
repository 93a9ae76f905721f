"""Rules of lookups and of their gradients; lookups of one rank, and rows scaled to a maximal norm.

Rows may be sharded: a rank then looks up the ids that it owns and returns zeros for the others,
so that the ranks' results add up. Columns may be sharded: the result is sharded alike. The ids may
be sharded along any dim if the table is whole; where both are sharded, see `embedding`.

A table that is sharded stays where it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from shardwise.core.layout import Layout
from shardwise.core.mesh import Coordinate
from shardwise.core.placements import REPLICATE, MaskPartial, Placement, Shard
from shardwise.dispatch.rule import (
    Call,
    Choice,
    CollectiveCost,
    Group,
    LocalCall,
    Rule,
    Table,
    parse,
    pattern_choices,
    table,
)
from shardwise.lookup.ids import check_ids, has_values, local_rows
from shardwise.ops.lookup.rank_bags import MODE_SUM, Bags, pooled_grad, row_grads, scale_rows
from shardwise.redistribute.execute import execute
from shardwise.redistribute.steps import find_steps
from shardwise.simulation.ranks import each_rank

aten = torch.ops.aten
# Without the Python method around it, which takes a microsecond.
_dense_backward = aten.embedding_dense_backward.default._op
#: Up to this many ids, torch's CPU kernel is faster than the calls that replace it.
_FEW_IDS = 64
#: From this many ids on, selecting the owned ones is faster than reading a row for each.
_MANY_IDS = 1024

# -- choices ---------------------------------------------------------------------------------
# A line of the notation says how ids, columns and bags may be sharded; the rows of a table, its
# letter v, are one dim that a rank may have a part of without the line saying so: it looks up its
# own, or makes the gradient of its own.


def table_stays(choices: Iterable[Choice], call: Call, number: int = 0) -> Iterator[Choice]:
    """Those that do not move the table, which is this input, if it is sharded; ids may move."""
    placed = call.placed[number] if call.placed else REPLICATE
    return (c for c in choices if not placed.is_shard() or c.inputs[number] == placed)


def lookup_choices(
    call: Call,
    line: str,
    local: LocalCall,
    of_rows: Placement,
    *,
    linear: Sequence[Group] = ((0,),),
    alone: tuple[CollectiveCost, ...] = (),
    together: tuple[CollectiveCost, ...] | None = None,
) -> Iterator[Choice]:
    """Operands: the table, the ids, and what else a batch has.

    Ranks that have some rows give `of_rows`, after the collectives `alone`. Where ids are sharded
    too, the result lies as they do, after the collectives `together`; None if that cannot be.
    """

    def of(rows: Placement, batch: Choice, out: Placement, sent: Any) -> Choice:
        inputs = (rows, *batch.inputs[1:])
        return Choice(inputs, (out,) * len(call.outputs), local, sent=sent)

    def every() -> Iterator[Choice]:
        whole, *others = pattern_choices(parse(line), call, linear)
        yield replace(whole, local=local)
        ids_sharded = bool(call.placed) and call.placed[1].is_shard()
        batches = [c for c in others if c.inputs[1].is_shard() and c.outputs[0].is_shard()]
        for sizes in call.splits([(0, 0)]):
            rows = Shard(0, sizes)
            if together is None or not ids_sharded or not batches:
                yield of(rows, whole, of_rows, alone)
            if together is not None:
                for batch in batches:
                    yield of(rows, batch, batch.outputs[0], together)
        for choice in others:
            yield replace(choice, local=local)

    return table_stays(every(), call)


def gradient_choices(
    call: Call,
    line: str,
    local: LocalCall,
    *,
    linear: Sequence[Group] = ((0,),),
    by_freq: bool,
) -> Iterator[Choice]:
    """Operands: the gradient of what was looked up, the ids, and what else a batch has.

    Each rank can make the gradient of the rows that it is preferred to have. With `by_freq` that is
    scaled by how often an id occurs on all ranks: the batch is not sharded.
    """
    reduce_op = None if by_freq else "sum"
    whole, *others = pattern_choices(parse(line), call, linear, reduce_op=reduce_op)
    yield replace(whole, local=local)
    for rows in call.wanted[:1]:
        if rows.is_shard(0):
            yield Choice(whole.inputs, (rows,), local)
    for choice in others:
        yield replace(choice, local=local)


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
    if not axes:
        return x, layout
    target = with_placement(layout, axes, REPLICATE)
    return execute(x, find_steps(layout, target)), target


def back(x: torch.Tensor, axes: Sequence[int], held: Placement, out: Layout) -> torch.Tensor:
    """A result that has the placement `held` over these axes, in the layout `out`."""
    return execute(x, find_steps(with_placement(out, axes, held), out)) if axes else x


def first_row(table: Layout, coordinate: Coordinate) -> Any:
    """The first row of a rank that may have only some."""
    return table.box(coordinate)[0][0] if table.axes_of(0) else None


# -- the lookup ------------------------------------------------------------------------------


def lookup(
    layouts: Sequence[Layout], weight: torch.Tensor, ids: torch.Tensor, *_: Any
) -> torch.Tensor:
    """The rows that this rank owns, and zeros for those of others."""
    table = layouts[0]
    check_ids(ids, layouts[1], table.shape[0])
    row_axes = table.axes_of(0)

    def here(coordinate: Coordinate, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if row_axes:
            return _owned_lookup(table, coordinate, weight, ids)
        return torch.embedding(weight, ids)

    return each_rank(table.grid, here, weight, ids, axes=row_axes)


def _owned_lookup(
    table: Layout, coordinate: Coordinate, weight: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    if weight.shape[0] == 0:
        return weight.new_zeros((*ids.shape, weight.shape[1]))
    if type(ids) is torch.Tensor and ids.is_cpu and ids.numel() >= _MANY_IDS:
        bags = Bags(ids.reshape(-1), None, None, -1)
        rows, places = bags.found(weight.shape[0], first_row(table, coordinate))
        assert places is not None, "rows of this table are sharded"
        found = weight.new_zeros((ids.numel(), weight.shape[1]))
        found.index_copy_(0, places, weight.index_select(0, rows))
        return found.view(*ids.shape, weight.shape[1])
    row, foreign = local_rows(table, coordinate, ids)
    return torch.embedding(weight, row).masked_fill_(foreign.unsqueeze(-1), 0)


LOOKUP = LocalCall(lookup, collective=True)
ROWS = "[v] d, ... -> ... d"


def _lookup_choices(call: Call) -> Iterator[Choice]:
    """The op itself, unless rows are of others, or ids are out of range on some ranks only."""
    for choice in lookup_choices(call, ROWS, LOOKUP, mask_partial(call)):
        checks = choice.inputs[0].is_shard(0) or choice.inputs[1].is_shard()
        yield choice if checks else replace(choice, local=None)


def mask_partial(call: Call) -> MaskPartial:
    weight = call.inputs[0]
    known = all(type(s) is int for s in weight.shape)
    return MaskPartial(logical_shape=tuple(weight.shape) if known else (), logical_dim=0)


# -- its gradient ----------------------------------------------------------------------------


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

    def here(coordinate: Coordinate, grad: torch.Tensor, ids: torch.Tensor) -> Any:
        if by_kernel:
            return _grad_by_kernel(table, coordinate, grad, ids, padding_idx, by_freq)
        grad, ids = grad.reshape(ids.numel(), grad.shape[-1]), ids.reshape(-1)
        compute = row_grads if sparse else pooled_grad
        options = (table.local_shape(coordinate)[0], MODE_SUM, by_freq)
        return compute(grad, ids, None, None, padding_idx, *options, first_row(table, coordinate))

    found = each_rank(table.grid, here, grad, ids, axes=table.axes_of(0))
    return (SparseRows(table, *found),) if sparse else found


def _grad_by_kernel(
    table: Layout,
    coordinate: Coordinate,
    grad: torch.Tensor,
    ids: torch.Tensor,
    padding_idx: int,
    by_freq: bool,
) -> torch.Tensor:
    """The gradient of the rows that this rank owns, by torch's kernel."""
    num_rows = table.local_shape(coordinate)[0]
    if any(type(size) is int and size == 0 for size in (num_rows, grad.shape[-1])):
        return grad.new_zeros((num_rows, grad.shape[-1]))  # it fails on CUDA
    if not table.axes_of(0):
        return _dense_backward(grad, ids, num_rows, padding_idx, by_freq)
    row, skipped = local_rows(table, coordinate, ids)
    if padding_idx >= 0:
        skipped = skipped | (ids == padding_idx)
    # Skipped ids become the padding index, which needs no copy of the gradient.
    if not grad.is_cuda and not by_freq:
        return _dense_backward(grad, row.masked_fill(skipped, -1), num_rows, -1, False)
    # On CUDA, and where rows are counted, the padding index must be a row: an extra one.
    row = row.masked_fill(skipped, num_rows)
    return _dense_backward(grad, row, num_rows + 1, num_rows, by_freq)[:num_rows]


TABLE_GRAD = LocalCall(table_grad, collective=True)


def _table_grad_choices(call: Call) -> Iterator[Choice]:
    sizes = call.inputs[1].shape
    few = all(type(size) is int for size in sizes) and math.prod(sizes) <= _FEW_IDS
    for choice in lookup_grad_choices(call, TABLE_GRAD):
        rows_sharded = choice.outputs[0].is_shard(0)
        yield choice if rows_sharded or not few else replace(choice, local=None)


def lookup_grad_choices(call: Call, local: LocalCall) -> Iterator[Choice]:
    """Operands: the gradient of the rows that were looked up, and the ids."""
    return gradient_choices(call, "... d, ... -> v d", local, by_freq=call.args[4])


class SparseRows(NamedTuple):
    """Local row numbers, with repeats, and one row of values for each; all other rows are zero."""

    layout: Layout
    rows: torch.Tensor
    values: torch.Tensor

    def dense(self) -> torch.Tensor:
        """The same values as a dense shard of the table."""
        layout = self.layout

        def here(coordinate: Coordinate, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return values.new_zeros(layout.local_shape(coordinate)).index_add_(0, rows, values)

        axes = tuple(a for a, p in enumerate(layout.placements) if p.is_shard())
        return each_rank(layout.grid, here, self.rows, self.values, axes=axes)


# -- rows of a maximal norm ------------------------------------------------------------------


def renorm(
    layouts: Sequence[Layout],
    weight: torch.Tensor,
    ids: torch.Tensor,
    max_norm: float,
    norm_type: float,
) -> torch.Tensor:
    """Scale down the rows of the ids that this rank owns, in place."""
    table = layouts[0]
    check_ids(ids, layouts[1], table.shape[0])

    def here(coordinate: Coordinate, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows = ids.reshape(-1), None, None, -1
        scale_rows(weight, *rows, max_norm, norm_type, first_row(table, coordinate))
        return weight

    with torch.no_grad():
        each_rank(table.grid, here, weight, ids, axes=table.axes_of(0))
    return weight


RENORM = LocalCall(renorm, collective=True)
_NORMS = "v [d], ... -> v [d]"


def _renorm_choices(call: Call) -> Iterator[Choice]:
    """Operands: the table, which is written to, and the ids. A norm needs all columns of a row."""
    for choice in pattern_choices(parse(_NORMS), call, reduce_op=None):
        yield replace(choice, local=RENORM)


RULES: Table = table(
    ((aten.embedding.default,), Rule(_lookup_choices, ROWS)),
    ((aten.embedding_dense_backward.default,), Rule(_table_grad_choices, "... d, ... -> v d")),
    ((aten.embedding_renorm_.default,), Rule(_renorm_choices, _NORMS)),
)
