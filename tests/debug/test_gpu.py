"""Backward of tensors on a GPU runs on a thread of its own."""

import pytest
import torch
from devices import needs_cuda
from torch import nn

import shardwise
from shardwise import Replicate, Shard
from shardwise.debug import CommDebugMode, explain

pytestmark = needs_cuda


@pytest.fixture
def step():
    """One step of a model whose backward communicates."""
    torch.ones(1, device="cuda")  # a mesh warns when no device was used before
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cuda", (2,), mesh_dim_names=("tp",))
        model = nn.Sequential(nn.Linear(8, 16, bias=False)).to("cuda")
        weight = shardwise.distribute_tensor(model[0].weight.data, mesh, [Shard(0)])
        model[0].weight = nn.Parameter(weight)
        x = shardwise.distribute_tensor(torch.randn(4, 8, device="cuda"), mesh, [Shard(0)])

        def run():
            model(x).redistribute(placements=[Replicate()]).square().sum().backward()

        yield run


def test_a_collective_on_another_thread_knows_its_place(step):
    with CommDebugMode() as comm:
        step()
    backward = [event for event in comm.events if event.phase == "backward"]
    assert backward
    assert all(event.line.startswith("test_gpu.py:") for event in backward)
    assert {e.module for e in backward if e.op == "linear_weight_grad"} == {"0"}


def test_calls_on_another_thread_are_explained(step):
    found = explain(step)
    grads = [call for call in found if call.op == "linear_weight_grad"]
    assert [(call.place.phase, call.place.module) for call in grads] == [("backward", "0")]
