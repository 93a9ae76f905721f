"""Bags on one rank's plain tensors: checks, pooling, maxima, and the fused kernels of a GPU.

Bags in any form of `embedding_bag` become flat ids and a length per bag.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn import functional as F

from shardwise._torch.functions import embedding_bag
from shardwise.core.once import differentiated_once
from shardwise.core.untraced import UntracedFunction
from shardwise.ops.lookup import fused_bags
from shardwise.ops.lookup.bag_shape import MODE_MEAN, MODE_SUM, Bags

#: The modes of the fused kernels.
_MODES = {"sum": MODE_SUM, "mean": MODE_MEAN}
#: The number of mode="max" in torch's own op.
_MAXIMUM = 2


def ids_fault(ids: torch.Tensor) -> str | None:
    whole = ids.dtype in (torch.int32, torch.int64)
    return None if whole else f"ids are int32 or int64, found {ids.dtype}."


def range_of(ids: torch.Tensor, fault: str | None) -> tuple[int, int]:
    """The lowest and the highest id of a batch without a fault."""
    if fault is not None or not ids.numel():
        return 0, -1
    low, high = torch.stack(torch.aminmax(ids)).tolist()
    return low, high


def batch_fault(
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    include_last_offset: bool,
) -> str | None:
    """What is wrong with a batch of bags, if anything."""
    if (fault := ids_fault(ids)) is not None:
        return fault
    if weights is not None and weights.shape != ids.shape:
        return f"per_sample_weights have shape {tuple(weights.shape)}, the ids {tuple(ids.shape)}."
    if ids.dim() == 2:
        return None if offsets is None else "ids of two dims are one bag per row: no offsets."
    if ids.dim() != 1:
        return f"ids have one dim, with offsets, or two; found shape {tuple(ids.shape)}."
    if offsets is None or offsets.dim() != 1:
        return "ids of one dim need offsets, of one dim too."
    return _offsets_fault(offsets.tolist(), ids.numel(), include_last_offset)


def _offsets_fault(offsets: list[int], num_ids: int, include_last_offset: bool) -> str | None:
    if include_last_offset and not offsets:
        return "with include_last_offset there is at least one offset."
    if offsets and offsets[0] != 0:
        return f"the first offset is 0, found {offsets[0]}."
    if any(b < a for a, b in itertools.pairwise(offsets)):
        return f"offsets do not decrease, found {offsets}."
    if offsets and offsets[-1] > num_ids:
        return f"the last offset is {offsets[-1]}, but there are {num_ids} ids."
    if include_last_offset and offsets[-1] != num_ids:
        return f"the last offset is the number of ids, {num_ids}; found {offsets[-1]}."
    if not offsets and num_ids:
        return f"there are {num_ids} ids but no bags."
    return None


def lengths_of(
    ids: torch.Tensor, offsets: torch.Tensor | None, include_last_offset: bool
) -> torch.Tensor:
    """How many ids each bag has. The batch has no fault."""
    if ids.dim() == 2:
        return torch.full((ids.shape[0],), ids.shape[1], dtype=torch.int64, device=ids.device)
    assert offsets is not None, "ids of one dim come with offsets"
    ends = offsets.long()
    if not include_last_offset:
        ends = torch.cat([ends, ends.new_tensor([ids.numel()])])
    return ends.diff()


def starts(lengths: torch.Tensor) -> torch.Tensor:
    """Where each bag begins."""
    return lengths.cumsum(0) - lengths


def pool(
    rows: torch.Tensor,
    ids: torch.Tensor,
    lengths: torch.Tensor,
    mode: str,
    weights: torch.Tensor | None,
    padding_idx: int | None,
) -> torch.Tensor:
    """The pooled bags out of one row per id; the padding id's rows do not count."""
    if not lengths.numel():
        return rows.new_zeros(0, rows.shape[1])
    place = torch.arange(ids.numel(), device=ids.device)
    padding = None
    if padding_idx is not None:
        # One more row stands for every padding id.
        padding = ids.numel()
        place = place.masked_fill(ids == padding_idx, padding)
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    return lookup(rows, place, starts(lengths), mode, weights, padding)


def lookup(
    table: torch.Tensor,
    ids: torch.Tensor,
    starts: torch.Tensor,
    mode: str,
    weights: torch.Tensor | None = None,
    padding_idx: int | None = None,
    sparse: bool = False,
) -> torch.Tensor:
    """The fused kernels' `embedding_bag`, or torch's own, which does not take empty tables."""
    if not table.numel() or not starts.numel():
        return table.new_zeros(starts.numel(), table.shape[1])
    if mode in _MODES and fused_bags.take_table(table):
        return _fused_lookup(table, ids, starts, mode, weights, padding_idx, sparse)
    return F.embedding_bag(
        ids,
        table,
        starts,
        mode=mode,
        sparse=sparse,
        per_sample_weights=weights,
        padding_idx=padding_idx,
    )


def maximum(
    table: torch.Tensor, ids: torch.Tensor, starts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The maximum of each bag and the row that it is from; 0 for an empty bag, from any row."""
    if not table.numel() or not starts.numel():
        shape = (starts.numel(), table.shape[1])
        return table.new_zeros(shape), ids.new_full(shape, -1)
    values, _, _, rows = embedding_bag(table, ids, starts, mode=_MAXIMUM)
    return values, rows


def _fused_lookup(
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
    return _FusedBlockBags.apply(table, ids, edges, weights, _MODES[mode], padding, sparse)


class _FusedBlockBags(UntracedFunction):
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
