"""A small language model as a task: tensor-parallel, on text that ships with Python."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from shardwise.errors import LayoutError
from shardwise.parallel import load_plan, parallelize_module

WIDTH, NUM_HEADS, NUM_BLOCKS, LENGTH = 64, 8, 2, 64
NUM_SYMBOLS = 128
EXAMPLES_PER_STEP = 16
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
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.norm_1(x)
        # Each rank has some of the heads, so their number is inferred.
        q, k, v = (
            layer(seen).unflatten(-1, (-1, WIDTH // NUM_HEADS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class LanguageModel(nn.Module):
    """Predicts the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_SYMBOLS, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(TransformerBlock() for _ in range(NUM_BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_SYMBOLS, bias=False)

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
    size: int = EXAMPLES_PER_STEP
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
