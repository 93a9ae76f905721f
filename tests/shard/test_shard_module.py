"""A plan applied to a module: what it becomes, how it trains, and what is refused."""

import copy
import pickle

import pytest
import torch
from parity import parameters, through_file, whole
from shard_cases import chunks, per_rank, stretches, tiles
from shard_models import (
    Broken,
    Collection,
    Forgetful,
    HalfAndHalf,
    Nested,
    ShardedCollection,
    Towers,
    Wrapper,
)
from torch import nn

import shardwise
from shardwise import LocalTensor, UnsupportedError
from shardwise.errors import ArgumentError, LayoutError, PathError, PlanError, WorldError
from shardwise.parallel import data_parallel, fully_shard
from shardwise.shard import (
    ShardedOptimizer,
    ShardedTensor,
    ShardingPlan,
    ShardingPlanner,
    load_with_process_group,
    named_params_with_sharded_tensor,
    pre_load_state_dict_hook,
    shard_module,
    shard_parameter,
    state_dict_hook,
    zeros,
)

PLANS = {
    "rows and columns": {"user.weight": chunks(0, 0, 1, 2, 3), "item.weight": chunks(1, 3, 1)},
    "with the dense part": {
        "user.weight": chunks(1, 2, 0, 1),
        "item.weight": stretches(0, (9, 6), (0, 4, 0, 5)),
        "dense.weight": chunks(0, 0, 1, 2, 3),
        "dense.bias": chunks(0, 1, 0),
    },
    "rows of the dense part": {
        "same.weight": chunks(0, 1),
        "item.weight": chunks(0, 2, 3),
        "dense.weight": chunks(1, 3, 2, 1, 0),
    },
}


@pytest.fixture(params=PLANS.values(), ids=PLANS.keys())
def plan(request):
    return ShardingPlan(request.param)


def batch(step=0):
    users = per_rank(lambda r, g: torch.randint(0, 11, (r + 2,), generator=g) * (step + 1) % 11)
    items = per_rank(lambda r, g: torch.randint(0, 9, (r + 2, 3), generator=g) * (step + 2) % 9)
    return users, items


# -- what a module becomes -------------------------------------------------------------------------


def test_parameters_are_sharded_in_place(world, plan):
    model = Towers()
    before = copy.deepcopy(model)
    assert shard_module(model, plan) is model
    for path, spec in plan.plan.items():
        parameter = model.get_parameter(path)
        assert isinstance(parameter, ShardedTensor)
        assert isinstance(parameter, nn.Parameter)
        assert parameter.sharding_spec() == spec
        assert parameter.requires_grad
    assert model.user.weight is model.same.weight
    for name, tensor in before.named_parameters():
        assert torch.equal(whole(model.get_parameter(name)), tensor)


def test_each_ranks_own_batch(world, plan):
    model = Towers()
    alone = copy.deepcopy(model)
    shard_module(model, plan)
    users, items = batch()
    out = model(users, items)
    for rank in range(4):
        expected = alone(users.on_rank(rank), items.on_rank(rank))
        torch.testing.assert_close(out.on_rank(rank), expected)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


def train_alone(model, make, batches):
    """One device, the mean of the losses that four ranks would have."""
    optimizer = make(model.parameters())
    for users, items in batches:
        optimizer.zero_grad()
        losses = [
            model(users.on_rank(rank), items.on_rank(rank)).square().mean() for rank in range(4)
        ]
        (sum(losses) / 4).backward()
        optimizer.step()


def train_sharded(model, optimizer, batches):
    for users, items in batches:
        optimizer.zero_grad()
        model(users, items).square().mean().backward()
        for parameter in model.parameters():
            if not isinstance(parameter, ShardedTensor):
                # What DDP does for the parameters that every rank keeps whole.
                grad = parameter.grad
                if isinstance(grad, LocalTensor):
                    mean = sum(grad.on_rank(rank) for rank in range(4)) / 4
                    parameter.grad = mean
        optimizer.step()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_training(world, plan, make):
    model = Towers()
    alone = copy.deepcopy(model)
    shard_module(model, plan)
    batches = [batch(step) for step in range(5)]
    train_alone(alone, make, batches)
    train_sharded(model, make(model.parameters()), batches)
    torch.testing.assert_close(parameters(model), parameters(alone))


