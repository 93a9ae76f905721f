"""Sharded collections compute what unsharded ones do: outputs, gradients, training."""

import copy
import functools
import gc
import sys

import embedding_cases as cases
import pytest
import torch
from parity import parameters, whole
from programs import record
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise
from shardwise import LocalTensor, UnsupportedError
from shardwise.debug import CommDebugMode
from shardwise.embedding import (
    SGD,
    Adagrad,
    Adam,
    EmbeddingBagCollection,
    EmbeddingCollection,
    Jagged,
    RowWiseAdagrad,
    Table,
    stacks,
)
from shardwise.errors import ArgumentError
from shardwise.lookup import ids as lookup_ids
from shardwise.lookup import messages
from shardwise.lookup.backends import torch_kernels

pytestmark = pytest.mark.slow
every_plan = pytest.mark.parametrize("plan", cases.PLANS.values(), ids=cases.PLANS)
both_kinds = pytest.mark.parametrize("kind", [EmbeddingBagCollection, EmbeddingCollection])


@functools.cache
def steps(num, **options):
    return [[cases.batch(10 * s + r, **options) for r in range(4)] for s in range(num)]


# -- against torch's own modules ---------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_bags_are_those_of_torch(pooling):
    bags = cases.make(tables=[Table("t", 11, 8, pooling=pooling)])
    batch = Jagged.from_lists({"t": [[1, 2, 1], [], [10]]})
    theirs = torch.nn.EmbeddingBag(11, 8, mode=pooling, include_last_offset=True)
    theirs.weight.data.copy_(bags.parameter("t"))
    ours = bags(batch)["t"]
    expected = theirs(batch.values, torch.tensor([0, 3, 3, 4]))
    assert_close(ours, expected)
    ours.pow(2).sum().backward()
    expected.pow(2).sum().backward()
    assert_close(bags.parameter("t").grad.to_dense(), theirs.weight.grad)


def test_weights_of_ids_are_those_of_torch():
    bags = cases.make(tables=[Table("t", 11, 8)])
    batch = Jagged.from_lists({"t": [[1, 2, 1], [10]]}, {"t": [[0.5, 2, -1], [3]]})
    weight = bags.parameter("t").detach().clone().requires_grad_()
    expected = torch.nn.functional.embedding_bag(
        batch.values, weight, torch.tensor([0, 3]), mode="sum", per_sample_weights=batch.weights
    )
    ours = bags(batch)["t"]
    assert_close(ours, expected)
    ours.pow(2).sum().backward()
    expected.pow(2).sum().backward()
    assert_close(bags.parameter("t").grad.to_dense(), weight.grad)


# -- outputs and gradients ---------------------------------------------------------------------


@every_plan
@both_kinds
@pytest.mark.parametrize("uneven", [False, True])
def test_outputs_and_gradients(mesh, plan, kind, uneven):
    alone, sharded = cases.make(kind), cases.make(kind).shard(mesh, plan)
    batches = [cases.batch(rank, uneven=uneven) for rank in range(4)]
    found = sharded(cases.spread(batches))
    for rank, batch in enumerate(batches):
        for feature, expected in alone(batch).items():
            here = found[feature]
            if kind is EmbeddingCollection:
                here, expected = here.values, expected.values
            assert_close(here.on_rank(rank), expected)
    cases.loss_of(found).backward()
    sum(cases.loss_of(alone(batch)) / 4 for batch in batches).backward()
    for name, parameter in alone.named_parameters():
        grad = sharded.get_parameter(name).grad
        assert grad.placements == sharded.get_parameter(name).placements
        assert_close(whole(grad), parameter.grad.to_dense())


def odd(collection):
    """The collection with few different numbers in its tables, some of them NaN or infinite."""
    draw = torch.Generator().manual_seed(3)
    entries = torch.tensor([-1.0, 0.5, 2.0, -0.5, 1.5, -torch.inf, torch.inf, torch.nan])
    with torch.no_grad():
        for parameter in collection.parameters():
            parameter.copy_(entries[torch.randint(8, parameter.shape, generator=draw)])
    return collection


@every_plan
@both_kinds
@pytest.mark.parametrize("optimizer", [None, SGD(0.1)])
def test_entries_that_are_not_finite(mesh, plan, kind, optimizer):
    alone = odd(cases.make(kind, optimizer=optimizer))
    sharded = odd(cases.make(kind, optimizer=optimizer)).shard(mesh, plan)
    weighted = kind is EmbeddingBagCollection
    batches = [cases.batch(rank, weighted=weighted) for rank in range(4)]
    found, expected = sharded(cases.spread(batches)), list(map(alone, batches))
    for rank, rows in enumerate(map(cases.rows_of, expected)):
        for feature, values in cases.rows_of(found).items():
            assert_close(values.on_rank(rank), rows[feature], equal_nan=True)
    cases.loss_of(found).backward()
    sum(cases.loss_of(each) / 4 for each in expected).backward()
    for name, parameter in alone.named_parameters():
        other = sharded.get_parameter(name)
        assert_close(whole(other.detach()), parameter.detach(), equal_nan=True)
        if optimizer is None:
            assert_close(whole(other.grad), parameter.grad.to_dense(), equal_nan=True)


