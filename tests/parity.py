"""Train a model on one device and sharded, and compare them after every step."""

import fnmatch
import io

import torch

import shardwise
from shardwise import DTensor, Replicate


def shard_by(plan):
    """A partition_fn: `plan` maps patterns of parameters' full names to their placements."""

    def partition(name, module, mesh):
        for key, parameter in list(module.named_parameters(recurse=False)):
            full = f"{name}.{key}" if name else key
            for pattern, placements in plan.items():
                if fnmatch.fnmatchcase(full, pattern):
                    placed = shardwise.distribute_tensor(parameter.detach(), mesh, placements)
                    module.register_parameter(key, torch.nn.Parameter(placed))

    return partition


def whole(tensor):
    """The values of any tensor, as one plain tensor."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    tensor = tensor.detach()
    return tensor.agreed() if isinstance(tensor, shardwise.LocalTensor) else tensor


def parameters(model):
    return {name: whole(p) for name, p in model.named_parameters()}


def gradients(model):
    """The gradients that there are, by name."""
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def through_file(x, *, weights_only=False):
    """A copy by way of torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def assert_gradients(model, expected, **tolerance):
    torch.testing.assert_close(gradients(model), gradients(expected), **tolerance)


def train(model, loss_of, batches, lr=0.5):
    """One SGD step per batch; the loss and all parameters after each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    history = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        after = {name: p.clone() for name, p in parameters(model).items()}
        history.append({"loss": whole(loss), **after})
    return history


def lay(tensor, mesh, *placements):
    return shardwise.distribute_tensor(tensor, mesh, placements)


def place(batches, mesh, placements=None):
    placements = placements or [Replicate()] * mesh.ndim
    return [
        tuple(shardwise.distribute_tensor(tensor, mesh, placements) for tensor in batch)
        for batch in batches
    ]
