"""The tasks: a recommender on a click log, and a small language model on text."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from shardwise.demo.data import NUM_DENSE, WIDTH, Batch, ClickFile, ClickLog, best_loss
from shardwise.demo.data import tables as planted_tables
from shardwise.embedding import EmbeddingBagCollection, Jagged, Plan, RowWiseAdagrad, Table
from shardwise.errors import LayoutError
from shardwise.parallel import data_parallel, load_plan, parallelize_module
from shardwise.testing.loop import per_rank, split_batch

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


# -- language ------------------------------------------------------------------------------------
# A small language model as a task: tensor-parallel, on text that ships with Python.


MODEL_WIDTH, NUM_HEADS, NUM_BLOCKS, LENGTH = 64, 8, 2, 64
NUM_SYMBOLS = 128
TEXTS_PER_STEP = 16
RATE = 3e-3

#: Attention and MLP are sharded by columns and then by rows: one all-reduce each in forward.
TENSOR_PLAN: dict[str, Any] = {
    "embed": "rowwise",
    "position": "replicate",
    "blocks.*.norm_[12]": "replicate",
    "blocks.*.[qkv]": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "norm": "replicate",
    "head": "colwise_rep",
}


class TransformerBlock(nn.Module):
    """Attention, then an MLP, each added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(MODEL_WIDTH), nn.LayerNorm(MODEL_WIDTH)
        self.q, self.k, self.v = (nn.Linear(MODEL_WIDTH, MODEL_WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(MODEL_WIDTH, MODEL_WIDTH)
        self.up, self.down = (
            nn.Linear(MODEL_WIDTH, 4 * MODEL_WIDTH),
            nn.Linear(4 * MODEL_WIDTH, MODEL_WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.norm_1(x)
        # Each rank has some of the heads, so their number is inferred.
        q, k, v = (
            layer(seen).unflatten(-1, (-1, MODEL_WIDTH // NUM_HEADS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class LanguageModel(nn.Module):
    """Predicts the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_SYMBOLS, MODEL_WIDTH)
        self.position = nn.Embedding(LENGTH, MODEL_WIDTH)
        self.blocks = nn.Sequential(*(TransformerBlock() for _ in range(NUM_BLOCKS)))
        self.norm = nn.LayerNorm(MODEL_WIDTH)
        self.head = nn.Linear(MODEL_WIDTH, NUM_SYMBOLS, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        place = torch.arange(text.shape[-1]).expand(text.shape)
        return self.head(self.norm(self.blocks(self.embed(text) + self.position(place))))


def python_text() -> torch.Tensor:
    """The language reference that comes with Python (what `help()` shows), as ASCII codes."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(list(text.encode("ascii", "ignore")), dtype=torch.int64)


@dataclass
class Writing:
    """The task: predict the next character of Python's documentation."""

    num_steps: int
    seed: int
    plan: str | os.PathLike[str] | None = None
    size: int = TEXTS_PER_STEP
    title: str = "A language model"
    _text: torch.Tensor = field(default_factory=python_text)

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return LanguageModel()

    def optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        # A larger epsilon: Adam amplifies gradients that are only rounding errors.
        return [torch.optim.AdamW(model.parameters(), lr=RATE, eps=1e-5)]

    def optimizers_within(self, model: nn.Module) -> list[Any]:
        return []

    def identity(self) -> dict[str, Any]:
        return {"model": "gpt", "seed": self.seed, "examples": self.size}

    def shard(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if NUM_HEADS % mesh.size():
            raise LayoutError(
                f"The model has {NUM_HEADS} heads, which {mesh.size()} ranks cannot share evenly: "
                f"use 1, 2, 4 or 8 ranks."
            )
        plan = TENSOR_PLAN if self.plan is None else load_plan(self.plan)
        return parallelize_module(model, mesh, plan, strict=True)

    def _excerpts(self, generator: torch.Generator, first: int, last: int) -> torch.Tensor:
        starts = torch.randint(first, last - LENGTH - 1, (self.size, 1), generator=generator)
        return self._text[starts + torch.arange(LENGTH + 1)]

    @property
    def _split(self) -> int:
        return len(self._text) * 9 // 10

    def batches(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        return (self._excerpts(generator, 0, self._split) for _ in range(self.num_steps))

    def loss(self, model: nn.Module, batch: torch.Tensor, num_ranks: int) -> torch.Tensor:
        scores = model(batch[:, :-1])
        return F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())

    def num_examples(self, batch: torch.Tensor) -> int:
        return len(batch)

    @torch.no_grad()
    def examine(self, model: nn.Module) -> dict[str, Any]:
        """Metrics on text that the model has not seen."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        excerpts = [self._excerpts(generator, self._split, len(self._text)) for _ in range(4)]
        scores = torch.cat([model(excerpt[:, :-1]) for excerpt in excerpts]).flatten(0, 1)
        target = torch.cat([excerpt[:, 1:] for excerpt in excerpts]).flatten()
        share = torch.bincount(self._text[: self._split], minlength=NUM_SYMBOLS) / self._split
        return {
            "loss": float(F.cross_entropy(scores, target)),
            "blind loss": float(-(share[target].clamp(min=1e-6).log()).mean()),
            "next characters right": float((scores.argmax(1) == target).float().mean()),
        }