@pytest.mark.parametrize("door", [data_parallel, fully_shard], ids=lambda door: door.__name__)
def test_the_rest_of_the_module_is_data_parallel(world, plan, door):
    """Whatever the order of the ranks that hold shards, the front door leaves these alone."""
    model = Towers()
    alone = copy.deepcopy(model)
    shard_module(model, plan)
    door(model, shardwise.init_device_mesh("cpu", (4,)))
    batches, make = [batch(step) for step in range(3)], OPTIMIZERS["SGD"]
    train_alone(alone, make, batches)
    optimizer = make(model.parameters())
    for users, items in batches:
        optimizer.zero_grad()
        model(users, items).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(parameters(model), parameters(alone))


def test_the_wrapper_trains_alike_and_its_state_moves_to_another_plan(world):
    batches = [batch(step) for step in range(4)]
    alone = Towers()
    first, second = copy.deepcopy(alone), copy.deepcopy(alone)
    shard_module(first, ShardingPlan(PLANS["rows and columns"]))
    shard_module(second, ShardingPlan(PLANS["with the dense part"]))
    made = [
        ShardedOptimizer(dict(m.named_parameters()), torch.optim.Adam, lr=0.05)
        for m in (first, second)
    ]
    train_alone(alone, lambda p: torch.optim.Adam(p, lr=0.05), batches)
    train_sharded(first, made[0], batches[:2])
    state = made[0].state_dict()
    assert isinstance(state["state"]["user.weight"]["exp_avg"], ShardedTensor)
    second.load_state_dict(first.state_dict())
    made[1].load_state_dict(state)
    exp_avg = made[1].state_dict()["state"]["dense.weight"]["exp_avg"]
    assert exp_avg.sharding_spec() == PLANS["with the dense part"]["dense.weight"]
    train_sharded(second, made[1], batches[2:])
    torch.testing.assert_close(parameters(second), parameters(alone))
    with pytest.raises(PathError, match="other parameters"):
        made[1].load_state_dict({"state": {"nobody": {}}, "param_groups": []})


def test_gradients_of_the_sum_of_losses(world):
    model = Towers()
    shard_module(model, ShardingPlan(PLANS["rows and columns"]), grad_reduction="sum")
    mean = Towers()
    mean.load_state_dict({k: whole(v) for k, v in model.state_dict().items()})
    shard_module(mean, ShardingPlan(PLANS["rows and columns"]))
    for each in (model, mean):
        each(*batch()).sum().backward()
    torch.testing.assert_close(whole(model.user.weight.grad), 4 * whole(mean.user.weight.grad))


def test_clipping(world, plan):
    model = Towers()
    shard_module(model, plan)
    model(*batch()).sum().backward()
    tables = [p for p in model.parameters() if isinstance(p, ShardedTensor)]
    norm = torch.sqrt(sum(whole(p.grad).square().sum() for p in tables))
    found = nn.utils.clip_grad_norm_(tables, 0.5)
    torch.testing.assert_close(found.full_tensor().agreed(), norm)
    after = torch.sqrt(sum(whole(p.grad).square().sum() for p in tables))
    torch.testing.assert_close(after, torch.tensor(0.5))


def test_a_meta_module(world):
    with torch.device("meta"):
        model = nn.Embedding(12, 4)
    shard_parameter(model, "weight", chunks(0, 3, 1))
    torch.manual_seed(2)
    nn.init.normal_(model.weight)
    torch.manual_seed(2)
    assert torch.equal(whole(model.weight), torch.empty(12, 4).normal_())


