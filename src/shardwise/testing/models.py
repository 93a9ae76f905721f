"""Small models of the kinds that people shard: for parity tests, examples and benchmarks.

Plain modules that know nothing of shards. Each has a `loss` of a batch, and `batch` draws one.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class CausalAttention(nn.Module):
    """Causal attention with rotary positions."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, width: int, num_heads: int, max_length: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        half = width // num_heads // 2
        speeds = 100.0 ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(max_length), speeds).repeat(1, 2)
        self.register_buffer("cosines", angles.cos())
        self.register_buffer("sines", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, length, self.num_heads, -1).transpose(1, 2)

        q, k = self._turn(heads(self.q(x))), self._turn(heads(self.k(x)))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            q, k, heads(self.v(x)), dropout_p=dropout, is_causal=True
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))

    def _turn(self, x: Tensor) -> Tensor:
        """Turn each pair of features by an angle that grows with the position."""
        length = x.shape[2]
        first, second = x.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        return x * self.cosines[:length] + turned * self.sines[:length]


class Block(nn.Module):
    def __init__(
        self, width: int, num_heads: int, hidden: int, max_length: int, dropout: float
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = CausalAttention(width, num_heads, max_length, dropout)
        self.up, self.gate = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        y = self.norm2(x)
        return x + self.drop(self.down(F.silu(self.gate(y)) * self.up(y)))


class GPT(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(
        self,
        vocabulary: int = 19,
        width: int = 16,
        num_heads: int = 4,
        hidden: int = 22,
        num_blocks: int = 2,
        max_length: int = 8,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.vocabulary, self.max_length = vocabulary, max_length
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            Block(width, num_heads, hidden, max_length, dropout) for _ in range(num_blocks)
        )
        self.norm = nn.RMSNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())

    def batch(self, size: int) -> tuple[Tensor, ...]:
        ids = torch.randint(0, self.vocabulary, (size, self.max_length + 1))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class ConvNet(nn.Module):
    """Convolutions with batch norm, pooling and a linear head."""

    def __init__(self, channels: int = 6, num_classes: int = 5, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.conv1 = nn.Conv2d(3, channels, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(2 * channels)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(2 * channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(images))), 2)
        x = F.relu(self.norm2(self.conv2(x)))
        return self.head(self.drop(x.mean((2, 3))))

    def loss(self, images: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(self(images), classes)

    def batch(self, size: int) -> tuple[Tensor, ...]:
        classes = torch.randint(0, self.num_classes, (size,))
        return torch.randn(size, 3, 8, 8), classes


class ClickModel(nn.Module):
    """Bags of categories, an MLP for numbers, products of all pairs, an MLP on top."""

    MODES = ("sum", "mean", "max")

    def __init__(
        self, rows: tuple[int, ...] = (11, 7, 23), width: int = 6, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.rows = rows
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(count, width, mode=mode)
            for count, mode in zip(rows, itertools.cycle(self.MODES), strict=False)
        )
        self.bottom = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, width), nn.ReLU())
        pairs = (len(rows) + 1) ** 2
        self.top = nn.Sequential(
            nn.Linear(pairs + width, 9), nn.ReLU(), nn.Dropout(dropout), nn.Linear(9, 1)
        )

    def forward(self, numbers: Tensor, *ids: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        pooled = [table(each) for table, each in zip(self.tables, ids, strict=True)]
        features = torch.stack([dense, *pooled], 1)
        products = torch.bmm(features, features.transpose(1, 2))
        return self.top(torch.cat([dense, products.flatten(1)], 1)).squeeze(1)

    def loss(self, numbers: Tensor, clicked: Tensor, *ids: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(self(numbers, *ids), clicked)

    def batch(self, size: int) -> tuple[Tensor, ...]:
        ids = [torch.randint(0, count, (size, 3)) for count in self.rows]
        return torch.randn(size, 4), torch.randint(0, 2, (size,)).float(), *ids


class Recurrent(nn.Module):
    """A recurrent net over tokens that predicts the next one; `kind` is "LSTM" or "GRU"."""

    def __init__(
        self, kind: str = "LSTM", vocabulary: int = 13, width: int = 8, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.tokens = nn.Embedding(vocabulary, width)
        self.net = getattr(nn, kind)(width, width, num_layers=2, batch_first=True, dropout=dropout)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.net(self.tokens(ids))[0])

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())

    def batch(self, size: int) -> tuple[Tensor, ...]:
        ids = torch.randint(0, self.vocabulary, (size, 6))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
