"""Models with collections, compiled: one graph, with an op for the lookup of all tables."""

import contextlib
import copy
import functools
import re

import compiled_cases
import embedding_cases as cases
import pytest
import torch
from compiled_cases import SIZES, Reader, Recommender, compiled, pairs, train
from found_again import assert_found_again
from torch.testing import assert_close

from shardwise import LocalTensor, effects
from shardwise.debug import CommDebugMode
from shardwise.embedding import SGD, Adam, Jagged, RowWiseAdagrad
from shardwise.errors import IdRangeError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("fresh_compiler"),
    # torch's compiler reads the gradient of what enters a graph, whether it is a leaf or not.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
TORCH_SGD = functools.partial(torch.optim.SGD, lr=0.1, foreach=False)


def batches(rank=None, sizes=SIZES, **options):
    """A batch per step: of one rank, or each rank's own."""
    steps = []
    for number, num_bags in enumerate(sizes):
        each = [cases.batch(10 * number + r, num_bags, **options) for r in range(4)]
        steps.append((cases.spread(each) if rank is None else each[rank],))
    return steps


def on_each_rank(x):
    return [x.on_rank(rank) for rank in x.ranks] if isinstance(x, LocalTensor) else [x]


def state_of(model):
    """All values and gradients of a model, whole."""
    tensors = []
    for parameter in model.parameters():
        for x in (parameter.detach(), parameter.grad):
            if x is not None:
                x = x.to_dense() if x.is_sparse or hasattr(x, "full_tensor") else x
                x = x.full_tensor() if hasattr(x, "full_tensor") else x
                tensors += on_each_rank(x)
    return tensors


def assert_trains_alike(make, steps, backend="aot_eager", torch_optimizer=None):
    models = [make(), make()]
    fast, counter = compiled(models[1], backend)
    losses = [
        train(model, run, steps, torch_optimizer)
        for model, run in zip(models, (models[0], fast), strict=True)
    ]
    for eager, found in zip(*losses, strict=True):
        assert_close(on_each_rank(found), on_each_rank(eager))
    assert_close(state_of(models[1]), state_of(models[0]))
    return counter.frame_count


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_device(backend):
    graphs = assert_trains_alike(lambda: Recommender(optimizer=Adam(0.1)), batches(0), backend)
    assert graphs == 2  # the first sizes, and all others


def test_one_device_and_an_optimizer_of_torch():
    assert_trains_alike(Recommender, batches(1), torch_optimizer=TORCH_SGD)


@pytest.mark.parametrize("plan", ["mixed", "column_wise"])
def test_updates_in_backward(mesh, plan):
    """Each rank has another number of ids, and of weights."""
    make = functools.partial(Recommender, cases.PLANS[plan], RowWiseAdagrad(0.1))
    assert assert_trains_alike(make, batches(weighted=plan == "mixed")) == 2


@pytest.mark.parametrize("sparse", [True, False])
def test_gradients_for_an_optimizer_of_torch(mesh, sparse):
    make = functools.partial(Recommender, cases.PLANS["mixed"], sparse=sparse)
    assert assert_trains_alike(make, batches(), torch_optimizer=TORCH_SGD) == 2


def test_inductor(mesh):
    """Its code is found again by a later process."""
    make = functools.partial(Recommender, "row_wise", SGD(0.1))

    def run():
        assert assert_trains_alike(make, batches(sizes=SIZES[:3]), "inductor") == 2

    # Older torch cannot name a graph of sizes that are known when it runs, so it keeps none.
    run() if torch.__version__ < "2.13" else assert_found_again(run)


def test_one_graph_from_the_first_call_on():
    model = Recommender(optimizer=SGD(0.1))
    fast, counter = compiled(model, dynamic=True)
    train(model, fast, batches(0))
    assert counter.frame_count == 1