def test_module_to_another_dtype(world, plan):
    model = Towers()
    before = parameters(model)
    shard_module(model, plan)
    model.double()
    for name, parameter in model.named_parameters():
        assert parameter.dtype is torch.float64
        assert torch.equal(whole(parameter), before[name].double())
    assert isinstance(model.user.weight, nn.Parameter)
    model(*batch()).sum().backward()


# -- state dicts -----------------------------------------------------------------------------------


def test_state_dicts_go_to_any_other_plan(world, plan):
    model = Towers()
    expected = parameters(model)
    shard_module(model, plan)
    state = model.state_dict()
    for other in PLANS.values():
        fresh = shard_module(Towers(), ShardingPlan(other))
        fresh.load_state_dict(state)
        assert all(torch.equal(whole(fresh.get_parameter(n)), t) for n, t in expected.items())
    with torch.no_grad():
        fresh.dense.weight.zero_()
    fresh.load_state_dict(expected | {"same.weight": expected["user.weight"]})
    assert all(torch.equal(whole(fresh.get_parameter(n)), t) for n, t in expected.items())


def test_state_dicts_in_files(world, plan):
    model = shard_module(Towers(), plan)
    fresh = shard_module(Towers(), plan)
    fresh.load_state_dict(through_file(model.state_dict(), weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(_wholes(model), _wholes(fresh), strict=True))


def _wholes(model):
    return parameters(model).values()


class Holder(nn.Module):
    """A sharded tensor that is neither parameter nor buffer."""

    def __init__(self, value, spec):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.held = zeros(spec, 7, 3).add_(value)
        self._register_state_dict_hook(state_dict_hook)
        self.register_load_state_dict_pre_hook(pre_load_state_dict_hook)


def test_hooks_for_attributes(world):
    saved = Holder(3, chunks(0, 2, 1)).state_dict()
    assert set(saved) == {"inner.weight", "inner.bias", "inner.held"}
    fresh = Holder(0, chunks(1, 0, 1, 2))
    fresh.load_state_dict(dict(saved))
    assert torch.equal(whole(fresh.inner.held), torch.full((7, 3), 3.0))
    assert fresh.inner.held.sharding_spec() == chunks(1, 0, 1, 2)
    fresh.inner.held = None
    fresh.load_state_dict(dict(saved))
    assert torch.equal(whole(fresh.inner.held), torch.full((7, 3), 3.0))
    assert fresh.inner.held.sharding_spec() == chunks(0, 2, 1)


def test_attributes_are_listed_beside_parameters(world):
    model = Holder(1, chunks(0, 0, 1))
    named = dict(named_params_with_sharded_tensor(model, "top"))
    assert list(named) == ["top.inner.held", "top.inner.weight", "top.inner.bias"]
    assert named["top.inner.held"] is model.inner.held
    assert list(dict(named_params_with_sharded_tensor(model, recurse=False))) == []
    optimizer = ShardedOptimizer(named, torch.optim.SGD, lr=1.0)
    model.inner.held.grad = model.inner.held.clone()
    optimizer.step()
    assert torch.equal(whole(model.inner.held), torch.zeros(7, 3))


# -- sharders --------------------------------------------------------------------------------------


def test_a_sharder_replaces_its_module(world):
    model = Nested()
    ids = per_rank(lambda r, g: torch.randint(0, 10, (2, r + 1), generator=g))
    expected = [model(ids.on_rank(rank)) for rank in range(4)]
    sharder = HalfAndHalf()
    plan = ShardingPlan({"collection": sharder, "head.weight": chunks(0, 0, 1)})
    shard_module(model, plan)
    assert isinstance(model.collection, ShardedCollection)
    assert model.collection.inner["t0"].weight.sharding_spec() == sharder.rows
    assert model.collection.inner["t3"].weight.sharding_spec() == sharder.columns
    out = model(ids)
    for rank in range(4):
        torch.testing.assert_close(out.on_rank(rank), expected[rank])


def test_a_container_without_forward_computes_as_before(world):
    model = Nested()
    expected = model(torch.arange(4).view(2, 2))
    shard_module(model, ShardingPlan({"collection": Wrapper()}))
    assert type(model.collection).__name__ == "Bare"
    torch.testing.assert_close(model(torch.arange(4).view(2, 2)), expected)
    copied = copy.deepcopy(model)
    torch.testing.assert_close(copied(torch.arange(4).view(2, 2)), expected)


def test_planners(world):
    class RowsEverywhere(ShardingPlanner):
        def build_plan(self, module):
            return ShardingPlan(
                {
                    f"{path}.weight": chunks(0, 0, 1, 2, 3)
                    for path, child in module.named_modules()
                    if isinstance(child, nn.EmbeddingBag)
                }
            )

    model = Nested()
    shard_module(model, RowsEverywhere().build_plan(model))
    assert all(isinstance(t.weight, ShardedTensor) for t in model.collection.tables.values())
    with pytest.raises(TypeError, match="abstract"):
        ShardingPlanner()


# -- outputs ---------------------------------------------------------------------------------------


def test_output_plan(world):
    layer = nn.Linear(6, 5)
    alone = copy.deepcopy(layer)
    plan = ShardingPlan({"weight": chunks(0, 1, 3)}, output_plan={"": chunks(1, 2, 0)})
    shard_module(layer, plan)
    x = per_rank(lambda r, g: torch.randn(r + 1, 6, generator=g))
    out = layer(x)
    joint = torch.cat([x.on_rank(rank) for rank in range(4)])
    assert isinstance(out, ShardedTensor)
    assert out.sharding_spec() == chunks(1, 2, 0)
    torch.testing.assert_close(whole(out), alone(joint))
    # A sharded output belongs to one loss, that of the joint batch.
    out.square().mul(0.5).sum().backward()
    alone(joint).square().mul(0.5).sum().backward()
    torch.testing.assert_close(whole(layer.weight.grad), alone.weight.grad)


def test_local_outputs(world):
    layer = nn.Linear(6, 5)
    alone = copy.deepcopy(layer)
    rows = chunks(0, 0, 1, 2, 3)
    plan = ShardingPlan({"weight": chunks(0, 1, 3)}, {"": rows}, return_local_tensor=[""])
    shard_module(layer, plan)
    x = per_rank(lambda r, g: torch.randn(r + 1, 6, generator=g))
    out = layer(x)
    joint = alone(torch.cat([x.on_rank(rank) for rank in range(4)]))
    for rank, expected in enumerate(joint.split([3, 3, 3, 1])):
        torch.testing.assert_close(out.on_rank(rank), expected)
    # Each rank's own loss again, so the mean of them.
    out.square().sum().backward()
    joint.square().sum().div(4).backward()
    torch.testing.assert_close(whole(layer.weight.grad), alone.weight.grad)


def test_outputs_that_cannot_be_laid_out(world):
    layer = nn.Linear(6, 5)
    shard_module(layer, ShardingPlan({}, output_plan={"": chunks(0, 0)}))
    shapes = [(1, 2, 6), (1, 2, 6), (1, 3, 6), (1, 2, 6)]
    with pytest.raises(LayoutError, match="more than their first dim"):
        layer(per_rank(lambda rank, g: torch.ones(shapes[rank])))


# -- what is refused -------------------------------------------------------------------------------


def refused(plan, error, match, model=None, **options):
    model = Nested() if model is None else model
    before = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules())
    with pytest.raises(error, match=match):
        shard_module(model, plan, **options)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert modules == dict(model.named_modules())


