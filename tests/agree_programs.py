"""Ten mistakes that one rank makes; each gives wrong numbers, or leaves the others waiting."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise import DTensor, Replicate, Shard
from shardwise._torch.c10d import default_store
from shardwise.debug import agree
from shardwise.embedding import SGD, EmbeddingBagCollection, Jagged, Table
from shardwise.parallel import data_parallel, parallelize_module

GUILTY = 2
MISTAKES = {
    "dropped call": "aten.relu.default(Layout((8, 8), torch.float32, [S(0)]",
    "other dtype": "dtype=torch.float64)",
    "other placement": "[S(1)] on mesh",
    "swapped order": "redistribute(Layout((8, 8), torch.float32, [S(0)] on mesh (tp=4)) (",
    "other seed": "The random generators are in different states",
    "other plan": "[S(1)] on mesh",
    "extra step": "nothing more before the end of agree() after 3 steps",
    "other loss scale": "512.0)",
    "other parameter order": "gradients of ",
    "NaN check": "aten.isnan.default(",
}
#: Those after which the collectives of the ranks no longer meet, so that no step ends.
PARTING = ["dropped call", "other placement", "other plan", "extra step"]


class TwoLayers(nn.Module):
    def __init__(self, names):
        super().__init__()
        for name in names:
            self.register_module(name, nn.Linear(8, 8, bias=False))

    def forward(self, x):
        return self.b(self.a(x))


def train(mistake, every, num_steps=3):
    """What this rank raises; `mistake` is made by one rank alone, in the second step."""
    guilty = dist.get_rank() == GUILTY
    mesh = shardwise.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    torch.manual_seed(3)
    weights = [
        shardwise.distribute_tensor(torch.eye(8), mesh, [Shard(0)]).requires_grad_()
        for _ in range(2)
    ]
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    names = ["b", "a"] if guilty and mistake == "other parameter order" else ["a", "b"]
    copies = data_parallel(TwoLayers(names), mesh, src_data_rank=None)
    optimizer = torch.optim.SGD(weights, lr=0.1)
    try:
        with agree(every=every):
            for step in range(num_steps + (guilty and mistake == "extra step")):
                wrong = mistake if guilty and step == 1 else None
                if mistake == "other plan" and step == 1:
                    plan = {"0": "rowwise" if guilty else "colwise"}
                    parallelize_module(layers, mesh, plan, src_data_rank=None)
                copies(torch.ones(1, 8)).sum().backward()
                run_step(mesh, weights, layers, wrong)
                optimizer.step()
                optimizer.zero_grad()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def fail_alone():
    """One rank's own error, and what the others raise, which wait for it."""
    mesh = shardwise.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    x = shardwise.ones(8, device_mesh=mesh, placements=[Shard(0)])
    store, rank = default_store(), dist.get_rank()
    try:
        with agree():
            y = x + 1
            if rank == GUILTY:
                raise ValueError("a bad row")
            y.full_tensor()
    except Exception as error:
        store.set(f"heard {rank}", "")
        # A process that ends would close its connections.
        store.wait([f"heard {each}" for each in range(4)], timedelta(seconds=60))
        return f"{type(error).__name__}: {error}"


def distribute(what):
    """One rank's tensor is another, where all ranks get their shards from the first."""
    mesh = shardwise.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    guilty = dist.get_rank() == GUILTY
    size = 4 if guilty and what == "shape" else 8
    dtype = torch.float64 if guilty and what == "dtype" else torch.float32
    try:
        with agree(every="collective"):
            shardwise.distribute_tensor(torch.ones(8, size, dtype=dtype), mesh, [Shard(0)])
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def fail_together():
    try:
        with agree():
            raise ValueError("a bad batch")
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


def train_on_two_axes(every):
    """Shards of other sizes on each line of the mesh, and tables with replicas."""
    mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = dist.get_rank()
    with agree(every=every):
        layer = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 4))
        layer = parallelize_module(layer, mesh, {"0": "colwise", "1": "rowwise"})
        bags = EmbeddingBagCollection([Table("user", 7, 4)], optimizer=SGD(0.1))
        model = nn.ModuleList([layer, bags.shard(mesh["tp"], "row_wise")])
        model = data_parallel(model, mesh["dp"])
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            batch = Jagged(["user"], torch.arange(1 + rank), lengths=torch.tensor([1 + rank]))
            (model[0](torch.ones(1, 8)) + model[1](batch)["user"]).sum().backward()
            optimizer.step()


def run_step(mesh, weights, layers, wrong):
    placement = Shard(1, sizes=(2, 2, 2, 2)) if wrong == "other placement" else Shard(0)
    local = torch.ones(8, 2) if wrong == "other placement" else torch.ones(2, 8)
    x = DTensor.from_local(local, mesh, [placement])
    x = x.to(torch.float64 if wrong == "other dtype" else torch.bfloat16).float()
    if wrong == "other seed":
        torch.rand(1)
    layers(torch.ones(2, 8))
    y = x @ weights[0]
    if wrong != "dropped call":
        y = y.relu()
    y = y @ weights[1]
    for weight in reversed(weights) if wrong == "swapped order" else weights:
        weight.detach().full_tensor()
    loss = y.sum().redistribute(placements=[Replicate()])
    if wrong == "NaN check" and torch.isnan(loss).any():
        return
    (loss * (512.0 if wrong == "other loss scale" else 1024.0)).backward()
