"""torch's pipeline schedules over tensor-parallel stages: the program of the how-to."""

import pytest
import torch
import torch.distributed as dist
from parity import whole
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

import shardwise
from shardwise.checkpoint import load, save
from shardwise.parallel import parallelize_module

pytestmark = pytest.mark.processes

NUM_LAYERS, WIDTH, BATCH = 4, 8, 8
PLAN = {"up": "colwise", "down": "rowwise"}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def all_layers():
    torch.manual_seed(0)
    return {str(number): Layer() for number in range(NUM_LAYERS)}


def batches(num):
    torch.manual_seed(1)
    return torch.randn(num, 2, BATCH, WIDTH)


def clip(parameters, max_norm, stages):
    """Clip by the norm over all stages."""
    own = nn.utils.get_total_norm([p.grad for p in parameters])
    square = whole(own).square()
    dist.all_reduce(square, group=stages.get_group())
    nn.utils.clip_grads_with_norm_(parameters, max_norm, square.sqrt())


def train(num_stages, folder, steps, resume):
    """Some steps on stages of tensor-parallel layers; the layers of this rank at the end."""
    sizes = (num_stages, dist.get_world_size() // num_stages)
    mesh = shardwise.init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "tp"))
    stage = mesh.get_local_rank("pp")
    each = NUM_LAYERS // num_stages
    mine = list(all_layers().items())[stage * each : (stage + 1) * each]
    layers = {name: parallelize_module(layer, mesh["tp"], PLAN) for name, layer in mine}
    module = nn.Sequential(*layers.values())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    state = {"layers": layers, "optimizer": optimizer}
    if resume:
        load(state, folder)
    piped = PipelineStage(
        module, stage, num_stages, torch.device("cpu"), group=mesh["pp"].get_group()
    )
    schedule = Schedule1F1B(piped, n_microbatches=4, loss_fn=F.mse_loss)
    for given, target in batches(5)[steps]:
        if stage == 0 and num_stages == 1:
            schedule.step(given, target=target)
        elif stage == 0:
            schedule.step(given)
        elif stage == num_stages - 1:
            schedule.step(target=target)
        else:
            schedule.step()
        clip(list(module.parameters()), 0.5, mesh["pp"])
        optimizer.step()
        optimizer.zero_grad()
    if not resume:
        save(state, folder)
    return {
        f"{name}.{key}": whole(p)
        for name, layer in layers.items()
        for key, p in layer.named_parameters()
    }


def alone():
    module = nn.Sequential(*all_layers().values())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for given, target in batches(5):
        F.mse_loss(module(given), target).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in module.named_parameters()}


def test_trains_and_resumes_on_other_stages(processes, tmp_path):
    processes(train, 2, str(tmp_path / "half"), slice(0, 3), False)
    expected = alone()
    for num_stages in (4, 2):
        found = processes(train, num_stages, str(tmp_path / "half"), slice(3, 5), True)
        assert {name for each in found for name in each} == expected.keys()
        for each in found:
            for name, parameter in each.items():
                torch.testing.assert_close(parameter, expected[name], rtol=0, atol=2e-5)