@every_plan
def test_features_side_by_side(mesh, plan):
    alone, sharded = cases.make(output="tensor"), cases.make(output="tensor").shard(mesh, plan)
    batches = [cases.batch(rank) for rank in range(4)]
    found = sharded(cases.spread(batches))
    for rank, batch in enumerate(batches):
        assert_close(found.on_rank(rank), alone(batch))


@every_plan
@pytest.mark.parametrize("optimizer", [None, SGD(0.1)])
def test_weights_of_ids(mesh, plan, optimizer):
    torch_sgd = None if optimizer else functools.partial(torch.optim.SGD, lr=0.1)
    per_step = steps(3, weighted=True)
    alone = cases.make(optimizer=optimizer)
    sharded = cases.make(optimizer=optimizer).shard(mesh, plan)
    assert_close(
        cases.train_sharded(sharded, per_step, torch_sgd),
        cases.train_alone(alone, per_step, torch_sgd),
    )


@every_plan
@pytest.mark.parametrize("kind", [EmbeddingBagCollection, EmbeddingCollection])
@pytest.mark.parametrize("optimizer", [None, SGD(0.1)])
def test_weights_of_ids_get_the_gradient_of_their_ranks_loss(mesh, plan, kind, optimizer):
    batches = [cases.batch(rank, weighted=True) for rank in range(4)]
    given = cases.spread(batches)
    given.weights.requires_grad_()
    sharded = cases.make(kind, optimizer=optimizer).shard(mesh, plan)
    cases.loss_of(sharded(given)).backward()
    for rank, batch in enumerate(batches):
        batch.weights.requires_grad_()
        cases.loss_of(cases.make(kind)(batch)).backward()
        assert_close(given.weights.grad.on_rank(rank), batch.weights.grad)


def test_weights_of_ids_get_the_gradient_that_torch_gives():
    bags, batch = cases.make(tables=cases.TABLES[:1]), cases.batch(0, tables=cases.TABLES[:1])
    weights = torch.rand(len(batch.values), requires_grad=True)
    twin = weights.detach().clone().requires_grad_()
    offsets = batch.lengths.cumsum(0) - batch.lengths
    expected = torch.nn.functional.embedding_bag(
        batch.values, bags.parameter("user"), offsets, mode="sum", per_sample_weights=twin
    )
    expected.pow(2).sum().backward()
    cases.loss_of(bags(batch.with_weights(weights))).backward()
    assert_close(weights.grad, twin.grad)


def test_means_with_weights_divide_by_the_number_of_ids():
    bags = cases.make(tables=[Table("t", 11, 8, pooling="mean")])
    batch = Jagged.from_lists({"t": [[1, 2, 1], [], [10]]}, {"t": [[0.5, 2, -1], [], [3]]})
    rows = bags.parameter("t").detach()
    expected = torch.stack([(2 * rows[2] - 0.5 * rows[1]) / 3, 0 * rows[0], 3 * rows[10]])
    assert_close(bags(batch)["t"], expected)


def test_only_some_ranks_have_weights(mesh):
    alone = cases.make()
    sharded = cases.make().shard(mesh, "row_wise")
    batches = [cases.batch(rank, weighted=True) for rank in range(4)]
    batches[1].weights.fill_(1)
    found = sharded(cases.spread(batches))
    batches[1].weights = None
    for feature, expected in alone(batches[1]).items():
        assert_close(found[feature].on_rank(1), expected)


def test_a_feature_that_no_loss_reads(mesh):
    sharded = cases.make().shard(mesh, cases.PLANS["mixed"])
    found = sharded(cases.spread([cases.batch(rank) for rank in range(4)]))
    found["user"].sum().backward()
    assert whole(sharded.parameter("user").grad).abs().sum() > 0
    assert whole(sharded.parameter("word").grad).abs().sum() == 0


def test_sum_of_losses(mesh):
    per_step = steps(2)
    sgd = functools.partial(torch.optim.SGD, lr=0.05)
    sharded = cases.make().shard(mesh, cases.PLANS["mixed"], grad_reduction="sum")
    assert_close(
        cases.train_sharded(sharded, per_step, sgd),
        cases.train_alone(cases.make(), per_step, sgd, reduction="sum"),
    )


# -- training ----------------------------------------------------------------------------------


FUSED = {
    "SGD": SGD(0.1),
    "Adagrad": Adagrad(0.1, weight_decay=0.01),
    "Adam": Adam(0.05),
    "RowWiseAdagrad": RowWiseAdagrad(0.1, weight_decay=0.01),
}


