"""What one rank computes of bags on a GPU, through the fused kernels.

As by torch's kernels, with sums in float32, each in the same order from run to run; and nothing as
large as the number of ids times the width of the table is written. `first_row` is the row of the
whole table that this rank's first is; ids of other rows are skipped, and are in range: that was
checked before.
"""

from __future__ import annotations

import importlib.util
import math
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from shardwise.kernels import DTYPES
from shardwise.ops.lookup.bag_shape import MODE_MEAN, Bags

if TYPE_CHECKING:
    from shardwise.kernels.tables import IdBags, KnownSets, TableSet


def take_table(weight: torch.Tensor) -> bool:
    """Whether the kernels take this table."""
    return take_grad(weight) and weight.is_contiguous()


def take_grad(values: torch.Tensor) -> bool:
    """Whether the kernels take such a gradient of bags."""
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
    # Imported here and below: nobody else needs Triton.
    from shardwise.kernels.tables import KnownSets

    return KnownSets()


def sums(weight: torch.Tensor, bags: Bags, first_row: int, mode: int) -> torch.Tensor:
    """The sum or mean of the rows of each bag that are here."""
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
    """The largest value of each bag and column, and the first place that has it.

    A bag that has none here is -inf, its place the number of ids.
    """
    from shardwise.kernels.lookup import pooled_lookup

    shape = (bags.num_bags, weight.shape[1])
    if not shape[1]:
        return weight.new_zeros(shape), bags.ids.new_zeros(shape, dtype=torch.int64)
    tables = _sets().of([weight], (first_row,))
    out, trace = pooled_lookup(
        tables, _as_kernels_take_them(tables, bags), mode="max", trace=True, dtype=weight.dtype
    )
    assert trace is not None, "asked for"
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
    from shardwise.kernels.notes import noted
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
    """The rows that were looked up, each once, and their gradients.

    `rows` are those of the ids that count, which stand at `places`.
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
    """How far the row of each id points along its bag's gradient; 0 for rows that are not here."""
    from shardwise.kernels.sample_grads import per_sample_weight_grads

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
    """What each bag's gradient gives to each of its ids, flat."""
    if mode == MODE_MEAN:
        grad = grad.float() / bags.sizes()
    return grad.contiguous().view(-1)


def _flat(x: Any) -> Any:
    return None if x is None else x.reshape(-1).contiguous()
