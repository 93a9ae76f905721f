"""Sizes that only a GPU has room for: places beyond 32 bits, and bags that never seem to end."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

if importlib.util.find_spec("triton") is None or not torch.cuda.is_available():
    pytest.skip("needs Triton and a GPU", allow_module_level=True)

from shardwise.kernels import lookup
from shardwise.kernels.lookup import per_sample_weight_grads, pooled_lookup, row_lookup
from shardwise.kernels.tables import IdBags, TableSet, first_bags, side_by_side
from shardwise.kernels.update import update

pytestmark = pytest.mark.gpu
DIM = 128
#: More than 2**31 elements.
ROWS = 2**31 // DIM + 1000


def test_a_table_of_more_elements_than_32_bits_count():
    table = torch.zeros(ROWS, DIM, dtype=torch.bfloat16, device="cuda")
    table[-2000:].normal_()
    tables = TableSet([table], [0])
    ids = torch.randint(ROWS - 2000, ROWS, (512,), device="cuda")
    offsets, firsts = torch.arange(0, 513, 8, device="cuda"), torch.tensor([0, 64], device="cuda")
    rows = side_by_side(tables, 64)
    out, trace = pooled_lookup(tables, IdBags(ids, offsets, firsts, 64, rows), trace=True)
    touched, whole = ids - (ROWS - 2000), table[-2000:].double()
    expected = F.embedding_bag(touched, whole, offsets, mode="sum", include_last_offset=True)
    assert_close(out.view(64, DIM).double(), expected, rtol=1e-5, atol=1e-5)
    one_by_one, _ = row_lookup(
        tables, ids[:64], firsts, 64, side_by_side(tables, 64), dtype=torch.bfloat16
    )
    assert torch.equal(one_by_one.view(64, DIM), table[ids[:64]])
    grad = torch.randn(64, DIM, device="cuda")
    update(tables, trace, grad.view(-1), "sgd", lr=0.5)
    step = torch.zeros(2000, DIM, dtype=torch.float64, device="cuda")
    step.index_add_(0, touched, grad.double().repeat_interleave(8, 0))
    assert_close(table[-2000:].double(), whole - 0.5 * step, rtol=1e-2, atol=1e-2)
    assert not table[: ROWS - 2000].any()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_bag_of_very_many_ids_among_short_ones(monkeypatch, mode):
    """In one launch and in two, on the same counters: each is the same again in every bit."""
    monkeypatch.setattr(lookup, "LONG", lookup.LONG_IN_SMALL)
    table = torch.randn(5000, DIM, device="cuda")
    tables = TableSet([table], [0])
    lengths = torch.randint(0, 30, (500,), device="cuda")
    lengths[7], lengths[8], lengths[-1] = 100_000, 1025, 40_000
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    ids = torch.randint(0, 5000, (int(offsets[-1]),), device="cuda")
    firsts, rows = torch.tensor([0, 500], device="cuda"), side_by_side(tables, 500)
    results = []
    for small in (2**20, 0, 2**20, 0):
        monkeypatch.setattr(lookup, "SMALL", small)
        out, _ = pooled_lookup(tables, IdBags(ids, offsets, firsts, 500, rows), mode)
        results.append(out.view(500, DIM))
    expected = F.embedding_bag(ids, table.double(), offsets[:-1], mode=mode)
    for one, again in (results[::2], results[1::2]):  # which add rows in different orders
        assert_close(one.double(), expected, rtol=1e-4, atol=1e-3)
        assert torch.equal(one, again)


def test_weights_of_a_bag_of_very_many_ids():
    table = torch.randn(5000, DIM, device="cuda")
    tables = TableSet([table], [0])
    lengths = torch.randint(0, 3, (5000,), device="cuda")
    lengths[1000:3000], lengths[4000] = 0, 100_000
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    ids = torch.randint(0, 5000, (int(offsets[-1]),), device="cuda")
    firsts, rows = torch.tensor([0, 5000], device="cuda"), side_by_side(tables, 5000)
    grad = torch.randn(5000, DIM, device="cuda")
    found = per_sample_weight_grads(tables, IdBags(ids, offsets, firsts, 5000, rows), grad.view(-1))
    of_bags = grad.double().repeat_interleave(lengths, 0)
    expected = (table.double()[ids] * of_bags).sum(1)
    assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_a_large_step_is_the_same_in_every_bit():
    """A million ids, half of them of one row: against float64, and against itself."""
    num_bags, per_bag, num_rows = 2**15, 32, 50_000
    start = torch.randn(num_rows, DIM, device="cuda")
    ids = torch.randint(0, num_rows, (num_bags * per_bag,), device="cuda")
    ids[torch.rand(ids.shape, device="cuda") < 0.5] = 77
    offsets = torch.arange(num_bags + 1, device="cuda") * per_bag
    firsts = torch.tensor([0, num_bags], device="cuda")
    grad = torch.randn(num_bags, DIM, device="cuda") / num_bags
    results = []
    for _ in range(2):
        table = start.clone()
        tables, squares = TableSet([table], [0]), torch.ones(num_rows, device="cuda")
        rows = side_by_side(tables, num_bags)
        out, trace = pooled_lookup(tables, IdBags(ids, offsets, firsts, num_bags, rows), trace=True)
        update(tables, trace, grad.view(-1), "rowwise_adagrad", [[squares]], lr=0.5, eps=1e-6)
        results.append((out, table, squares))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    total = torch.zeros(num_rows, DIM, dtype=torch.float64, device="cuda")
    total.index_add_(0, ids, grad.double().repeat_interleave(per_bag, 0))
    squares = 1 + total.square().mean(1, keepdim=True)
    expected = start.double() - 0.5 * total / (squares.sqrt() + 1e-6)
    assert_close(results[0][1].double(), expected, rtol=1e-5, atol=1e-5)
    assert_close(results[0][2].double(), squares.squeeze(1), rtol=1e-5, atol=1e-5)


def test_a_captured_lookup_and_step_outlive_other_batches():
    """A graph reads what it was captured with, whatever sizes were looked up since."""
    table = torch.randn(5000, DIM, device="cuda")
    tables = TableSet([table], [0])
    ids = torch.randint(0, 5000, (64 * 40,), device="cuda")

    def step(num_bags: int) -> torch.Tensor:
        offsets = torch.arange(num_bags + 1, device="cuda") * 40
        firsts, rows = first_bags((num_bags,), tables.device), side_by_side(tables, num_bags)
        bags = IdBags(ids[: num_bags * 40], offsets, firsts, num_bags, rows)
        out, trace = pooled_lookup(tables, bags, trace=True)
        update(tables, trace, out, "sgd", lr=1e-3)  # small: values stay near 1
        return out.view(num_bags, DIM)

    step(64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(64)
    for num_bags in (1, 32, 64, 7):
        step(num_bags)
    junk = [torch.full((64,), 2**40, device="cuda") for _ in range(1000)]
    ids.random_(5000)
    before = table.double()
    graph.replay()
    bag = before[ids].view(64, 40, DIM).sum(1)
    assert_close(out.double(), bag, rtol=1e-5, atol=1e-4)
    expected = before.index_add(0, ids, bag.repeat_interleave(40, 0), alpha=-1e-3)
    assert_close(table.double(), expected, rtol=1e-5, atol=1e-5)
    assert len(junk) == 1000
