"""The gradient contract: who reduces what, whatever the doors, their order and their nesting."""

from copy import deepcopy

import parity
import pytest
import torch
from devices import needs_cuda
from fully_sharded import mesh_of
from torch import nn
from torch.nn import functional as F

import shardwise
from shardwise import LayoutError, LocalTensor, Replicate
from shardwise.debug import CommDebugMode
from shardwise.embedding import SGD, EmbeddingBagCollection, Table
from shardwise.errors import BatchError, UnsupportedError
from shardwise.parallel import data_parallel, fully_shard, parallelize_module


def per_rank(x, place):
    """Each rank's part of a batch: `place(rank)` of as many parts as there are places."""
    world = torch.distributed.get_world_size()
    num = 1 + max(place(rank) for rank in range(world))
    return LocalTensor.per_rank(lambda rank: x.chunk(num)[place(rank)])


class Net(nn.Module):
    """A norm and a scale that no plan names, around layers that one does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.scale * self.down(F.gelu(self.up(self.norm(x))))


PLAN = {"up": "colwise", "down": "rowwise"}


def gradients(model, x):
    model.zero_grad()
    model(x).pow(2).mean().backward()
    return parity.gradients(model)


def assert_alike(model, x, place):
    """Gradients of the model, each rank with its part of `x`, are those of one device."""
    expected = gradients(Net(), x)
    found = gradients(model, per_rank(x, place))
    torch.testing.assert_close(found, expected)
    assert not any(type(p.grad) is LocalTensor for p in model.parameters())


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def test_shards_beside_parameters_that_no_plan_names():
    with shardwise.simulate(2):
        mesh = mesh_of(dp=2, tp=1)
        model = fully_shard(parallelize_module(Net(), mesh, PLAN), mesh["dp"])
        assert_alike(model, X, lambda rank: rank)
        assert all(placement.is_shard(0) for placement in model.up.weight.placements)


def test_styles_on_two_axes_reduce_what_no_plan_names():
    with shardwise.simulate(4):
        model = parallelize_module(Net(), mesh_of(dp=2, tp=2), PLAN)
        assert_alike(model, X, lambda rank: rank // 2)


DOORS = {
    "plan": lambda model, mesh: parallelize_module(model, mesh, PLAN),
    "shards": lambda model, mesh: fully_shard(model, mesh["shard"]),
    "data": lambda model, mesh: data_parallel(model, mesh["rep"]),
    "inside": lambda model, mesh: data_parallel(model.norm, mesh["shard"]),
    "flat": lambda model, mesh: data_parallel(model, mesh["rep", "shard"]._flatten("flat")),
    "both": lambda model, mesh: data_parallel(model, mesh["rep", "shard"]),
}


@pytest.mark.parametrize(
    "order",
    [
        "plan shards data",
        "shards plan data",
        "data shards plan",
        "data plan shards",
        "plan shards flat",
        "flat plan shards",
        "inside plan both",
        "both inside plan",
        "plan data inside shards",
        "shards data flat plan",
    ],
)
def test_doors_in_any_order(order):
    with shardwise.simulate(8):
        mesh = mesh_of(rep=2, shard=2, tp=2)
        model = Net()
        for door in order.split():
            DOORS[door](model, mesh)
        assert_alike(model, X, lambda rank: rank // 2)
        if "shards" in order:
            rep, *others = model.up.weight.placements
            assert rep == Replicate()
            assert all(placement.is_shard(0) for placement in others)


def test_nested_on_another_axis():
    """The example has one weight, and batches of 0, 1, 2 and 3: the mean is 1.5."""
    with shardwise.simulate(4):
        mesh = mesh_of(a=2, b=2)
        batch = LocalTensor.per_rank(lambda rank: torch.full((1, 1), float(rank)))
        for inner_first in (True, False):
            inner = nn.Linear(1, 1, bias=False)
            outer = nn.Sequential(inner)
            doors = [(inner, mesh["b"]), (outer, mesh["a"])]
            for module, axis in doors if inner_first else reversed(doors):
                data_parallel(module, axis)
            outer(batch).sum().backward()
            assert inner.weight.grad.tolist() == [[1.5]]


def test_an_inner_module_is_suspended_alone():
    with shardwise.simulate(2):
        mesh = mesh_of(dp=2)
        outer = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        data_parallel(outer, mesh)
        data_parallel(outer[0], mesh)
        batch = LocalTensor.per_rank(lambda rank: torch.full((1, 1), float(rank)))
        with outer[0].no_sync():
            outer(batch).sum().backward()
        assert isinstance(outer[0].weight.grad, LocalTensor)
        assert type(outer[1].weight.grad) is torch.Tensor
        outer(batch).sum().backward()
        assert type(outer[0].weight.grad) is torch.Tensor


def test_unfrozen_later():
    with shardwise.simulate(2):
        mesh = mesh_of(dp=2)
        model = Net().requires_grad_(False)
        data_parallel(model, mesh)
        assert not any(p.requires_grad for p in model.parameters())
        model.requires_grad_(True)
        assert_alike(model, X, lambda rank: rank)
        model.norm.requires_grad_(False)
        assert gradients(model, per_rank(X, lambda rank: rank)).keys() == gradients(
            Net(), X
        ).keys() - {"norm.weight", "norm.bias"}


def test_parameters_added_later_start_alike_and_are_reduced():
    with shardwise.simulate(2):
        model = data_parallel(nn.Sequential(nn.Linear(1, 1, bias=False)), mesh_of(dp=2))
        late = nn.Linear(1, 1, bias=False)
        late.weight = nn.Parameter(
            LocalTensor.per_rank(lambda rank: torch.full((1, 1), rank + 1.0))
        )
        model.append(late)
        batch = LocalTensor.per_rank(lambda rank: torch.full((1, 1), float(rank)))
        model(batch).sum().backward()
        assert late.weight.detach().agreed().item() == 1.0
        expected = model[0].weight.detach() * 0.5
        torch.testing.assert_close(late.weight.grad.agreed(), expected)


def test_a_part_is_copied_with_the_axes_of_the_whole():
    with shardwise.simulate(4):
        mesh = mesh_of(a=2, b=2)
        model = data_parallel(nn.Sequential(nn.Linear(1, 1, bias=False)), mesh["a"])
        data_parallel(model[0], mesh["b"])
        batch = LocalTensor.per_rank(lambda rank: torch.full((1, 1), float(rank)))
        for copied in (deepcopy(model[0]), deepcopy(model)):
            copied(batch).sum().backward()
            (weight,) = copied.parameters()
            assert weight.grad.tolist() == [[1.5]]


def test_a_flattened_axis_takes_one_collective():
    with shardwise.simulate(4):
        mesh = mesh_of(rep=2, shard=2)
        model = data_parallel(Net(), mesh["rep", "shard"]._flatten("flat"))
        with CommDebugMode() as comm:
            model(per_rank(X, lambda rank: rank)).sum().backward()
        assert [event.axis for event in comm.events] == ["flat"]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("door", [data_parallel, fully_shard])
def test_one_axis_is_not_both_for_batches_and_for_layers(door, first):
    """'replicate' takes the same batch on all ranks: rows would come from several batches."""
    with shardwise.simulate(2):
        mesh = mesh_of(dp=2)
        model = Net()
        plan = dict.fromkeys(("norm", "up", "down"), "replicate")
        doors = [lambda: parallelize_module(model, mesh, plan), lambda: door(model, mesh)]
        (doors if first else doors[::-1])[0]()
        before = [type(p) for p in model.parameters()]
        with pytest.raises(LayoutError, match=r"axis 'dp' .* cannot be a data axis"):
            (doors if first else doors[::-1])[1]()
        assert [type(p) for p in model.parameters()] == before


class Between(nn.Module):
    """A scale that is used where each rank has some of the columns."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.down(self.scale * self.up(x))


