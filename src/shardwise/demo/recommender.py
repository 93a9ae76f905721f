"""The recommender as a task: a click log, synthetic or from a file, and a plan for the tables."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from shardwise.demo.data import NUM_DENSE, WIDTH, Batch, ClickFile, ClickLog, best_loss
from shardwise.demo.data import tables as planted_tables
from shardwise.embedding import EmbeddingBagCollection, Jagged, Plan, RowWiseAdagrad, Table
from shardwise.parallel import data_parallel
from shardwise.testing.batches import per_rank, split_batch

TABLE_RATE = 0.1


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with a smooth activation.

    With ReLU, rounding decides whether a value near zero has a gradient, and two trainings that
    differ only by rounding would drift apart.
    """
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(itertools.pairwise(widths)):
        layers += [nn.GELU()] * (number > 0) + [nn.Linear(before, after)]
    return nn.Sequential(*layers)


class Recommender(nn.Module):
    """Predicts the log-odds of a click, as DLRM: tables, two MLPs, products of their outputs."""

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


EXAMPLES_PER_STEP = 1024
DENSE_RATE = 0.05

#: Large tables by rows, the next by columns, small ones on one rank, tiny ones on all.
MIXED_PLAN = Plan(
    {
        "user": "row_wise",
        "item": "column_wise",
        "campaign": "table_wise",
        "city": {"kind": "grid", "ranks": [0, 1]},
        "category": "table_wise",
        "*": "data_parallel",
    }
)


@dataclass
class Recommending:
    """The task: predict clicks, of a synthetic log without `data`."""

    num_steps: int
    seed: int
    plan: Plan
    data: ClickFile | None = None
    size: int = EXAMPLES_PER_STEP
    title: str = "A recommender"

    def tables(self) -> list[Table]:
        return self.data.tables() if self.data is not None else planted_tables()

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return Recommender(self.tables())

    def optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        dense = [p for name, p in model.named_parameters() if not name.startswith("tables.")]
        return [torch.optim.SGD(dense, lr=DENSE_RATE, momentum=0.9)]

    def optimizers_within(self, model: Any) -> list[Any]:
        return [model.tables.optimizer]

    def identity(self) -> dict[str, Any]:
        tables = {table.name: table.num_embeddings for table in self.tables()}
        return {"model": "dlrm", "seed": self.seed, "examples": self.size, "tables": tables}

    def shard(self, model: Any, mesh: DeviceMesh) -> nn.Module:
        model.tables.shard(mesh, self.plan)
        return data_parallel(model, mesh)

    def batches(self) -> Iterator[Batch]:
        if self.data is not None:
            return self.data.batches(self.num_steps, self.size)
        return ClickLog(self.seed).batches(self.num_steps, self.size)

    def loss(self, model: Any, batch: Batch, num_ranks: int) -> torch.Tensor:
        whole = (batch.dense, batch.ids, batch.clicks)
        if not num_ranks:
            return model.loss(*whole)
        parts = split_batch(whole, num_ranks)
        return model.loss(*per_rank(parts, lambda rank: rank))

    def num_examples(self, batch: Batch) -> int:
        return len(batch)

    @torch.no_grad()
    def examine(self, model: nn.Module) -> dict[str, Any]:
        """Metrics on new examples: loss, and how often the side of the truth is predicted."""
        if self.data is not None:
            return {}
        log = ClickLog(self.seed)
        for _ in log.batches(self.num_steps, self.size):
            pass
        fresh = list(log.batches(4, self.size))
        odds = torch.cat([model(b.dense, b.ids) for b in fresh])
        clicks = torch.cat([b.clicks for b in fresh])
        truth = torch.cat([b.truth for b in fresh if b.truth is not None])
        loss = nn.functional.binary_cross_entropy_with_logits(odds, clicks)
        share = clicks.mean()
        return {
            "loss": float(loss),
            "best loss": best_loss(fresh),
            "blind loss": float(-(share * share.log() + (1 - share) * (1 - share).log())),
            "accuracy": float(((odds > 0) == (truth > 0)).float().mean()),
        }