@pytest.mark.parametrize("plan", [None, "row_wise"])
def test_a_row_per_id_of_a_batch_made_inside(mesh, plan):
    """How many ids each feature has is known only when the code runs."""
    steps = []
    for number, size in enumerate(SIZES):
        each = [pairs(10 * number + rank, size) for rank in range(4)]
        spread = [LocalTensor.per_rank(lambda r, i=i: each[r][i]) for i in range(2)]  # noqa: B023
        steps.append(each[0] if plan is None else spread)
    make = functools.partial(Reader, plan, SGD(0.1))
    assert assert_trains_alike(make, steps) == 2


class Weighing(torch.nn.Module):
    """Weights of ids that are learnt; a tensor per feature, of other numbers of bags."""

    def __init__(self, plan):
        super().__init__()
        self.bags = cases.make(tables=compiled_cases.PAIRS, optimizer=SGD(0.1))
        if plan is not None:
            self.bags.shard(plan[0], plan[1])

    def forward(self, batch, weights):
        found = self.bags(batch.with_weights(weights.sigmoid()))
        return found["right"].sum() + found["first"].square().sum()  # one feature is not used


@pytest.mark.parametrize("given", ["one device", "each rank", "all ranks"])
def test_weights_that_learn_and_sizes_per_feature(mesh, given):
    """Weights that all ranks share have a gradient per rank."""
    sharded = given != "one device"
    ids = torch.arange(12) % 7
    batch = Jagged(
        ["left", "right", "first"],
        ids,
        offsets=torch.tensor([0, 2, 2, 5, 6, 9, 12]),
        batch_sizes=[1, 3, 2],
    )
    outcomes = []
    model = Weighing((mesh, "row_wise") if sharded else None)
    for run in (model, compiled(copy.deepcopy(model))[0]):
        weights = torch.linspace(-1, 1, 12)
        if given == "each rank":
            weights = LocalTensor.per_rank(lambda rank: torch.linspace(-1, rank, 12))
        weights.requires_grad_()
        for _ in range(2 if given != "all ranks" else 1):
            loss = run(batch, weights)
            loss.backward()
        outcomes.append([*on_each_rank(loss.detach()), *on_each_rank(weights.grad)])
    assert_close(outcomes[1], outcomes[0])


def test_communication_is_that_of_eager_code(mesh):
    model = Recommender(cases.PLANS["mixed"], RowWiseAdagrad(0.1))
    fast, _ = compiled(model)
    counts = []
    for run in (model, fast, fast):
        model.zero_grad()
        with CommDebugMode() as comm:
            run(*batches()[0]).backward()
        counts.append(comm.get_comm_counts())
    assert counts[0]
    assert counts == [counts[0]] * 3


def test_updates_are_held_stepped_and_skipped():
    models = [Recommender(optimizer=SGD(0.1)) for _ in range(2)]
    fast, _ = compiled(models[1])
    for model, run in zip(models, (models[0], fast), strict=True):
        model.bags.parameter("item").requires_grad_(False)
        with model.bags.optimizer.hold():
            run(*batches(0)[0]).backward()
            loss = run(*batches(1)[0])
            loss.backward(retain_graph=True)
            loss.backward()
        assert model.bags.optimizer.num_held == 3
        model.bags.optimizer.step()
        assert model.bags.optimizer.num_steps == 1
    assert_close(state_of(models[1]), state_of(models[0]))


def test_what_is_kept_for_backward_goes_with_the_graph():
    model = Recommender()
    fast, _ = compiled(model)
    batch = batches(0)[0]
    loss = fast(*batch)
    assert len(effects._kept) == 1
    loss.backward()
    assert not effects._kept
    del loss
    fast(*batch)
    assert not effects._kept
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            assert_close(fast(*batch), model(*batch))


def test_a_copy_and_other_dtypes_are_collections_of_their_own():
    model = Recommender(optimizer=SGD(0.1))
    fast, _ = compiled(model)
    before = fast(*batches(0)[0])
    other = copy.deepcopy(model)
    compiled(other)[0](*batches(0)[0]).backward()
    assert_close(fast(*batches(0)[0]), before)
    assert fast(*batches(0)[0]) != other(*batches(0)[0])
    model.double()
    assert_close(fast(*batches(0)[0]), before.double())


