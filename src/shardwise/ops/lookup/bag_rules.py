"""Bags: rows of a table that are looked up and pooled, by sum or mean; bags of one rank.

Ids come in two forms. Of shape (bags, ids in each), they may be sharded along the bags, and the
result is sharded like them. In one dim with offsets, they are replicated: where a bag ends is
data-dependent. A row-sharded table gives a Partial, since each rank sums the rows that it owns; ids
that are sharded along the same axis are gathered, and the sums reduce-scattered along the bags.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

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
from shardwise.kernels import DTYPES
from shardwise.lookup.ids import check_ids, check_offsets, has_values, local_rows, owned
from shardwise.ops.lookup.embedding_rules import table_stays
from shardwise.redistribute.execute import execute
from shardwise.redistribute.steps import find_steps
from shardwise.simulation.ranks import each_rank

if TYPE_CHECKING:
    from shardwise.kernels.tables import IdBags, KnownSets, TableSet


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

    def here(
        coordinate: Coordinate, weight: torch.Tensor, ids: torch.Tensor, *rest: Optional
    ) -> torch.Tensor:
        bags = Bags(ids, rest[0], rest[1], padding_idx)
        return _rows_here(table, coordinate, weight, bags, mode)

    sums = each_rank(table.grid, here, weight, ids, offsets, weights, axes=table.axes_of(0))
    return execute(sums, find_steps(with_placement(out, met, SUM), out)) if met else sums


# -- a rank's terms of the bags --------------------------------------------------------------


def _rows_here(
    table: Layout, coordinate: Coordinate, weight: torch.Tensor, bags: Bags, mode: int
) -> torch.Tensor:
    """The sum, or the term of the mean, of the rows that this rank owns."""
    if take_table(weight):
        return fused_sums(weight, bags, table.box(coordinate)[0][0], mode)
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
    """Operands: the table, the ids, and where there are any, the offsets and weights."""
    out = call.outputs[0]
    reduced = CollectiveCost("reduce_scatter", num_bytes(out.shape, out.dtype))
    yield from table_choices(call, POOLED, SUM, together=(reduced,))
    if call.args[4] == MODE_SUM:
        for inside in inside_splits(call, 1):
            yield Choice(batch_placements(call, (REPLICATE,), Shard(1, inside)), (SUM,), POOLED)
    for choice in linear_choices(call, linear_inputs(call)):
        if table_stays(call, choice):
            yield Choice(choice.inputs, choice.outputs, POOLED)


def table_choices(
    call: Call,
    local: LocalCall,
    of_rows: Placement,
    alone: tuple[CollectiveCost, ...] = (),
    together: tuple[CollectiveCost, ...] = (),
) -> Iterator[Choice]:
    """Operands: the table, the ids, and what else a batch has. A sharded table stays.

    A table of which each rank has some rows gives `of_rows`, after the collectives `alone`; where
    the batch is sharded too, `together` follow the gathering of ids and weights.
    """

    def choice(
        first: Placement, batch: Placement, out: Placement, *moved: CollectiveCost
    ) -> Choice:
        inputs = batch_placements(call, (first,), batch)
        return Choice(inputs, (out,) * len(call.outputs), local, sent=moved)

    found = [choice(REPLICATE, REPLICATE, REPLICATE)]
    batches = [Shard(0, bags) for bags in bag_splits(call, 1)]
    ids_sharded = bool(call.placed) and call.placed[1].is_shard() and call.inputs[1].ndim == 2
    for sizes in call.splits([(0, 0)]):
        if not ids_sharded:
            found.append(choice(Shard(0, sizes), REPLICATE, of_rows, *alone))
        gathered = [
            CollectiveCost("all_gather", num_bytes(meta.shape, meta.dtype))
            for meta in call.inputs[1:]
            if meta.ndim == 2
        ]
        found += [choice(Shard(0, sizes), b, b, *gathered, *together) for b in batches]
    for sizes in call.splits([(0, 1)]):
        found.append(choice(Shard(1, sizes), REPLICATE, Shard(1, sizes)))
    found += [choice(REPLICATE, batch, batch) for batch in batches]
    return (each for each in found if table_stays(call, each))


RULES: Table = table(((pooled,), Rule(_pooled_choices, "v d, b ... -> b d")))


# -- bags of one rank ----------------------------------------------------------------------------


MODE_SUM, MODE_MEAN, MODE_MAX = 0, 1, 2

Optional = torch.Tensor | None


class Bags(NamedTuple):
    """The ids of one rank's bags, of shape (bags, ids in each), or flat with offsets.

    Offsets include the end of the last bag; later ids are in no bag. Flat ids without offsets are a
    bag each. Ids equal to `padding_idx` do not count; it is -1 for none.
    """

    ids: torch.Tensor
    offsets: Optional
    weights: Optional
    padding_idx: int

    @property
    def num_bags(self) -> Any:
        return self.ids.shape[0] if self.offsets is None else self.offsets.shape[0] - 1

    @property
    def bounds(self) -> torch.Tensor:
        """Where each bag starts among the flat ids, and where the last one ends."""
        if self.offsets is not None:
            return self.offsets
        num_bags, length = self.ids.shape
        return torch.arange(num_bags + 1, device=self.ids.device) * length

    @property
    def single(self) -> bool:
        """Whether each id is a bag of its own."""
        return self.offsets is None and self.ids.dim() == 1

    @property
    def places(self) -> torch.Tensor:
        """The position of each of the flat ids."""
        return torch.arange(self.ids.numel(), device=self.ids.device)

    def bag_of(self, places: torch.Tensor) -> torch.Tensor:
        """The bag of each position; the number of bags for those after the last."""
        if self.offsets is None:
            return places if self.ids.dim() == 1 else places // self.ids.shape[1]
        return torch.searchsorted(self.offsets, places, right=True) - 1

    def sizes(self) -> torch.Tensor:
        """The number of ids of each bag that count, at least 1, as a column."""
        edges = self.bounds
        if self.padding_idx >= 0:
            real = self.ids.reshape(-1) != self.padding_idx
            edges = torch.nn.functional.pad(real.cumsum(0), (1, 0))[edges]
        return edges.diff().clamp(min=1).unsqueeze(-1)

    def skipped(self, foreign: torch.Tensor) -> torch.Tensor:
        """Which ids do not count: those of other ranks, and padding."""
        return foreign | (self.ids == self.padding_idx) if self.padding_idx >= 0 else foreign

    def rows(self, table: Layout, coordinate: Coordinate) -> tuple[torch.Tensor, torch.Tensor]:
        """The local row of each id, and which do not count here (their row is arbitrary)."""
        row, foreign = local_rows(table, coordinate, self.ids)
        return row, self.skipped(foreign)


def batch_placements(
    call: Call, first: Sequence[Placement], placement: Placement
) -> tuple[Placement, ...]:
    """Placements of an op's inputs: `first`, then `placement` for ids and their weights."""
    rest = len(call.inputs) - len(first)
    if rest == 3:
        return (*first, placement, REPLICATE, placement)
    has_offsets = call.args[len(first) + 1] is not None
    return (*first, placement, *((REPLICATE if has_offsets else placement,) * (rest - 1)))


