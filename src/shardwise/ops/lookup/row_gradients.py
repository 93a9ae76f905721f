"""The gradient of a table as the rows that have one: of the batch's size, not the table's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardwise.core.layout import Layout
from shardwise.core.mesh import Coordinate
from shardwise.dispatch.rule import Call, Choice, LocalCall, Rule, Table, table
from shardwise.lookup.ids import has_values, local_rows
from shardwise.ops.lookup.embedding_rules import (
    lookup_grad_choices,
    owned_values,
    picked_rows,
    times,
)
from shardwise.simulation.ranks import each_rank


class SparseRows:
    """Local row numbers, with repeats, and one row of values for each; all other rows are zero."""

    __slots__ = ("layout", "rows", "values")

    def __init__(self, layout: Layout, rows: torch.Tensor, values: torch.Tensor) -> None:
        self.layout, self.rows, self.values = layout, rows, values

    def dense(self) -> torch.Tensor:
        """The same values as a dense shard of the table."""
        layout = self.layout

        def here(coordinate: Coordinate, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return values.new_zeros(layout.local_shape(coordinate)).index_add_(0, rows, values)

        axes = tuple(a for a, p in enumerate(layout.placements) if p.is_shard())
        return each_rank(layout.grid, here, self.rows, self.values, axes=axes)


def sparse_grad(
    grad: torch.Tensor, ids: torch.Tensor, num_rows: int, padding_idx: int, by_freq: bool
) -> tuple[torch.Tensor]:
    """The gradient of a table; on DTensors, as SparseRows."""
    return (torch.ops.aten.embedding_dense_backward(grad, ids, num_rows, padding_idx, by_freq),)


def _sparse_grad(
    layouts: Sequence[Layout],
    grad: torch.Tensor,
    ids: torch.Tensor,
    num_rows: int,
    padding_idx: int,
    by_freq: bool,
) -> tuple[SparseRows]:
    table, known = layouts[-1], has_values(ids)

    def here(coordinate: Coordinate, grad: torch.Tensor, ids: torch.Tensor) -> Any:
        if not known:
            return _traced_values(table, coordinate, grad, ids, padding_idx, by_freq)
        rows, values = owned_values(table, coordinate, grad, ids, padding_idx)
        if by_freq:
            values = values / times(rows).unsqueeze(-1)
        return rows, values

    return (SparseRows(table, *each_rank(table.grid, here, grad, ids, axes=table.axes_of(0))),)


def _traced_values(
    table: Layout,
    coordinate: Coordinate,
    grad: torch.Tensor,
    ids: torch.Tensor,
    padding_idx: int,
    by_freq: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `owned_values`, in a traced graph."""
    rows, keep = ids.reshape(-1), None
    values = grad.reshape(ids.numel(), grad.shape[-1])
    if padding_idx >= 0:
        keep = rows != padding_idx
    if table.axes_of(0):
        if not table.box(coordinate)[1][0]:
            return rows[:0], values[:0]
        rows, foreign = local_rows(table, coordinate, rows)
        keep = ~foreign if keep is None else keep & ~foreign
    return picked_rows(keep, rows, values, by_freq)


SPARSE_GRAD = LocalCall(_sparse_grad, collective=True)


def _choices(call: Call) -> Iterator[Choice]:
    return lookup_grad_choices(call, SPARSE_GRAD, call.args[4])


RULES: Table = table(((sparse_grad,), Rule(_choices, "... d, ... -> v d")))