ROWS = chunks(0, 0, 1)


def test_an_empty_path_for_a_sharder(world):
    refused(ShardingPlan({"": HalfAndHalf()}), KeyError, "^path must not be empty for custom sha")


@pytest.mark.parametrize(
    "plan",
    [
        {"collection.tables.t0.weight": ROWS, "collection": HalfAndHalf()},
        {"collection": HalfAndHalf(), "collection.tables": HalfAndHalf()},
        {"": HalfAndHalf(), "head.weight": ROWS},
        {"collection": HalfAndHalf(), "collection.tables.t9": ROWS, "nowhere": ROWS},
    ],
)
def test_entries_inside_a_sharders_module(world, plan):
    refused(ShardingPlan(plan), RuntimeError, "should not conflict with the submodule tree")


def test_conflicts_name_the_entries(world):
    plan = {"collection.tables.t0.weight": ROWS, "collection": HalfAndHalf()}
    with pytest.raises(PlanError, match=r"'collection'.*'collection\.tables\.t0\.weight'"):
        shard_module(Nested(), ShardingPlan(plan))


def test_a_name_that_only_begins_alike_does_not_conflict(world):
    model = nn.ModuleDict({"emb": Collection(), "emb2": nn.Embedding(4, 4)})
    shard_module(model, ShardingPlan({"emb": HalfAndHalf(), "emb2.weight": ROWS}))
    assert isinstance(model["emb2"].weight, ShardedTensor)


