"""Experts in parts: one device's numbers, whatever the tokens choose."""

from copy import deepcopy

import pytest
import torch
from parallel_models import Experts, Mixture, assert_trains_alike, squared, whole
from parity import train
from torch import nn

import shardwise
from shardwise import LayoutError, LocalTensor, Shard, UnsupportedError
from shardwise.debug import CommDebugMode
from shardwise.parallel import (
    ExpertParallel,
    check_plan,
    data_parallel,
    fully_shard,
    parallelize_module,
)

PLAN = {"experts": "experts"}


def pairs(num_tokens=10, num=3):
    return [(torch.randn(num_tokens, 8), torch.randn(num_tokens, 8)) for _ in range(num)]


@pytest.mark.parametrize("num_experts", [8, 6, 3])
def test_trains_as_on_one_device(mesh, num_experts):
    """8 experts divide by the four ranks, 6 do not, 3 leave a rank with none."""
    model = assert_trains_alike(Mixture(num_experts), mesh, PLAN, pairs())
    placements = {name: p.placements[0] for name, p in model.experts.named_parameters()}
    assert placements == {
        "up": Shard(0),
        "bias": Shard(0),
        "down": Shard(0),
        "scale": shardwise.Replicate(),
    }


def test_a_rank_whose_experts_nobody_chose(mesh):
    experts = Experts(8)
    tokens = torch.randn(5, 8, requires_grad=True)
    chosen, weights = torch.zeros(5, 1, dtype=torch.long), torch.ones(5, 1)
    expected = deepcopy(experts)
    expected(tokens, chosen, weights).sum().backward()
    wanted, tokens.grad = tokens.grad, None
    parallelize_module(experts, mesh, "experts")
    experts(tokens, chosen, weights).sum().backward()
    torch.testing.assert_close(whole(tokens.grad), wanted)
    for name, parameter in experts.named_parameters():
        torch.testing.assert_close(whole(parameter.grad), expected.get_parameter(name).grad)


def test_one_sum_forward_and_one_each_for_tokens_and_weights_backward(mesh):
    experts = parallelize_module(Experts(8), mesh, "experts")
    tokens, weights = torch.randn(10, 8, requires_grad=True), torch.rand(10, 2, requires_grad=True)
    with CommDebugMode() as comm:
        out = experts(tokens, torch.randint(8, (10, 2)), weights)
        assert [(e.kind, e.num_bytes) for e in comm.events] == [("all_reduce", 10 * 8 * 4)]
        out.sum().backward()
    backward = {(e.kind, e.num_bytes) for e in comm.events[1:]}
    assert backward == {("all_reduce", 10 * 8 * 4), ("all_reduce", 10 * 2 * 4)}
    assert len(comm.events) == 3


def two_axes():
    return shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@pytest.mark.parametrize("in_pieces", [False, True])
def test_with_a_data_axis(in_pieces):
    """Each row of ranks has its own tokens; the experts' parameters may lie in pieces too."""
    model, data = Mixture(), pairs()
    reference = deepcopy(model)
    train(reference, squared, data)
    with shardwise.simulate(4):
        mesh = two_axes()
        parallelize_module(model, mesh, {"router": "replicate", **PLAN})
        if in_pieces:
            fully_shard(model, mesh["dp"])
        else:
            data_parallel(model, mesh["dp"])

        def own_mean(model, *batch):
            """The loss of each row of ranks, on its half of the batch."""
            halves = [LocalTensor.per_rank(lambda rank, x=x: x.chunk(2)[rank // 2]) for x in batch]
            squared(model, *halves).backward()
            return torch.zeros((), requires_grad=True)

        train(model, own_mean, data)
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(whole(model.get_parameter(name)), parameter.detach())


def test_a_copy_runs_its_own_experts(mesh):
    model = parallelize_module(Mixture(), mesh, PLAN)
    copied = deepcopy(model)
    x = torch.randn(4, 8)
    torch.testing.assert_close(copied(x).agreed(), model(x).agreed())
    with torch.no_grad():
        copied.experts.down.zero_()
    torch.testing.assert_close(copied(x).agreed(), x)
    assert not torch.equal(model(x).agreed(), x)


def test_what_is_no_stack_of_experts(mesh):
    with pytest.raises(UnsupportedError, match="Module '0' is a Linear without stacked experts"):
        parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh, {"0": "experts"})
    with pytest.raises(TypeError, match="one placement"):
        ExpertParallel(output_layouts="whole")


def test_inputs_of_other_shapes(mesh):
    model = parallelize_module(Mixture(), mesh, PLAN)
    with pytest.raises(LayoutError, match=r"Module 'experts'.* found \(2, 5, 8\)"):
        model(torch.randn(2, 5, 8))


def test_report_counts_the_experts_of_each_rank():
    report = check_plan(Mixture(6), PLAN, 4)
    of_one = (12 * 8 + 12 + 8 * 12) * 4
    rest = (8 * 6 + 6 + 8) * 4
    assert report.bytes_per_rank == tuple(of_one * n + rest for n in (2, 2, 2, 0))
