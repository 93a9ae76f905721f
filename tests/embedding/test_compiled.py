"""Models with collections, compiled: graphs before and after the tables."""

import compiled_cases
import embedding_cases as cases
import pytest
import torch
from torch.testing import assert_close

from shardwise.embedding import SGD

# torch's compiler reads the gradient of what enters a graph, whether it is a leaf or not.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
SIZES = (3, 3, 5, 4)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tables_of_one_device():
    model = compiled_cases.Recommender(optimizer=SGD(0.1))
    for number, num_bags in enumerate(SIZES):
        with model.bags.optimizer.hold():
            for rank in range(4):
                (model(cases.batch(10 * number + rank, num_bags)) / 4).backward()
        model.bags.optimizer.step()
    return {name: p.detach() for name, p in model.bags.named_parameters()}


def test_one_device():
    model, plain = (compiled_cases.Recommender(optimizer=SGD(0.1)) for _ in range(2))
    compiled = torch.compile(model, backend="aot_eager")
    for number, num_bags in enumerate(SIZES):
        batch = cases.batch(number, num_bags)
        found, expected = compiled(batch), plain(batch)
        assert_close(found, expected)
        found.backward()
        expected.backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(mine, theirs)
    assert_close(model.dense.weight.grad, plain.dense.weight.grad)


def test_played_ranks(mesh):
    model = compiled_cases.Recommender("row_wise", SGD(0.1))
    batch = cases.spread([cases.batch(rank) for rank in range(4)])
    expected = model(batch)
    found = torch.compile(model, backend="aot_eager")(batch)
    assert_close(found.on_rank(2), expected.on_rank(2))


def test_one_graph_cannot_hold_it():
    compiled = torch.compile(compiled_cases.Recommender(), backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="sends as much as its ids ask for"):
        compiled(cases.batch(0))


@pytest.mark.processes
def test_sharded_and_compiled_trains_alike(processes):
    found = processes(compiled_cases.trained_compiled, cases.PLANS["mixed"], SGD(0.1), SIZES)
    for name, expected in tables_of_one_device().items():
        assert_close(found[1][name], expected)