def bag_splits(call: Call, number: int) -> list[tuple[int, ...] | None]:
    """How the bags may be sharded: not at all with offsets."""
    return call.splits([(number, 0)]) if call.inputs[number].ndim == 2 else []


def inside_splits(call: Call, number: int) -> list[tuple[int, ...] | None]:
    """How the ids may be sharded inside bags, for sums."""
    return call.splits([(number, 1)]) if call.inputs[number].ndim == 2 else []


def linear_inputs(call: Call) -> tuple[tuple[int, ...], ...]:
    """Groups of inputs in which the op is linear: the first, and the weights of the samples."""
    has_weights = call.args[3] is not None
    return ((0,), (len(call.inputs) - 1,)) if has_weights else ((0,),)


# -- fused bags ----------------------------------------------------------------------------------
# One rank's bags on a GPU, with the fused kernels.
#
# Results are those of torch's kernels, with sums in float32 in a deterministic order; no tensor of
# size (ids, width of the table) is written. `first_row` is the global number of this rank's first
# row; ids of other rows are skipped. All ids are in range: that was checked before.


def take_table(weight: torch.Tensor) -> bool:
    """Whether the kernels take this table."""
    return take_grad(weight) and weight.is_contiguous()


def take_grad(values: torch.Tensor) -> bool:
    """Whether the kernels take this gradient of bags."""
    return (
        values.is_cuda
        and type(values) in (torch.Tensor, torch.nn.Parameter)  # not in a traced graph
        and values.dtype in DTYPES
        and _has_triton()
    )


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _sets() -> KnownSets:
    # Imported here and below, since it needs Triton.
    from shardwise.kernels.tables import KnownSets

    return KnownSets()