def test_a_plain_gradient_that_differs_along_a_tensor_axis():
    with shardwise.simulate(2):
        model = parallelize_module(Between(), mesh_of(tp=2), PLAN)
        with pytest.raises(LayoutError, match=r"gradients of \['scale'\] differ .* axis 'tp'"):
            model(X).pow(2).mean().backward()


def test_the_check_of_plain_gradients_is_made_once():
    with shardwise.simulate(2):
        model = parallelize_module(Net(), mesh_of(tp=2), PLAN)
        for expected in (1, 0):
            with CommDebugMode() as comm:
                model(X).pow(2).mean().backward()
            checks = [event for event in comm.events if event.op == "a check of plain gradients"]
            assert len(checks) == expected


def test_rows_are_gathered_not_made_dense():
    with shardwise.simulate(2):
        mesh = mesh_of(dp=2)
        table = nn.EmbeddingBag(50, 3, sparse=True, mode="sum")
        expected = deepcopy(table)
        ids = torch.tensor([[1, 2], [2, 7]])
        expected(ids).pow(2).mean().backward()
        data_parallel(table, mesh)
        with CommDebugMode() as comm:
            table(per_rank(ids, lambda rank: rank)).pow(2).mean().backward()
        assert type(table.weight.grad) is torch.Tensor
        assert table.weight.grad.is_sparse
        torch.testing.assert_close(table.weight.grad.to_dense(), expected.weight.grad.to_dense())
        assert max(event.num_bytes for event in comm.events) < 50 * 3 * 4 / 2