@pytest.mark.parametrize(
    ("plan", "error", "match"),
    [
        ({"head.wieght": ROWS}, PathError, "did you mean 'head.weight'"),
        ({"haed.weight": ROWS}, PathError, "did you mean 'head.weight'"),
        ({"head": ROWS}, PathError, "no such parameter"),
        ({"colection": HalfAndHalf()}, PathError, "did you mean 'collection'"),
        ({"head.weight": chunks(0, 0, 9)}, LayoutError, r"ranks \[9\]"),
        ({"head.weight": chunks(2, 0, 1)}, LayoutError, "has 2 dims"),
        ({"head.weight": stretches(0, (4, 8), (2, 2))}, LayoutError, "outside"),
        ({"head.weight": tiles((9, 9))}, LayoutError, "outside"),
        ({"head.weight": "rows"}, TypeError, "Only `ShardingSpec` and `Sharder` are supported to"),
        ({"head.weight": ROWS, "head.bias": chunks(0, 7)}, LayoutError, r"ranks \[7\]"),
    ],
)
def test_mistakes_change_nothing(world, plan, error, match):
    refused(ShardingPlan(plan), error, match)


def test_more_mistakes(world):
    refused({"head.weight": ROWS}, ArgumentError, "ShardingPlan")
    refused(ShardingPlan({"head.weight": ROWS}), LayoutError, "src_rank=4", src_rank=4)
    refused(
        ShardingPlan({"head.weight": ROWS}), ArgumentError, "grad_reduction", grad_reduction="x"
    )
    refused(ShardingPlan({}, output_plan={"haed": ROWS}), PathError, "did you mean 'head'")
    refused(ShardingPlan({}, return_local_tensor=["haed"]), PathError, "did you mean 'head'")
    plan = ShardingPlan({"user.weight": ROWS, "same.weight": chunks(1, 0)})
    refused(plan, PlanError, "one parameter", Towers())
    refused(ShardingPlan({"collection": Forgetful()}), ArgumentError, "replaces it")
    plan = ShardingPlan({"head.weight": ROWS, "collection": Broken()})
    refused(plan, RuntimeError, "had enough")


def test_sharding_twice(world):
    model = Nested()
    shard_parameter(model, "head.weight", ROWS)
    refused(ShardingPlan({"head.weight": ROWS}), LayoutError, "sharded already", model)


def test_without_a_world():
    with pytest.raises(WorldError, match="no process group"):
        shard_module(Nested(), ShardingPlan({"head.weight": ROWS}))
    with pytest.raises(KeyError, match="must not be empty"):
        shard_module(Nested(), ShardingPlan({"": HalfAndHalf()}))


def test_worlds_leave_nothing_behind():
    for size in (2, 3):
        with shardwise.simulate(size):
            model = shard_module(nn.Embedding(5, 4), ShardingPlan({"weight": ROWS}))
            assert model(torch.tensor([4])).shape == (1, 4)


# -- copies and files ------------------------------------------------------------------------


def copies(module):
    return [copy.deepcopy(module), through_file(module)]


