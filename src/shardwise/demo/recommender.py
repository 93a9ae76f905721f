"""A recommender of the DLRM kind: tables, two MLPs, and products between all their outputs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from shardwise.demo.clicks import NUM_DENSE, WIDTH
from shardwise.embedding import EmbeddingBagCollection, Jagged, RowWiseAdagrad, Table

TABLE_RATE = 0.1


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with a smooth function between them.

    With ReLU, rounding decides whether a value near its kink passes a gradient, and two trainings
    that differ by rounding alone drift apart by whole updates.
    """
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(itertools.pairwise(widths)):
        layers += [nn.GELU()] * (number > 0) + [nn.Linear(before, after)]
    return nn.Sequential(*layers)


class Recommender(nn.Module):
    """Predicts the log-odds of a click."""

    pairs: torch.Tensor

    def __init__(self, tables: Sequence[Table]) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(
            tables, output="tensor", optimizer=RowWiseAdagrad(lr=TABLE_RATE)
        )
        self.num_features = len(self.tables.features)
        self.bottom = mlp(NUM_DENSE, 64, WIDTH)
        num_vectors = self.num_features + 1
        self.top = mlp(WIDTH * num_vectors + num_vectors * (num_vectors - 1) // 2, 64, 1)
        row, column = torch.tril_indices(num_vectors, num_vectors, -1)
        self.register_buffer("pairs", row * num_vectors + column, persistent=False)

    def forward(self, dense: torch.Tensor, ids: Jagged) -> torch.Tensor:
        known = self.bottom(dense).unsqueeze(1)
        looked_up = self.tables(ids).unflatten(1, (self.num_features, WIDTH))
        vectors = torch.cat([known, looked_up], 1)
        products = (vectors @ vectors.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        return self.top(torch.cat([vectors.flatten(1), products], 1)).squeeze(1)

    def loss(self, dense: torch.Tensor, ids: Jagged, clicks: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(self(dense, ids), clicks)
