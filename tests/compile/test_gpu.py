"""Compiled code of a simulated world on one CUDA device."""

import pytest
import torch
from by_hand import value
from compiling import compiled
from devices import needs_cuda
from torch import nn
from torch.nn import functional as F

import shardwise
from shardwise import DTensor, Replicate, Shard, distribute_tensor
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = needs_cuda

R, S0, S1 = Replicate(), Shard(0), Shard(1)


@pytest.fixture
def pair():
    torch.ones(1, device="cuda")  # a mesh warns when no device was used before
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cuda", (2,))
        shardwise.zeros(1, device_mesh=mesh)
        yield mesh


def outcome(fn, inputs):
    out = fn(*inputs)
    wanted = [x for x in inputs if x.requires_grad]
    return [value(out), *map(value, torch.autograd.grad(out.square().sum(), wanted))]


def assert_as_eager(fn, fast, inputs):
    torch.testing.assert_close(outcome(fast, inputs), outcome(fn, inputs))


def lookup(ids, table):
    return F.embedding(ids, table) * 2


def linear(x, weight):
    return F.linear(x, weight).relu()


def moved(x, weight):
    return F.linear(x, weight).redistribute(placements=[Replicate()])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("placement", [S0, S1], ids=repr)
def test_a_lookup_of_any_batch_size(pair, backend, placement):
    fast, counter = compiled(lookup, backend, dynamic=True)
    for size in (8, 9, 23):
        table = distribute_tensor(torch.randn(11, 14, device="cuda"), pair, [placement])
        ids = distribute_tensor(torch.randint(0, 11, (size,), device="cuda"), pair, [R])
        assert_as_eager(lookup, fast, (ids, table.requires_grad_()))
    assert counter.frame_count == 1


@pytest.mark.parametrize("fn", [linear, moved], ids=["linear", "redistribute inside"])
def test_linear(pair, fn):
    fast = torch.compile(fn, fullgraph=True)
    # In float64: the kernels of the two sides add in other orders.
    options = {"device": "cuda", "dtype": torch.float64}
    weight = distribute_tensor(torch.randn(36, 20, **options), pair, [S0]).requires_grad_()
    for rows in (27, 32, 2):
        x = distribute_tensor(torch.randn(rows, 20, **options), pair, [S0])
        assert_as_eager(fn, fast, (x, weight))


@pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="older compilers describe a parameter and its gradient by one set of parts",
)
def test_training_on_after_a_backward(pair):
    model = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 14)).to("cuda")
    shardwise.distribute_module(model, pair)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    for rows in (6, 8):
        x = distribute_tensor(torch.randn(rows, 10, device="cuda"), pair, [S0])
        torch.testing.assert_close(value(fast(x)), value(model(x)))
        fast(x).square().mean().backward()  # the next compilation meets a gradient
        optimizer.step()


def test_a_local_tensor_enters(pair):
    def scaled(x, weight):
        return DTensor.from_local(x, pair, [Replicate()]) @ weight

    weight = distribute_tensor(torch.randn(10, 14, device="cuda"), pair, [S1])
    x = torch.randn(6, 10, device="cuda")
    fast = torch.compile(scaled, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(value(fast(x, weight)), value(scaled(x, weight)))


def test_a_parallelized_module(pair):
    model = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 14)).to("cuda")
    parallelize_module(model, pair, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(7, 10, device="cuda")
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(fast(x).agreed(), model(x).agreed())


def test_autocast(pair):
    x = distribute_tensor(torch.randn(6, 20, device="cuda"), pair, [S0])
    weight = distribute_tensor(torch.randn(36, 20, device="cuda"), pair, [R])
    with torch.autocast("cuda", dtype=torch.bfloat16):
        fast = torch.compile(linear, backend="aot_eager", fullgraph=True)(x, weight)
        assert fast.dtype == linear(x, weight).dtype == torch.bfloat16
