"""Models for the tests of reports and of the command line, as a person would write them."""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from shardwise import LayoutError
from shardwise.embedding import SGD, EmbeddingBagCollection, Jagged, Table

TENSOR_PLAN = """format = "shardwise plan 1"

[modules]
up = "colwise"
down = "rowwise"
"""
TABLE_PLAN = """format = "shardwise embedding plan 1"

[tables]
user = "row_wise"
"*" = "table_wise"
"""


class MLP(nn.Module):
    def __init__(self, drop=0.0):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(6, 10), nn.Linear(10, 6), nn.Dropout(drop)

    def forward(self, x, target):
        return F.mse_loss(self.drop(self.down(F.gelu(self.up(x)))), target)


def mlp():
    return MLP(), (torch.randn(8, 6), torch.randn(8, 6))


class MLPBatch(NamedTuple):
    x: torch.Tensor
    target: torch.Tensor


def mlp_with_named_batch():
    return MLP(), MLPBatch(torch.randn(8, 6), torch.randn(8, 6))


class Filter(nn.Module):
    """Multiplies frequencies by complex weights."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight).pow(2).mean()


def complex_filter():
    return Filter(), torch.randn(8, 6)


def sparse_rows():
    return nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 1)), torch.arange(8)


def dropping():
    return MLP(0.5), (torch.randn(8, 6), torch.randn(8, 6))


def wide_layers():
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))), torch.randn(4, 64)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        q, k, v = self.mix(x).unflatten(-1, (6, 4)).transpose(1, 2).chunk(3, 1)
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.down(F.gelu(self.up(x)))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, inputs_embeds):
        for layer in self.layers:
            inputs_embeds = layer(inputs_embeds)
        return inputs_embeds


def layers():
    return Layers(), torch.randn(4, 8, 8)


def mlp_on_meta():
    with torch.device("meta"):
        return mlp()


class Careless(MLP):
    """Uses the local part of a weight as if it were the whole."""

    def forward(self, x, target):
        weight = self.up.weight
        part = weight.to_local() if hasattr(weight, "to_local") else weight
        return super().forward(x, target) + part.sum()


def careless():
    return Careless(), (torch.randn(8, 6), torch.randn(8, 6))


class Forgetful(MLP):
    """Takes another way once it was sharded and trained."""

    def forward(self, x, target):
        sharded = hasattr(self.up.weight, "to_local")
        moved = sharded and bool(self.steps > 0)
        self.steps = getattr(self, "steps", 0) + 1
        return super().forward(x, target) * (2 if moved else 1)

    steps = 0


def forgetful():
    return Forgetful(), (torch.randn(8, 6), torch.randn(8, 6))


class Strict(MLP):
    """Is refused in training steps, which are taken in double precision."""

    def forward(self, x, target):
        if hasattr(self.up.weight, "to_local") and x.dtype == torch.float64:
            raise LayoutError("not in double precision")
        return super().forward(x, target)


def strict():
    return Strict(), (torch.randn(8, 6), torch.randn(8, 6))


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        tables = [Table("user", 11, 4), Table("item", 7, 4), Table("day", 3, 4)]
        self.tables = EmbeddingBagCollection(tables, output="tensor", optimizer=SGD(lr=0.1))
        self.top = nn.Linear(12, 1)

    def forward(self, ids):
        return self.top(self.tables(ids)).pow(2).mean()


def only_tables():
    model, batch = clicks()
    return model.tables, batch


def clicks():
    ids = torch.arange(24) % 3
    batch = Jagged(["user", "item", "day"], ids, lengths=torch.ones(24, dtype=torch.int64))
    return Clicks(), (batch,)


class Classes(MLP):
    def forward(self, x, target):
        return self.up(x).argmax(1)


def classes():
    return Classes(), (torch.randn(8, 6), torch.randn(8, 6))


class Normed(MLP):
    """Changes buffers in place, and puts another tensor in the place of one."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(10)
        self.register_buffer("is_odd", torch.tensor(False))
        self.register_buffer("num_calls", torch.tensor(0))

    def forward(self, x, target):
        self.is_odd = ~self.is_odd
        loss = F.mse_loss(self.down(F.gelu(self.norm(self.up(x)))), target)
        self.num_calls += 1  # after all that backward needs
        return loss


def normed():
    return Normed(), (torch.randn(8, 6), torch.randn(8, 6))


class Tied(nn.Module):
    """Has one parameter, which is its embedding and its head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)

    def forward(self, ids):
        x = self.embed(ids)
        return F.cross_entropy(F.linear(x, self.embed.weight), ids)


def tied():
    return Tied(), torch.arange(8) % 7


class Single(MLP):
    def forward(self, x, target):
        return super().forward(x.float(), target)


def single():
    return Single(), (torch.randn(8, 6), torch.randn(8, 6))


class Masked(MLP):
    """Its outputs are infinite in places; with `broken`, not where they should be."""

    broken = False

    def forward(self, x, target):
        scores = self.up(x)
        mask = torch.arange(10) < 3
        if self.broken and type(x) is not torch.Tensor:  # on simulated ranks
            mask = ~mask
        return {"loss": scores.pow(2).mean(), "scores": scores.masked_fill(mask, -torch.inf)}


def masked():
    return Masked(), (torch.randn(8, 6), torch.randn(8, 6))


def badly_masked():
    model, batch = masked()
    model.broken = True
    return model, batch


class LossInDict(MLP):
    def forward(self, x, target):
        return {"loss": super().forward(x, target), "much_larger": 100 * self.up(x)}


def loss_in_dict():
    return LossInDict(), (torch.randn(8, 6), torch.randn(8, 6))


def frozen():
    return MLP().requires_grad_(False), (torch.randn(8, 6), torch.randn(8, 6))


def no_module():
    return 3


def failing():
    raise RuntimeError("the weights are elsewhere")
