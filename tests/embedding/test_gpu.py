"""Collections on one GPU, in a world of played ranks: torch's kernels and the fused ones."""

from __future__ import annotations

import pytest
from devices import needs_cuda
from embedding_cases import (
    PLANS,
    batch,
    loss_of,
    make,
    spread,
    train_alone,
    train_sharded,
)
from torch.testing import assert_close

import shardwise
from shardwise.embedding import (
    SGD,
    Adagrad,
    Adam,
    EmbeddingBagCollection,
    EmbeddingCollection,
    RowWiseAdagrad,
)

pytestmark = needs_cuda


@pytest.mark.parametrize("backend", ["torch", "triton", "auto"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("optimizer", [SGD, Adagrad, RowWiseAdagrad, Adam])
def test_training_equals_one_device(backend, plan, optimizer):
    steps = [[batch(10 * step + rank) for rank in range(4)] for step in range(3)]
    settings = optimizer(lr=0.1, weight_decay=0.01)
    expected = train_alone(make(optimizer=settings), steps)
    on_device = [[each.to("cuda") for each in batches] for batches in steps]
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cuda", (4,))
        collection = make(optimizer=settings, backend=backend).to("cuda")
        found = train_sharded(collection.shard(mesh, plan), on_device)
    for name, table in expected.items():
        assert_close(found[name].cpu(), table, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [EmbeddingBagCollection, EmbeddingCollection])
@pytest.mark.parametrize("plan", sorted(PLANS.keys() - {"column_wise"}))
def test_eight_ranks(kind, plan):
    """Pooled and unpooled, through the fused kernels; some tables have fewer than 8 columns."""
    steps = [[batch(10 * step + rank) for rank in range(8)] for step in range(2)]
    settings = RowWiseAdagrad(lr=0.1)
    expected = train_alone(make(kind, optimizer=settings), steps)
    on_device = [[each.to("cuda") for each in batches] for batches in steps]
    with shardwise.simulate(8):
        mesh = shardwise.init_device_mesh("cuda", (8,))
        collection = make(kind, optimizer=settings, backend="triton").to("cuda")
        found = train_sharded(collection.shard(mesh, PLANS[plan]), on_device)
    for name, table in expected.items():
        assert_close(found[name].cpu(), table, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_gradients_of_weights(backend, plan):
    batches = [batch(rank, weighted=True) for rank in range(4)]
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cuda", (4,))
        collection = make(backend=backend).to("cuda").shard(mesh, plan)
        given = spread([each.to("cuda") for each in batches])
        given.weights.requires_grad_()
        loss_of(collection(given)).backward()
        found = [given.weights.grad.on_rank(rank).cpu() for rank in range(4)]
    for one, grad in zip(batches, found, strict=True):
        one.weights.requires_grad_()
        loss_of(make()(one)).backward()
        assert_close(grad, one.weights.grad, rtol=1e-4, atol=1e-4)
