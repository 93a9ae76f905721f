"""Collections in four gloo processes, against one device and against the simulated world."""

import functools
import re

import embedding_cases as cases
import pytest
import torch
from programs import record
from torch.testing import assert_close

import shardwise
from shardwise.embedding import SGD, Adagrad, Adam, EmbeddingBagCollection, EmbeddingCollection
from shardwise.errors import IdRangeError, RankMismatchError

pytestmark = pytest.mark.processes


def steps(num):
    return [[cases.batch(10 * s + r) for r in range(4)] for s in range(num)]


@pytest.mark.parametrize("plan", cases.PLANS.values(), ids=cases.PLANS)
@pytest.mark.parametrize("kind", [EmbeddingBagCollection, EmbeddingCollection])
def test_both_worlds_train_alike(processes, plan, kind):
    optimizer = Adagrad(0.1)
    found = processes(cases.trained_in_processes, plan, optimizer, 5, kind)
    for other in found[1:]:
        for name in other:
            assert torch.equal(other[name], found[0][name])
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cpu", (4,))
        simulated = cases.make(kind, optimizer=optimizer).shard(mesh, plan)
        assert_close(found[0], cases.train_sharded(simulated, steps(5)))
    assert_close(found[0], cases.train_alone(cases.make(kind, optimizer=optimizer), steps(5)))


@pytest.mark.parametrize("kind", [EmbeddingBagCollection, EmbeddingCollection])
def test_large_messages_train_alike_and_are_seen(processes, kind):
    small = processes(record, cases.trained_in_processes, "row_wise", Adagrad(0.1), 5, kind)
    large = processes(cases.trained_with_large_messages, "row_wise", kind)
    for (events, tables), (others, expected) in zip(large, small, strict=True):
        assert [e.kind for e in events] == [e.kind for e in others]
        assert sum(e.num_bytes for e in events) == sum(e.num_bytes for e in others)
        for name, (table,) in tables.items():
            assert torch.equal(table, expected[name][0])


@pytest.mark.parametrize("optimizer", [SGD(0.1), Adam(0.05)], ids=["SGD", "Adam"])
def test_twenty_steps(processes, optimizer):
    found = processes(cases.trained_in_processes, cases.PLANS["mixed"], optimizer, 20)
    assert_close(found[0], cases.train_alone(cases.make(optimizer=optimizer), steps(20)))


def test_tables_that_never_were_whole(processes):
    torch.manual_seed(0)  # that of the first rank
    alone = EmbeddingBagCollection(cases.TABLES)
    for found in processes(cases.drawn_when_sharded, cases.PLANS["mixed"]):
        for name, parameter in alone.named_parameters():
            assert torch.equal(found[name], parameter)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("optimizer", [None, SGD(0.1)], ids=["torch", "fused"])
@pytest.mark.parametrize("plan", ["row_wise", "column_wise", "table_wise"])
@pytest.mark.parametrize("kind", [EmbeddingBagCollection, EmbeddingCollection])
def test_tables_that_train_on_some_ranks(processes, kind, plan, optimizer, ahead):
    """The others help to make the gradients of those ranks."""
    found = processes(cases.trained_on_some_ranks, kind, plan, optimizer, ahead)
    for rank, (before, here, everywhere) in enumerate(found):
        assert_close(here, before if rank % 2 else everywhere)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("optimizer", [None, SGD(0.1)], ids=["torch", "fused"])
@pytest.mark.parametrize("kind", [EmbeddingBagCollection, EmbeddingCollection])
def test_copies_of_tables_that_train_on_some_ranks(processes, kind, optimizer, ahead):
    """All ranks say so: the copies would differ from then on."""
    args = cases.trained_on_some_ranks, kind, "data_parallel", optimizer, ahead
    for answer in processes.run(*args):
        assert issubclass(answer.kind, RankMismatchError)
        assert (
            "on ranks 1, 3 other replicated tables require grad than on ranks 0, 2"
            in answer.message
        )


def test_ordinary_optimizer(processes):
    found = processes(cases.trained_by_sgd, cases.PLANS["mixed"], 20)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    assert_close(found[0], cases.train_alone(cases.make(), steps(20), sgd))


@pytest.mark.parametrize("plan", ["row_wise", cases.PLANS["mixed"]], ids=["row_wise", "mixed"])
def test_together_with_ddp(processes, plan):
    found = processes(cases.beside_ddp, plan)
    assert_close(found[3], cases.beside_dense())


@pytest.mark.parametrize("plan", ["row_wise", "table_wise", "data_parallel"])
def test_an_id_out_of_range_on_one_rank(processes, plan):
    failures = processes.run(cases.broken_on_one_rank, plan)
    for failure in failures:
        assert failure.kind is IdRangeError
        assert "rank 2: feature 'user' of table 'user': id 99" in failure.message


