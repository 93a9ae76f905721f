"""Many parameters: whether one was replaced, and writes to them, without a look at each."""

import copy
import pickle

import pytest
import torch
from parity import parameters, whole
from torch import nn

import shardwise
from shardwise.embedding import SGD, EmbeddingBagCollection, Jagged, Table
from shardwise.errors import ShardwiseError


@pytest.fixture
def mesh():
    with shardwise.simulate(4):
        yield shardwise.init_device_mesh("cpu", (4,))


def made(mesh=None, num_tables=3):
    tables = [Table(f"t{i}", 8, 4) for i in range(num_tables)]
    bags = EmbeddingBagCollection(tables, output="tensor", optimizer=SGD(0.1))
    return bags if mesh is None else bags.shard(mesh, "row_wise")


def batch(bags):
    num = len(bags.features)
    return Jagged(bags.features, torch.arange(2).repeat(num), lengths=torch.ones(2 * num).long())


def step(bags):
    bags(batch(bags)).sum().backward()


def versions(bags):
    return [parameter._version for parameter in bags.parameters()]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("copied", [None, copy.deepcopy])
def test_an_update_counts_as_a_write_to_each_parameter(mesh, sharded, copied):
    bags = made(mesh if sharded else None)
    bags = bags if copied is None else copied(bags)
    for _ in range(2):
        before = versions(bags)
        step(bags)
        assert all(a < b for a, b in zip(before, versions(bags), strict=True))


@pytest.mark.parametrize("sharded", [False, True])
def test_backward_refuses_a_table_that_an_update_changed(mesh, sharded):
    bags = made(mesh if sharded else None)
    squares = (bags.parameter("t1") ** 2).sum()
    step(bags)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


@pytest.mark.parametrize("optimizer", [None, SGD(0.1)])
def test_a_write_to_one_table_is_none_to_another(optimizer):
    bags = EmbeddingBagCollection([Table("t0", 8, 4), Table("t1", 8, 4)], optimizer=optimizer)
    squares = (bags.parameter("t1") ** 2).sum()
    with torch.no_grad():
        bags.parameter("t0").zero_()
    squares.backward()
    torch.testing.assert_close(bags.parameter("t1").grad, 2 * bags.parameter("t1").detach())
    squares = (bags.parameter("t0") ** 2).sum()
    with torch.no_grad():
        bags.parameter("t0").fill_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


def test_a_first_lookup_is_no_write(mesh):
    bags = made(mesh)
    squares = (bags.parameter("t1") ** 2).sum()
    bags(batch(bags))
    squares.backward()
    assert bags.parameter("t1").grad is not None


def test_as_many_counters_for_many_tables_as_for_few(mesh, monkeypatch):
    counted = []
    increment = torch.autograd.graph.increment_version
    for num_tables in (2, 100):
        bags = made(mesh, num_tables)
        step(bags)

        def count(tensors):
            counted.append(len(tensors) if isinstance(tensors, list) else 1)
            increment(tensors)

        with monkeypatch.context() as patched:
            patched.setattr(torch.autograd.graph, "increment_version", count)
            listed = bags._parameters_in_order()
            step(bags)
            assert bags._parameters_in_order() is listed
        assert len(listed) == num_tables
    assert len(counted) % 2 == 0
    assert counted[: len(counted) // 2] == counted[len(counted) // 2 :]
    assert max(counted) == 1


def replace_attribute(module, value):
    module.weight = value


def replace_item(module, value):
    module._parameters["weight"] = value


def replace_by_update(module, value):
    module._parameters.update(weight=value)


@pytest.mark.parametrize("replace", [replace_attribute, replace_item, replace_by_update])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_parameter_that_is_replaced_after_a_step(mesh, sharded, replace):
    bags = made(mesh if sharded else None)
    step(bags)
    module, old = bags.embedding_bags["t1"], bags.parameter("t1")
    replace(module, nn.Parameter(old.detach().clone()))
    with pytest.raises(ShardwiseError, match="'t1' was replaced"):
        step(bags)
    replace(module, old)
    step(bags)


def test_a_module_that_is_replaced_after_a_step(mesh):
    bags = made(mesh)
    step(bags)
    bags.embedding_bags["t1"] = copy.deepcopy(bags.embedding_bags["t1"])
    with pytest.raises(ShardwiseError, match="'t1' was replaced"):
        step(bags)


def test_a_pickled_collection_trains():
    bags = made()
    again = pickle.loads(pickle.dumps(bags))
    for each in (bags, again):
        step(each)
    for one, other in zip(bags.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_frozen_table_beside_trained_ones(mesh):
    bags = made(mesh)
    step(bags)
    bags.parameter("t1").requires_grad_(False)
    before = parameters(bags)
    step(bags)
    changed = [not torch.equal(before[n], whole(p)) for n, p in bags.named_parameters()]
    assert changed == [True, False, True]
