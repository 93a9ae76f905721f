"""Small models, written as people write them, and what tests do with them."""

from copy import deepcopy

from parity import assert_same_history, train, whole
from torch import nn
from torch.nn import functional as F

from shardwise.parallel import parallelize_module

__all__ = ["MLP", "Block", "TiedLM", "assert_trains_alike", "whole"]


class MLP(nn.Module):
    def __init__(self, width=8, hidden=12):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    """Heads are counted by what the projections give, so that a rank may hold some of them."""

    def __init__(self, width, num_heads):
        super().__init__()
        self.head_width = width // num_heads
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.o = nn.Linear(width, width)

    def forward(self, x):
        def heads(y):
            return y.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(
            heads(self.q(x)), heads(self.k(x)), heads(self.v(x)), is_causal=True
        )
        return self.o(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width=8, num_heads=4, hidden=12):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.mlp = MLP(width, hidden)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TiedLM(nn.Module):
    def __init__(self, vocabulary=11, width=8):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.mlp = MLP(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.mlp(self.embed(ids)))


def squared(model, x, y):
    return (model(x) - y).pow(2).mean()


def assert_trains_alike(model, mesh, plan, batches, loss_of=squared, enter=lambda x: x):
    """Some SGD steps, parallel and on one device: the same losses and parameters."""
    expected = train(deepcopy(model), loss_of, batches)
    parallel = parallelize_module(deepcopy(model), mesh, plan)
    found = train(parallel, loss_of, [tuple(map(enter, batch)) for batch in batches])
    assert_same_history(found, expected)
    return parallel
