"""A model that is fully sharded over several meshes, and its training; for both worlds."""

import copy

import torch
from parity import parameters
from torch import nn
from torch.nn import functional as F

import shardwise
from shardwise.parallel import CPUOffloadPolicy, data_parallel, fully_shard, parallelize_module
from shardwise.simulation.ranks import on_every_rank
from shardwise.training.fully_sharded import members


def mesh_of(**axes):
    return shardwise.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


class Layer(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 10), nn.Linear(10, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """A tied embedding, layers, and a scalar, which stays whole."""

    def __init__(self, num_layers=3):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.scale * x)


PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
IDS = torch.randint(11, (5, 8, 3), generator=torch.Generator().manual_seed(1))


def loss_of(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def sharded(model, mesh, **options):
    for layer in model.layers:
        fully_shard(layer, mesh, **options)
    return fully_shard(model, mesh, **options)


def own(ids, num_parts, each=1):
    """Each rank's part of a batch; `each` neighbouring ranks have the same."""
    return on_every_rank(lambda rank: ids.chunk(num_parts)[rank // each])


def train(model, batches, loss_of=loss_of, lr=1e-2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for batch in batches:
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model


MESHES = {
    "1": lambda model: (sharded(model, mesh_of(dp=1)), 1, 1),
    "2": lambda model: (sharded(model, mesh_of(dp=2)), 2, 1),
    "3": lambda model: (sharded(model, mesh_of(dp=3)), 3, 1),
    "4": lambda model: (sharded(model, mesh_of(dp=4)), 4, 1),
    "8": lambda model: (sharded(model, mesh_of(dp=8)), 8, 1),
    "4, never freed": lambda model: (
        sharded(model, mesh_of(dp=4), reshard_after_forward=False),
        4,
        1,
    ),
    "4, freed": lambda model: (sharded(model, mesh_of(dp=4), reshard_after_forward=True), 4, 1),
    "4, kept by 2": lambda model: (sharded(model, mesh_of(dp=4), reshard_after_forward=2), 4, 1),
    "4, no prefetch": lambda model: (sharded(model, mesh_of(dp=4), prefetch=0), 4, 1),
    "4, one group": lambda model: (fully_shard(model, mesh_of(dp=4)), 4, 1),
    "replicas": lambda model: (sharded(model, mesh_of(rep=2, shard=2)), 4, 1),
    "replicas, kept by 2": lambda model: (
        sharded(model, mesh_of(rep=2, shard=4), reshard_after_forward=2),
        8,
        1,
    ),
    "flattened": lambda model: (
        sharded(model, mesh_of(a=2, b=2)["a", "b"]._flatten("ab")),
        4,
        1,
    ),
}


def with_layers(model, **axes):
    mesh = mesh_of(**axes)
    return parallelize_module(model, mesh, PLAN), mesh


def over_tensor_parallel(model):
    model, mesh = with_layers(model, dp=2, tp=2)
    return sharded(model, mesh["dp"]), 2, 2


def over_uneven_layers(model):
    """10 rows over 4 ranks are 3, 3, 3 and 1: these parameters have buffers of their own."""
    model, mesh = with_layers(model, dp=2, tp=4)
    return sharded(model, mesh["dp"]), 2, 4


def over_replicas_and_layers(model):
    model, mesh = with_layers(model, rep=2, shard=2, tp=2)
    return sharded(model, mesh["rep", "shard"]), 4, 2


def beside_data_parallel(model):
    model, mesh = with_layers(model, rep=2, shard=2, tp=2)
    return data_parallel(sharded(model, mesh["shard"]), mesh["rep"]), 4, 2


def flattened_over_layers(model):
    model, mesh = with_layers(model, a=2, b=2, tp=2)
    return sharded(model, mesh["a", "b"]._flatten("ab")), 4, 2


def before_the_plan(model):
    mesh = mesh_of(dp=2, tp=2)
    return parallelize_module(sharded(model, mesh["dp"]), mesh, PLAN), 2, 2


ALL_MESHES = {
    **MESHES,
    "tensor parallel": over_tensor_parallel,
    "uneven layers": over_uneven_layers,
    "replicas, tensor parallel": over_replicas_and_layers,
    "data parallel, tensor parallel": beside_data_parallel,
    "before the plan": before_the_plan,
    "flattened, tensor parallel": flattened_over_layers,
}
NUM_RANKS = {
    "1": 1,
    "2": 2,
    "3": 3,
    "8": 8,
    "replicas, kept by 2": 8,
    "uneven layers": 8,
    "flattened, tensor parallel": 8,
    "replicas, tensor parallel": 8,
    "data parallel, tensor parallel": 8,
}


def over_a_part_of_the_mesh(model):
    """The plan on the tensor axis alone."""
    mesh = mesh_of(dp=2, tp=2)
    return sharded(parallelize_module(model, mesh["tp"], PLAN), mesh["dp"]), 2, 2


ALL_MESHES["a part of the mesh"] = over_a_part_of_the_mesh


def trained(name):
    """The parameters after training on a mesh of `ALL_MESHES`."""
    model, num_parts, each = ALL_MESHES[name](Model())
    # 8 examples do not divide by 3: there each rank has all of them.
    train(model, IDS if num_parts == 3 else [own(ids, num_parts, each) for ids in IDS])
    return parameters(model)


# -- chunks of lengths of their own ---------------------------------------------------------------


class Odd(nn.Module):
    """Rows that divide neither way: chunks are uneven where no padding is little."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(53, 59, bias=False), nn.Linear(59, 61, bias=False)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def _odd_layers(mesh, **options):
    model = Odd().double()
    for layer in (model.first, model.second):
        fully_shard(layer, mesh, **options)
    return model


def _odd_over_layers():
    """59 rows over 3 or 2 ranks: a buffer of its own."""
    mesh = mesh_of(dp=2, tp=2)
    model = parallelize_module(Odd().double(), mesh, {"first": "colwise", "second": "rowwise"})
    return fully_shard(model, mesh["dp"]), 2, 2


def _odd_offloaded():
    return fully_shard(Odd().double(), mesh_of(dp=4), offload_policy=CPUOffloadPolicy()), 4, 1


def _odd_copy():
    model = _odd_layers(mesh_of(dp=4))
    model(torch.ones(2, 53).double()).sum()
    return copy.deepcopy(model), 4, 1


def _odd_loaded():
    model, empty = _odd_layers(mesh_of(dp=4)), _odd_layers(mesh_of(dp=4))
    for parameter in empty.parameters():
        parameter.detach().zero_()
    empty.load_state_dict(model.state_dict())
    return empty, 4, 1


ODD = {
    "layers": lambda: (_odd_layers(mesh_of(dp=4)), 4, 1),
    "freed": lambda: (_odd_layers(mesh_of(dp=4), reshard_after_forward=True), 4, 1),
    "kept by 2": lambda: (_odd_layers(mesh_of(dp=4), reshard_after_forward=2), 4, 1),
    "one group": lambda: (fully_shard(Odd().double(), mesh_of(dp=4)), 4, 1),
    "replicas": lambda: (_odd_layers(mesh_of(rep=2, shard=2)), 4, 1),
    "tensor parallel": _odd_over_layers,
    "offloaded": _odd_offloaded,
    "copied": _odd_copy,
    "loaded": _odd_loaded,
}
ODD_BATCHES = torch.randn(4, 8, 53, generator=torch.Generator().manual_seed(2)).double()


def train_odd(model, batches):
    """Steps of AdamW; the second of them with the first layer frozen."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, batch in enumerate(batches):
        model.first.weight.requires_grad_(step != 1)
        model(batch).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model


def trained_odd(name):
    little, members.LITTLE = members.LITTLE, 0
    try:
        return _trained_odd(name)
    finally:
        members.LITTLE = little


def _trained_odd(name):
    model, num_parts, each = ODD[name]()
    buffers = [
        buffer
        for module in model.modules()
        if "_shard_group" in module.__dict__
        for buffer in module.__dict__["_shard_group"].parameters.buffers
    ]
    train_odd(model, [own(batch, num_parts, each) for batch in ODD_BATCHES])
    found = parameters(model)
    return found, [buffer.uneven for buffer in buffers]


def all_trained_odd():
    return {name: trained_odd(name) for name in ODD}
