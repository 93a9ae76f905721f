"""A sharded model and its optimizer written by torch.distributed.checkpoint, and read otherwise."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1, self.net2 = nn.Linear(6, 10), nn.Linear(10, 3)

    def forward(self, x):
        return self.net2(self.net1(x).relu())


def shard_by(dim):
    def partition(name, module, mesh):
        for key, parameter in list(module.named_parameters(recurse=False)):
            placement = [Shard(dim if parameter.dim() > dim else 0)]
            placed = nn.Parameter(distribute_tensor(parameter, mesh, placement))
            module.register_parameter(key, placed)

    return partition


def state_of(model, optimizer):
    names = {parameter: name for name, parameter in model.named_parameters()}
    moments = {
        f"{names[parameter]}.{key}": value
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
        if isinstance(value, DTensor)
    }
    return {"model": model.state_dict(), "moments": moments}


def train(model, optimizer, mesh):
    x = distribute_tensor(torch.linspace(-1, 1, 24).view(4, 6), mesh, [Replicate()])
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def main(folder, write):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0 if write else 1)
    model = distribute_module(Toy(), mesh, shard_by(0 if write else 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, optimizer, mesh)
    state = state_of(model, optimizer)
    if write:
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
    wholes = {f"model.{name}": x.full_tensor() for name, x in model.state_dict().items()}
    return wholes | {name: x.full_tensor() for name, x in state["moments"].items()}