@functools.cache
def trained_alone(num, kind=EmbeddingBagCollection, fused=None, ordinary=None, sparse=True):
    """The tables that one device trains, which every plan is compared with."""
    collection = cases.make(kind, optimizer=FUSED.get(fused), sparse=sparse)
    return cases.train_alone(collection, steps(num), ordinary)


@every_plan
@both_kinds
@pytest.mark.parametrize("optimizer", FUSED)
def test_twenty_fused_steps(mesh, plan, kind, optimizer):
    num = 20 if kind is EmbeddingBagCollection else 4
    sharded = cases.make(kind, optimizer=FUSED[optimizer]).shard(mesh, plan)
    assert_close(cases.train_sharded(sharded, steps(num)), trained_alone(num, kind, optimizer))
    assert all(parameter.grad is None for parameter in sharded.parameters())


@every_plan
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize(
    "torch_optimizer",
    [functools.partial(torch.optim.SGD, lr=0.1), functools.partial(torch.optim.Adagrad, lr=0.1)],
    ids=["SGD", "Adagrad"],
)
def test_twenty_steps_of_ordinary_optimizers(mesh, plan, sparse, torch_optimizer):
    sharded = cases.make(sparse=sparse).shard(mesh, plan)
    assert_close(
        cases.train_sharded(sharded, steps(20), torch_optimizer),
        trained_alone(20, ordinary=torch_optimizer, sparse=sparse),
    )


SPARSE_ADAM = functools.partial(torch.optim.SparseAdam, lr=0.05)


@every_plan
def test_twenty_steps_of_sparse_adam(mesh, plan):
    assert_close(
        cases.train_sharded(cases.make().shard(mesh, plan), steps(20), SPARSE_ADAM),
        trained_alone(20, ordinary=SPARSE_ADAM),
    )


@pytest.mark.parametrize(
    ("fused", "ordinary"),
    [
        (SGD(0.1), functools.partial(torch.optim.SGD, lr=0.1)),
        (Adagrad(0.1), functools.partial(torch.optim.Adagrad, lr=0.1)),
        (Adam(0.1), functools.partial(torch.optim.SparseAdam, lr=0.1)),
    ],
    ids=["SGD", "Adagrad", "Adam"],
)
def test_fused_updates_are_those_of_torch(fused, ordinary):
    per_step = steps(20)
    assert_close(
        cases.train_alone(cases.make(optimizer=fused), per_step),
        cases.train_alone(cases.make(sparse=True), per_step, ordinary),
    )


def test_row_wise_adagrad_by_hand():
    bags = cases.make(tables=[Table("t", 5, 4)], optimizer=RowWiseAdagrad(0.5, eps=1e-3))
    weight, state = bags.parameter("t").detach().clone(), torch.zeros(5)
    for ids in ([[0, 3], [3]], [[3, 3], [1]]):
        grad = torch.zeros(5, 4)
        for row in [*ids[0], *ids[1]]:
            grad[row] += 1
        state += grad.pow(2).mean(1)
        weight -= 0.5 * grad / (state.sqrt() + 1e-3).unsqueeze(1)
        bags(Jagged.from_lists({"t": ids}))["t"].sum().backward()
    assert_close(bags.parameter("t").detach(), weight)
    assert_close(bags.optimizer.state["t"]["sum"], state.unsqueeze(1))


def test_row_wise_adagrad_of_each_part_of_the_columns(mesh):
    """`across_columns=False`: as many tables, each as wide as a part."""
    optimizer = RowWiseAdagrad(0.5, across_columns=False)
    sharded = cases.make(tables=[Table("t", 6, 8)], optimizer=optimizer).shard(mesh, "column_wise")
    weight = sharded.parameter("t").full_tensor().agreed().clone()
    narrow = [EmbeddingBagCollection([Table("t", 6, 2)], optimizer=optimizer) for _ in range(4)]
    with torch.no_grad():
        for part, columns in zip(narrow, weight.split(2, dim=1), strict=True):
            part.parameter("t").copy_(columns)
    for ids in ([[0, 3], [3]], [[3, 3], [1]]):
        batch = Jagged.from_lists({"t": ids})
        sharded(batch)["t"].pow(2).sum().backward()
        for part in narrow:
            part(batch)["t"].pow(2).sum().backward()
    expected = torch.cat([part.parameter("t") for part in narrow], 1)
    assert_close(sharded.parameter("t").full_tensor().agreed(), expected)
    assert sharded.optimizer.state["t"]["sum"].shape == (6, 4)


# -- stepping, skipping, resting ---------------------------------------------------------------


