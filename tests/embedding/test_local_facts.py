"""What a rank knows alone must not change what all ranks compute together."""

import embedding_cases as cases
import local_cases
import pytest
import torch
from parity import whole
from torch.testing import assert_close

from shardwise.embedding import (
    SGD,
    EmbeddingBagCollection,
    EmbeddingCollection,
    Jagged,
    RowWiseAdagrad,
    Table,
)
from shardwise.errors import ShardwiseError

ONE = [Table("t", 10, 4)]
IDS, LENGTHS = torch.tensor([3, 1, 4, 1, 5, 9]), torch.tensor([2, 4])


@pytest.mark.processes
@pytest.mark.parametrize("plan", ["row_wise", "table_wise"])
def test_replicas_stay_equal_where_hosts_have_other_threads(processes, plan):
    first, second, third, fourth = processes(local_cases.replicas_with_other_threads, plan)
    assert torch.equal(first, third)
    assert torch.equal(second, fourth)


UNREADABLE = {
    "no features": {},
    "ids elsewhere": Jagged(
        [feature for table in cases.TABLES for feature in table.features],
        torch.zeros(6, dtype=torch.int64, device="meta"),
        lengths=torch.ones(6, dtype=torch.int64),
    ),
}


@pytest.mark.processes
@pytest.mark.parametrize("batch", UNREADABLE.values(), ids=UNREADABLE)
def test_a_batch_that_one_rank_cannot_read(two_processes, batch):
    first, second = two_processes.run(local_cases.unreadable_on_one_rank, batch)
    assert first.kind.__name__ == second.kind.__name__ == "BatchError"
    assert first.message == second.message
    assert "On rank 1: " in first.message


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "output"),
    [
        (EmbeddingBagCollection, {}),
        (EmbeddingBagCollection, {"output": "tensor"}),
        (EmbeddingCollection, {}),
    ],
    ids=["bags", "joined", "rows"],
)
def test_a_rank_whose_loss_gives_no_gradient(two_processes, kind, output):
    expected = cases.make(kind, optimizer=SGD(0.1))
    (cases.loss_of(expected(cases.batch(0))) / 2).backward()
    for found in two_processes(local_cases.no_gradient_on_one_rank, kind, output):
        for name, parameter in expected.named_parameters():
            assert_close(found[name], parameter.detach())


@pytest.mark.processes
@pytest.mark.parametrize("plan", ["row_wise", cases.MIXED_ON_TWO, "data_parallel"])
@pytest.mark.parametrize("optimizer", [None, SGD(0.1)], ids=["torch", "fused"])
def test_weights_that_train_on_one_rank_where_tables_are_frozen(two_processes, plan, optimizer):
    alone, batch = cases.make().requires_grad_(False), cases.batch(1, weighted=True)
    batch.weights = batch.weights.requires_grad_()
    cases.loss_of(alone(batch)).backward()
    _, found = two_processes(local_cases.weights_that_train_on_one_rank, plan, optimizer)
    assert_close(found, batch.weights.grad)


@pytest.mark.processes
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("plan", ["row_wise", cases.MIXED_ON_TWO, "data_parallel"])
@pytest.mark.parametrize("optimizer", [None, SGD(0.1)], ids=["torch", "fused"])
def test_a_rank_without_autograd(two_processes, plan, optimizer, compiled):
    args = local_cases.without_autograd_on_one_rank, plan, optimizer, compiled
    first, second = two_processes.run(*args)
    assert first.kind.__name__ == second.kind.__name__ == "RankMismatchError"
    assert first.message == second.message
    assert "rank 0 will need the backward of all ranks, and rank 1 cannot" in first.message


@pytest.mark.processes
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("plan", [cases.MIXED_ON_TWO, "data_parallel"])
def test_a_replicated_table_that_one_rank_freezes(two_processes, plan, compiled):
    """Copies of it would differ."""
    expected = cases.make(optimizer=SGD(0.1))
    expected.parameter("day").requires_grad_(False)
    for rank in range(2):
        with expected.optimizer.hold():
            (cases.loss_of(expected(cases.batch(rank))) / 2).backward()
    expected.optimizer.step()
    args = local_cases.frozen_on_one_rank, plan, SGD(0.1), compiled
    for said, found in two_processes(*args):
        assert "on rank 1 other replicated tables require grad than on rank 0" in said
        for name, parameter in expected.named_parameters():
            assert_close(found[name], parameter.detach())


