"""Rules of lookups, of bags and of their gradients; what runs on each rank.

A table's rows may be sharded: a rank looks up the ids that it owns, and the ranks' results add up.
Its columns may be sharded: the result is sharded alike. A table that is sharded stays where it is.

Ids come in three forms. A lookup gives a row for each, of any shape, sharded as they are. Bags are
of shape (bags, ids in each), which may be sharded along the bags, or flat with offsets; flat ids
are replicated, since where a bag ends is data-dependent. Where one axis shards both the rows and
the ids, ids are gathered, and results scattered to where the ids lie; see also `embedding`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from shardwise.comm import collectives
from shardwise.core.layout import Layout
from shardwise.core.mesh import Coordinate
from shardwise.core.placements import REPLICATE, SUM, MaskPartial, Placement, Shard
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
from shardwise.lookup.ids import check_offsets, checked_ids, has_values, sharded_axes
from shardwise.ops.lookup import rank_bags
from shardwise.ops.lookup.rank_bags import Bags, Optional, pooled, pooled_grad, sample_grad
from shardwise.redistribute.execute import Run, execute, prepare
from shardwise.redistribute.steps import find_steps
from shardwise.simulation.ranks import each_rank, rank_call

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


def _table_stays(choices: Iterable[Choice], call: Call, number: int = 0) -> Iterator[Choice]:
    """Those that do not move the table, which is this input, if it is sharded; ids may move."""
    placed = call.placed[number] if call.placed else REPLICATE
    return (c for c in choices if not placed.is_shard() or c.inputs[number] == placed)


def _run_by(local: LocalCall, choices: Iterable[Choice]) -> Iterator[Choice]:
    return (replace(choice, local=local) for choice in choices)


def lookup_choices(
    call: Call,
    line: str,
    local: LocalCall,
    of_rows: Placement,
    *,
    linear: Sequence[Group] = ((0,),),
    alone: tuple[CollectiveCost, ...] = (),
    together: tuple[CollectiveCost, ...],
) -> Iterator[Choice]:
    """Operands: the table, the ids, and what else a batch has.

    Ranks that have some rows give `of_rows`, after the collectives `alone`. Where ids are sharded
    too, the result lies as they do, after the collectives `together`.
    """
    whole, *others = pattern_choices(parse(line), call, linear)
    ids_sharded = bool(call.placed) and call.placed[1].is_shard()
    batches = [c for c in others if c.inputs[1].is_shard() and c.outputs[0].is_shard()]
    ways = [(batch, batch.outputs[0], together) for batch in batches]
    if not ids_sharded or not batches:
        ways.insert(0, (whole, of_rows, alone))
    by_rows = [
        Choice((Shard(0, sizes), *batch.inputs[1:]), (out,) * len(call.outputs), sent=sent)
        for sizes in call.splits([(0, 0)])
        for batch, out, sent in ways
    ]
    return _table_stays(_run_by(local, (whole, *by_rows, *others)), call)


def _gradient_choices(
    call: Call,
    line: str,
    local: LocalCall,
    *,
    linear: Sequence[Group] = ((0,),),
    by_freq: bool = False,
) -> Iterator[Choice]:
    """Operands: the gradient of what was looked up, the ids, and what else a batch has.

    Each rank can make the gradient of the rows that it is preferred to have. With `by_freq` that is
    scaled by how often an id occurs on all ranks: the batch is not sharded.
    """
    reduce_op = None if by_freq else "sum"
    whole, *others = pattern_choices(parse(line), call, linear, reduce_op=reduce_op)
    of_rows = [replace(whole, outputs=(rows,)) for rows in call.wanted[:1] if rows.is_shard(0)]
    return _run_by(local, (whole, *of_rows, *others))


def _gathering(call: Call, *after: CollectiveCost) -> tuple[CollectiveCost, ...]:
    """The collectives where ids are sharded like rows: the batch's, and `after`, or of sums."""
    batch = (CollectiveCost("all_gather", _num_bytes(meta)) for meta in call.inputs[1:])
    return *batch, *(after or (CollectiveCost("reduce_scatter", _num_bytes(call.outputs[0])),))


def _num_bytes(meta: Any) -> float:
    sizes = (size if type(size) is int else 1024 for size in meta.shape)
    return float(math.prod(sizes) * meta.dtype.itemsize)


# -- lookups ---------------------------------------------------------------------------------


def _with_placement(layout: Layout, axes: Sequence[int], placement: Placement) -> Layout:
    if not axes:
        return layout
    placements = list(layout.placements)
    for axis in axes:
        placements[axis] = placement
    return layout.with_placements(tuple(placements))