def test_copies_keep_what_the_plan_did(world):
    """Outputs that are laid out, and the forward of a module that a sharder replaced."""
    rows = chunks(0, 0, 1, 2, 3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 6))
    plan = ShardingPlan(
        {"0.weight": rows}, output_plan={"0": rows, "1": rows}, return_local_tensor=["0"]
    )
    shard_module(model, plan)
    x = per_rank(lambda r, g: torch.randn(2, 4, generator=g))
    expected = model(x)
    wrapped = shard_module(nn.Sequential(Collection()), ShardingPlan({"0": Wrapper()}))
    ids = per_rank(lambda r, g: torch.randint(0, 10, (3, 2), generator=g))
    for found in copies(model):
        assert isinstance(found(x), ShardedTensor)
        assert torch.equal(found(x).full_tensor().agreed(), expected.full_tensor().agreed())
    for found in copies(wrapped):
        for rank in range(4):
            assert torch.equal(found(ids).on_rank(rank), wrapped(ids).on_rank(rank))


def test_a_file_of_a_module_on_some_ranks(world):
    group = torch.distributed.new_group([0, 1])
    layer = nn.Sequential(nn.Linear(4, 4))
    shard_module(layer, ShardingPlan({}, return_local_tensor=["0"]), process_group=group)
    saved = pickle.dumps(layer)
    with pytest.raises(WorldError, match=r"The output plan of '0' was saved on the group of ranks"):
        pickle.loads(saved)
    with load_with_process_group(group):
        assert torch.equal(pickle.loads(saved)(torch.ones(4)), layer(torch.ones(4)))


@pytest.mark.parametrize("spec", [chunks(0, 1, 0), chunks(1, 1, 0)])
def test_penalties_on_the_gradient_of_a_linear_layers_input(spec):
    def penalized(layer, x):
        loss = layer(x).pow(3).sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + grad.pow(2).sum()).backward()
        return x.grad

    layer = nn.Linear(3, 4, dtype=torch.float64)
    alone, inputs = copy.deepcopy(layer), [torch.randn(2, 3).double() for _ in range(2)]
    expected = [penalized(alone, x.requires_grad_()).clone() for x in inputs]
    with shardwise.simulate(2):
        shard_module(layer, ShardingPlan({"weight": spec}))
        own = LocalTensor.per_rank(lambda rank: inputs[rank].detach()).requires_grad_()
        found = penalized(layer, own)
        for rank in range(2):
            torch.testing.assert_close(found.on_rank(rank), expected[rank])
        weights = layer.weight.grad.resharded(chunks(0, 0, 1)).full_tensor().agreed()
        torch.testing.assert_close(weights, alone.weight.grad / 2)


def test_other_second_derivatives_are_refused():
    """The exchange has a first derivative; a penalty on a gradient through it says so."""
    ids = torch.tensor([[0, 2], [1, 1]])
    for module, inputs in [(nn.Linear(3, 4), torch.randn(2, 3)), (nn.EmbeddingBag(4, 3), ids)]:
        with shardwise.simulate(2):
            shard_module(module, ShardingPlan({"weight": chunks(0, 0, 1)}))
            loss = module(inputs).pow(3).sum()
            (grad,) = torch.autograd.grad(loss, module.weight, create_graph=True)
            with pytest.raises(UnsupportedError, match="not differentiated again"):
                (loss + grad.pow(2).sum()).backward()


def test_weights_of_ids_have_no_second_derivative():
    """Their gradient depends on the table, also where the gradient of the bags is constant."""
    table, weights = nn.EmbeddingBag(4, 3, mode="sum"), torch.ones(2, 2, requires_grad=True)
    with shardwise.simulate(2):
        shard_module(table, ShardingPlan({"weight": chunks(0, 0, 1)}))
        bags = table(torch.tensor([[0, 2], [1, 1]]), per_sample_weights=weights)
        (grad,) = torch.autograd.grad(bags.sum(), weights, create_graph=True)
        with pytest.raises(UnsupportedError, match="not differentiated again"):
            grad.square().sum().backward()