@every_plan
def test_two_losses_are_one_update(mesh, plan):
    alone = cases.make(optimizer=Adagrad(0.1))
    sharded = cases.make(optimizer=Adagrad(0.1)).shard(mesh, plan)
    batches = [cases.batch(rank) for rank in range(4)]
    with sharded.optimizer.hold():
        cases.loss_of(sharded(cases.spread(batches))).backward()
        cases.loss_of(sharded(cases.spread(batches[::-1]))).backward()
    before = copy.deepcopy(parameters(sharded))
    assert sharded.optimizer.num_held == 2
    sharded.optimizer.step()
    assert sharded.optimizer.num_held == 0
    for name, parameter in sharded.named_parameters():
        assert not torch.equal(before[name], whole(parameter))
    with alone.optimizer.hold():
        for batch in [*batches, *batches]:
            (cases.loss_of(alone(batch)) / 4).backward()
    alone.optimizer.step()
    assert_close(
        parameters(sharded),
        {name: p.detach() for name, p in alone.named_parameters()},
    )


def test_skipped_updates_change_nothing(mesh):
    sharded = cases.make(optimizer=Adam(0.1)).shard(mesh, cases.PLANS["mixed"])
    before = copy.deepcopy(parameters(sharded))
    with sharded.optimizer.hold():
        cases.loss_of(sharded(cases.spread([cases.batch(r) for r in range(4)]))).backward()
    sharded.optimizer.skip()
    sharded.optimizer.step()
    assert_close(parameters(sharded), before)
    assert sharded.optimizer.num_steps == 0


@every_plan
@pytest.mark.parametrize("optimizer", [None, Adagrad(0.1)])
def test_a_table_that_rests(mesh, plan, optimizer):
    sharded = cases.make(optimizer=optimizer)
    sharded.parameter("item").requires_grad_(False)
    sharded.shard(mesh, plan)
    alone = cases.make(optimizer=optimizer)
    alone.parameter("item").requires_grad_(False)
    sgd = None if optimizer else functools.partial(torch.optim.SGD, lr=0.1)
    per_step = steps(3)
    found = cases.train_sharded(sharded, per_step, sgd)
    assert_close(found, cases.train_alone(alone, per_step, sgd))
    assert_close(found["embedding_bags.item.weight"], cases.make().parameter("item").detach())