@pytest.mark.parametrize("check", ["auto", "now"])
def test_whatever_is_wrong_on_one_rank_is_said_on_all(processes, check):
    """Names of features that differ between ranks too, which a simulated world cannot have."""
    left_out = dict.fromkeys(("user", "item", "place", "word"), "row_wise")
    found = processes(cases.bad_on_one_rank, cases.PLANS["mixed"], left_out, check)
    good = cases.batch(5)
    expected = cases.train_alone(cases.make(optimizer=SGD(0.1)), [[good] * 4])
    told = found[0][0]
    for other, tables in found:
        assert other == told
        assert_close(tables, expected)
    for position in range(len(good.values)):
        text = told.pop(position)
        assert re.search(rf"IdRange.*On rank {position % 4}: .*: id {-1 - position} ", text), text
    says = {
        "unknown feature": "Batch.*On rank 2: feature 'sold' belongs to no table; of the tables, ",
        "missing feature": "Batch.*On rank 2: feature 'day' of table 'day' is missing",
        "offsets decrease": "Batch.*On rank 2: feature 'user' of table 'user': offsets decrease",
        "offsets overrun": "Batch.*On rank 2: .* up to feature 'day' of table 'day', but there are",
        "lengths do not sum": "Batch.*On rank 2: .* up to feature 'day' of table 'day', but there",
        "weights of another length": "Batch.*On rank 2: weights .* feature 'day' of table 'day'",
        "ids that are not flat": r"Batch.*On rank 2: values are flat.*1\) \(feature 'user' of tab",
        "ids that are no numbers": "Batch.*On rank 2: values are int32 or int64, found torch.floa",
        "offsets that are not flat": r"Batch.*On rank 2: offsets are flat, found shape \(1, 19\)",
        "sizes that are not whole": "Batch.*On rank 2: batch_sizes are int32 or int64, found tor",
        "no batch": "Batch.*On rank 2: A batch is a Jagged, a dict .* found NoneType",
        "no nested tensors": "Batch.*On rank 2: Bags are a matrix, .* found one of shape",
        "id out of range": "IdRange.*On rank 2: feature 'user' of table 'user': id 1",
        "uneven": "Batch.*On rank 2: feature 'user' of table 'user' has 2 bags, feature 'bought'",
        "ahead": "IdRange.*On rank 2: feature 'user' of table 'user': id 1",
        "replaced": "^ShardwiseError: On rank 2: the parameter of table 'day' was replaced",
        "plan": r"Layout.*the plan of a collection fails, .*On rank 2: .*leaves out: day",
        "plan file": r"Layout.* fails, .*On rank 2: .*/nowhere/plan.toml cannot be read: .*No such",
    }
    assert told.keys() == says.keys()
    for name, pattern in says.items():
        assert re.search(pattern, told[name]), (name, told[name])


def test_prefetch_overlaps_and_computes_the_same(processes):
    found = processes(cases.trained_with_prefetch, cases.PLANS["mixed"], 4)
    assert_close(found[0], cases.train_alone(cases.make(optimizer=SGD(0.1)), steps(4)))


def test_prefetch_waits_for_nobody(processes):
    """The late rank is later than the work of `prefetch` takes, by far."""
    found = processes(cases.prefetched_late, cases.PLANS["mixed"], 2, 1.5)
    expected = cases.train_alone(cases.make(optimizer=SGD(0.1)), steps(2))
    for tables, longest_s in found:
        assert_close(tables, expected)
        assert longest_s < 1


@pytest.mark.parametrize("kind", [EmbeddingBagCollection, EmbeddingCollection])
def test_memory_that_is_kept_is_not_written_over(processes, kind):
    found = processes(cases.trained_in_small_pieces, kind, 3)
    alone = cases.make(kind, tables=cases.EQUALS, optimizer=SGD(0.01))
    for number in range(3):
        for part in (number, number + 1):
            with alone.optimizer.hold():
                for rank in range(4):
                    (cases.loss_of(alone(cases.of_equals(part, rank))) / 4).backward()
        alone.optimizer.step()
    for tables in found:
        assert_close(tables, {name: p.detach() for name, p in alone.named_parameters()})


def test_gradients_of_weights_where_they_are_wanted(processes):
    """Rank 2 has no weights, rank 0 has some that want no gradient."""
    found = processes(cases.gradients_of_weights, cases.PLANS["mixed"])
    for rank in (1, 3):
        batch = cases.batch(rank, weighted=True)
        batch.weights.requires_grad_()
        cases.loss_of(cases.make()(batch)).backward()
        assert_close(found[rank], batch.weights.grad)
    assert found[0] is None
    assert found[2] is None


@pytest.mark.parametrize("kind", [EmbeddingBagCollection, EmbeddingCollection])
def test_repeated_ids_send_the_same_in_both_worlds(processes, kind):
    sent = {}
    for num_different in (16, 4):
        args = cases.step_of_repeated_ids, kind, "row_wise", num_different
        found = processes(record, *args)
        with shardwise.simulate(4):
            events, held = record(*args)
        counted = ("rows of tables", "gradients of rows")
        sent[num_different] = sum(e.num_bytes for each, _ in found for e in each if e.op in counted)
        assert [e.num_bytes for e in found[0][0]] == [e.num_bytes for e in events]
        for name, parts in held.items():
            for rank in range(4):
                assert_close(found[rank][1][name][0], parts[rank] if len(parts) == 4 else parts[0])
    assert 4 * sent[4] == sent[16] > 0


def test_copies_stay_equal_where_ranks_have_other_tables(two_processes):
    first, second = two_processes(cases.copies_beside_a_large_table, 5)
    assert torch.equal(first, second)
