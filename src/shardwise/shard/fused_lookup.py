"""The bags of one block of a table on a GPU, through the fused kernels, under torch's autograd."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.core.once import differentiated_once
from shardwise.core.untraced import UntracedFunction
from shardwise.rules import fused_bags
from shardwise.rules.bag_shape import MODE_MEAN, MODE_SUM, Bags

_MODES = {"sum": MODE_SUM, "mean": MODE_MEAN}


def takes(table: torch.Tensor, mode: str) -> bool:
    return mode in _MODES and fused_bags.take_table(table)


def lookup(
    table: torch.Tensor,
    ids: torch.Tensor,
    starts: torch.Tensor,
    mode: str,
    weights: torch.Tensor | None,
    padding_idx: int | None,
    sparse: bool,
) -> torch.Tensor:
    """As `F.embedding_bag`; the ids are in range."""
    edges = torch.nn.functional.pad(starts, (0, 1), value=ids.shape[0])
    padding = -1 if padding_idx is None else padding_idx
    return _RowsLookup.apply(table, ids, edges, weights, _MODES[mode], padding, sparse)


class _RowsLookup(UntracedFunction):
    @staticmethod
    def forward(
        ctx: Any,
        table: torch.Tensor,
        ids: torch.Tensor,
        edges: torch.Tensor,
        weights: torch.Tensor | None,
        mode: int,
        padding_idx: int,
        sparse: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(ids, edges, weights, None if weights is None else table)
        ctx.options = (tuple(table.shape), mode, padding_idx, sparse)
        return fused_bags.sums(table, Bags(ids, edges, weights, padding_idx), 0, mode)

    @staticmethod
    @differentiated_once("a sharded module")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ids, edges, weights, table = ctx.saved_tensors
        shape, mode, padding_idx, sparse = ctx.options
        bags = Bags(ids, edges, weights, padding_idx)
        of_table = of_weights = None
        if ctx.needs_input_grad[0] and sparse:
            of_table = _row_sparse(grad, bags, shape, mode)
        elif ctx.needs_input_grad[0]:
            of_table = fused_bags.table_grad(grad, bags, 0, shape[0], mode)
        if ctx.needs_input_grad[3]:
            of_weights = fused_bags.sample_grad(grad, table, bags, 0)
        return of_table, None, None, of_weights, None, None, None


def _row_sparse(grad: torch.Tensor, bags: Bags, shape: tuple[int, int], mode: int) -> torch.Tensor:
    rows, places = bags.ids, bags.places
    if bags.padding_idx >= 0:
        places = (rows != bags.padding_idx).nonzero().squeeze(1)
        rows = rows.index_select(0, places)
    rows, values = fused_bags.row_grads(grad, bags, rows, places, mode)
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0), values, shape, check_invariants=False, is_coalesced=True
    )
