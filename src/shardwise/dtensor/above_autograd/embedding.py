"""Embedding lookups, above autograd: see Note [Above autograd].

The gradient is that of the table's own rows, and goes back the way by which the ids came.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.core.layout import Layout
from shardwise.core.untraced import UntracedFunction
from shardwise.dtensor.above_autograd.operands import all_distributed
from shardwise.dtensor.autograd import direct_apply, gradient_layout
from shardwise.dtensor.row_sparse import RowSparse
from shardwise.dtensor.tensor import DTensor, run
from shardwise.errors import UnsupportedError
from shardwise.rules.ids import has_values
from shardwise.rules.routed import Parcel, both_sharded, returned_grad, routed_lookup
from shardwise.rules.row_sparse import sparse_grad

aten = torch.ops.aten
_table_lookup = aten.embedding.default
_table_grad = aten.embedding_dense_backward.default


class EmbeddingLookup(UntracedFunction):
    @staticmethod
    def forward(ctx: Any, weight: Any, ids: Any, options: tuple[int, bool, bool]) -> Any:
        rows, routing = _look_up(weight, ids)
        ctx.save_for_backward(ids)
        by_freq = options[1]
        ctx.plan = (gradient_layout(weight._layout), options, None if by_freq else routing)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (ids,) = ctx.saved_tensors
        layout, (padding_idx, by_freq, sparse), routing = ctx.plan
        num_rows = layout.shape[0]
        if torch.is_grad_enabled() and not sparse:  # double backward
            found = LookupGrad.apply(grad, ids, layout, padding_idx, by_freq)
        elif routing is not None:
            parcel = Parcel(routing)
            found = run(
                returned_grad, grad, ids, num_rows, padding_idx, sparse, parcel, wish=layout
            )
            parcel.routing = None
        elif sparse:
            found = run(sparse_grad, grad, ids, num_rows, padding_idx, by_freq, wish=layout)
        else:
            found = run(_table_grad, grad, ids, num_rows, padding_idx, by_freq, wish=layout)
        return RowSparse.of(*found) if sparse else found, None, None


def _look_up(weight: Any, ids: Any) -> tuple[Any, Any]:
    """The rows, and the routing where ids were exchanged."""
    if both_sharded(weight._layout, ids._layout):
        return run(routed_lookup, weight, ids, not has_values(ids._local))
    return run(_table_lookup, weight, ids), None


class LookupGrad(UntracedFunction):
    """The gradient of a table, itself differentiable for the gradient that it is made of."""

    @staticmethod
    def forward(
        ctx: Any, grad: Any, ids: Any, layout: Layout, padding_idx: int, by_freq: bool
    ) -> Any:
        ctx.save_for_backward(ids)
        ctx.options = (padding_idx, by_freq)
        return run(_table_grad, grad, ids, layout.shape[0], padding_idx, by_freq, wish=layout)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (ids,) = ctx.saved_tensors
        padding_idx, by_freq = ctx.options
        if by_freq:
            raise UnsupportedError(
                "The second derivative of an embedding with scale_grad_by_freq is not supported."
            )
        rows = embedding(grad, ids)
        if padding_idx >= 0:
            rows = rows * (ids != padding_idx).unsqueeze(-1)
        return rows, None, None, None, None


_apply_lookup = direct_apply(EmbeddingLookup)


def embedding(
    weight: Any,
    ids: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if type(weight) is not DTensor or type(ids) is not DTensor:
        weight, ids = all_distributed(_table_lookup, (weight, ids))
    if weight.requires_grad and torch.is_grad_enabled():
        return _apply_lookup(weight, ids, (int(padding_idx), scale_grad_by_freq, sparse))
    return _look_up(weight, ids)[0]


KERNELS = (("embedding", embedding),)