SAME = ("a", "b"), ("a", "b")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("lr", "features", "said"),
    [((0.1, 0.2), SAME, "lr=0.2"), ((0.1, 0.1), (("a", "b"), ("b", "a")), "sum of b, a")],
    ids=["lr", "features"],
)
def test_collections_that_differ_between_ranks(two_processes, lr, features, said):
    for failure in two_processes.run(local_cases.other_settings, lr, features):
        assert failure.kind.__name__ == "LayoutError"
        assert said in failure.message


@pytest.mark.parametrize("plan", ["row_wise", "column_wise", "data_parallel"])
@pytest.mark.parametrize("convert", [False, True], ids=["made", "converted"])
def test_weights_of_float64_tables_are_not_rounded(mesh, plan, convert):
    collection = EmbeddingBagCollection(ONE, dtype=None if convert else torch.float64).double()
    weights = torch.rand(6, dtype=torch.float64)
    expected = torch.stack(
        [
            (w[:, None] * collection.parameter("t").detach()[i]).sum(0)
            for i, w in zip(IDS.split([2, 4]), weights.split([2, 4]), strict=True)
        ]
    )
    batch = Jagged(["t"], IDS, lengths=LENGTHS, weights=weights)
    assert_close(collection(batch)["t"].detach(), expected, rtol=0, atol=1e-15)
    sharded = collection.shard(mesh, plan)(batch)["t"].detach()
    assert_close(sharded.agreed(), expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("optimizer", [None, SGD(0.1)], ids=["torch", "fused"])
def test_weights_of_a_batch_that_was_prefetched_without_autograd(mesh, optimizer):
    collection = cases.make(tables=ONE, optimizer=optimizer).shard(mesh, "row_wise")
    weights = torch.ones(6, requires_grad=True)
    with torch.no_grad():
        ahead = collection.prefetch(Jagged(["t"], IDS, lengths=LENGTHS, weights=weights))
    rows = whole(collection.parameter("t"))
    collection(ahead)["t"].sum().backward()
    assert_close(weights.grad.agreed(), rows[IDS].sum(1))


@pytest.mark.parametrize("optimizer", [SGD(0.5), RowWiseAdagrad(0.5)], ids=["SGD", "row-wise"])
@pytest.mark.parametrize("held", [False, True])
def test_weights_of_two_lookups_before_backward(mesh, optimizer, held):
    """The update by one must not change the rows of which the other makes its gradient."""
    collection = cases.make(tables=ONE, optimizer=optimizer).shard(mesh, "row_wise")
    rows = whole(collection.parameter("t"))
    weights = [torch.ones(6, requires_grad=True) for _ in range(2)]
    loss = sum(
        collection(Jagged(["t"], IDS, lengths=LENGTHS, weights=each))["t"].sum() for each in weights
    )
    if not held:
        with pytest.raises(ShardwiseError, match=r"optimizer\.hold\(\)"):
            loss.backward()
        return
    with collection.optimizer.hold():
        loss.backward()
    collection.optimizer.step()
    for each in weights:
        assert_close(each.grad.agreed(), rows[IDS].sum(1))


def test_collections_on_the_meta_device_get_values_in_turn(mesh):
    """As on one device: tables made one after another do not begin with equal rows."""
    torch.manual_seed(3)
    expected = [EmbeddingBagCollection(ONE) for _ in range(2)]
    after = torch.rand(1)
    torch.manual_seed(3)
    found = [EmbeddingBagCollection(ONE, device="meta").shard(mesh, "row_wise") for _ in range(2)]
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.parameter("t"), whole(other.parameter("t")))
    assert torch.equal(after, torch.rand(1))
