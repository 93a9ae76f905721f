"""Jagged in its several spellings."""

import embedding_cases as cases
import pytest
import torch
from torch.testing import assert_close

import shardwise
from shardwise import LocalTensor
from shardwise.embedding import SGD, EmbeddingBagCollection, EmbeddingCollection, Jagged, Table
from shardwise.errors import ArgumentError


def nested(*bags):
    return torch.nested.nested_tensor([torch.tensor(bag) for bag in bags], layout=torch.jagged)


def test_one_nested_tensor_is_not_copied():
    ids = nested([1, 2], [3], [4], [5, 6, 7])
    batch = Jagged.from_nested(ids, ["a", "b"])
    assert batch.values.data_ptr() == ids.values().data_ptr()
    assert batch.bags("a") == [[1, 2], [3]]
    assert batch.bags("b") == [[4], [5, 6, 7]]


def test_a_nested_tensor_per_feature():
    batch = Jagged.from_nested({"a": nested([1, 2], [3]), "b": nested([4])})
    assert batch.bags("a") == [[1, 2], [3]]
    assert batch.bags("b") == [[4]]


def test_nested_weights():
    weights = torch.nested.nested_tensor(
        [torch.tensor([0.5, 1.0]), torch.tensor([2.0])], layout=torch.jagged
    )
    batch = Jagged.from_nested(nested([1, 2], [3]), ["a"], weights)
    assert batch.weights.tolist() == [0.5, 1.0, 2.0]
    batch = Jagged.from_nested({"a": nested([1, 2], [3])}, weights={"a": weights})
    assert batch.weights.tolist() == [0.5, 1.0, 2.0]


def test_a_collection_takes_nested_tensors():
    collection = cases.make(tables=[Table("a", 9, 4), Table("b", 9, 4)])
    found = collection({"a": nested([1, 2], [3]), "b": nested([4], [5])})
    expected = collection(Jagged.from_lists({"a": [[1, 2], [3]], "b": [[4], [5]]}))
    assert_close(found, expected)


def test_rows_as_a_nested_tensor():
    collection = cases.make(EmbeddingCollection, tables=[Table("a", 9, 4)])
    rows = collection(Jagged.from_lists({"a": [[1, 2], [3]]}))["a"].to_nested()
    first, second = rows.unbind()
    assert_close(first, collection.parameter("a")[[1, 2]])
    assert_close(second, collection.parameter("a")[[3]])


def test_offsets_are_lengths():
    batch = Jagged(["a"], torch.tensor([1, 2, 3]), offsets=torch.tensor([0, 2, 2, 3]))
    assert batch.bags("a") == [[1, 2], [], [3]]


def test_features_in_any_order():
    collection = cases.make()
    batch = cases.batch(1)
    turned = {feature: batch.bags(feature) for feature in reversed(batch.features)}
    assert_close(collection(Jagged.from_lists(turned)), collection(batch))


def test_int32_ids_and_lengths():
    collection = cases.make()
    batch = cases.batch(1)
    small = Jagged(batch.features, batch.values.int(), lengths=batch.lengths.int())
    assert_close(collection(small), collection(batch))


def test_a_keyed_jagged_tensor_is_not_copied():
    jagged_tensor = pytest.importorskip("torchrec.sparse.jagged_tensor")
    theirs = jagged_tensor.KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.tensor([1, 2, 3, 4]),
        lengths=torch.tensor([1, 1, 0, 2]),
        weights=torch.tensor([0.1, 0.2, 0.3, 0.4]),
    )
    batch = Jagged.of(theirs)
    assert batch.values.data_ptr() == theirs.values().data_ptr()
    assert batch.weights.data_ptr() == theirs.weights().data_ptr()
    assert batch.bags("b") == [[], [3, 4]]


def test_a_keyed_jagged_tensor_with_a_batch_of_its_own_for_each_feature():
    jagged_tensor = pytest.importorskip("torchrec.sparse.jagged_tensor")
    theirs = jagged_tensor.KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.tensor([1, 2, 3, 4]),
        lengths=torch.tensor([1, 1, 0, 2, 0]),
        stride_per_key_per_rank=[[2], [3]],
    )
    batch = Jagged.of(theirs)
    assert batch.bags("a") == [[1], [2]]
    assert batch.bags("b") == [[], [3, 4], []]


@pytest.mark.parametrize(
    ("bags", "found"),
    [
        (torch.ones(3), r"shape \(3,\)"),
        ([[1]], "list"),
    ],
    ids=["flat", "list"],
)
def test_what_holds_no_bags(bags, found):
    with pytest.raises(ArgumentError, match=rf"layout torch\.jagged.*found.*{found}"):
        Jagged.from_nested({"a": bags})


@pytest.mark.parametrize("plan", ["table_wise", "row_wise"])
def test_a_collection_takes_matrices(plan):
    a, b = torch.tensor([[1, 2], [3, 0]]), torch.tensor([[4], [5]])
    tables = [Table("a", 9, 4), Table("b", 9, 4)]
    alone = cases.make(tables=tables)
    expected = alone(Jagged.from_lists({"a": a.tolist(), "b": b.tolist()}))
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        found = cases.make(tables=tables).shard(mesh, plan)({"a": a, "b": b})
        assert_close(found, expected)


@pytest.mark.parametrize(
    ("kind", "weighted"),
    [(EmbeddingBagCollection, False), (EmbeddingBagCollection, True), (EmbeddingCollection, False)],
)
@pytest.mark.parametrize("plan", [None, "table_wise", "row_wise", "column_wise", "data_parallel"])
def test_ids_after_the_last_bag_are_not_looked_up(kind, plan, weighted):
    """A padded batch trains as the same batch without padding, gradients of weights included."""
    tables = [Table("a", 7, 4), Table("b", 9, 4, pooling="mean"), Table("c", 5, 8)]
    ids, lengths = torch.arange(10) % 5, torch.tensor([2, 1, 1, 2, 3, 1])
    found = []
    for num_more in (0, 5):
        torch.manual_seed(0)
        weights = torch.ones(10 + num_more, requires_grad=True) if weighted else None
        more = torch.full((num_more,), 3)
        given = torch.cat([ids, more])
        batch = Jagged(list("abc"), given, lengths=lengths, weights=weights, padded=num_more > 0)
        with shardwise.simulate(2):
            collection = kind(tables, optimizer=SGD(0.1))
            if plan is not None:
                collection.shard(shardwise.init_device_mesh("cpu", (2,)), plan)
            outputs = collection(batch).values()
            rows = [x if isinstance(x, torch.Tensor) else x.values for x in outputs]
            sum(x.pow(2).sum() for x in rows).backward()
            values = [p if plan is None else p.full_tensor() for p in collection.parameters()]
            found.append([x.agreed() if isinstance(x, LocalTensor) else x for x in values])
        if weighted:
            assert weights.grad.shape == weights.shape
            assert not weights.grad[10:].any()
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)
