"""Tables sharded in groups of ranks; data_parallel keeps the replicas in all groups equal."""

import copy
import functools
import pickle

import embedding_cases as cases
import pytest
import replica_cases as programs
import torch
from both_worlds import assert_close as assert_all_close
from both_worlds import both
from parity import whole
from torch.testing import assert_close

import shardwise
from shardwise import checkpoint
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
)
from shardwise.parallel import data_parallel

pytestmark = pytest.mark.slow

OPTIMIZERS = {
    "SGD": SGD(0.1),
    "Adagrad": Adagrad(0.1),
    "row-wise Adagrad": RowWiseAdagrad(0.1),
    "Adam": Adam(0.05),
    "torch": None,
}
every_axis = pytest.mark.parametrize("axes", programs.AXES)
every_plan = pytest.mark.parametrize("plan", programs.PLANS.values(), ids=programs.PLANS)
every_kind = pytest.mark.parametrize("kind", [EmbeddingBagCollection, EmbeddingCollection])


@pytest.fixture
def hosts():
    with shardwise.simulate(4):
        yield programs.hosts()


ALONE = {}


def trained_alone(optimizer, num_steps, kind=EmbeddingBagCollection, num_ranks=4, **options):
    """The tables that one device trains, which every plan is compared with."""
    key = repr((optimizer, num_steps, kind, num_ranks, options))
    if key not in ALONE:
        alone = cases.make(kind, optimizer=optimizer, **options)
        steps = [programs.batches(step, num_ranks) for step in range(num_steps)]
        ALONE[key] = cases.train_alone(alone, steps, None if optimizer else programs.TORCH_SGD)
    return ALONE[key]


def assert_tables(found, expected):
    """`expected` on all ranks."""
    assert_close({name: whole(found[name]) for name in expected}, expected)


@every_kind
@every_axis
@every_plan
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_replicas_train_as_one_device(hosts, plan, axes, kind, optimizer):
    found = programs.trained(axes, plan, optimizer, kind, 3)
    assert_tables(found, trained_alone(optimizer, 3, kind))


@pytest.mark.parametrize("sparse", [True, False], ids=["rows", "dense"])
def test_gradients_that_accumulate(hosts, sparse):
    collection = programs.grouped("neighbours", programs.PLANS["mixed"], sparse=sparse)
    alone = cases.make(sparse=sparse)
    for step in range(2):
        cases.loss_of(collection(cases.spread(programs.batches(step)))).backward()
        for each in programs.batches(step):
            (cases.loss_of(alone(each)) / 4).backward()
    for name, parameter in alone.named_parameters():
        grad = collection.get_parameter(name).grad
        grad = grad.to_dense() if sparse else grad
        assert_close(whole(grad), parameter.grad.to_dense())


@pytest.mark.parametrize("plan", ["row_wise", "column_wise", "data_parallel"])
@pytest.mark.parametrize("optimizer", [SGD(0.1), RowWiseAdagrad(0.1)], ids=["SGD", "row-wise"])
def test_the_middle_one_of_three_axes(plan, optimizer):
    with shardwise.simulate(8):
        mesh = shardwise.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pod", "dev", "host"))
        collection = cases.make(optimizer=optimizer).shard(mesh["dev"], plan)
        data_parallel(collection, mesh["pod", "host"])
        for step in range(2):
            cases.loss_of(collection(cases.spread(programs.batches(step, 8)))).backward()
        expected = trained_alone(optimizer, 2, num_ranks=8)
        assert_tables(dict(collection.named_parameters()), expected)


def test_groups_that_nothing_keeps_equal(hosts):
    """Without data_parallel each group trains on its own batches."""
    collection = cases.make(optimizer=SGD(0.1)).shard(hosts["dev"], programs.PLANS["mixed"])
    each = programs.batches(0)
    cases.loss_of(collection(cases.spread(each))).backward()
    for ranks in ((0, 1), (2, 3)):
        alone = cases.make(optimizer=SGD(0.1))
        expected = cases.train_alone(alone, [[each[rank] for rank in ranks]])
        for name, parameter in collection.named_parameters():
            for rank in ranks:
                assert_close(parameter.full_tensor().on_rank(rank), expected[name])


