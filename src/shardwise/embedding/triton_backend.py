"""The backend of fused kernels on a GPU: one launch per stack to look up, two to update.

The kernels take ids in any order and bags of any length (see shardwise.kernels); an update sorts
the ids of the batch, sums the gradients of each row in that order, and steps it, all in one pass.
"""

from __future__ import annotations

import math

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.embedding.backend import Query
from shardwise.embedding.fused import SGD, Adagrad, Adam, RowUpdate, RowWiseAdagrad
from shardwise.errors import UnsupportedError
from shardwise.kernels.lookup import Trace, pooled_lookup, row_lookup
from shardwise.kernels.tables import TableSet, side_by_side
from shardwise.kernels.update import update


class TritonBackend:
    """Lookups and updates by shardwise's own kernels."""

    name = "triton"

    def __init__(self) -> None:
        #: By stack, as long as it lives.
        self._sets = WeakTensorKeyDictionary()

    def look_up(self, weight: torch.Tensor, query: Query) -> torch.Tensor:
        num_bags, dim = query.num_bags, weight.shape[1]
        tables = self._set_of(weight)
        rows = side_by_side(tables, num_bags)
        firsts = torch.tensor([0, num_bags], device=weight.device)
        if query.lengths is None and query.weights is None:
            out, _ = row_lookup(tables, query.ids, firsts, num_bags, rows, dtype=weight.dtype)
        else:
            out, _ = pooled_lookup(
                tables,
                query.ids,
                _offsets(query),
                firsts,
                num_bags,
                rows,
                weights=query.weights,
                dtype=weight.dtype,
            )
        return out.view(num_bags, dim)

    def row_gradient(
        self, weight: torch.Tensor, query: Query, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, places = torch.unique(query.ids.to(torch.int64), return_inverse=True)
        sums = torch.zeros(rows.numel(), weight.shape[1], device=weight.device)
        if rows.numel():
            tables = TableSet([sums], [0])
            update(tables, _trace(query, places, sums.shape), _flat(grad), "gradient", [[sums]])
        return rows, sums.to(grad.dtype)

    def update(
        self, weight: torch.Tensor, query: Query, grad: torch.Tensor, rule: RowUpdate
    ) -> None:
        tables, trace = self._set_of(weight), _trace(query, query.ids, weight.shape)
        optimizer, state, grads = rule.optimizer, rule.state, _flat(grad)
        if isinstance(optimizer, SGD):
            update(tables, trace, grads, "sgd", lr=optimizer.lr)
        elif isinstance(optimizer, RowWiseAdagrad):
            sums, lr, eps = [[state["sum"]]], optimizer.lr, optimizer.eps
            update(tables, trace, grads, "rowwise_adagrad", sums, lr=lr, eps=eps)
        elif isinstance(optimizer, Adagrad):
            sums = [[state["sum"]]]
            update(tables, trace, grads, "adagrad", sums, lr=optimizer.lr, eps=optimizer.eps)
        elif isinstance(optimizer, Adam):
            moments = [[state["exp_avg"]], [state["exp_avg_sq"]]]
            # SparseAdam adds eps before it corrects the second moment, the kernel after.
            eps = optimizer.eps / math.sqrt(1 - optimizer.betas[1] ** rule.step)
            lr, betas, step = optimizer.lr, optimizer.betas, rule.step
            update(tables, trace, grads, "adam", moments, lr=lr, eps=eps, betas=betas, step=step)
        else:
            raise UnsupportedError(
                f"backend='triton' has no kernel for {type(optimizer).__name__}: use one of SGD, "
                "Adagrad, RowWiseAdagrad, Adam, or backend='torch'."
            )

    def _set_of(self, weight: torch.Tensor) -> TableSet:
        known: TableSet | None = self._sets.get(weight)
        if known is None or known.tables[0].data_ptr() != weight.data_ptr():
            # Of a detached alias: the set must not keep its own key alive.
            known = self._sets[weight] = TableSet([weight.detach()], [0])
        return known


def _offsets(query: Query) -> torch.Tensor:
    if query.lengths is None:
        return torch.arange(query.num_bags + 1, device=query.ids.device)
    offsets = query.ids.new_zeros(query.num_bags + 1)
    torch.cumsum(query.lengths, 0, dtype=offsets.dtype, out=offsets[1:])
    return offsets


def _trace(query: Query, keys: torch.Tensor, shape: torch.Size) -> Trace:
    """What the kernels' lookup would have written down: whose gradient each id belongs to."""
    bags = torch.arange(query.num_bags, device=keys.device)
    if query.lengths is not None:
        bags = torch.repeat_interleave(bags, query.lengths, output_size=keys.numel())
    small = torch.int32 if max(shape[0], query.num_bags * shape[1]) < 2**31 else torch.int64
    scale = None if query.weights is None else query.weights.float()
    return Trace(keys.to(small), (bags * shape[1]).to(small), scale, None)


def _flat(grad: torch.Tensor) -> torch.Tensor:
    return grad.contiguous().view(-1)