@every_plan
def test_state_goes_through_a_checkpoint(mesh, plan):
    per_step = steps(6)
    straight = cases.make(optimizer=Adam(0.1)).shard(mesh, plan)
    expected = cases.train_sharded(straight, per_step)
    first = cases.make(optimizer=Adam(0.1)).shard(mesh, plan)
    cases.train_sharded(first, per_step[:3])
    second = cases.make(optimizer=Adam(0.5)).shard(mesh, plan)
    second.load_state_dict(first.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    assert second.optimizer.lr == 0.1
    assert_close(cases.train_sharded(second, per_step[3:]), expected)


@every_plan
def test_what_was_never_sharded_is_loaded(mesh, plan):
    """Tables and the state of the optimizer, into another layout each."""
    alone = cases.make(optimizer=RowWiseAdagrad(0.1))
    cases.loss_of(alone(cases.batch(0))).backward()
    sharded = EmbeddingBagCollection(cases.TABLES, optimizer=RowWiseAdagrad(0.1)).shard(mesh, plan)
    sharded.load_state_dict(alone.state_dict())
    sharded.optimizer.load_state_dict(alone.optimizer.state_dict())
    batch = cases.batch(1)
    cases.loss_of(alone(batch)).backward()
    cases.loss_of(sharded(batch)).backward()
    assert_close(
        parameters(sharded),
        {name: p.detach() for name, p in alone.named_parameters()},
    )


@every_plan
def test_what_is_sharded_is_loaded_whole(mesh, plan):
    sharded = cases.make(optimizer=Adagrad(0.1)).shard(mesh, plan)
    cases.train_sharded(sharded, steps(1))
    alone = EmbeddingBagCollection(cases.TABLES, optimizer=Adagrad(0.5))
    alone.load_state_dict(sharded.state_dict())
    alone.optimizer.load_state_dict(sharded.optimizer.state_dict())
    per_step = steps(2)
    assert_close(cases.train_alone(alone, per_step), cases.train_sharded(sharded, per_step))


@every_plan
def test_state_moves_to_another_plan(mesh, plan):
    first = cases.make(optimizer=RowWiseAdagrad(0.1)).shard(mesh, "table_wise")
    second = cases.make(optimizer=RowWiseAdagrad(0.1)).shard(mesh, plan)
    per_step = steps(2)
    cases.train_sharded(first, per_step[:1])
    second.load_state_dict(first.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    assert_close(
        cases.train_sharded(second, per_step[1:]), cases.train_sharded(first, per_step[1:])
    )


def test_held_gradients_are_not_lost_in_a_checkpoint(mesh):
    sharded = cases.make(optimizer=SGD(0.1)).shard(mesh, "row_wise")
    with sharded.optimizer.hold():
        cases.loss_of(sharded(cases.spread([cases.batch(r) for r in range(4)]))).backward()
    with pytest.raises(shardwise.ShardwiseError, match="1 backward passes are held"):
        sharded.optimizer.state_dict()


def test_learning_rates_are_numbers():
    bags = cases.make(optimizer=SGD(0.1))
    bags.optimizer.lr = torch.tensor(0.5)
    assert bags.optimizer.lr == 0.5
    with pytest.raises(TypeError, match="lr is a number from 0 on, found -1"):
        bags.optimizer.lr = -1


# -- communication -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "forward", "backward"),
    [
        ("row_wise", 3, 1),
        ("column_wise", 3, 1),
        ("table_wise", 3, 1),
        ({"*": {"kind": "grid", "ranks": [1, 3]}}, 3, 1),
        ("data_parallel", 1, 1),
        (cases.PLANS["mixed"], 3, 2),
    ],
    ids=["row_wise", "column_wise", "table_wise", "grid", "data_parallel", "mixed"],
)
@pytest.mark.parametrize("num_copies", [1, 5])
def test_exchanges_do_not_grow_with_tables(mesh, plan, forward, backward, num_copies):
    """Counts and ids out, rows back; then gradients: whatever the number of tables and kinds."""
    tables = [
        Table(t.name + "x" * n, t.num_embeddings, t.embedding_dim)
        for n in range(num_copies)
        for t in cases.TABLES
    ]
    if isinstance(plan, dict):
        plan = {name if "*" in name else f"{name}*": entry for name, entry in plan.items()}
    sharded = cases.make(tables=tables, optimizer=SGD(0.1)).shard(mesh, plan)
    batch = cases.spread([cases.batch(rank, tables=tables) for rank in range(4)])
    with CommDebugMode() as comm:
        loss = cases.loss_of(sharded(batch))
    assert comm.get_total_counts() == forward
    with CommDebugMode() as comm:
        loss.backward()
    assert comm.get_total_counts() == backward


def test_ids_go_out_while_rows_or_gradients_travel(mesh):
    """What `prefetch` begins is done at points that are the same on every rank."""
    sharded = cases.make(optimizer=SGD(0.1)).shard(mesh, "row_wise")
    ahead = sharded.prefetch(cases.batch(0))
    with CommDebugMode() as comm:
        following = sharded.prefetch(cases.batch(1))
        loss = cases.loss_of(sharded(ahead))
        last = sharded.prefetch(cases.batch(2))
        loss.backward()
        sharded(following), sharded(last)
    assert [event.op for event in comm.events] == [
        "counts of a batch",  # of the following
        "ids of a batch",  # of the first: nothing was sent between
        "rows of tables",
        "ids of a batch",
        "counts of a batch",  # of the last
        "gradients of rows",
        "ids of a batch",
        "rows of tables",
        "rows of tables",
    ]


def test_prefetched_batches(mesh):
    per_step = steps(4)
    sharded = cases.make(optimizer=SGD(0.1)).shard(mesh, cases.PLANS["mixed"])
    ahead = sharded.prefetch(cases.spread(per_step[0]))
    for number in range(4):
        loss = cases.loss_of(sharded(ahead))
        if number + 1 < 4:
            ahead = sharded.prefetch(cases.spread(per_step[number + 1]))
        loss.backward()
    expected = cases.train_sharded(
        cases.make(optimizer=SGD(0.1)).shard(mesh, cases.PLANS["mixed"]), per_step
    )
    assert_close(parameters(sharded), expected)


# -- weights -----------------------------------------------------------------------------------


@every_plan
def test_existing_weights_are_kept(mesh, plan):
    alone, sharded = cases.make(), cases.make().shard(mesh, plan)
    for name, parameter in alone.named_parameters():
        assert torch.equal(whole(sharded.get_parameter(name)), parameter)


@every_plan
def test_tables_on_meta_get_the_values_of_one_device(mesh, plan, monkeypatch):
    """Some rows at a time, and each rank those that it owns."""
    monkeypatch.setattr(stacks, "_CHUNK_NUMBERS", 24)
    torch.manual_seed(3)
    alone = EmbeddingBagCollection(cases.TABLES)
    torch.manual_seed(3)
    sharded = EmbeddingBagCollection(cases.TABLES, device="meta", optimizer=Adagrad(0.1))
    with pytest.raises(shardwise.ShardwiseError, match="on the meta device"):
        sharded(cases.batch(0))
    sharded.shard(mesh, plan)
    for name, parameter in alone.named_parameters():
        assert torch.equal(whole(sharded.get_parameter(name)), parameter)
    cases.loss_of(sharded(cases.batch(0))).backward()


def test_memory_for_tables_on_meta():
    torch.manual_seed(3)
    expected = EmbeddingBagCollection(cases.TABLES).state_dict()
    torch.manual_seed(3)
    with torch.device("meta"):
        bags = EmbeddingBagCollection(cases.TABLES, optimizer=Adagrad(0.1))
    bags.to_empty(device="cpu").reset_parameters()
    assert_close(bags.state_dict(), expected)
    assert not bags.optimizer.state["user"]["sum"].any()
    cases.loss_of(bags(cases.batch(0))).backward()


def test_a_rank_holds_only_its_part(mesh):
    sharded = cases.make(optimizer=Adam(0.1)).shard(mesh, "row_wise")
    local = sharded.parameter("user").to_local()
    assert [tuple(local.on_rank(r).shape) for r in range(4)] == [(3, 8), (3, 8), (3, 8), (2, 8)]
    state = sharded.optimizer.state["user"]["exp_avg"]
    assert state.placements == sharded.parameter("user").placements


def test_output_of_no_bags(mesh):
    sharded = cases.make(optimizer=SGD(0.1)).shard(mesh, cases.PLANS["mixed"])
    empty = cases.batch(0, num_bags=0)
    found = sharded(empty)
    cases.loss_of(found).backward()
    assert all(len(rows.on_rank(3)) == 0 for rows in found.values())


def test_double_precision(mesh):
    alone = cases.make(dtype=torch.float64)
    sharded = cases.make(dtype=torch.float64).shard(mesh, cases.PLANS["mixed"])
    batches = [cases.batch(rank) for rank in range(4)]
    found = sharded(cases.spread(batches))
    for feature, expected in alone(batches[2]).items():
        assert expected.dtype == torch.float64
        assert_close(found[feature].on_rank(2), expected)


def test_conversion_before_sharding(mesh):
    bags = cases.make(optimizer=Adagrad(0.1)).double()
    expected = cases.make(optimizer=Adagrad(0.1), dtype=torch.float64)
    with torch.no_grad():
        for mine, theirs in zip(expected.parameters(), bags.parameters(), strict=True):
            mine.copy_(theirs)
    per_step = steps(2)
    assert_close(cases.train_alone(bags, per_step), cases.train_alone(expected, per_step))
    sharded = bags.shard(mesh, "row_wise")
    with pytest.raises(shardwise.ShardwiseError, match=r"convert it before shard\(\)"):
        sharded.float()
    assert sharded.double() is sharded


@pytest.mark.parametrize("sharded", [False, True])
def test_a_copy_trains_by_itself(mesh, sharded):
    bags = cases.make(optimizer=Adam(0.1))
    if sharded:
        bags.shard(mesh, cases.PLANS["mixed"])
    before = {name: p.detach().clone() for name, p in bags.named_parameters()}
    copied = copy.deepcopy(bags)
    batch = cases.batch(0)
    cases.loss_of(copied(batch)).backward()
    cases.loss_of(copied(batch)).backward()
    for name, parameter in bags.named_parameters():
        value, other = before[name], copied.get_parameter(name)
        if sharded:
            parameter, value, other = map(whole, (parameter.detach(), value, other.detach()))
        assert torch.equal(parameter, value)
        assert not torch.equal(other, value)
    cases.loss_of(bags(batch)).backward()


def test_a_batch_that_all_ranks_share(mesh):
    sharded = cases.make().shard(mesh, "row_wise")
    found = sharded(cases.batch(3))
    assert isinstance(found["user"], LocalTensor)
    assert_close(found["user"].on_rank(1), cases.make()(cases.batch(3))["user"])


# -- second derivatives --------------------------------------------------------------------------


def bent(rows):
    return (torch.tanh(rows) * torch.linspace(0.5, 2, rows.shape[-1])).pow(2).sum()


def test_a_penalty_on_what_the_loss_says_of_the_rows(mesh):
    """The table takes part in the last backward alone."""

    def step(bags):
        rows = bags(Jagged.from_lists({"t": [[1, 2, 1], [3], [10]]}))["t"]
        loss = bent(rows)
        (grad,) = torch.autograd.grad(loss, rows, create_graph=True)
        (loss + grad.pow(2).sum()).backward()
        return bags.parameter("t").grad

    alone = cases.make(tables=[Table("t", 11, 8)])
    sharded = copy.deepcopy(alone)
    sharded.shard(mesh, "row_wise")
    expected = step(alone).to_dense()
    found = step(sharded).to_dense().full_tensor().agreed()
    assert_close(found, expected)


@pytest.mark.parametrize("sharded", [False, True])
def test_the_gradient_of_a_table_is_not_differentiated_again(mesh, sharded):
    bags = cases.make(tables=[Table("t", 11, 8)])
    if sharded:
        bags.shard(mesh, "row_wise")
    loss = bent(bags(Jagged.from_lists({"t": [[1, 2, 1], [3], [10]]}))["t"])
    (grad,) = torch.autograd.grad(loss, bags.parameter("t"), create_graph=True)
    with pytest.raises(UnsupportedError, match="not differentiated again"):
        grad.to_dense().pow(2).sum().backward()


def test_a_row_of_a_table_follows_updates_in_backward():
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        tables = [Table("t", 6, 4, features=("f",))]
        collection = EmbeddingBagCollection(tables, optimizer=SGD(lr=1.0))
        collection.shard(mesh, "row_wise")
        table = collection.parameter("t").detach()
        row = table[0]  # it took communication, so it is a copy
        before = row.full_tensor().agreed().clone()
        batch = Jagged(["f"], torch.tensor([0]), lengths=torch.tensor([1]))
        collection(batch)["f"].sum().backward()
        torch.testing.assert_close(row.full_tensor().agreed(), before - 1)


@pytest.mark.parametrize("output", ["dict", "tensor"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("plan", ["row_wise", "grid", "mixed"])
@pytest.mark.parametrize("fewer", [False, True])
def test_rows_or_sums_of_bags(fewer, plan, weighted, output, mesh, monkeypatch):
    """Whatever is exchanged, outputs and updates are those of one device."""
    monkeypatch.setattr(messages, "rows_are_fewer", lambda *_: fewer)
    given = cases.batch(5, weighted=weighted)
    plain = cases.make(optimizer=SGD(0.1), output=output)
    sharded = cases.make(optimizer=SGD(0.1), output=output).shard(mesh, cases.PLANS[plan])
    found, expected = sharded(given), plain(given)
    for one, other in zip(_parts(found), _parts(expected), strict=True):
        assert_close(one.on_rank(3), other)
    cases.loss_of(found).backward()
    cases.loss_of(expected).backward()
    for one, other in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert_close(whole(one), other.detach())


def _parts(outputs):
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs.values())


def test_one_hot_ids_send_rows(mesh):
    """A row per id, not one from each of four owners."""
    tables = [Table("t", 8, 4)]
    batch = Jagged.from_lists({"t": [[row] for row in range(8)]})
    longer = Jagged.from_lists({"t": [[0, 1, 2, 3, 4, 5, 6, 7]] * 8})
    sharded = cases.make(tables=tables, optimizer=SGD(0.1)).shard(mesh, "row_wise")
    sent = []
    for each in (batch, longer):
        with CommDebugMode() as comm:
            sharded(each)
        sent += [event.num_bytes for event in comm.events if event.op == "rows of tables"]
    assert sent == [8 * 4 * 4, 4 * 8 * 4 * 4]


@both_kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("plan", ["table_wise", "column_wise", "row_wise", "mixed"])
def test_rows_and_gradients_travel_rounded(kind, dtype, plan, mesh):
    """Each row that is sent is rounded once; of the gradients here only those of means change."""
    plan, given = cases.PLANS[plan], cases.batch(3)
    rounded = cases.make(kind, optimizer=SGD(0.1)).shard(mesh, plan, exchange_dtype=dtype)
    exact = cases.make(kind, optimizer=SGD(0.1)).shard(mesh, plan)
    magnitudes = cases.make(kind)
    with torch.no_grad():
        for parameter in magnitudes.parameters():
            parameter.abs_()
    outputs = [collection(given) for collection in (rounded, exact, magnitudes)]
    differs = False
    for feature in exact.features:
        found, expected, most = (
            out[feature] if kind is EmbeddingBagCollection else out[feature].values
            for out in outputs
        )
        for rank in range(4):
            error = (found.on_rank(rank) - expected.on_rank(rank)).abs()
            # Half a unit in the last place, and what float32 sums may differ by.
            assert (error <= most * (torch.finfo(dtype).eps / 2 + 1e-6)).all()
            differs = differs or bool(error.any())
    assert differs
    for out in outputs[:2]:
        parts = out.values() if kind is EmbeddingBagCollection else [o.values for o in out.values()]
        sum(part.sum() for part in parts).backward()
    for one, other in zip(rounded.parameters(), exact.parameters(), strict=True):
        assert_close(one.full_tensor(), other.full_tensor(), atol=1e-3, rtol=0)


@pytest.mark.parametrize("given", [torch.float32, torch.int16, "bfloat16"])
def test_an_exchange_dtype_that_is_none(given, mesh):
    with pytest.raises(ArgumentError, match="exchange_dtype is torch"):
        cases.make().shard(mesh, "row_wise", exchange_dtype=given)


@pytest.mark.parametrize(
    ("optimizer", "weighted"), [(SGD, False), (RowWiseAdagrad, False), (SGD, True)]
)
@pytest.mark.parametrize("kind", [None, "table_wise", "column_wise", "row_wise"])
def test_a_step_makes_as_many_calls_for_many_tables_as_for_few(
    kind, optimizer, weighted, mesh, monkeypatch
):
    """All calls of Python and C functions, and all ops: forward, backward and update."""
    # Another sort is faster from some number of ids on, and many ids are sorted in parts. Neither
    # grows with tables.
    monkeypatch.setattr(lookup_ids, "_HAS_RADIX", False)
    monkeypatch.setattr(torch_kernels, "_PART_IDS", 1 << 20)
    # Multiples of four: a simulated world needs fewer calls for messages of one length.
    numbers = (26, 100, 1000) if kind is None else (28, 100, 1000)
    few, *more = (_calls_of_a_step(num, optimizer(0.1), weighted, kind, mesh) for num in numbers)
    assert few[0] > 500
    assert few[1] > 50
    assert more == [few, few]


def _calls_of_a_step(num_tables, optimizer, weighted, kind, mesh):
    """Calls of functions, and ops, in one step."""
    # The heights differ, so that the ids of each feature have limits of their own.
    poolings = ["sum", "mean"]
    tables = [
        cases.Table(f"t{i}", 16 + i % 2, 8, pooling=poolings[i % 2]) for i in range(num_tables)
    ]
    bags = EmbeddingBagCollection(tables, output="tensor", optimizer=optimizer)
    if kind is not None:
        bags.shard(mesh, kind)
    ids = torch.arange(16).repeat(num_tables)
    given = {"lengths": torch.full((num_tables * 2,), 8), "batch_sizes": [2] * num_tables}
    weights = torch.ones(len(ids), requires_grad=True)

    def step():
        batch = Jagged(bags.features, ids, weights=weights if weighted else None, **given)
        bags(batch).sum().backward()

    for _ in range(2):  # the parameters are compared with the stacks once
        step()
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    gc.disable()  # what it frees calls back
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(before)
        gc.enable()
    with CountedOps() as ops:
        step()
    return calls, ops.num


@pytest.mark.parametrize("kind", [None, "table_wise", "row_wise"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("cls", [EmbeddingBagCollection, EmbeddingCollection])
def test_a_tensor_for_each_feature_takes_as_many_ops_for_many_tables_as_for_few(
    cls, frozen, kind, mesh
):
    assert len({_ops_of_a_step(cls, num, frozen, kind, mesh) for num in (28, 100, 400)}) == 1


def _ops_of_a_step(cls, num_tables, frozen, kind, mesh):
    """Forward, backward and update, of ids that repeat; half of the tables may be frozen."""
    poolings = ["sum", "mean"]
    tables = [cases.Table(f"t{i}", 16, 8, pooling=poolings[i % 2]) for i in range(num_tables)]
    rows = cls(tables, optimizer=SGD(0.1))
    for parameter in list(rows.parameters())[::2]:
        parameter.requires_grad_(not frozen)
    if kind is not None:
        rows.shard(mesh, kind)
    ids, lengths = (torch.tensor(each).repeat(num_tables) for each in ([1, 2, 1], [3]))
    batch = Jagged(rows.features, ids, lengths=lengths)
    ones = [torch.ones_like(each) for each in cases.rows_of(rows(batch)).values()]
    with CountedOps() as ops:
        torch.autograd.backward(list(cases.rows_of(rows(batch)).values()), ones)
    return ops.num


@pytest.mark.parametrize("cls", [EmbeddingBagCollection, EmbeddingCollection])
def test_columns_of_all_features_are_put_together_at_once(cls, mesh):
    ops = set()
    for num_tables in (8, 100):
        rows = cls([cases.Table(f"t{i}", 16, 8) for i in range(num_tables)]).shard(
            mesh, "column_wise"
        )
        ids, lengths = (torch.tensor(each).repeat(num_tables) for each in ([1, 2, 3], [3]))
        with torch.no_grad():
            rows(Jagged(rows.features, ids, lengths=lengths))  # compares parameters once
            with CountedOps() as counted:
                rows(Jagged(rows.features, ids, lengths=lengths))
        ops.add(counted.num)
    assert len(ops) == 1


class CountedOps(TorchDispatchMode):
    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("plan", ["row_wise", "column_wise", "table_wise"])
@pytest.mark.parametrize("kind", [EmbeddingBagCollection, EmbeddingCollection])
def test_rows_of_repeated_ids_are_sent_once(kind, plan):
    """As many rows and gradients as a rank has different ids, and the numbers of one device."""
    sent = {}
    for num_different in (16, 4):
        with shardwise.simulate(4):
            events, held = record(cases.step_of_repeated_ids, kind, plan, num_different)
        per_op = {event.op: event.num_bytes for event in events}
        sent[num_different] = [per_op["rows of tables"], per_op["gradients of rows"]]
        torch.manual_seed(0)
        alone = cases.make(kind, cases.REPEATING, SGD(0.1))
        batches = [cases.repeating(rank, num_different) for rank in range(4)]
        for rank, each in enumerate(batches):
            for name, rows in cases.rows_of(alone(each)).items():
                assert_close(held[name][rank], rows)
        for name, table in cases.train_alone(alone, [batches]).items():
            assert_close(held[name][0], table)
    # Bags of a table that is not split by rows are pooled by its owner: one row for each.
    pooled = kind is EmbeddingBagCollection and plan != "row_wise"
    share = 1 if pooled else 4
    assert sent[16][1] == share * sent[4][1] > 0
    if plan != "row_wise":  # rows are in one place, or in all
        assert sent[16][0] == share * sent[4][0] > 0
