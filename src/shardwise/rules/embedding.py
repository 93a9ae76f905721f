"""Lookups in a table, and the table's gradient.

Rows may be sharded: a rank then looks up the ids that it owns and returns zeros for the others,
so that the ranks' results add up. Columns may be sharded: the result is sharded likewise. The ids
may be sharded along any dim when the table is whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardwise.core.grid import Coordinate
from shardwise.core.layout import Layout
from shardwise.core.placements import REPLICATE, MaskPartial, Partial, Shard
from shardwise.rules.notation import linear_choices
from shardwise.rules.rule import Call, Choice, LocalCall, Rule, Table, table

aten = torch.ops.aten
# Without the Python method around it, which takes a microsecond of its own.
_dense_backward = aten.embedding_dense_backward.default._op


def owned_lookup(
    coordinate: Coordinate,
    layouts: Sequence[Layout],
    weight: torch.Tensor,
    ids: torch.Tensor,
    *_: Any,
) -> torch.Tensor:
    """The rows that this rank owns, and true zeros for those of others."""
    check_ids(ids, layouts[0].shape[0])
    if weight.shape[0] == 0:
        return weight.new_zeros((*ids.shape, weight.shape[1]))
    row, foreign = _rows(layouts[0], coordinate, ids)
    return torch.embedding(weight, row).masked_fill_(foreign.unsqueeze(-1), 0)


def check_ids(ids: torch.Tensor, num_rows: Any) -> None:
    """An id out of range raises as on one device: a table in pieces would give zeros for it.

    Every rank that holds a piece sees the same ids, so all of them raise. On CUDA a look at the
    values would wait for the device, and a traced graph has none.
    """
    if type(ids) is torch.Tensor and ids.numel() and not ids.is_cuda and not ids.is_meta:
        low, high = map(int, torch.aminmax(ids))
        if low < 0 or high >= num_rows:
            raise IndexError(
                f"index out of range in a table of {num_rows} rows: ids run from {low} to {high}."
            )


def owned_grad(
    coordinate: Coordinate,
    layouts: Sequence[Layout],
    grad: torch.Tensor,
    ids: torch.Tensor,
    num_rows: int,
    padding_idx: int,
    scale_by_freq: bool,
) -> torch.Tensor:
    """The gradient of the rows that this rank owns; no other row is ever made."""
    local_rows = layouts[-1].local_shape(coordinate)[0]
    if type(local_rows) is int and local_rows == 0:
        return grad.new_zeros((0, grad.shape[-1]))
    row, skipped = _rows(layouts[-1], coordinate, ids)
    if padding_idx >= 0:
        skipped = skipped | (ids == padding_idx)
    if scale_by_freq:
        counts = torch.zeros(local_rows, dtype=grad.dtype, device=grad.device)
        counts.index_add_(0, row.reshape(-1), (~skipped).reshape(-1).to(grad.dtype))
        grad = grad / counts[row].clamp(min=1).unsqueeze(-1)
    # Entries equal to the padding index leave no gradient: no copy of the gradient is needed.
    row = row.masked_fill(skipped, -1)
    return _dense_backward(grad, row, local_rows, -1, False)


def _rows(
    layout: Layout, coordinate: Coordinate, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The local row of each id, and which ids another rank owns (their row is any valid one)."""
    offset, shape = layout.box(coordinate)
    shifted = ids - offset[0]
    row = shifted.clamp(0, shape[0] - 1)
    return row, shifted != row


def lookup_choices(call: Call) -> Iterator[Choice]:
    """Operands: the table and the ids."""
    weight, ids = call.inputs
    last = ids.ndim
    yield call.replicated()
    # A rank that owns all rows would not need the mask, but one rule for all is simpler.
    known = all(type(s) is int for s in weight.shape)
    masked = MaskPartial(logical_shape=tuple(weight.shape) if known else (), logical_dim=0)
    for sizes in call.splits([(0, 0)]):
        yield Choice(
            (Shard(0, sizes), REPLICATE), (masked,), LocalCall(owned_lookup, per_rank=True)
        )
    for sizes in call.splits([(0, 1)]):
        yield Choice((Shard(1, sizes), REPLICATE), (Shard(last, sizes),))
    # A table that is sharded is never gathered to meet ids that are: ids move, tables do not.
    table_is_whole = not call.placed or not call.placed[0].is_shard()
    for dim in range(ids.ndim) if table_is_whole else ():
        for sizes in call.splits([(1, dim)]):
            yield Choice((REPLICATE, Shard(dim, sizes)), (Shard(dim, sizes),))
    yield from linear_choices(call, ((0,),))


def lookup_grad_choices(call: Call) -> Iterator[Choice]:
    """Operands: the gradient of the rows that were looked up, and the ids."""
    last = call.inputs[1].ndim
    yield call.replicated()
    wanted = call.wanted[0] if call.wanted else None
    columns = call.splits([(0, last)])
    if isinstance(wanted, Shard) and wanted.dim == 0:
        yield Choice((REPLICATE, REPLICATE), (wanted,), LocalCall(owned_grad, per_rank=True))
    elif isinstance(wanted, Shard) and wanted.sizes not in columns:
        columns.append(wanted.sizes)
    for sizes in columns:
        yield Choice((Shard(last, sizes), REPLICATE), (Shard(1, sizes),))
    # With scale_grad_by_freq a rank would have to count the ids of all.
    if not call.args[4]:
        for dim in range(call.inputs[1].ndim):
            for sizes in call.splits([(0, dim), (1, dim)]):
                yield Choice((Shard(dim, sizes), Shard(dim, sizes)), (Partial("sum"),))
    yield from linear_choices(call, ((0,),))


RULES: Table = table(
    ((aten.embedding.default,), Rule(lookup_choices, "[v] d, ... -> ... d")),
    ((aten.embedding_dense_backward.default,), Rule(lookup_grad_choices, "... d, ... -> v d")),
)
