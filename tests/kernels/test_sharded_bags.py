"""One sharded table: `F.embedding_bag` of DTensors through the fused kernels, in float64's eyes."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICE, INTERPRETED, of_kernels, skip_without_triton
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import shardwise
from shardwise import Replicate, Shard
from shardwise.kernels import DTYPES
from shardwise.ops.lookup import rank_bags

skip_without_triton()

from shardwise.kernels import lookup, update  # noqa: E402  (after the check for Triton)
from shardwise.lookup.backends.triton_kernels import TritonBackend  # noqa: E402

pytestmark = of_kernels
R, S0, S1 = Replicate(), Shard(0), Shard(1)
UNEVEN = {
    2: Shard(0, sizes=(0, 11)),
    4: Shard(0, sizes=(0, 2, 9, 0)),
    8: Shard(0, sizes=(0, 2, 0, 0, 5, 4, 0, 0)),
}
ROWS, COLUMNS, PADDING = 11, 6, 3


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    """Bags and segments are split early; on a CPU the kernels are asked as on a GPU.

    Gives the names of what the kernels were asked for.
    """
    monkeypatch.setattr(lookup, "LONG", 8)
    monkeypatch.setattr(update, "SPAN", 8)
    if INTERPRETED:
        kernels = TritonBackend()
        monkeypatch.setattr(
            rank_bags,
            "fused_backend",
            lambda x: kernels if x.dtype in DTYPES and not x.is_meta else None,
        )
    asked = []
    for name in ("look_up", "largest", "add_gradients", "part_gradient", "weight_gradient"):
        real = getattr(TritonBackend, name)

        def counted(*args, name=name, real=real):
            asked.append(name)
            return real(*args)

        monkeypatch.setattr(TritonBackend, name, counted)
    return asked


@pytest.fixture(params=[2] if INTERPRETED else [4, 8])
def mesh(request):
    torch.ones(1, device=DEVICE)  # a mesh warns when no device was used before
    with shardwise.simulate(request.param):
        yield shardwise.init_device_mesh(DEVICE, (request.param,))


def lay(tensor, mesh, placement):
    placement = placement[mesh.size()] if isinstance(placement, dict) else placement
    return shardwise.distribute_tensor(tensor, mesh, [placement], src_data_rank=None)


def whole(x):
    return x.full_tensor().agreed()


def draw(form):
    """Ids, offsets or None, whether the last offset ends the last bag."""
    if form == "two dims":
        return torch.randint(0, ROWS, (8, 3), device=DEVICE), None, False
    if form == "int32":
        return torch.randint(0, ROWS, (8, 2), device=DEVICE, dtype=torch.int32), None, False
    # One long bag, empty ones, and ids that stand after the last bag.
    offsets = torch.tensor([0, 0, 14, 14, 17], device=DEVICE)
    return torch.randint(0, ROWS, (21,), device=DEVICE), offsets, True


def check(mesh, placements, form, weighted=False, dtype=torch.float32, entries=None, **options):
    ids, offsets, last = draw(form)
    weight = torch.randn(ROWS, COLUMNS, device=DEVICE).to(dtype)
    if entries is not None:
        weight = entries[torch.randint(len(entries), weight.shape, device=DEVICE)]
    samples = torch.randn(ids.shape, device=DEVICE).to(dtype) if weighted else None
    one = [None if t is None else t.double().requires_grad_() for t in (weight, samples)]
    dense = {name: option for name, option in options.items() if name != "sparse"}
    # What stands after the last bag is in none; torch's kernels differ in that.
    counted = slice(int(offsets[-1]) if last else None)
    expected = F.embedding_bag(
        ids.long()[counted],
        one[0],
        offsets,
        per_sample_weights=None if samples is None else one[1][counted],
        include_last_offset=last,
        **dense,
    )
    upstream = torch.randn(expected.shape, device=DEVICE).to(dtype)
    expected.backward(upstream.double())

    sharded = lay(weight, mesh, placements[0]).requires_grad_()
    laid = None if samples is None else lay(samples, mesh, placements[1]).requires_grad_()
    starts = None if offsets is None else lay(offsets, mesh, R)
    found = F.embedding_bag(
        lay(ids, mesh, placements[1]),
        sharded,
        starts,
        per_sample_weights=laid,
        include_last_offset=last,
        **options,
    )
    found.backward(lay(upstream, mesh, R))
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    near["equal_nan"] = True
    assert_close(whole(found.detach()).double(), expected.detach(), **near)
    grad = sharded.grad.to_dense() if options.get("sparse") else sharded.grad
    assert_close(whole(grad).double(), one[0].grad, **near)
    if weighted:
        assert_close(whole(laid.grad).double(), one[1].grad, **near)
    return found


CASES = {
    "rows": (S0, R, "offsets"),
    "uneven rows": (UNEVEN, S0, "int32"),
    "columns": (S1, R, "two dims"),
    "rows, sharded ids": (S0, S0, "two dims"),
    "uneven rows, offsets": (UNEVEN, R, "offsets"),
    "columns, offsets": (S1, R, "offsets"),
    "whole": (R, S0, "int32"),
}
#: Interpreted kernels take long.
FEW = [name for number, name in enumerate(CASES) if number < 3 or not INTERPRETED]


@pytest.mark.parametrize("case", FEW)
def test_every_mode(mesh, fused, case):
    *placements, form = CASES[case]
    for options in ({"mode": "sum"}, {"mode": "mean", "padding_idx": PADDING}, {"mode": "max"}):
        check(mesh, placements, form, **options)
    assert {"look_up", "largest", "add_gradients"} <= set(fused)


@pytest.mark.parametrize("case", FEW)
def test_a_maximum_of_entries_that_are_not_finite(mesh, fused, case):
    *placements, form = CASES[case]
    entries = torch.tensor([-1.0, 0.5, -torch.inf, -torch.inf, torch.inf, torch.nan, torch.nan])
    for padding in (None, PADDING):
        options = {"mode": "max", "padding_idx": padding}
        check(mesh, placements, form, entries=entries.to(DEVICE), **options)
    assert "largest" in fused


@pytest.mark.parametrize("placement", [S0] if INTERPRETED else [S0, S1], ids=repr)
def test_weights_of_samples_and_rows_that_have_a_gradient(mesh, fused, placement):
    for form in ("offsets",) if INTERPRETED else ("two dims", "offsets"):
        check(mesh, (placement, R), form, weighted=True, mode="sum", sparse=True, padding_idx=2)
    check(mesh, (placement, R), "offsets", mode="mean", sparse=True)
    assert {"look_up", "part_gradient", "weight_gradient"} <= set(fused)
    assert "add_gradients" not in fused


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_rows_of_ids_are_one_lookup(mesh, fused, dtype):
    ids = torch.randint(0, ROWS, (4, 3), device=DEVICE, dtype=dtype)
    weight, upstream = torch.randn(ROWS, COLUMNS, device=DEVICE), torch.randn(4, 3, COLUMNS)
    one = weight.clone().requires_grad_()
    F.embedding(ids, one).backward(upstream.to(DEVICE))
    sharded = lay(weight, mesh, S0).requires_grad_()
    found = F.embedding(lay(ids, mesh, R), sharded, sparse=True)
    found.backward(lay(upstream.to(DEVICE), mesh, R))
    assert_close(whole(found.detach()), F.embedding(ids, weight))
    assert_close(whole(sharded.grad.to_dense()), one.grad)
    assert set(fused) == {"look_up", "part_gradient"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes(mesh, fused, dtype):
    check(mesh, (S0, R), "two dims", dtype=dtype, mode="mean")
    check(mesh, (S1, R), "offsets", dtype=dtype, weighted=True, mode="sum")
    assert {"look_up", "add_gradients", "weight_gradient"} <= set(fused)


def test_float64_goes_through_torchs_kernels(mesh, fused):
    check(mesh, (S0, R), "two dims", dtype=torch.float64, mode="sum")
    assert not fused


def test_a_module_steps_twice_the_same_in_every_bit(mesh, fused):
    module = nn.EmbeddingBag(ROWS, COLUMNS, mode="sum", device=DEVICE)
    start, results = module.weight.detach().clone(), []
    shape = (4, 3) if INTERPRETED else (64, 50)
    batches = [torch.randint(0, ROWS, shape, device=DEVICE) for _ in range(2)]
    for _ in range(2):
        module.weight = nn.Parameter(lay(start, mesh, S0))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        for ids in batches:
            module(lay(ids, mesh, R)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(whole(module.weight.detach()))
    assert torch.equal(*results)
    assert not torch.equal(results[0], start)