def test_a_bad_batch_raises_what_eager_code_raises(mesh):
    model = Recommender("row_wise", SGD(0.1))
    fast, _ = compiled(model)
    given = [cases.batch(rank) for rank in range(4)]
    given[2].values[0] = 99
    with pytest.raises(IdRangeError, match=r"On rank 2: feature 'user'.*id 99"):
        fast(cases.spread(given))
    assert_close(fast(*batches()[0]).on_rank(1), model(*batches()[0]).on_rank(1))


def test_tables_that_rest_get_nothing():
    model = Recommender().requires_grad_(False)
    model.dense.requires_grad_()
    train(model, compiled(model)[0], batches(0, sizes=(3,)))
    assert [p.grad for p in model.bags.parameters()] == [None] * 5
    assert model.dense.weight.grad is not None


def test_a_row_per_id_without_fullgraph():
    """Sizes that only runs know break the graph; the lookup runs as it is."""
    models = [Reader(optimizer=SGD(0.1)) for _ in range(2)]
    broken = torch.compile(models[1], backend="aot_eager")
    for model, run in zip(models, (models[0], broken), strict=True):
        train(model, run, [pairs(number, size) for number, size in enumerate((3, 4))])
    assert_close(state_of(models[1]), state_of(models[0]))


def test_what_is_not_in_a_graph(mesh):
    model = Recommender("row_wise", SGD(0.1))
    with pytest.raises(NotImplementedError, match=r"torch.export of a collection"):
        torch.export.export(Reader(), pairs(0, 3), strict=False)
    uneven = cases.spread([cases.batch(rank, rank + 1) for rank in range(4)])
    with pytest.raises(Exception, match="ranks differ"):
        compiled(model)[0](uneven)
    torch._dynamo.reset()
    expected = model(*batches()[0])
    ahead = model.bags.prefetch(*batches()[0])
    with pytest.raises(torch._dynamo.exc.Unsupported, match="prefetch sends"):
        compiled(model)[0](ahead)
    assert_close(torch.compile(model, backend="aot_eager")(ahead).on_rank(2), expected.on_rank(2))


@pytest.mark.processes
@pytest.mark.parametrize("fused", [SGD(0.1), None])
def test_processes_train_alike(two_processes, fused):
    of_torch = None if fused else TORCH_SGD
    alone = Recommender(optimizer=fused)
    optimizer = of_torch(alone.bags.parameters()) if of_torch else alone.bags.optimizer
    for number, num_bags in enumerate(SIZES):
        alone.zero_grad()
        with contextlib.nullcontext() if of_torch else optimizer.hold():
            for rank in range(2):
                (alone(cases.batch(10 * number + rank, num_bags)) / 2).backward()
        optimizer.step()
    program, plan = compiled_cases.trained_compiled, cases.MIXED_ON_TWO
    options = fused, of_torch, "aot_eager", SIZES
    for tables, num_graphs, alike in two_processes(program, plan, *options):
        assert num_graphs == 2
        assert alike
        for name, expected in alone.bags.named_parameters():
            assert_close(tables[name], expected.detach())


@pytest.mark.processes
@pytest.mark.parametrize("fused", [SGD(0.1), None])
def test_tables_that_train_on_one_rank(two_processes, fused):
    """The other one helps to make its gradients, as in eager code."""
    found = two_processes(compiled_cases.trained_on_one_rank, "row_wise", fused)
    for rank, (before, here, everywhere) in enumerate(found):
        assert_close(here, before if rank else everywhere)


@pytest.mark.processes
def test_all_ranks_hear_of_a_bad_batch(processes):
    found = processes(compiled_cases.told_of_a_bad_batch, "row_wise")
    told = found[0][0]
    says = ["IdRangeError.*rank 2", "On rank 2: feature 'day'", "On rank 2: values are", "rank 2"]
    assert len(told) == len(says)
    for text, pattern in zip(told, says, strict=True):
        assert re.search(pattern, text), text
    for other, loss in found:
        assert other == told
        assert_close(loss, Recommender()(cases.batch(5)).detach())