def test_a_sparse_gradient_that_nobody_expects_is_reduced_dense():
    with shardwise.simulate(2):
        holder = nn.ParameterDict({"table": nn.Parameter(torch.ones(5, 2))})
        data_parallel(holder, mesh_of(dp=2))
        ids = LocalTensor.per_rank(lambda rank: torch.tensor([rank]))
        F.embedding(ids, holder["table"], sparse=True).sum().backward()
        assert holder["table"].grad[:3].tolist() == [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0]]


def test_tables_stay_as_their_plan_says():
    with shardwise.simulate(2):
        mesh = mesh_of(dp=2)
        tables = EmbeddingBagCollection([Table("t", 6, 4, ["f"])], optimizer=SGD(lr=0.1))
        tables.shard(mesh, "data_parallel")
        fully_shard(nn.Sequential(tables), mesh)
        assert tables.parameter("t").placements == (Replicate(),)


def test_a_collection_that_is_not_sharded_takes_one_batch():
    with shardwise.simulate(2):
        tables = EmbeddingBagCollection([Table("t", 6, 4, ["f"])])
        data_parallel(tables, mesh_of(dp=2))
        ids = LocalTensor.per_rank(lambda rank: torch.arange(rank + 1))
        lengths = LocalTensor.per_rank(lambda rank: torch.tensor([rank + 1]))
        batch = shardwise.embedding.Jagged(["f"], ids, lengths=lengths)
        with pytest.raises(BatchError, match=r"not sharded .*'data_parallel'"):
            tables(batch)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
def test_reduced_gradients_have_no_history():
    with shardwise.simulate(2):
        model = data_parallel(Net(), mesh_of(dp=2))
        with pytest.raises(UnsupportedError, match="create_graph=True"):
            model(per_rank(X, lambda rank: rank)).sum().backward(create_graph=True)


# -- hooks and values that a user puts around a step -----------------------------------------


DOORS_THAT_REPLACE = {
    "fully_shard": lambda model, mesh: fully_shard(model, mesh["dp"]),
    "parallelize_module": lambda model, mesh: parallelize_module(model, mesh, PLAN),
    "distribute_module": lambda model, mesh: shardwise.distribute_module(model, mesh),
}


@pytest.mark.parametrize("door", DOORS_THAT_REPLACE.values(), ids=DOORS_THAT_REPLACE)
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_that_would_be_lost_are_refused(door, kind):
    with shardwise.simulate(4):
        model = Net()
        handle = getattr(model.up.weight, kind)(lambda _: None)
        with pytest.raises(UnsupportedError, match="hooks"):
            door(model, mesh_of(dp=2, tp=2))
        handle.remove()
        door(model, mesh_of(dp=2, tp=2))