def test_each_group_decides_between_rows_and_sums(hosts):
    """The bags of one group have one id each, those of the other many: rows are fewer in one."""
    tables = [Table("a", 40, 4)]

    def given(rank):
        num = 1 if rank < 2 else 12
        return Jagged(["a"], torch.arange(3 * num) % (7 + rank), lengths=torch.tensor([num] * 3))

    alone = cases.make(tables=tables)
    collection = cases.make(tables=tables).shard(hosts["dev"], "row_wise")
    rows = collection(cases.spread([given(rank) for rank in range(4)]))["a"]
    for rank in range(4):
        assert_close(rows.on_rank(rank), alone(given(rank))["a"])


@every_axis
def test_weights_of_ids_and_bags_of_all_numbers(hosts, axes):
    options = {"weighted": True, "uneven": True}
    each = programs.batches(3, **options)
    given = cases.spread(each)
    given.weights.requires_grad_()
    collection = programs.grouped(axes, programs.PLANS["mixed"])
    cases.loss_of(collection(given)).backward()
    for rank, one in enumerate(each):
        one.weights.requires_grad_()
        cases.loss_of(cases.make()(one)).backward()
        assert_close(given.weights.grad.on_rank(rank), one.weights.grad)


def test_replicated_tables_are_stored_once_in_each_group(hosts):
    collection = cases.make().shard(hosts["host"], "data_parallel")
    local = collection.parameter("user").to_local()
    memory = [local.on_rank(rank).data_ptr() for rank in range(4)]
    assert memory[0] == memory[2] != memory[1] == memory[3]


@every_plan
def test_batches_that_are_sent_ahead(hosts, plan):
    found = programs.trained_ahead("neighbours", plan, SGD(0.1), 3)
    assert_tables(found, trained_alone(SGD(0.1), 3))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_goes_on_alike(hosts, copied):
    plan, optimizer = programs.PLANS["mixed"], RowWiseAdagrad(0.1)
    collection = programs.grouped("apart", plan, optimizer)
    cases.loss_of(collection(cases.spread(programs.batches(0)))).backward()
    other = copied(collection)
    expected = trained_alone(optimizer, 2)
    for each in (collection, other):
        cases.loss_of(each(cases.spread(programs.batches(1)))).backward()
        assert_tables(dict(each.named_parameters()), expected)


@every_plan
@every_axis
def test_a_checkpoint_and_a_state_dict(hosts, plan, axes, tmp_path):
    """Saved by replicas, loaded by one device, by other replicas and by a mesh of one axis."""
    optimizer = RowWiseAdagrad(0.1)
    collection = programs.grouped(axes, plan, optimizer)
    cases.loss_of(collection(cases.spread(programs.batches(0)))).backward()
    saved = {"model": collection, "optimizer": collection.optimizer}
    checkpoint.save(saved, tmp_path / "saved")
    expected = trained_alone(optimizer, 2)
    for other in (
        programs.grouped("neighbours", "row_wise", optimizer),
        cases.make(optimizer=optimizer).shard(hosts._flatten(), "column_wise"),
        cases.make(optimizer=optimizer),
    ):
        checkpoint.load({"model": other, "optimizer": other.optimizer}, tmp_path / "saved")
        train = cases.train_alone if other.plan is None else cases.train_sharded
        found = train(other, [programs.batches(1)])
        assert_close(found, expected)
    twin = programs.grouped(axes, plan, optimizer)
    twin.load_state_dict(collection.state_dict())
    twin.optimizer.load_state_dict(collection.optimizer.state_dict())
    cases.loss_of(twin(cases.spread(programs.batches(1)))).backward()
    assert_tables(dict(twin.named_parameters()), expected)


