"""Inference mode switches autograd off, and with it the kernels above it."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise
from shardwise import DTensor, MixedTensorsError, Shard
from shardwise.debug import CommDebugMode

ROWS, PLANES, STEPS = (8, 4), (4, 3, 5, 5), (4, 6, 4)
MODULES = {
    "batch norm": (nn.BatchNorm2d(3), PLANES),
    "batch norm, evaluated": (nn.BatchNorm2d(3).eval(), PLANES),
    "lstm": (nn.LSTM(4, 3), STEPS),
    "gru": (nn.GRU(4, 3, num_layers=2), STEPS),
    "attention": (nn.MultiheadAttention(4, 2, batch_first=True).eval(), STEPS),
}
FUNCTIONS = {
    "embedding_bag": lambda x: F.embedding_bag(_ids(x), x),
    "cross_entropy": lambda x: F.cross_entropy(x, x.argmax(1)),
    # Torch takes no view, in inference mode, of a wrapper that was made outside.
    "instance_norm": lambda x: F.instance_norm((x + 0).unsqueeze(0)),
    "matmul": lambda x: (x + 0).unsqueeze(0) @ (x + 0).mT,
    "quantile": lambda x: torch.quantile(x, 0.3),
    "matrix_power": lambda x: torch.linalg.matrix_power((x + 0) @ (x + 0).mT, 3),
}


def _ids(x):
    return x.argsort(0)[:, :2]


def _first(result):
    return result[0] if isinstance(result, tuple) else result


def _check(call, alone, x, mesh):
    """As on one device, and communicating what it would without inference mode."""
    shards = shardwise.distribute_tensor(x, mesh, [Shard(0)])
    with torch.no_grad(), CommDebugMode() as expected:
        call(shards)
    with torch.inference_mode(), CommDebugMode() as comm:
        found = _first(call(shards))
    assert isinstance(found, DTensor)
    assert comm.get_comm_counts() == expected.get_comm_counts()
    torch.testing.assert_close(found.full_tensor(), _first(alone(x)))


@pytest.mark.parametrize("name", MODULES)
def test_modules(mesh, name):
    module, shape = MODULES[name]
    module = copy.deepcopy(module)
    sharded = shardwise.distribute_module(copy.deepcopy(module), mesh)

    def alone(x):
        return module(x, x, x) if name == "attention" else module(x)

    def call(x):
        return sharded(x, x, x) if name == "attention" else sharded(x)

    _check(call, alone, torch.randn(shape), mesh)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(mesh, name):
    _check(FUNCTIONS[name], FUNCTIONS[name], torch.randn(ROWS), mesh)


def test_a_plain_state_of_anybody_else_is_refused(mesh):
    net = shardwise.distribute_module(nn.GRU(4, 3), mesh)
    x = shardwise.distribute_tensor(torch.randn(STEPS), mesh, [Shard(0)])
    with torch.inference_mode(), pytest.raises(MixedTensorsError, match="implicit_replication"):
        net(x, torch.ones(1, 6, 3))
