"""Sharded tables on CUDA: four simulated ranks on one device, against that device alone."""

import pytest
import torch
from devices import needs_cuda
from torch import nn
from torch.nn import functional as F

import shardwise
from shardwise import Replicate, Shard

pytestmark = needs_cuda

R, S0, S1 = Replicate(), Shard(0), Shard(1)
ROWS, COLUMNS = 1003, 64
CASES = [(S0, R), (S0, S0), (Shard(0, sizes=(0, 3, 1000, 0)), S0), (S1, R), (R, S0)]


@pytest.fixture
def mesh():
    torch.ones(1, device="cuda")  # a mesh warns when no device was used before
    with shardwise.simulate(4):
        yield shardwise.init_device_mesh("cuda", (4,))


def lay(tensor, mesh, placement):
    return shardwise.distribute_tensor(tensor, mesh, [placement], src_data_rank=None)


def whole(x):
    return x.full_tensor().agreed()


def check(mesh, placements, fn, ids, **options):
    """Values and gradients of `fn` are those of the device alone."""
    weight = torch.randn(ROWS, COLUMNS, device="cuda")
    one, sharded = weight.clone().requires_grad_(), lay(weight, mesh, placements[0])
    sharded.requires_grad_()
    expected = fn(ids, one, **options)
    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    found = fn(lay(ids, mesh, placements[1]), sharded, **options)
    found.backward(lay(upstream, mesh, R))
    torch.testing.assert_close(whole(found.detach()), expected.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(whole(sharded.grad), one.grad.to_dense(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"sparse": True}], ids=str)
@pytest.mark.parametrize("placements", CASES, ids=str)
def test_lookups(mesh, placements, options):
    """Few ids are gathered, many are exchanged."""
    for num in (7, 4000):
        ids = torch.randint(0, ROWS, (num, 2), device="cuda")
        check(mesh, placements, F.embedding, ids, **options)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("placements", CASES, ids=str)
def test_bags(mesh, placements, mode):
    ids = torch.randint(0, ROWS, (40, 3), device="cuda")
    check(mesh, placements, F.embedding_bag, ids, mode=mode, padding_idx=5)


@pytest.mark.parametrize("placement", [S0, R], ids=repr)
def test_rows_of_a_maximal_norm(mesh, placement):
    weight = torch.randn(ROWS, COLUMNS, device="cuda")
    one, sharded = weight.clone(), lay(weight, mesh, placement)
    ids = torch.randint(0, ROWS, (50,), device="cuda")
    expected = F.embedding(ids, one, max_norm=1.0)
    torch.testing.assert_close(
        whole(F.embedding(lay(ids, mesh, S0), sharded, max_norm=1.0)), expected
    )
    torch.testing.assert_close(whole(sharded), one)


@pytest.mark.parametrize("placement", [S0, S1, R], ids=repr)
def test_sparse_adam(mesh, placement):
    weight = torch.randn(ROWS, COLUMNS, device="cuda")
    one, sharded = nn.Parameter(weight.clone()), nn.Parameter(lay(weight, mesh, placement))
    steps = [torch.optim.SparseAdam([p], lr=0.1) for p in (one, sharded)]
    for _ in range(2):
        ids = torch.randint(0, ROWS, (64,), device="cuda")
        F.embedding(ids, one, sparse=True).pow(2).sum().backward()
        F.embedding(lay(ids, mesh, S0), sharded, sparse=True).pow(2).sum().backward()
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(whole(sharded.detach()), one.detach(), rtol=1e-4, atol=1e-4)


def test_exchanged_ids_out_of_range_raise(mesh):
    """The counts have to be read anyway, so this needs no assertion on the device."""
    ids = torch.zeros(4000, dtype=torch.long, device="cuda")
    ids[-1] = ROWS
    weight = lay(torch.randn(ROWS, COLUMNS, device="cuda"), mesh, S0)
    with pytest.raises(IndexError, match="out of range"):
        F.embedding(lay(ids, mesh, S0), weight)


@pytest.mark.parametrize("placements", [(S0, R), (S0, S0), (S1, R)], ids=str)
def test_compiled(mesh, placements):
    torch._dynamo.reset()
    fast = torch.compile(F.embedding, backend="aot_eager", fullgraph=True, dynamic=True)
    ids = torch.randint(0, ROWS, (37,), device="cuda")
    check(mesh, placements, fast, ids)
    torch._dynamo.reset()
