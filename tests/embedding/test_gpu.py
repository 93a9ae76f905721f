"""Collections on one GPU, in a world of four played ranks: torch's kernels and the fused ones."""

from __future__ import annotations

import pytest
import torch
from embedding_cases import PLANS, batch, make, train_alone, train_sharded
from torch.testing import assert_close

import shardwise
from shardwise.embedding import SGD, Adagrad, Adam, RowWiseAdagrad

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@pytest.mark.parametrize("backend", ["torch", "triton", "auto"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("optimizer", [SGD, Adagrad, RowWiseAdagrad, Adam])
def test_training_equals_one_device(backend, plan, optimizer):
    steps = [[batch(10 * step + rank) for rank in range(4)] for step in range(3)]
    expected = train_alone(make(optimizer=optimizer(lr=0.1)), steps)
    on_device = [[each.to("cuda") for each in batches] for batches in steps]
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cuda", (4,))
        collection = make(optimizer=optimizer(lr=0.1), backend=backend).to("cuda")
        found = train_sharded(collection.shard(mesh, plan), on_device)
    for name, table in expected.items():
        assert_close(found[name].cpu(), table, rtol=1e-4, atol=1e-5)
