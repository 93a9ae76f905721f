"""Bags of one rank: where they start and end, how their ids may be sharded, fused kernels."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardwise.core.layout import Layout
from shardwise.core.mesh import Coordinate
from shardwise.core.placements import REPLICATE, Placement
from shardwise.dispatch.rule import Call
from shardwise.kernels import DTYPES
from shardwise.lookup.ids import local_rows

if TYPE_CHECKING:
    from shardwise.kernels.tables import IdBags, KnownSets, TableSet


MODE_SUM, MODE_MEAN, MODE_MAX = 0, 1, 2

Optional = torch.Tensor | None


class Bags(NamedTuple):
    """The ids of one rank's bags, of shape (bags, ids in each), or flat with offsets.

    Offsets include the end of the last bag; later ids are in no bag. Ids equal to `padding_idx` do
    not count; it is -1 for none.
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
    def places(self) -> torch.Tensor:
        """The position of each of the flat ids."""
        return torch.arange(self.ids.numel(), device=self.ids.device)

    def bag_of(self, places: torch.Tensor) -> torch.Tensor:
        """The bag of each position; the number of bags for those after the last."""
        if self.offsets is None:
            return places // self.ids.shape[1]
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


def packed(*tensors: Optional) -> list[torch.Tensor]:
    return [t for t in tensors if t is not None]


def unpacked(parts: Sequence[torch.Tensor], offsets: Any, weights: Any, padding_idx: int) -> Bags:
    """The bags of the tensors that are not None, in the order of `packed`."""
    rest = iter(parts)
    return Bags(
        next(rest),
        None if offsets is None else next(rest),
        None if weights is None else next(rest),
        padding_idx,
    )


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


def sums(weight: torch.Tensor, bags: Bags, first_row: int, mode: int) -> torch.Tensor:
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