def fused_sums(weight: torch.Tensor, bags: Bags, first_row: int, mode: int) -> torch.Tensor:
    """The sum or mean of the local rows of each bag."""
    from shardwise.kernels.lookup import pooled_lookup

    if not weight.shape[1]:
        return weight.new_zeros((bags.num_bags, 0))
    tables = _sets().of([weight], (first_row,))
    by_length = mode == MODE_MEAN and bags.padding_idx < 0
    divided = mode == MODE_MEAN and not by_length
    out, _ = pooled_lookup(
        tables,
        _as_kernels_take_them(tables, bags),
        mode="mean" if by_length else "sum",
        weights=_flat(bags.weights),
        dtype=torch.float32 if divided else weight.dtype,
    )
    out = out.view(bags.num_bags, weight.shape[1])
    return out.div_(bags.sizes()).to(weight.dtype) if divided else out


def largest(weight: torch.Tensor, bags: Bags, first_row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest value of each bag and column, and its first position.

    A bag without local rows is -inf, with the number of ids as position.
    """
    from shardwise.kernels.lookup import pooled_lookup

    shape = (bags.num_bags, weight.shape[1])
    if not shape[1]:
        return weight.new_zeros(shape), bags.ids.new_zeros(shape, dtype=torch.int64)
    tables = _sets().of([weight], (first_row,))
    out, trace = pooled_lookup(
        tables, _as_kernels_take_them(tables, bags), mode="max", trace=True, dtype=weight.dtype
    )
    assert trace is not None, "requested"
    assert trace.argmax is not None, "a maximum has it"
    place = trace.argmax.view(shape).long()
    none = place < 0
    return (
        out.view(shape).masked_fill_(none, -math.inf),
        place.masked_fill_(none, bags.ids.numel()),
    )


def table_grad(
    grad: torch.Tensor, bags: Bags, first_row: int, num_rows: int, mode: int
) -> torch.Tensor:
    """The gradient of this rank's rows."""
    from shardwise.kernels.lookup import noted
    from shardwise.kernels.tables import TableSet
    from shardwise.kernels.update import add_gradients

    found = grad.new_zeros((num_rows, grad.shape[1]))
    if not grad.shape[1]:
        return found
    tables = TableSet([found], [0], [first_row])
    given = _as_kernels_take_them(tables, bags)
    trace = noted(tables, given, weights=_flat(bags.weights), all_in_bags=bags.offsets is None)
    add_gradients(tables, trace, _per_id(grad, bags, mode))
    return found


def row_grads(
    grad: torch.Tensor, bags: Bags, rows: torch.Tensor, places: torch.Tensor, mode: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The distinct rows that were looked up, and their gradients.

    `rows` are those of the ids that count, at the positions `places`.
    """
    from shardwise.kernels.lookup import Trace
    from shardwise.kernels.update import row_sums

    if not grad.shape[1]:
        return rows, grad.new_zeros((rows.shape[0], 0))
    weights = None if bags.weights is None else _flat(bags.weights)[places].float()
    trace = Trace(rows, bags.bag_of(places) * grad.shape[1], weights, None)
    found, values = row_sums(trace, _per_id(grad, bags, mode), grad.shape[1], grad.dtype)
    return found, values


def sample_grad(
    grad: torch.Tensor, weight: torch.Tensor, bags: Bags, first_row: int
) -> torch.Tensor:
    """The dot product of each id's row with its bag's gradient; 0 for rows of other ranks."""
    from shardwise.kernels.lookup import per_sample_weight_grads

    if not weight.shape[1]:
        return grad.new_zeros(bags.ids.shape)
    tables = _sets().of([weight], (first_row,))
    given = _as_kernels_take_them(tables, bags)
    found = per_sample_weight_grads(tables, given, grad.contiguous().view(-1))
    return found.to(grad.dtype).view(bags.ids.shape)


def _as_kernels_take_them(tables: TableSet, bags: Bags) -> IdBags:
    from shardwise.kernels.tables import IdBags, first_bags, one_after_another

    ids = bags.ids
    if bags.padding_idx >= 0:
        ids = ids.masked_fill(ids == bags.padding_idx, -1)  # no rank's row
    count = (bags.num_bags,)
    return IdBags(
        _flat(ids),
        bags.bounds.contiguous(),
        first_bags(count, tables.device),
        bags.num_bags,
        one_after_another(tables, count),
    )


def _per_id(grad: torch.Tensor, bags: Bags, mode: int) -> torch.Tensor:
    """The gradient that each bag passes to each of its ids, flat."""
    if mode == MODE_MEAN:
        grad = grad.float() / bags.sizes()
    return grad.contiguous().view(-1)


def _flat(x: Any) -> Any:
    return None if x is None else x.reshape(-1).contiguous()
