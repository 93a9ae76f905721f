"""Small models, written as people write them, and what tests do with them."""

from copy import deepcopy

import torch
from parity import train, whole
from torch import nn
from torch.nn import functional as F

from shardwise import Replicate, Shard
from shardwise.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

__all__ = ["MLP", "Block", "Experts", "Mixture", "TiedLM", "assert_trains_alike", "whole"]


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


def sequence_plan():
    """A plan for a Block whose activations are split along the sequence between its layers."""
    whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    scattered = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    return {
        "": PrepareModuleInputOutput(
            input_layouts=Replicate(),
            desired_input_layouts=Shard(1),
            output_layouts=Shard(1),
            desired_output_layouts=Replicate(),
        ),
        "norm?": SequenceParallel(),
        "attention": whole,
        "attention.[kqv]": ColwiseParallel(),
        "attention.o": scattered,
        "mlp": whole,
        "mlp.up": ColwiseParallel(),
        "mlp.down": scattered,
    }


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
    torch.testing.assert_close(found, expected)
    return parallel


class Experts(nn.Module):
    """Stacked experts with a loop over those that some token chose, as mixtures are written."""

    def __init__(self, num_experts=6, width=8, hidden=12):
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, hidden, width) / 3)
        self.bias = nn.Parameter(torch.randn(num_experts, hidden) / 3)
        self.down = nn.Parameter(torch.randn(num_experts, width, hidden) / 3)
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, tokens, experts, weights):
        out = torch.zeros_like(tokens)
        for expert in experts.unique().tolist():
            token, slot = (experts == expert).nonzero(as_tuple=True)
            hidden = F.gelu(F.linear(tokens[token], self.up[expert], self.bias[expert]))
            term = F.linear(hidden, self.down[expert]) * self.scale
            out = out.index_add(0, token, term * weights[token, slot, None])
        return out


class Mixture(nn.Module):
    """A router, and the two experts of each token that it prefers."""

    def __init__(self, num_experts=6, width=8):
        super().__init__()
        self.router = nn.Linear(width, num_experts)
        self.experts = Experts(num_experts, width)

    def forward(self, x):
        weights, experts = self.router(x).softmax(-1).topk(2, dim=-1)
        return x + self.experts(x, experts, weights / weights.sum(-1, keepdim=True))
