"""torchao's float8 linear layers under tensor parallelism; where torchao is installed."""

import pytest
import torch
from fully_sharded import mesh_of, own, train
from parity import parameters, whole
from torch import nn

import shardwise
from shardwise.errors import MixedTensorsError
from shardwise.parallel import fully_shard, parallelize_module

float8 = pytest.importorskip("torchao.float8")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

PLAN = {"0": "colwise", "2": "rowwise"}
BATCHES = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(0))


def converted(model, recipe):
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    return float8.convert_to_float8_training(model, config=config)


def layers(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    return converted(model, recipe) if recipe is not None else model


def train_squares(model, batches):
    return train(model, batches, lambda model, batch: model(batch).pow(2).mean(), lr=1e-3)


def trained(recipe):
    """On two data ranks, fully sharded, times two tensor ranks."""
    mesh = mesh_of(dp=2, tp=2)
    model = parallelize_module(layers(recipe), mesh, PLAN)
    train_squares(fully_shard(model, mesh["dp"]), [own(batch, 2, 2) for batch in BATCHES])
    assert {type(model[0]), type(model[2])} == {float8.float8_linear.Float8Linear}
    return parameters(model)


def assert_as_one_device(found):
    expected, plain = (
        train_squares(layers("tensorwise"), BATCHES),
        train_squares(layers(None), BATCHES),
    )
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=0, atol=2e-5)
        assert (parameter - plain.get_parameter(name)).abs().max() > 1e-4  # it is float8 indeed


def test_trains_as_one_device():
    with shardwise.simulate(4):
        found = trained("tensorwise")
    assert_as_one_device(found)


@pytest.mark.processes
def test_in_processes(processes):
    for found in processes(trained, "tensorwise"):
        assert_as_one_device(found)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_forward_and_backward_of_each_recipe(recipe):
    """Products come in bfloat16 where rows have their own scales: a sum of two rounds otherwise."""
    alone, x = layers(recipe), BATCHES[0].clone().requires_grad_()
    expected = alone(x)
    (wanted,) = torch.autograd.grad(expected.float().pow(2).mean(), x)
    with shardwise.simulate(2):
        model = parallelize_module(layers(recipe), mesh_of(tp=2), PLAN)
        found = model(x)
        (grad,) = torch.autograd.grad(found.float().pow(2).mean(), x)
        tolerance = 1e-6 if recipe == "tensorwise" else 1e-2
        torch.testing.assert_close(whole(found), expected.detach(), rtol=0, atol=tolerance)
        torch.testing.assert_close(whole(grad), wanted, rtol=0, atol=tolerance / 10)


def test_layers_that_are_converted_too_late():
    """The new layers have lost the styles of the old ones."""
    with shardwise.simulate(2):
        model = parallelize_module(layers(None), mesh_of(tp=2), PLAN)
        with pytest.raises(MixedTensorsError):
            converted(model, "tensorwise")(BATCHES[0])
