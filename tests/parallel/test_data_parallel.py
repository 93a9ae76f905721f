"""Ranks with a batch each train one module: the gradient of the mean of their losses."""

from copy import deepcopy

import pytest
import torch
from parallel_models import MLP
from parity import assert_gradients, train
from torch import nn

import shardwise
from shardwise import LayoutError, LocalTensor, Partial, Replicate, Shard
from shardwise.debug import CommDebugMode
from shardwise.parallel import ColwiseParallel, RowwiseParallel, data_parallel, parallelize_module


def loss_of(model, x, y):
    return (model(x) - y).pow(2).mean()


def batches(num=3):
    return [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(num)]


def by_rank(tensor, coordinate):
    """Each rank's part of a batch of two."""
    return LocalTensor.per_rank(lambda rank: tensor.chunk(2)[coordinate(rank)])


@pytest.fixture
def pair():
    with shardwise.simulate(2):
        yield shardwise.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


@pytest.mark.parametrize("source", [2, -1])
def test_a_source_that_is_no_coordinate(pair, source):
    with pytest.raises(LayoutError, match=f"src_data_rank={source} is not a coordinate"):
        data_parallel(MLP(), pair, src_data_rank=source)


@pytest.mark.parametrize(("bucket_bytes", "num_buckets"), [(1 << 20, 1), (1, 4), (0, 4)])
def test_small_buckets_hold_one_gradient_each(pair, bucket_bytes, num_buckets):
    model = data_parallel(MLP(), pair, bucket_bytes=bucket_bytes)
    with CommDebugMode() as comm:
        model(torch.ones(2, 8)).sum().backward()
    assert [event.kind for event in comm.events] == ["all_reduce"] * num_buckets


def test_plain_parameters_train_as_on_one_device(pair):
    model, data = MLP(), batches()
    expected = train(deepcopy(model), loss_of, data)
    parallel = data_parallel(model, pair)
    split = [tuple(by_rank(t, lambda rank: rank) for t in batch) for batch in data]
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.5, momentum=0.5)
    found = []
    for batch in split:
        optimizer.zero_grad()
        loss = loss_of(parallel, *batch)
        loss.backward()
        optimizer.step()
        after = {name: p.detach().clone() for name, p in parallel.named_parameters()}
        mean = torch.stack([loss.detach().on_rank(rank) for rank in range(2)]).mean()
        found.append({"loss": mean, **after})
    torch.testing.assert_close(found, expected)


def test_gradients_are_plain_tensors_again(pair):
    model = data_parallel(MLP(), pair)
    loss_of(model, *(by_rank(t, lambda rank: rank) for t in batches(1)[0])).backward()
    assert all(type(p.grad) is torch.Tensor for p in model.parameters())


def test_buckets_are_sent_during_backward(pair):
    """Two layers, a bucket each: the last layer's is on its way before the first's is there."""
    model = data_parallel(MLP(), pair, bucket_bytes=500)
    reached = []
    model.up.weight.register_hook(lambda grad: reached.append(len(comm.events)))
    with CommDebugMode() as comm:
        loss_of(model, *(by_rank(t, lambda rank: rank) for t in batches(1)[0])).backward()
    assert len(comm.events) == 2
    assert reached == [1]
    assert {(event.kind, event.op) for event in comm.events} == {("all_reduce", "data_parallel")}


def test_one_bucket_sends_once(pair):
    model = data_parallel(MLP(), pair)
    with CommDebugMode() as comm:
        loss_of(model, *(by_rank(t, lambda rank: rank) for t in batches(1)[0])).backward()
    assert comm.get_total_counts() == 1


def test_no_sync_accumulates_first(pair):
    model, data = MLP(), batches(3)
    expected = deepcopy(model)
    for batch in data:
        loss_of(expected, *batch).backward()
    parallel = data_parallel(model, pair)
    split = [tuple(by_rank(t, lambda rank: rank) for t in batch) for batch in data]
    with CommDebugMode() as comm, parallel.no_sync():
        loss_of(parallel, *split[0]).backward()
        loss_of(parallel, *split[1]).backward()
    assert comm.get_total_counts() == 0
    loss_of(parallel, *split[2]).backward()
    assert_gradients(parallel, expected)


def test_a_second_backward_adds_to_the_first(pair):
    model, data = MLP(), batches(2)
    expected = deepcopy(model)
    parallel = data_parallel(model, pair)
    for batch in data:
        loss_of(expected, *batch).backward()
        loss_of(parallel, *(by_rank(t, lambda rank: rank) for t in batch)).backward()
    assert_gradients(parallel, expected)


def test_unused_parameters_keep_no_gradient(pair):
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
    data_parallel(model, pair)
    x = by_rank(torch.randn(4, 4), lambda rank: rank)
    model["used"](x).sum().backward()
    assert model["unused"].weight.grad is None
    assert model["used"].weight.grad is not None


def test_after_a_backward_that_raised(pair):
    model, (batch,) = MLP(), batches(1)
    expected = deepcopy(model)
    loss_of(expected, *batch).backward()
    parallel = data_parallel(model, pair)
    split = tuple(by_rank(t, lambda rank: rank) for t in batch)

    def fail(grad):
        raise RuntimeError("half-way")

    handle = parallel.up.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="half-way"):
        loss_of(parallel, *split).backward()
    handle.remove()
    parallel.zero_grad()
    loss_of(parallel, *split).backward()
    assert_gradients(parallel, expected)


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


@pytest.mark.parametrize("reduced", [True, False])
def test_with_tensor_parallelism(reduced):
    """On two axes, plain batches give the mean of the losses with data_parallel and without."""
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model, (batch,) = MLP(hidden=10), batches(1)
        expected = deepcopy(model)
        loss_of(expected, *batch).backward()
        parallelize_module(model, mesh, PLAN)
        if reduced:
            data_parallel(model, mesh["dp"])
        loss_of(model, *(by_rank(t, lambda rank: rank // 2) for t in batch)).backward()
        wanted = Replicate() if reduced else Partial()
        assert model.up.weight.grad.placements == (wanted, Shard(0))
        assert model.down.bias.grad.placements[0] == wanted
        assert_gradients(model, expected)


def test_plain_parts_around_tensor_parallel_ones():
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(8, 8), MLP(), nn.Linear(8, 8))
        (batch,) = batches(1)
        expected = deepcopy(model)
        loss_of(expected, *batch).backward()
        parallelize_module(model, mesh, {f"1.{name}": style for name, style in PLAN.items()})
        data_parallel(model, mesh["dp"])
        loss_of(model, *(by_rank(t, lambda rank: rank // 2) for t in batch)).backward()
        assert_gradients(model, expected)


def test_all_axes_of_a_mesh_are_data_axes(square):
    model, (batch,) = MLP(), batches(1)
    expected = deepcopy(model)
    loss_of(expected, *batch).backward()
    data_parallel(model, square)
    mine = (LocalTensor.per_rank(lambda rank, t=t: t.chunk(4)[rank]) for t in batch)
    loss_of(model, *mine).backward()
    assert_gradients(model, expected)


def test_starts_from_one_ranks_values(pair):
    layer = nn.Linear(2, 2, bias=False)
    values = LocalTensor.per_rank(lambda rank: torch.full((2, 2), float(rank)))
    layer.weight = nn.Parameter(values)
    data_parallel(layer, pair, src_data_rank=1)
    assert layer.weight.detach().agreed().unique().tolist() == [1.0]


def test_a_second_time_is_an_error(pair):
    model = data_parallel(MLP(), pair)
    with pytest.raises(LayoutError, match="data-parallel already"):
        data_parallel(model, pair)
