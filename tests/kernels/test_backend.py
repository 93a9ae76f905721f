"""The backend of fused kernels gives what the backend of torch's kernels gives."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch.testing import assert_close

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if importlib.util.find_spec("triton") is None or not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("needs Triton, and a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from shardwise.embedding.backend import Query  # noqa: E402  (after the check for Triton)
from shardwise.embedding.fused import (  # noqa: E402
    SGD,
    Adagrad,
    Adam,
    RowUpdate,
    RowWiseAdagrad,
)
from shardwise.embedding.torch_backend import TorchBackend  # noqa: E402
from shardwise.embedding.triton_backend import TritonBackend  # noqa: E402

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
DEVICE = "cpu" if INTERPRETED else "cuda"
NUM_ROWS, DIM = 23, 6


def draw(bags: bool, weighted: bool) -> Query:
    lengths = torch.tensor([0, 3, 1, 7, 2, 0, 5], device=DEVICE) if bags else None
    count = 18 if bags else 9
    ids = torch.randint(0, NUM_ROWS, (count,), device=DEVICE)
    return Query(ids, lengths, torch.rand(count, device=DEVICE) if weighted else None)


@pytest.mark.parametrize("bags", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_lookups_and_gradients_of_rows(bags, weighted):
    weight, query = torch.randn(NUM_ROWS, DIM, device=DEVICE), draw(bags, weighted)
    fused, plain = TritonBackend(), TorchBackend()
    assert_close(fused.look_up(weight, query), plain.look_up(weight, query))
    grad = torch.randn(query.num_bags, DIM, device=DEVICE)
    rows, sums = fused.row_gradient(weight, query, grad)
    expected_rows, expected_sums = plain.row_gradient(weight, query, grad)
    assert rows.tolist() == expected_rows.tolist()
    assert_close(sums, expected_sums)


@pytest.mark.parametrize("make", [SGD, Adagrad, RowWiseAdagrad, Adam])
@pytest.mark.parametrize("weighted", [True, False])
def test_updates(make, weighted):
    optimizer = make(lr=0.1)
    start, query = torch.randn(NUM_ROWS, DIM, device=DEVICE), draw(True, weighted)
    found = []
    grads = [torch.randn(query.num_bags, DIM, device=DEVICE) for _ in range(3)]
    for backend in (TritonBackend(), TorchBackend()):
        weight = start.clone()
        state = {
            name: torch.zeros(NUM_ROWS if per_row else (NUM_ROWS, DIM), device=DEVICE)
            for name, per_row in optimizer.states.items()
        }
        for step, grad in enumerate(grads, 1):
            backend.update(weight, query, grad.clone(), RowUpdate(optimizer, state, step))
        found.append([weight, *state.values()])
    for ours, torchs in zip(*found, strict=True):
        assert_close(ours, torchs, rtol=1e-4, atol=1e-5)
