"""Train small models on one device and sharded: for both worlds.

A run is ten steps of AdamW with clipping, a schedule, and two batches per step. It returns the
loss and output of every step, and gradients, parameters, buffers and states at the end.
"""

import copy
from dataclasses import dataclass, field

import torch
from parity import shard_by, whole
from torch import nn
from torch.nn import functional as F

import shardwise
from shardwise import Placement, Replicate, Shard
from tests.training_steps.models import GPT, ClickModel

R, S0, S1 = Replicate(), Shard(0), Shard(1)
NUM_STEPS = 10


@dataclass(frozen=True)
class Run:
    """A model, the mesh, how parameters lie (by pattern; others are replicated) and the batch."""

    model: str
    options: dict = field(default_factory=dict)
    mesh: tuple[int, ...] = (4,)
    plan: dict[str, list[Placement]] = field(default_factory=dict)
    batch: tuple[Placement, ...] = (R,)
    batch_size: int = 6


_trained = {}


def one_device(run, dropout=0.0):
    """Trained once for all runs that shard the same model in other ways."""
    key = (run.model, str(run.options), run.batch_size, dropout)
    if key not in _trained:
        _trained[key] = _train(*_made(run, dropout), lambda tensor: tensor)
    return _trained[key]


def sharded(run, dropout=0.0):
    mesh = shardwise.init_device_mesh("cpu", run.mesh)
    model, batches = _made(run, dropout)
    model = shardwise.distribute_module(model, mesh, shard_by(run.plan))
    return _train(model, batches, lambda x: shardwise.distribute_tensor(x, mesh, list(run.batch)))


def _made(run, dropout):
    """The model and two batches per step, from one seed."""
    torch.manual_seed(5)
    model = MODELS[run.model](**run.options, dropout=dropout).double()
    batches = [
        tuple(t.double() if t.is_floating_point() else t for t in model.batch(run.batch_size))
        for _ in range(2 * NUM_STEPS)
    ]
    return model, batches


def _train(model, batches, place):
    torch.manual_seed(6)  # of dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=NUM_STEPS)
    found = {}
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for half in range(2):
            loss = model.loss(*map(place, batches[2 * step + half])) / 2
            loss.backward()
            found[f"loss {step}.{half}"] = whole(loss)
        found[f"norm {step}"] = whole(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        scheduler.step()
    for name, parameter in model.named_parameters():
        found[f"gradient of {name}"] = whole(parameter.grad)
        found[name] = whole(parameter)
        for key, value in optimizer.state[parameter].items():
            found[f"{key} of {name}"] = whole(value)
    found |= {name: whole(buffer) for name, buffer in model.named_buffers()}
    return copy.deepcopy(found)


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


class ConvNet(nn.Module):
    """Convolutions with batch norm, pooling and a linear head."""

    def __init__(self, channels=6, num_classes=5, dropout=0.0):
        super().__init__()
        self.num_classes = num_classes
        self.conv1 = nn.Conv2d(3, channels, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(2 * channels)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(2 * channels, num_classes)

    def forward(self, images):
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(images))), 2)
        x = F.relu(self.norm2(self.conv2(x)))
        return self.head(self.drop(x.mean((2, 3))))

    def loss(self, images, classes):
        return F.cross_entropy(self(images), classes)

    def batch(self, size):
        classes = torch.randint(0, self.num_classes, (size,))
        return torch.randn(size, 3, 8, 8), classes


class Recurrent(nn.Module):
    """A recurrent net over tokens that predicts the next one; `kind` is "LSTM" or "GRU"."""

    def __init__(self, kind="LSTM", vocabulary=13, width=8, dropout=0.0):
        super().__init__()
        self.vocabulary = vocabulary
        self.tokens = nn.Embedding(vocabulary, width)
        self.net = getattr(nn, kind)(width, width, num_layers=2, batch_first=True, dropout=dropout)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        return self.head(self.net(self.tokens(ids))[0])

    def loss(self, ids, targets):
        return F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())

    def batch(self, size):
        ids = torch.randint(0, self.vocabulary, (size, 6))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


MODELS = {model.__name__: model for model in (GPT, ClickModel, ConvNet, Recurrent)}


# -- the runs --------------------------------------------------------------------------------

COLUMNS = ("*.q.weight", "*.k.weight", "*.v.weight", "*.up.weight", "*.gate.weight")
ROWS = ("*.out.weight", "*.down.weight")
TENSOR = {"tokens.weight": [S0]} | {c: [S0] for c in COLUMNS} | {r: [S1] for r in ROWS}
LAYERED = {"conv1.*": [S0], "norm1.*": [S0], "conv2.weight": [S1], "head.*": [S0]}
TABLES = {"tables.*.weight": [S0], "bottom.0.*": [S0], "bottom.2.weight": [S1]}


def over(first, plan):
    """A plan of the second axis, with `first` for the first."""
    return {pattern: [first, *placements] for pattern, placements in plan.items()}


RUNS = {
    "GPT, data": Run("GPT", batch=(S0,)),
    "GPT, tensor": Run("GPT", plan=TENSOR),
    "GPT, data x tensor": Run("GPT", mesh=(2, 2), plan=over(R, TENSOR), batch=(S0, R)),
    "GPT, all sharded over data": Run("GPT", plan={"*": [S0]}, batch=(S0,), batch_size=5),
    "GPT, uneven heads": Run("GPT", {"num_heads": 3, "width": 12}, plan=TENSOR),
    "GPT, three ranks": Run("GPT", mesh=(3,), plan=TENSOR, batch_size=5),
    "convolutions, data": Run("ConvNet", batch=(S0,), batch_size=8),
    "convolutions, uneven data": Run("ConvNet", batch=(S0,), batch_size=7),
    "convolutions, channels": Run("ConvNet", plan=LAYERED),
    "convolutions, data x channels": Run(
        "ConvNet", mesh=(2, 2), plan=over(R, LAYERED), batch=(S0, R)
    ),
    "recommender, data": Run("ClickModel", batch=(S0,), batch_size=7),
    "recommender, rows": Run("ClickModel", plan=TABLES, batch=(S0,)),
    "recommender, columns": Run(
        "ClickModel", plan={"tables.*.weight": [S1]}, batch=(S0,), batch_size=7
    ),
    "recommender, data x rows": Run("ClickModel", mesh=(2, 2), plan=over(R, TABLES), batch=(S0, R)),
    "recommender, tables on one rank": Run(
        "ClickModel",
        plan={
            "tables.0.weight": [Shard(0, (0, 11, 0, 0))],
            "tables.1.weight": [Shard(0, (7, 0, 0, 0))],
            "tables.2.weight": [Shard(0, (5, 6, 0, 12))],
        },
        batch=(S0,),
    ),
    "LSTM, data": Run("Recurrent", {"kind": "LSTM"}, batch=(S0,)),
    "GRU, data": Run("Recurrent", {"kind": "GRU"}, batch=(S0,), batch_size=7),
    "LSTM, table and head": Run(
        "Recurrent", {"kind": "LSTM"}, plan={"tokens.weight": [S0], "head.*": [S0]}
    ),
}