def _met_axes(layouts: Sequence[Layout]) -> list[int]:
    """The axes that shard both the rows and the ids."""
    table, ids = layouts[:2]
    return [axis for axis in table.axes_of(0) if ids.placements[axis].is_shard()]


def _all_ids(layouts: Sequence[Layout], met: Sequence[int]) -> Run:
    """A function that gathers the ids along these axes, and checks them."""
    table, ids = layouts[:2]
    everywhere = _with_placement(ids, met, REPLICATE)
    check = checked_ids(everywhere, table.shape[0])
    if not met:
        return check
    gather = prepare(find_steps(ids, everywhere))
    return lambda x: check(gather(x))


def _back(met: Sequence[int], held: Placement, out: Layout) -> Run:
    """A function that brings a result with the placement `held` on these axes to this layout."""
    return prepare(find_steps(_with_placement(out, met, held), out))


def _own(table: Layout, coordinate: Coordinate) -> tuple[Any, Any]:
    """The first row of a rank, None where it has all rows; and how many it has."""
    offset, (num_rows, *_) = table.box(coordinate)
    has_all = not table.axes_of(0) or (not table.symbolic and num_rows == table.shape[0])
    return None if has_all else offset[0], num_rows


def _by_owners(table: Layout, fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs `fn(*args, first_row)` on each rank."""

    def of_rank(coordinate: Coordinate) -> Callable[..., Any]:
        first_row, _ = _own(table, coordinate)
        return lambda *args: fn(*args, first_row)

    return rank_call(table.grid, of_rank, table.axes_of(0))


def lookup(layouts: Sequence[Layout]) -> Callable[..., torch.Tensor]:
    """The rows that each rank owns, and zeros for those of others."""
    table, met = layouts[0], _met_axes(layouts)
    all_ids, back = _all_ids(layouts, met), _back(met, SUM, layouts[-1])
    own_rows = rank_call(table.grid, functools.partial(_own_rows, table), table.axes_of(0))
    return lambda weight, ids, *_: back(own_rows(weight, all_ids(ids)))


def _own_rows(table: Layout, coordinate: Coordinate) -> Callable[..., torch.Tensor]:
    first_row, _ = _own(table, coordinate)
    if first_row is None:
        return torch.embedding

    def look_up(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        num_rows = weight.shape[0]
        if num_rows == 0:
            return weight.new_zeros((*ids.shape, weight.shape[1]))
        if type(ids) is torch.Tensor and ids.is_cpu and ids.numel() >= _MANY_IDS:
            rows, places = Bags(ids, None, None, -1).found(num_rows, first_row)
            assert places is not None, "rows of this table are sharded"
            found = weight.new_zeros((ids.numel(), weight.shape[1]))
            found.index_copy_(0, places, weight.index_select(0, rows))
            return found.view(*ids.shape, weight.shape[1])
        fused = rank_bags.fused_backend(weight)
        if fused is not None:  # in one pass
            query = Bags(ids.reshape(-1, 1), None, None, -1).fused_query(first_row)
            return fused.look_up(weight, query).view(*ids.shape, weight.shape[1])
        row, foreign = _own_row(ids, first_row, num_rows)
        return torch.embedding(weight, row).masked_fill_(foreign.unsqueeze(-1), 0)

    return look_up


def _own_row(ids: torch.Tensor, first_row: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The local row of each id, and which ids another rank owns (their row is arbitrary)."""
    shifted = ids - first_row
    row = shifted.clamp(0, num_rows - 1)
    return row, shifted != row


ROWS = "[v] d, ... -> ... d"


def _lookup_choices(call: Call) -> Iterator[Choice]:
    """The op itself, unless rows are of others, or ids are out of range on some ranks only."""
    local, of_rows = LocalCall(lookup, collective=True), mask_partial(call)
    for choice in lookup_choices(call, ROWS, local, of_rows, together=_gathering(call)):
        checks = choice.inputs[0].is_shard(0) or choice.inputs[1].is_shard()
        yield choice if checks else replace(choice, local=None)


def mask_partial(call: Call) -> MaskPartial:
    weight = call.inputs[0]
    known = all(type(s) is int for s in weight.shape)
    return MaskPartial(logical_shape=tuple(weight.shape) if known else (), logical_dim=0)


# -- bags ------------------------------------------------------------------------------------


def _is_square(call: Call) -> bool:
    """Whether each bag has as many ids: there are no offsets then."""
    return call.inputs[1].ndim == 2


def _inside(call: Call, mode: int) -> str:
    """The letter of the ids in a bag: those of a mean stay together."""
    return "[l]" if call.args[mode] == rank_bags.MODE_MEAN else "l"


def _pooled(layouts: Sequence[Layout]) -> Callable[..., torch.Tensor]:
    table, met = layouts[0], _met_axes(layouts)
    all_ids, back = _all_ids(layouts, met), _back(met, SUM, layouts[-1])
    sums = _by_owners(table, pooled)

    def run(
        weight: torch.Tensor, ids: torch.Tensor, offsets: Optional, weights: Optional, *options: int
    ) -> torch.Tensor:
        ids = all_ids(ids)
        if offsets is not None:
            check_offsets(offsets, ids.shape[0])
        if weights is not None and met:
            as_ids = layouts[-2]
            weights = execute(weights, find_steps(as_ids, _with_placement(as_ids, met, REPLICATE)))
        return back(sums(weight, ids, offsets, weights, *options))

    return run


def _pooled_choices(call: Call) -> Iterator[Choice]:
    """Operands: the table, the ids, and where there are any, the offsets and weights."""
    line, linear = "[v] d, [n], [e], [n] -> [b] d", ((0,), (3,))
    if _is_square(call):
        line, linear = f"[v] d, b {_inside(call, 5)}, b l -> b d", ((0,), (2,))
    local, together = LocalCall(_pooled, collective=True), _gathering(call)
    return lookup_choices(call, line, local, SUM, linear=linear, together=together)


# Of a maximum with sharded rows, ranks agree on the largest entry of each column, then on the first
# id that has it: two all-reduces. The gradient goes to that id alone.


def largest(
    weight: torch.Tensor, ids: torch.Tensor, offsets: Optional, padding_idx: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest entry of each bag and column, and the id it is of; 0 and -1 for an empty bag."""
    return _winners(ids, *rank_bags.largest(weight, ids, offsets, None, padding_idx))


def _own_largest(table: Layout, coordinate: Coordinate) -> Callable[..., Any]:
    """Of a rank's rows; with a first row where ranks compare theirs, even if this one has all."""
    first_row = table.box(coordinate)[0][0] if table.axes_of(0) else None
    return lambda *batch: rank_bags.largest(*batch, first_row)


def _winners(
    ids: torch.Tensor, best: torch.Tensor, place: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    is_nan, empty = place < 0, place == ids.numel()  # see Note [NaN in a maximum]
    best = best.masked_fill(empty, 0).masked_fill(is_nan, math.nan)
    padded = torch.nn.functional.pad(ids.reshape(-1), (0, 1), value=-1)
    return best, padded[torch.where(is_nan, -1 - place, place)]


def _largest(layouts: Sequence[Layout]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    table, (out, won) = layouts[0], layouts[-2:]
    grid, row_axes, met = table.grid, table.axes_of(0), _met_axes(layouts)
    own_largest = rank_call(grid, functools.partial(_own_largest, table), row_axes)
    all_ids = _all_ids(layouts, met)
    values_back, ids_back = _back(met, REPLICATE, out), _back(met, REPLICATE, won)

    def standing(_: Coordinate, best: Any, own: Any, place: Any, ids: Any) -> torch.Tensor:
        """The position of this rank's entry where no other rank has a larger one."""
        return torch.where(best == own, place, ids.numel())

    def run(
        weight: torch.Tensor, ids: torch.Tensor, offsets: Optional, padding_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids = all_ids(ids)
        if offsets is not None:
            check_offsets(offsets, ids.shape[0])
        own, place = own_largest(weight, ids, offsets, None, padding_idx)
        best = own
        if row_axes:
            for axis in row_axes:
                best = collectives.all_reduce(best, "max", grid, axis)
            place = each_rank(grid, standing, best, own, place, ids, axes=())
            for axis in row_axes:
                place = collectives.all_reduce(place, "min", grid, axis)
        values, ids_won = each_rank(grid, lambda _, *t: _winners(*t), ids, best, place, axes=())
        return values_back(values), ids_back(ids_won)

    return run


def _largest_choices(call: Call) -> Iterator[Choice]:
    """Operands: the table, the ids, and perhaps offsets."""
    line = "[v] d, b [l] -> b d, b d" if _is_square(call) else "[v] d, [n], [e] -> [b] d, [b] d"
    local = LocalCall(_largest, collective=True)
    agreed = tuple(CollectiveCost("all_reduce", _num_bytes(out)) for out in call.outputs)
    sent = {"alone": agreed, "together": _gathering(call, *agreed)}
    return lookup_choices(call, line, local, REPLICATE, linear=(), **sent)


# -- gradients -------------------------------------------------------------------------------


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

        return each_rank(layout.grid, here, self.rows, self.values, axes=sharded_axes(layout))


def sparse_grad(grad: torch.Tensor, ids: torch.Tensor, offsets: Optional, *rest: Any) -> tuple[Any]:
    """As `pooled_grad`, or of a row for each id; on DTensors, one SparseRows."""
    return (pooled_grad(*_as_bags(grad, ids, offsets), offsets, *rest),)


def _as_bags(grad: Any, ids: Any, offsets: Optional) -> tuple[Any, Any]:
    """A row for each id is a bag of one."""
    if offsets is None and grad.dim() > ids.dim():
        return grad.reshape(ids.numel(), grad.shape[-1]), ids.reshape(-1, 1)
    return grad, ids


def _each_grad(layouts: Sequence[Layout], compute: Callable[..., Any]) -> Callable[..., Any]:
    """A function that computes the gradient of the rows that each rank has."""
    table = layouts[-1]

    def of_rank(coordinate: Coordinate) -> Callable[..., Any]:
        first_row, own_rows = _own(table, coordinate)

        def run(
            grad: Any, ids: Any, offsets: Any, weights: Any, padding: int, _: int, *options: Any
        ) -> Any:
            grad, ids = _as_bags(grad, ids, offsets)
            return compute(grad, ids, offsets, weights, padding, own_rows, *options, first_row)

        return run

    return rank_call(table.grid, of_rank, table.axes_of(0))


def rows_grad(layouts: Sequence[Layout]) -> Callable[..., torch.Tensor]:
    return _each_grad(layouts, pooled_grad)


def sparse_rows_grad(layouts: Sequence[Layout]) -> Callable[..., tuple[SparseRows]]:
    each = _each_grad(layouts, rank_bags.row_grads)
    return lambda *batch: (SparseRows(layouts[-1], *each(*batch)),)


EACH = "... d, ... -> v d"


def _rows_grad_choices(call: Call) -> Iterator[Choice]:
    """Operands: the gradient of the bags, the ids, and where there are any, offsets and weights."""
    fn = rows_grad if call.op is pooled_grad else sparse_rows_grad
    line, linear = "[b] d, [n], [e], [n] -> v d", ((0,), (3,))
    if call.args[2] is None:
        line, linear = f"b d, b {_inside(call, 6)}, b l -> v d", ((0,), (2,))
        if call.inputs[0].ndim > call.inputs[1].ndim:
            line = EACH
    local = LocalCall(fn, collective=True)
    return _gradient_choices(call, line, local, linear=linear, by_freq=call.args[7])


def table_grad(layouts: Sequence[Layout]) -> Callable[..., torch.Tensor]:
    """The gradient of a table whose rows were looked up, by torch's kernel or as that of bags."""
    table = layouts[-1]
    of_bags = rows_grad(layouts)
    by_kernel = rank_call(table.grid, functools.partial(_kernel_grad, table), table.axes_of(0))

    def run(
        grad: torch.Tensor, ids: torch.Tensor, num_rows: int, padding_idx: int, by_freq: bool
    ) -> torch.Tensor:
        # Torch's CPU kernel takes several times as long as adding rows, except for few ids. The
        # CUDA kernel adds in a fixed order, and the compiler knows it.
        few = type(ids) is torch.Tensor and ids.numel() <= _FEW_IDS
        if few or not has_values(ids) or ids.is_cuda:
            return by_kernel(grad, ids, padding_idx, by_freq)
        return of_bags(grad, ids, None, None, padding_idx, num_rows, rank_bags.MODE_SUM, by_freq)

    return run


def _kernel_grad(table: Layout, coordinate: Coordinate) -> Callable[..., torch.Tensor]:
    first_row, num_rows = _own(table, coordinate)

    def run(grad: torch.Tensor, ids: torch.Tensor, padding_idx: int, by_freq: bool) -> torch.Tensor:
        width = grad.shape[-1]
        if (type(num_rows) is int and not num_rows) or (type(width) is int and not width):
            return grad.new_zeros((num_rows, width))  # it fails on CUDA
        if first_row is None:
            return _dense_backward(grad, ids, num_rows, padding_idx, by_freq)
        row, skipped = _own_row(ids, first_row, num_rows)
        if padding_idx >= 0:
            skipped = skipped | (ids == padding_idx)
        # Skipped ids become the padding index, which needs no copy of the gradient.
        if not grad.is_cuda and not by_freq:
            return _dense_backward(grad, row.masked_fill(skipped, -1), num_rows, -1, False)
        # On CUDA, and where rows are counted, the padding index must be a row: an extra one.
        row = row.masked_fill(skipped, num_rows)
        return _dense_backward(grad, row, num_rows + 1, num_rows, by_freq)[:num_rows]

    return run


def _table_grad_choices(call: Call) -> Iterator[Choice]:
    """Operands: the gradient of the rows that were looked up, and the ids."""
    sizes = call.inputs[1].shape
    few = all(type(size) is int for size in sizes) and math.prod(sizes) <= _FEW_IDS
    local = LocalCall(table_grad, collective=True)
    for choice in _gradient_choices(call, EACH, local, by_freq=call.args[4]):
        rows_sharded = choice.outputs[0].is_shard(0)
        yield choice if rows_sharded or not few else replace(choice, local=None)


def largest_grad(
    grad: torch.Tensor, won: torch.Tensor, num_rows: int, first_row: int | None = None
) -> torch.Tensor:
    """The gradient of the table: that of a bag's column goes to the id that had the largest."""
    found = grad.new_zeros((num_rows, grad.shape[1]))
    if type(num_rows) is int and num_rows == 0:
        return found
    row, foreign = _own_row(won, first_row or 0, num_rows)
    return found.scatter_add(0, row.long(), grad.masked_fill(foreign | (won < 0), 0))


def _largest_grad(
    coordinate: Coordinate, layouts: Sequence[Layout], grad: torch.Tensor, *won: Any
) -> torch.Tensor:
    first_row, num_rows = _own(layouts[-1], coordinate)
    return largest_grad(grad, won[0], num_rows, first_row)


def _largest_grad_choices(call: Call) -> Iterator[Choice]:
    """Operands: the gradient of the bags, and the ids that had the largest."""
    return _gradient_choices(call, "b d, b d -> v d", LocalCall(_largest_grad, per_rank=True))


def _sample_grad(coordinate: Coordinate, layouts: Sequence[Layout], *args: Any) -> torch.Tensor:
    return sample_grad(*args, _own(layouts[-2], coordinate)[0])


def _sample_grad_choices(call: Call) -> Iterator[Choice]:
    """Operands: the gradient of the bags, the ids, the offsets if there are any, and the table."""
    line = "b d, b l, v d -> b l" if _is_square(call) else "[b] d, [n], [e], v d -> [n]"
    table = len(call.inputs) - 1
    choices = pattern_choices(parse(line), call, ((0,), (table,)))
    return _table_stays(_run_by(LocalCall(_sample_grad, per_rank=True), choices), call, table)


# -- rows of a maximal norm ------------------------------------------------------------------


def renorm(layouts: Sequence[Layout]) -> Callable[..., torch.Tensor]:
    """Scale down the rows of the ids that each rank owns, in place."""
    table, ids_layout = layouts[:2]
    check = checked_ids(ids_layout, table.shape[0])
    scale = _by_owners(table, rank_bags.scale_rows)

    def run(weight: torch.Tensor, ids: torch.Tensor, *norm: float) -> torch.Tensor:
        """`norm` is the largest one and its type."""
        with torch.no_grad():
            scale(weight, check(ids), None, None, -1, *norm)
        return weight

    return run


_NORMS = "v [d], ... -> v [d]"


def _renorm_choices(call: Call) -> Iterator[Choice]:
    """Operands: the table, which is written to, and the ids. A norm needs all columns of a row."""
    choices = pattern_choices(parse(_NORMS), call, reduce_op=None)
    return _run_by(LocalCall(renorm, collective=True), choices)


RULES: Table = table(
    ((aten.embedding.default,), Rule(_lookup_choices, ROWS)),
    ((aten.embedding_dense_backward.default,), Rule(_table_grad_choices, EACH)),
    ((aten.embedding_renorm_.default,), Rule(_renorm_choices, _NORMS)),
    ((pooled,), Rule(_pooled_choices, "v d, b ... -> b d")),
    ((pooled_grad, sparse_grad), Rule(_rows_grad_choices, "b d, b ... -> v d")),
    ((sample_grad,), Rule(_sample_grad_choices, "b d, b ..., v d -> b ...")),
    ((largest,), Rule(_largest_choices, "v d, b ... -> b d, b d")),
    ((largest_grad,), Rule(_largest_grad_choices, "b d, b d -> v d")),
)
