"""The backend of fused kernels gives what the backend of torch's kernels gives."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICE, of_kernels, skip_without_triton
from torch.testing import assert_close

skip_without_triton()

from shardwise.kernels import update  # noqa: E402
from shardwise.lookup.backends.backend import Query  # noqa: E402  (after the check for Triton)
from shardwise.lookup.backends.torch_kernels import TorchBackend, products_of_rows  # noqa: E402
from shardwise.lookup.backends.triton_kernels import TritonBackend  # noqa: E402
from shardwise.lookup.optimizers import SGD, Adagrad, Adam, RowUpdate, RowWiseAdagrad  # noqa: E402

pytestmark = of_kernels
NUM_ROWS, DIM = 23, 6


@pytest.fixture(autouse=True)
def short_spans(monkeypatch):
    """Rows whose ids are in several programs, in few ids."""
    monkeypatch.setattr(update, "SPAN", 4)


def draw(bags: bool, weighted: bool) -> Query:
    lengths = torch.tensor([0, 3, 1, 4, 0], device=DEVICE) if bags else None
    count = 8 if bags else 5
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
    optimizer = make(lr=0.1, weight_decay=0.05 if weighted else 0.0)
    start, query = torch.randn(NUM_ROWS, DIM, device=DEVICE), draw(True, weighted)
    found = []
    grads = [torch.randn(query.num_bags, DIM, device=DEVICE) for _ in range(2)]
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


@pytest.mark.parametrize("bags", [True, False])
def test_stacks_of_several_widths_at_once(bags):
    """Stacks and their ids together give what each gives by itself."""
    weights = [torch.randn(NUM_ROWS, dim, device=DEVICE) for dim in (6, 3, 8)]
    queries = [draw(bags, weighted=True) for _ in weights]
    grads = [
        torch.randn(q.num_bags, w.shape[1], device=DEVICE)
        for q, w in zip(queries, weights, strict=True)
    ]
    fused, plain = TritonBackend(), TorchBackend()
    answers = fused.look_up_stacks(weights, queries)
    for found, weight, query in zip(answers, weights, queries, strict=True):
        assert_close(found, plain.look_up(weight, query))
    optimizer, results = RowWiseAdagrad(lr=0.1), []
    for each_alone in (True, False):
        changed = [weight.clone() for weight in weights]
        states = [{"sum": torch.zeros(NUM_ROWS, device=DEVICE)} for _ in weights]
        rules = [RowUpdate(optimizer, state, 1) for state in states]
        if each_alone:
            for asked in zip(changed, queries, grads, rules, strict=True):
                plain.update(*asked)
        else:
            fused.update_stacks(changed, queries, grads, rules)
        results.append((changed, states))
    assert_close(*results)


@pytest.mark.parametrize("bags", [True, False])
def test_gradients_of_weights(bags):
    weight, query = torch.randn(NUM_ROWS, DIM, device=DEVICE), draw(bags, weighted=True)
    grad = torch.randn(query.num_bags, DIM, device=DEVICE)
    found = TritonBackend().weight_gradient(weight, query, grad)
    assert_close(found, products_of_rows(weight, query, grad))
