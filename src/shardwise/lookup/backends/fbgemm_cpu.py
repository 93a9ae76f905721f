"""The backend of fbgemm's CPU kernels, where `fbgemm-gpu-cpu` or `fbgemm-gpu` is installed.

To fbgemm a stack is one table with many bags. What it has no kernel for (single rows, Adam, weight
decay, other dtypes, tensors on a GPU) uses torch's kernels; the results are the same.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from shardwise.errors import ArgumentError
from shardwise.lookup.backends.backend import Query
from shardwise.lookup.backends.torch_kernels import TorchBackend, in_parts
from shardwise.lookup.ids import edges_of
from shardwise.lookup.optimizers import SGD, Adagrad, RowUpdate, RowWiseAdagrad

_SUM = 0
_FLOAT = 0


class FbgemmBackend(TorchBackend):
    """Pooled lookups, and the updates of SGD, Adagrad and row-wise Adagrad, through fbgemm."""

    name = "fbgemm"

    def __init__(self) -> None:
        super().__init__()
        try:
            importlib.import_module("fbgemm_gpu")
        except ImportError as error:
            raise ArgumentError(
                "backend='fbgemm' needs fbgemm: pip install fbgemm-gpu-cpu (or fbgemm-gpu)."
            ) from error
        self._ops: Any = torch.ops.fbgemm

    def look_up(self, weight: torch.Tensor, query: Query) -> torch.Tensor:
        if query.lengths is None or not _takes(weight, query):
            return super().look_up(weight, query)
        width = weight.shape[1]
        return self._ops.split_embedding_codegen_forward_cpu(
            weight.view(-1),
            torch.tensor([0]),
            torch.tensor([0, width], dtype=torch.int32),
            width,
            torch.tensor([0, weight.shape[0]]),
            query.ids.long(),
            _offsets(query),
            _SUM,
            _weights(query),
            _FLOAT,
        )

    def update(
        self, weight: torch.Tensor, query: Query, grad: torch.Tensor, rule: RowUpdate
    ) -> None:
        optimizer = rule.optimizer
        kind = type(optimizer)
        known = kind in (SGD, Adagrad, RowWiseAdagrad) and not optimizer.weight_decay
        if not known or not _takes(weight, query):
            super().update(weight, query, grad, rule)
            return
        for part in in_parts(query, weight.shape[0]):  # its sort is faster where it fits the cache
            first, last = part.first_row, part.last_row
            self._update(
                weight[first:last], part.of(query), part.bags_of(grad), rule.on(first, last)
            )

    def _update(
        self, weight: torch.Tensor, query: Query, grad: torch.Tensor, rule: RowUpdate
    ) -> None:
        optimizer, kind = rule.optimizer, type(rule.optimizer)
        none, start = torch.zeros(1, dtype=torch.int32), torch.tensor([0])
        common = (
            grad.contiguous(),
            weight.view(-1),
            none,
            start,
            torch.tensor([0, weight.shape[1]], dtype=torch.int32),
            weight.shape[1],
            torch.tensor([0, weight.shape[0]]),
            weight.shape[0].bit_length(),
            query.ids.long(),
            _offsets(query),
            _SUM,
            _weights(query),
            False,
        )
        rate = torch.tensor(optimizer.lr, dtype=torch.float32)
        if kind is SGD:
            self._ops.split_embedding_backward_codegen_sgd_cpu(*common, rate)
            return
        state = rule.state["sum"].view(-1)
        if kind is Adagrad:
            update = self._ops.split_embedding_backward_codegen_adagrad_cpu
        else:
            update = self._ops.split_embedding_backward_codegen_rowwise_adagrad_cpu
        update(*common, state, none, start, rate, optimizer.eps)  # type: ignore[attr-defined]


def _takes(weight: torch.Tensor, query: Query) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and query.ids.numel() > 0


def _offsets(query: Query) -> torch.Tensor:
    if query.lengths is None:
        return torch.arange(query.ids.shape[0] + 1)
    return edges_of(query.lengths)


def _weights(query: Query) -> torch.Tensor | None:
    # None arrives as an undefined tensor: its kernels then multiply nothing.
    return None if query.weights is None else query.weights.float()
