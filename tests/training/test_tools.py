"""What surrounds a training step works on sharded models as on plain ones."""

import copy

import pytest
import torch
from parity import shard_by, whole
from torch import nn
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import Replicate, Shard
from shardwise.debug import cache_stats

pytestmark = pytest.mark.slow

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def mlp():
    """Ten hidden units, uneven on four ranks."""
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 3))


def shard(model, mesh):
    """Column-parallel, then row-parallel."""
    plan = {"0.weight": [S0], "0.bias": [S0], "2.weight": [S1]}
    return shardwise.distribute_module(copy.deepcopy(model), mesh, shard_by(plan))


@pytest.fixture(params=[R, S0], ids=["whole batch", "batch-sharded"])
def pair(request, mesh):
    """`(model, batch)` on one device, and sharded."""
    model, x = mlp(), torch.randn(7, 6)
    placed = shardwise.distribute_tensor(x, mesh, [request.param])
    return (model, x), (shard(model, mesh), placed)


def same(pair, run, **tolerance):
    (model, x), (sharded, placed) = pair
    for found, expected in zip(run(sharded, placed), run(model, x), strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(whole(found), expected.detach(), **tolerance)


def gradients(model):
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
def test_autocast(pair, inside):
    """Layers compute in bfloat16; parameters and their gradients stay float32."""

    def run(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
            loss = nn.functional.mse_loss(out, torch.zeros_like(out))
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [out, loss, *gradients(model)]

    same(pair, run, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(pair, reentrant):
    def run(model, x):
        x = x.detach().requires_grad_()
        loss = (checkpoint(model, x, use_reentrant=reentrant) ** 2).sum()
        loss.backward()
        return [loss, x.grad, *gradients(model)]

    same(pair, run)


def test_gradient_accumulation(pair):
    def run(model, x):
        for number in range(3):
            (model(x * (number + 1)) ** 2).sum().backward()
        return gradients(model)

    same(pair, run)


def test_functional_call(pair):
    def run(model, x):
        doubled = {name: parameter * 2 for name, parameter in model.named_parameters()}
        loss = (torch.func.functional_call(model, doubled, (x,)) ** 2).sum()
        loss.backward()
        return [loss, *gradients(model)]

    same(pair, run)


def test_transformed_functions(pair):
    def run(model, x):
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss(values):
            return (torch.func.functional_call(model, values, (x,)) ** 2).sum()

        def output(row):
            return torch.func.functional_call(model, parameters, (row,))

        return [*torch.func.grad(loss)(parameters).values(), torch.func.vmap(output)(x)]

    same(pair, run)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
        {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
    ],
    ids=["equal", "one by one", "together"],
)
def test_averaged_weights(pair, options):
    def run(model, x):
        average = swa_utils.AveragedModel(model, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
        for _ in range(3):
            optimizer.zero_grad()
            (model(x) ** 2).sum().backward()
            optimizer.step()
            scheduler.step()
            average.update_parameters(model)
        return list(average.module.parameters())

    same(pair, run)


def test_parameters_as_one_vector(pair):
    same(pair, lambda model, x: [nn.utils.parameters_to_vector(model.parameters())])


@pytest.mark.parametrize("foreach", [False, True])
def test_long_training_leaves_the_caches_as_they_are(mesh, foreach):
    model = shard(mlp(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=foreach)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)

    def step(number):
        optimizer.zero_grad()
        torch.manual_seed(number)
        x = shardwise.distribute_tensor(torch.randn(7, 6), mesh, [S0])
        (model(x) ** 2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0 + number)
        optimizer.step()
        scheduler.step()

    for number in range(3):
        step(number)
    before = cache_stats()
    for number in range(3, 203):
        step(number)
    after = cache_stats()
    assert after.misses == before.misses
    assert after.size == before.size
    assert after.hits > before.hits