@pytest.mark.parametrize("first", [data_parallel, fully_shard])
def test_own_hooks_of_another_front_door_are_no_hooks_of_a_user(first):
    with shardwise.simulate(4):
        mesh = mesh_of(dp=2, tp=2)
        model = first(Net(), mesh["dp"])
        parallelize_module(model, mesh, PLAN)
        assert_alike(model, torch.randn(8, 4), lambda rank: rank // 2)


def test_a_hook_that_would_see_a_gradient_before_its_reduction_is_refused():
    with shardwise.simulate(2):
        model = data_parallel(Net(), mesh_of(dp=2))
        model.up.weight.register_post_accumulate_grad_hook(lambda _: None)
        with pytest.raises(UnsupportedError, match="before it is reduced"):
            gradients(model, per_rank(torch.randn(4, 4), lambda rank: rank))


@pytest.mark.parametrize("door", [data_parallel, fully_shard])
def test_parameters_with_a_history_are_refused(door):
    with shardwise.simulate(2):
        model = door(Net(), mesh_of(dp=2))
        other = {name: 2 * p for name, p in model.named_parameters()}
        with pytest.raises((UnsupportedError, LayoutError), match=r"functional_call|a history"):
            torch.func.functional_call(model, other, (torch.randn(4, 4),))


@pytest.mark.parametrize("door", [data_parallel, fully_shard])
def test_a_penalty_on_parameters_beside_a_rank_own_loss(door):
    def penalized(model, x):
        penalty = sum(p.pow(2).sum() for p in model.parameters())
        (model(x).pow(2).mean() + 0.1 * penalty).backward()
        return parity.gradients(model)

    x = torch.randn(4, 4)
    expected = penalized(Net(), x)
    with shardwise.simulate(2):
        found = penalized(door(Net(), mesh_of(dp=2)), per_rank(x, lambda rank: rank))
    torch.testing.assert_close(found, expected)


def test_a_parameter_that_its_module_computes_is_named():
    with shardwise.simulate(2):
        model = Net()
        nn.utils.parametrizations.weight_norm(model.up)
        with pytest.raises(LayoutError, match="which the module computes"):
            parallelize_module(model, mesh_of(tp=2), PLAN)


def test_a_mesh_of_some_ranks_is_not_a_submesh():
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "dev"))
        data_parallel(shardwise.distribute_module(nn.Linear(2, 2), mesh["dev"]), mesh["host"])
        model = shardwise.distribute_module(nn.Linear(2, 2), shardwise.DeviceMesh("cpu", [0, 1]))
        with pytest.raises(shardwise.LayoutError, match=r"lacks some of ranks \[0, 1, 2, 3\]"):
            data_parallel(model, mesh["host"])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
def test_parameters_that_are_frozen_between_steps(device):
    """One device's gradients; and what all ranks compare is sent after a change alone."""
    x, counts = torch.randn(4, 4, device=device), []  # a mesh warns when no device was used before
    with shardwise.simulate(2):
        model = data_parallel(Net().to(device), shardwise.init_device_mesh(device, (2,)))
        for names in ((), (), ("up.bias",), ("up.bias",), ("norm.weight", "scale"), ()):
            alone = Net().to(device)
            for each in (alone, model):
                each.zero_grad()
                for name, parameter in each.named_parameters():
                    parameter.requires_grad_(name not in names)
            alone(x).mean().backward()
            with CommDebugMode() as comm:
                model(per_rank(x, lambda rank: rank)).mean().backward()
            counts.append(len(comm.events))
            for name, parameter in alone.named_parameters():
                found = model.get_parameter(name).grad
                assert (found is None) == (parameter.grad is None)
                if found is not None:
                    torch.testing.assert_close(found, parameter.grad)
    # A bucket; with what froze, its comparison; and what is trained again.
    assert counts == [1, 1, 2, 1, 3, 3]


def test_a_dtensor_that_is_trained_later_is_reduced_in_backward():
    with shardwise.simulate(2):
        mesh = mesh_of(dp=2)
        model = shardwise.distribute_module(nn.Linear(2, 2), mesh).requires_grad_(False)
        data_parallel(model, mesh)
        x = shardwise.distribute_tensor(torch.ones(4, 2), mesh, [shardwise.Shard(0)])
        for trained in (model.weight, model.bias):
            trained.requires_grad_()
            model(x).sum().backward()
            assert trained.grad.placements == (Replicate(),)
        assert torch.equal(model.bias.grad.full_tensor().agreed(), torch.full((2,), 4.0))
