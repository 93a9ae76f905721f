"""Tools of torch that people put around a model: they meet DTensors as they meet tensors."""

import copy

import pytest
import torch
import torch.distributed as dist
from by_hand import lay, value
from torch import nn

import shardwise
from shardwise import Replicate, Shard


def pair(mesh, placement):
    """A layer on one device, and the same with its parameters laid out."""
    alone = nn.Linear(8, 6)
    shared = copy.deepcopy(alone)
    for name, parameter in alone.named_parameters():
        laid_out = shardwise.distribute_tensor(parameter.detach(), mesh, [placement])
        setattr(shared, name, nn.Parameter(laid_out))
    return alone, shared


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=repr)
def test_weight_norm(mesh, placement):
    alone, shared = map(nn.utils.parametrizations.weight_norm, pair(mesh, placement))
    x = torch.randn(4, 8)
    alone(x).pow(2).sum().backward()
    shared(lay(x, mesh, [Replicate()])).pow(2).sum().backward()
    for one, other in zip(alone.parameters(), shared.parameters(), strict=True):
        torch.testing.assert_close(value(other.grad), one.grad)


def test_attention_that_returns_its_weights(mesh):
    """Its gradient arrives expanded, and is viewed in memory that a product has laid out."""
    alone = nn.MultiheadAttention(16, 4, batch_first=True)
    shared = copy.deepcopy(alone)
    shardwise.distribute_module(shared, mesh)
    x = torch.randn(8, 6, 16)
    laid_out = lay(x, mesh, [Shard(0)]).requires_grad_()
    x.requires_grad_()
    for layer, batch in ((alone, x), (shared, laid_out)):
        rows, weights = layer(batch, batch, batch, need_weights=True)
        (rows.pow(2).sum() + weights.pow(2).sum()).backward()
    torch.testing.assert_close(value(laid_out.grad), x.grad)
    torch.testing.assert_close(value(shared.in_proj_weight.grad), alone.in_proj_weight.grad)


def test_the_search_for_anomalies(mesh):
    _, shared = pair(mesh, Shard(0))
    x = lay(torch.randn(4, 8), mesh, [Shard(0)])
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        shared(x).sum().backward()
    x = lay(torch.full((4, 8), -1.0), mesh, [Shard(0)]).requires_grad_()
    with (
        pytest.warns(UserWarning, match=r"Anomaly|Error detected"),
        torch.autograd.detect_anomaly(),
        pytest.raises(RuntimeError, match="nan"),
    ):
        x.sqrt().sum().backward()


# torch's own formulas for it are scripted when it is first used.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_forward_mode_gradients(mesh):
    x, direction = torch.randn(8, 4), torch.randn(8, 4)
    laid_out = [lay(t, mesh, [p]) for t, p in ((x, Shard(0)), (direction, Shard(1)))]
    found = torch.func.jvp(torch.sin, (laid_out[0],), (laid_out[1],))
    expected = torch.func.jvp(torch.sin, (x,), (direction,))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(value(one), other)


def test_a_number_is_formatted_as_one(mesh):
    loss = lay(torch.arange(10.0), mesh, [Shard(0)]).sum()
    assert f"{loss:.2f}" == "45.00"
    assert f"{loss}" == str(loss)


def test_a_collective_on_a_distributed_tensor_is_refused(mesh):
    x = lay(torch.ones(8), mesh, [Shard(0)])
    with pytest.raises(shardwise.UnsupportedError, match="to_local"):
        dist.all_reduce(x)
    assert torch.equal(value(x), torch.ones(8))
