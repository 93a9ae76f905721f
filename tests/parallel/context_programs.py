"""Programs on sequences that are split over ranks, for both worlds."""

import copy

import torch
from parity import assert_gradients
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import Shard
from shardwise.parallel import context_parallel, data_parallel, parallelize_module
from shardwise.simulation.ranks import on_every_rank, on_rank

LENGTH, BATCH = 16, 4
PLAN = {
    "layers.*.q": "colwise",
    "layers.*.k": "colwise",
    "layers.*.v": "colwise",
    "layers.*.out": "rowwise",
}


class Attention(nn.Module):
    """Causal, with rotary positions and grouped key heads."""

    def __init__(self, heads=4, key_heads=2, width=8):
        super().__init__()
        self.width = width
        for name, num in (("q", heads), ("k", key_heads), ("v", key_heads)):
            setattr(self, name, nn.Linear(32, num * width))
        self.out = nn.Linear(heads * width, 32)

    def forward(self, x, position_ids):
        q, k, v = (
            each(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        q, k = (rotated(each, position_ids) for each in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def rotated(x, positions):
    angles = positions[:, None, :, None] * 0.3 ** torch.arange(x.shape[-1] // 2)
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Model(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        self.embed = nn.Embedding(37, 32)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(32, 37)
        self.recompute = recompute

    def forward(self, input_ids, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        x = self.embed(input_ids)
        for layer in self.layers:
            if self.recompute:
                x = checkpoint(layer, x, position_ids, use_reentrant=False)
            else:
                x = layer(x, position_ids)
        return self.head(x)


def train(sizes, method=None, recompute=False):
    """Gradients of a model on a mesh of (dp, cp, tp) are those of one device."""
    torch.manual_seed(0)
    model = Model(recompute)
    alone = copy.deepcopy(model)
    ids, target = torch.randint(37, (2, BATCH, LENGTH))
    loss = F.cross_entropy(alone(ids).flatten(0, 1), target.flatten())
    loss.backward()

    mesh = shardwise.init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "cp", "tp"))
    if sizes[2] > 1:
        parallelize_module(model, mesh, PLAN)
    context_parallel(model, mesh, "layers.*", method=method)
    data_parallel(model, mesh["dp"])
    places = dict(enumerate(torch.cartesian_prod(*map(torch.arange, sizes)).tolist()))

    def batch(rank):
        return ids.chunk(sizes[0])[places[rank][0]]

    def targets(rank):
        mine = target.chunk(sizes[0])[places[rank][0]]
        return mine.chunk(sizes[1], 1)[places[rank][1]].flatten()

    logits = model(on_every_rank(batch))
    F.cross_entropy(logits.flatten(0, 1), on_every_rank(targets)).backward()
    assert_gradients(model, alone)


def dtensors(heads, key_heads):
    """Attention of DTensors that are sharded along the sequence, and its gradients."""
    torch.manual_seed(0)
    given = [torch.randn(2, num, 18, 8) for num in (heads, key_heads, key_heads)]
    alone = [x.clone().requires_grad_() for x in given]
    expected = F.scaled_dot_product_attention(*alone, is_causal=True, enable_gqa=True)
    expected.square().sum().backward()
    mesh = shardwise.init_device_mesh("cpu", (4,))
    laid = [shardwise.distribute_tensor(x, mesh, [Shard(2)]).requires_grad_() for x in given]
    found = F.scaled_dot_product_attention(*laid, is_causal=True, enable_gqa=True)
    found.square().sum().backward()
    torch.testing.assert_close(on_rank(found.full_tensor(), 0), expected)
    for x, one in zip(laid, alone, strict=True):
        torch.testing.assert_close(on_rank(x.grad.full_tensor(), 0), one.grad)
