"""Parallel modules are copied and go through files as other modules do."""

import copy
import pickle

import parallel_programs as programs
import pytest
import torch
from parallel_models import Block, Mixture, sequence_plan, whole
from parity import through_file
from torch import nn

import shardwise
from shardwise import LocalTensor, Replicate, distribute_tensor
from shardwise.parallel import data_parallel, fully_shard, parallelize_module

WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "file": through_file,
}


def enter(module, inputs, mesh):
    return tuple(distribute_tensor(x, mesh, [Replicate()] * mesh.ndim) for x in inputs)


def leave(module, output, mesh):
    return output.full_tensor()


def grid():
    return shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def own_batches():
    return LocalTensor.per_rank(lambda rank: torch.full((2, 6, 8), rank // 2 + 1.0))


def in_pieces():
    mesh = grid()
    return fully_shard(parallelize_module(Block(), mesh, programs.PLAN_OF_ALL), mesh["dp"])


def reduced():
    mesh = grid()
    return data_parallel(parallelize_module(Block(), mesh, programs.PLAN), mesh["dp"])


def both_ends():
    return shardwise.distribute_module(Block(), grid(), input_fn=enter, output_fn=leave)


#: Modules, and what they are called with.
CASES = {
    "styles": (lambda: parallelize_module(Block(), grid(), sequence_plan()), own_batches),
    "experts": (
        lambda: parallelize_module(Mixture(), grid(), {"experts": "experts"}),
        lambda: torch.randn(5, 8),
    ),
    "data_parallel": (reduced, own_batches),
    "fully_shard": (in_pieces, own_batches),
    "distribute_module": (both_ends, lambda: torch.randn(2, 6, 8)),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_copy_computes_and_trains_alike(case, way):
    make, batch = case
    torch.manual_seed(0)
    with shardwise.simulate(4):
        module, x = make(), batch()
        copied = way(module)
        for each in (module, copied):
            each(x).pow(2).sum().backward()
        assert copied.state_dict().keys() == module.state_dict().keys()
        for name, parameter in module.named_parameters():
            found = copied.get_parameter(name)
            assert found is not parameter
            assert type(found.grad) is type(parameter.grad), name
            torch.testing.assert_close(whole(found.grad), whole(parameter.grad), msg=name)


def test_a_copy_does_not_wait_for_gradients_of_the_first():
    """Each reduces its own, also while the other is told to leave them as they are."""
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        layer = data_parallel(nn.Linear(3, 1), mesh)
        copied = copy.deepcopy(layer)
        x = LocalTensor.per_rank(lambda rank: torch.full((4, 3), float(rank)))
        with layer.no_sync():
            layer(x).mean().backward()
            copied(x).mean().backward()
        assert isinstance(layer.weight.grad, LocalTensor)
        assert torch.equal(copied.weight.grad, torch.full((1, 3), 0.5))


def test_a_file_of_a_world_that_is_gone():
    with shardwise.simulate(4):
        layer = parallelize_module(nn.Linear(4, 6), grid(), "colwise")
        saved, x = pickle.dumps(layer), torch.randn(3, 4)
        expected = layer(x).on_rank(3)
    with shardwise.simulate(4):
        assert torch.equal(pickle.loads(saved)(x).on_rank(3), expected)
    with shardwise.simulate(2), pytest.raises(shardwise.errors.WorldError, match="2 ranks"):
        pickle.loads(saved)
