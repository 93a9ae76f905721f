"""A parallel module trains as on one device."""

from copy import deepcopy

import pytest
import torch
from parallel_models import (
    MLP,
    Block,
    TiedLM,
    assert_trains_alike,
    sequence_plan,
    squared,
    whole,
)
from parallel_programs import PLAN
from parity import place, train
from torch import nn
from torch.nn import functional as F

import shardwise
from shardwise import DTensor, LocalTensor, Replicate, Shard, distribute_tensor
from shardwise.debug import CommDebugMode
from shardwise.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    data_parallel,
    fully_shard,
    parallelize_module,
)

MLP_PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def pairs(*shape, num=3):
    return [(torch.randn(shape), torch.randn(shape)) for _ in range(num)]


@pytest.mark.parametrize("hidden", [12, 10, 3])
def test_mlp_with_plain_activations(mesh, hidden):
    """12 divides by the four ranks, 10 does not, 3 leaves a rank with nothing."""
    assert_trains_alike(MLP(hidden=hidden), mesh, MLP_PLAN, pairs(5, 8))


def test_mlp_with_distributed_activations(mesh):
    plan = {
        "up": ColwiseParallel(use_local_output=False),
        "down": RowwiseParallel(use_local_output=False),
    }
    assert_trains_alike(
        MLP(hidden=10), mesh, plan, pairs(5, 8), enter=lambda x: distribute_tensor(x, mesh)
    )


def test_mlp_communicates_once_forward_and_once_backward(mesh):
    model = parallelize_module(MLP(), mesh, MLP_PLAN)
    x = torch.randn(5, 8, requires_grad=True)
    with CommDebugMode() as comm:
        model(x).sum().backward()
    assert [event.kind for event in comm.events] == ["all_reduce", "all_reduce"]


BLOCK_PLAN = {"norm[12]": "replicate", **PLAN}


def test_block(mesh):
    assert_trains_alike(Block(), mesh, BLOCK_PLAN, pairs(2, 6, 8))


def test_block_with_plain_norms(mesh):
    plan = {k: v for k, v in BLOCK_PLAN.items() if "norm" not in k}
    assert_trains_alike(Block(), mesh, plan, pairs(2, 6, 8))


@pytest.mark.parametrize("length", [8, 6])
def test_block_with_sequence_parallelism(mesh, length):
    assert_trains_alike(Block(), mesh, sequence_plan(), pairs(2, length, 8))


def test_sequence_parallelism_sends_no_more_than_plain(mesh):
    model = parallelize_module(Block(), mesh, BLOCK_PLAN)
    with CommDebugMode() as comm:
        model(torch.ones(2, 8, 8))
    assert [event.kind for event in comm.events] == ["all_reduce"] * 2
    plan = sequence_plan()
    del plan[""]
    model = parallelize_module(Block(), mesh, plan)
    x = shardwise.ones(2, 8, 8, device_mesh=mesh, placements=[Shard(1)])
    with CommDebugMode() as comm:
        model(x)
    kinds = [event.kind for event in comm.events]
    assert kinds == ["all_gather_into_tensor", "reduce_scatter_tensor"] * 2


def next_token(model, ids, target):
    return F.cross_entropy(model(ids).flatten(0, -2), target.flatten())


def tokens(num=3):
    return [(torch.randint(11, (2, 5)), torch.randint(11, (2, 5))) for _ in range(num)]


TIED_PLANS = {
    "both named": {
        "embed": "rowwise",
        "head": "colwise_rep",
        "mlp.up": "colwise",
        "mlp.down": "rowwise",
    },
    "embedding": {"embed": "rowwise", "mlp.up": "colwise", "mlp.down": "rowwise"},
    "columns": {"embed": "colwise_rep"},
    "head": {"head": "colwise_rep", "mlp": "replicate"},
}


@pytest.mark.parametrize("plan", TIED_PLANS.values(), ids=TIED_PLANS.keys())
def test_tied_embedding_and_head(mesh, plan):
    """The vocabulary of 11 does not divide by 4."""
    model = assert_trains_alike(TiedLM(), mesh, plan, tokens(), next_token)
    assert model.head.weight is model.embed.weight
    assert isinstance(model.head.weight, DTensor)


DISTRIBUTED_PLAN = {
    "norm[12]": SequenceParallel(),
    "attention.[qkv]": ColwiseParallel(use_local_output=False),
    "attention.o": RowwiseParallel(use_local_output=False),
    "mlp.up": ColwiseParallel(use_local_output=False),
    "mlp.down": RowwiseParallel(use_local_output=False),
}


def two_axes(order):
    sizes = {"dp": 2, "tp": 2}
    return shardwise.init_device_mesh(
        "cpu", tuple(sizes[name] for name in order), mesh_dim_names=order
    )


