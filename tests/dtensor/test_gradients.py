"""The contract of gradients: one device's value, laid out like the leaf or Partial."""

import pytest
import torch
from torch.nn import functional as F

import shardwise
from shardwise import Partial, Replicate, Shard
from shardwise.debug import CommDebugMode


def lay(tensor, mesh, *placements):
    return shardwise.distribute_tensor(tensor, mesh, placements)


def value(tensor):
    return tensor.full_tensor().detach().agreed()


@pytest.fixture
def layers(mesh):
    """A replicated layer after a batch-sharded step: its gradients are Partial."""
    model = shardwise.distribute_module(torch.nn.Linear(3, 3).double(), mesh)
    x = lay(torch.randn(8, 3, dtype=torch.float64), mesh, Shard(0))
    (model(x) ** 2).sum().backward()
    return model


def test_reduce_gradients_takes_one_collective(layers):
    before = {name: value(p.grad) for name, p in layers.named_parameters()}
    assert all(p.grad.placements == (Partial(),) for p in layers.parameters())
    with CommDebugMode() as comm:
        shardwise.reduce_gradients(layers.parameters())
    assert comm.get_total_counts() == 1
    for name, parameter in layers.named_parameters():
        assert parameter.grad.placements == (Replicate(),)
        torch.testing.assert_close(value(parameter.grad), before[name])


def test_small_buckets_take_more_collectives(layers):
    with CommDebugMode() as comm:
        shardwise.reduce_gradients(layers.parameters(), bucket_bytes=1)
    assert comm.get_total_counts() == 2


def test_an_optimizer_reduces_all_gradients_together(layers):
    optimizer = torch.optim.AdamW(layers.parameters())
    with CommDebugMode() as comm:
        optimizer.step()
    assert comm.get_total_counts() == 1


def test_a_remembered_reduction_is_forgotten_when_the_gradient_changes(mesh):
    terms = shardwise.LocalTensor.per_rank(lambda rank: torch.ones(2) * rank)
    grad = shardwise.DTensor.from_local(terms, mesh, [Partial()])
    total = lay(torch.zeros(2), mesh, Replicate())
    total.add_(grad)
    grad.mul_(10)
    total.add_(grad)
    assert value(total).tolist() == [66, 66]
    grad.view(2, 1).zero_()
    total.add_(grad)
    assert value(total).tolist() == [66, 66]


@pytest.mark.parametrize(
    "placement", [Shard(0), Shard(1), Shard(0, sizes=(1, 0, 3, 1)), Replicate()]
)
def test_a_leaf_used_by_any_op_gets_a_gradient_of_its_placements(mesh, placement):
    whole = torch.randn(5, 6, dtype=torch.float64)
    leaf = lay(whole, mesh, placement).requires_grad_()
    x = lay(torch.randn(4, 6, dtype=torch.float64), mesh, Shard(0))
    loss = (x @ leaf.t()).exp().sum() + (leaf * 2).mean()
    loss.backward()
    alone = whole.clone().requires_grad_()
    ((value(x) @ alone.t()).exp().sum() + (alone * 2).mean()).backward()
    found = leaf.grad.placements[0]
    assert found == placement or (placement == Replicate() and found.is_partial())
    torch.testing.assert_close(value(leaf.grad), alone.grad)


def test_gradients_accumulate_over_micro_batches(mesh):
    whole = torch.randn(3, 4, dtype=torch.float64)
    leaf, alone = lay(whole, mesh, Shard(0)).requires_grad_(), whole.clone().requires_grad_()
    for seed in range(3):
        batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)).double()
        F.linear(lay(batch, mesh, Shard(0)), leaf).pow(2).sum().backward()
        F.linear(batch, alone).pow(2).sum().backward()
    torch.testing.assert_close(value(leaf.grad), alone.grad)


def test_double_backward_of_a_linear_layer(mesh):
    weight, x = torch.randn(3, 4).double(), torch.randn(5, 4).double()

    def penalty(weight, x):
        loss = F.linear(x, weight).pow(3).sum()
        (grad,) = torch.autograd.grad(loss, weight, create_graph=True)
        return (grad**2).sum()

    alone = weight.clone().requires_grad_()
    penalty(alone, x).backward()
    leaf = lay(weight, mesh, Shard(0)).requires_grad_()
    penalty(leaf, lay(x, mesh, Shard(0))).backward()
    torch.testing.assert_close(value(leaf.grad), alone.grad)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=repr)
def test_double_backward_of_a_lookup(mesh, placement):
    table, ids = torch.randn(6, 4).double(), torch.tensor([1, 5, 1])

    def penalty(table, ids):
        loss = F.embedding(ids, table).pow(3).sum()
        (grad,) = torch.autograd.grad(loss, table, create_graph=True)
        return (grad**2).sum()

    alone = table.clone().requires_grad_()
    penalty(alone, ids).backward()
    leaf = lay(table, mesh, placement).requires_grad_()
    penalty(leaf, lay(ids, mesh, Replicate())).backward()
    torch.testing.assert_close(value(leaf.grad), alone.grad)


def test_hooks_see_global_gradients(mesh):
    seen = []
    leaf = lay(torch.ones(4, 4), mesh, Shard(0)).requires_grad_()
    y = leaf * 2
    y.register_hook(lambda grad: seen.append(tuple(grad.shape)))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert seen == [(4, 4), (4, 4)]
    assert torch.equal(value(leaf.grad), torch.full((4, 4), 4.0))
