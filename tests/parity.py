"""Train a model on one device and sharded, and compare them after every step."""

import torch

import shardwise
from shardwise import DTensor, Replicate


def shard_by(plan):
    """A partition_fn: `plan` maps a parameter's full name to its placements."""

    def partition(name, module, mesh):
        for key, parameter in list(module.named_parameters(recurse=False)):
            full = f"{name}.{key}" if name else key
            if full in plan:
                placed = shardwise.distribute_tensor(parameter.detach(), mesh, plan[full])
                module.register_parameter(key, torch.nn.Parameter(placed))

    return partition


def whole(tensor):
    """The values of any tensor, as one plain tensor."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    tensor = tensor.detach()
    return tensor.agreed() if isinstance(tensor, shardwise.LocalTensor) else tensor


def train(model, loss_of, batches, lr=0.5):
    """One SGD step per batch; the loss and all parameters after each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    history = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        after = {name: whole(p).clone() for name, p in model.named_parameters()}
        history.append({"loss": whole(loss), **after})
    return history


def place(batches, mesh, placements=None):
    placements = placements or [Replicate()] * mesh.ndim
    return [
        tuple(shardwise.distribute_tensor(tensor, mesh, placements) for tensor in batch)
        for batch in batches
    ]


def assert_same_history(found, expected):
    for number, (sharded, alone) in enumerate(zip(found, expected, strict=True)):
        assert sharded.keys() == alone.keys()
        for name, tensor in alone.items():
            torch.testing.assert_close(
                sharded[name], tensor, msg=lambda m, n=name, i=number: f"{n} after step {i}: {m}"
            )