def test_tables_that_never_were_whole(hosts):
    torch.manual_seed(0)
    alone = EmbeddingBagCollection(cases.TABLES)
    torch.manual_seed(0)
    collection = EmbeddingBagCollection(cases.TABLES, device="meta")
    collection.shard(hosts["dev"], programs.PLANS["mixed"])
    assert_tables(dict(collection.named_parameters()), dict(alone.named_parameters()))


BAD_PLANS = {name: programs.PLANS[name] for name in ("row_wise", "data_parallel", "mixed")}


@every_axis
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("plan", BAD_PLANS.values(), ids=BAD_PLANS)
def test_a_bad_batch_changes_no_replica(hosts, plan, axes, rank):
    told, before, after, last = programs.broken(axes, plan, RowWiseAdagrad(0.1), rank)
    assert told.startswith(f"IdRangeError: On rank {rank}: feature 'user' of table 'user': id 99")
    for name, values in before.items():
        assert torch.equal(values, after[name])
    alone = cases.make(optimizer=RowWiseAdagrad(0.1))
    expected = cases.train_alone(alone, [programs.batches(step) for step in (0, 2)])
    assert_close(last, expected)


def test_bad_batches_in_several_groups_are_one_error(hosts):
    collection = programs.grouped("neighbours", "row_wise")
    bad = programs.batches(0)
    for rank in (1, 2):
        bad[rank].values[0] = 99
    message = cases.message_of(collection, cases.spread(bad))
    assert message.startswith("IdRangeError: On ranks 1-2: feature 'user' of table 'user': id 99")


def test_a_step_communicates_inside_groups_and_between_replicas(hosts):
    collection = programs.grouped("neighbours", "row_wise", SGD(0.1))
    with CommDebugMode() as comm:
        cases.loss_of(collection(cases.spread(programs.batches(0)))).backward()
    along = {event.op: event.axis for event in comm.events}
    assert along == {
        "counts of a batch": "dev",
        "ids of a batch": "dev",
        "rows of tables": "dev",
        "gradients of rows": "dev",
        "gradients of replicated tables": "host",
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(0.1), None], ids=["fused", "torch"])
def test_compiled_code(fresh_compiler, hosts, optimizer):
    collection = programs.grouped("apart", programs.PLANS["mixed"], optimizer, output="tensor")
    by_torch = None if optimizer is not None else programs.TORCH_SGD(collection.parameters())

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss(batch):
        return collection(batch).pow(2).sum()

    for step in range(2):
        loss(cases.spread(programs.batches(step))).backward()
        if by_torch is not None:
            by_torch.step()
            by_torch.zero_grad()
    expected = trained_alone(optimizer, 2, output="tensor")
    assert_tables(dict(collection.named_parameters()), expected)


# -- in processes ----------------------------------------------------------------------------------


@pytest.mark.processes
@every_axis
@every_plan
@every_kind
def test_both_worlds_train_alike(processes, plan, axes, kind):
    for optimizer in (RowWiseAdagrad(0.1), None):
        held, real = both(processes, programs.trained, axes, plan, optimizer, kind, 2)
        assert_all_close(held, real)


@pytest.mark.processes
def test_both_worlds_send_ahead_alike(processes):
    plan = programs.PLANS["mixed"]
    held, real = both(processes, programs.trained_ahead, "neighbours", plan, Adagrad(0.1), 3)
    assert_all_close(held, real)


@pytest.mark.processes
def test_both_worlds_round_what_is_sent_alike(processes):
    program = functools.partial(programs.trained, exchange_dtype=torch.bfloat16)
    plan = programs.PLANS["mixed"]
    held, real = both(processes, program, "apart", plan, SGD(0.1), EmbeddingBagCollection, 2)
    assert_all_close(held, real)


@pytest.mark.processes
def test_the_group_of_a_bad_batch_raises(processes):
    """Other groups have batches of their own, and hear of it where they wait for this one."""
    found = processes(programs.broken_forward, "neighbours", "row_wise", 1)
    assert found[0] == found[1]
    assert found[0].startswith("IdRangeError: On rank 1: feature 'user' of table 'user': id 99")
    assert found[2] == found[3] == "nothing"
