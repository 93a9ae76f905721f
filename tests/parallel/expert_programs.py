"""Experts on ranks with tokens of their own, for both worlds."""

from copy import deepcopy

import torch
from parallel_models import Mixture, squared
from parity import whole

import shardwise
from shardwise.parallel import data_parallel, expert_parallel
from shardwise.simulation.ranks import on_every_rank


def places(sizes):
    return torch.cartesian_prod(*map(torch.arange, sizes)).reshape(-1, len(sizes)).tolist()


def train(sizes, names, num_experts=6, steps=3):
    """Some steps of AdamW; the parameters are those of one device."""
    torch.manual_seed(0)
    model = Mixture(num_experts)
    alone = deepcopy(model)
    batches = [torch.randn(2, 24, 8) for _ in range(steps)]
    optimizer = torch.optim.AdamW(alone.parameters(), 0.05)
    for batch in batches:
        optimizer.zero_grad()
        squared(alone, *batch).backward()
        optimizer.step()
    mesh = shardwise.init_device_mesh("cpu", sizes, mesh_dim_names=names)
    expert_parallel(model, mesh, "experts")
    if "dp" in names:
        data_parallel(model, mesh["dp"])
    own = [i for i, name in enumerate(names) if name != "tp"]
    num = torch.Size([sizes[i] for i in own]).numel()

    def part(x):
        """Ranks along a tensor axis have the same tokens."""

        def on(rank):
            number = 0
            for i in own:
                number = number * sizes[i] + places(sizes)[rank][i]
            return x.chunk(num)[number]

        return on_every_rank(on)

    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    for batch in batches:
        optimizer.zero_grad()
        squared(model, *map(part, batch)).backward()
        optimizer.step()
    for name, expected in alone.named_parameters():
        torch.testing.assert_close(
            whole(model.get_parameter(name)), expected.detach(), rtol=1e-4, atol=2e-5
        )


def other_numbers_of_tokens():
    """Rank r has 3 r tokens, the first none; its loss is a sum."""
    torch.manual_seed(0)
    model = Mixture(5)
    alone = deepcopy(model)
    batches = [torch.randn(3 * rank, 8) for rank in range(4)]
    (squares(alone(torch.cat(batches))) / 4).backward()
    mesh = shardwise.init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    expert_parallel(model, mesh, "experts")
    squares(model(on_every_rank(lambda rank: batches[rank]))).backward()
    for name, expected in alone.named_parameters():
        found = whole(model.get_parameter(name).grad)
        torch.testing.assert_close(found, expected.grad, rtol=1e-4, atol=1e-5)


def squares(x):
    return x.square().sum()