@pytest.mark.parametrize("order", [("dp", "tp"), ("tp", "dp")])
def test_batch_over_a_data_axis(order):
    with shardwise.simulate(4):
        mesh = two_axes(order)
        placements = [Shard(0) if name == "dp" else Replicate() for name in order]
        assert_trains_alike(
            Block(),
            mesh,
            DISTRIBUTED_PLAN,
            pairs(4, 6, 8),
            enter=lambda x: distribute_tensor(x, mesh, placements),
        )


def test_three_axes():
    with shardwise.simulate(8):
        mesh = shardwise.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        plan = {
            "up": ColwiseParallel(use_local_output=False),
            "down": RowwiseParallel(use_local_output=False),
        }
        placements = [Shard(0), Shard(0), Replicate()]
        assert_trains_alike(
            MLP(), mesh, plan, pairs(8, 8), enter=lambda x: distribute_tensor(x, mesh, placements)
        )


def test_three_axes_two_of_them_for_data():
    """Parameters in pieces over one data axis, gradients reduced over the other, plain batches."""
    model, x = TiedLM(), torch.randint(11, (8, 3))
    reference = deepcopy(model)
    next_token(reference, x, x).backward()
    with shardwise.simulate(8):
        mesh = shardwise.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "fsdp", "tp"))
        plan = {"embed": "rowwise", "mlp.up": "colwise", "mlp.down": "rowwise"}
        parallelize_module(model, mesh, plan)
        fully_shard(model, mesh["fsdp"])
        data_parallel(model, mesh["dp"])
        mine = LocalTensor.per_rank(lambda rank: x.chunk(4)[rank // 2])
        next_token(model, mine, mine).backward()
        for name, parameter in model.named_parameters():
            dp, fsdp, _ = parameter.grad.placements
            assert dp == Replicate(), name
            assert fsdp.is_shard(0), name
            wanted = reference.get_parameter(name).grad
            torch.testing.assert_close(whole(parameter.grad), wanted, msg=name)
    assert model.head.weight is model.embed.weight


def test_deepcopy_of_a_parallel_module(mesh):
    model = parallelize_module(MLP(), mesh, MLP_PLAN)
    x = torch.randn(5, 8)
    torch.testing.assert_close(deepcopy(model)(x).agreed(), model(x).agreed())


def test_frozen_parameters_stay_frozen(mesh):
    layer = nn.Linear(4, 4)
    layer.weight.requires_grad_(False)
    parallelize_module(layer, mesh, "colwise")
    assert not layer.weight.requires_grad
    assert layer.bias.requires_grad


@pytest.mark.parametrize("order", [("dp", "tp"), ("tp", "dp")])
def test_parameters_sharded_over_the_data_axis_too(order):
    with shardwise.simulate(4):
        mesh = two_axes(order)
        placements = [Shard(0) if name == "dp" else Replicate() for name in order]
        model, data = Block(hidden=10), pairs(4, 6, 8)
        expected = train(deepcopy(model), squared, data)
        parallelize_module(model, mesh, DISTRIBUTED_PLAN)
        fully_shard(model, mesh["dp"])
        found = train(model, squared, place(data, mesh, placements))
        torch.testing.assert_close(found, expected)
        axis = order.index("dp")
        for name, parameter in model.named_parameters():
            assert parameter.placements[axis].is_shard(0), name
            assert parameter.grad.placements == parameter.placements, name


def test_sharded_parameters_are_gathered_and_reduced_together():
    with shardwise.simulate(4):
        mesh = two_axes(("dp", "tp"))
        model = MLP()
        plan = {name: DISTRIBUTED_PLAN[f"mlp.{name}"] for name in ("up", "down")}
        parallelize_module(model, mesh, plan)
        fully_shard(model, mesh["dp"])
        x = shardwise.ones(4, 8, device_mesh=mesh, placements=[Shard(0), Replicate()])
        with CommDebugMode() as comm:
            model(x).sum().backward()
        along_data = [event.kind for event in comm.events if event.axis == "dp"]
        assert along_data == ["all_gather_into_tensor", "reduce_scatter_tensor"]
        assert type(model.up.weight) is type(next(model.parameters()))


@pytest.mark.parametrize("plan", [BLOCK_PLAN, sequence_plan()], ids=["plain", "sequence"])
def test_styles_communicate_nothing_that_is_not_written_down(mesh, plan):
    model = parallelize_module(Block(), mesh, plan)
    with shardwise.explicit_redistribution():
        model(torch.randn(2, 8, 8)).pow(2).mean().backward()


def test_an_axis_of_one_rank_sends_nothing():
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        model = parallelize_module(Block(), mesh, BLOCK_PLAN)
        with CommDebugMode() as comm:
            model(torch.randn(2, 8, 8)).pow(2).mean().backward()
        assert [event for event in comm.events if event.axis == "tp"] == []
