"""Gradients are clipped and unscaled as on one device, and every axis of a mesh is asked once."""

import math

import pytest
import torch
from parity import whole
from torch import nn
from torch.nn import functional as F

import shardwise
from shardwise import DTensor, Replicate, Shard
from shardwise.core.placements import NormPartial
from shardwise.debug import CommDebugMode

R, S0, S1 = Replicate(), Shard(0), Shard(1)
SHAPES = [(7, 5), (3, 7), (5, 3), (3, 5), (3, 3), ()]
LINE = [[S0], [S1], [Shard(0, (0, 3, 1, 1))], [R], None, [R]]
SQUARE = [[S0, S1], [R, S1], [S0, S0], [R, R], None, [R, R]]


def with_gradients(place):
    """Parameters whose gradients lie like them."""
    torch.manual_seed(1)
    parameters = []
    for number, shape in enumerate(SHAPES):
        parameter = nn.Parameter(place(number, torch.randn(shape, dtype=torch.float64)))
        (parameter**2).sum().backward()
        parameters.append(parameter)
    return parameters


def plain(number, tensor):
    return tensor


def laid(mesh, plan):
    def place(number, tensor):
        placements = plan[number]
        return (
            tensor if placements is None else shardwise.distribute_tensor(tensor, mesh, placements)
        )

    return place


def assert_gradients(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(whole(one.grad), other.grad)


ORDERS = [2.0, 1.0, 2.5, math.inf, 0.0]


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_norm_on_one_axis(mesh, order, foreach):
    alone, sharded = with_gradients(plain), with_gradients(laid(mesh, LINE))
    expected = nn.utils.clip_grad_norm_(alone, 1.5, norm_type=order)
    with CommDebugMode() as comm:
        total = nn.utils.clip_grad_norm_(sharded, 1.5, norm_type=order, foreach=foreach)
        found = total.item()
    assert found == pytest.approx(expected.item())
    assert_gradients(sharded, alone)
    if order:
        assert [event.kind for event in comm.events] == ["all_reduce"]
        assert [p.grad.placements for p in sharded if isinstance(p, DTensor)] == [
            tuple(placements) for placements in LINE if placements
        ]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_norm_on_two_axes(square, order):
    alone, sharded = with_gradients(plain), with_gradients(laid(square, SQUARE))
    expected = nn.utils.clip_grad_norm_(alone, 1.5, norm_type=order)
    with CommDebugMode() as comm:
        total = nn.utils.clip_grad_norm_(sharded, 1.5, norm_type=order)
        found = total.item()
    assert found == pytest.approx(expected.item())
    assert_gradients(sharded, alone)
    if order:
        assert sorted(event.axis for event in comm.events) == ["cols", "rows"]


def test_norm_over_two_meshes(square):
    line = shardwise.init_device_mesh("cpu", (4,), mesh_dim_names=("line",))
    plan = [(SQUARE[0], square), (SQUARE[1], square), *((each, line) for each in LINE[2:])]

    def place(number, tensor):
        placements, mesh = plan[number]
        return (
            tensor if placements is None else shardwise.distribute_tensor(tensor, mesh, placements)
        )

    alone, sharded = with_gradients(plain), with_gradients(place)
    expected = nn.utils.clip_grad_norm_(alone, 1.5)
    with CommDebugMode() as comm:
        total = nn.utils.clip_grad_norm_(sharded, 1.5)
    assert whole(total).item() == pytest.approx(expected.item())
    assert_gradients(sharded, alone)
    assert sorted(event.axis for event in comm.events) == ["cols", "line", "rows"]


def test_replicas_need_no_collective(mesh):
    sharded = with_gradients(laid(mesh, [[R]] * len(SHAPES)))
    with CommDebugMode() as comm:
        nn.utils.clip_grad_norm_(sharded, 1.5).item()
    assert comm.get_total_counts() == 0


def test_total_norm_of_gradients(mesh):
    alone, sharded = with_gradients(plain), with_gradients(laid(mesh, LINE))
    expected = nn.utils.get_total_norm([p.grad for p in alone])
    total = nn.utils.get_total_norm([p.grad for p in sharded])
    assert total.placements == (NormPartial(norm_type=2.0),)
    torch.testing.assert_close(whole(total), expected)
    nn.utils.clip_grads_with_norm_(sharded, 1.5, total)
    nn.utils.clip_grads_with_norm_(alone, 1.5, expected)
    assert_gradients(sharded, alone)


def test_an_infinite_norm_is_reported(mesh):
    sharded = with_gradients(laid(mesh, LINE))
    sharded[0].grad.fill_(math.inf)
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(sharded, 1.5, error_if_nonfinite=True)


@pytest.mark.parametrize("foreach", [None, True])
def test_values(square, foreach):
    alone, sharded = with_gradients(plain), with_gradients(laid(square, SQUARE))
    nn.utils.clip_grad_value_(alone, 0.7)
    nn.utils.clip_grad_value_(sharded, 0.7, foreach=foreach)
    assert_gradients(sharded, alone)


def test_a_norm_has_a_gradient(mesh):
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    placed = shardwise.distribute_tensor(x.detach(), mesh, [S0]).requires_grad_()
    torch.linalg.vector_norm(x, 3.0).backward()
    torch.linalg.vector_norm(placed, 3.0).backward()
    assert placed.grad.placements == (S0,)
    torch.testing.assert_close(whole(placed.grad), x.grad)


def test_the_order_of_a_norm_is_not_forgotten(mesh):
    """Plans ignore the values of most numbers."""
    x = torch.randn(5, 3, dtype=torch.float64)
    placed = shardwise.distribute_tensor(x, mesh, [S0])
    for order in (2.0, 3.0, 2.0, math.inf):
        torch.testing.assert_close(
            whole(torch.linalg.vector_norm(placed, order)), torch.linalg.vector_norm(x, order)
        )


def test_norms_of_narrow_floats_do_not_overflow(mesh):
    """300 squared is no float16."""
    x = torch.full((8,), 300.0, dtype=torch.float16)
    placed = shardwise.distribute_tensor(x, mesh, [S0])
    assert whole(torch.linalg.vector_norm(placed)) == torch.linalg.vector_norm(x)


# -- gradients that are Partial --------------------------------------------------------------


def model_of(place):
    """Three matrices and a batch; all gradients are sums over the axis that splits the batch."""
    torch.manual_seed(2)
    shapes = [(7, 5), (3, 7), (3, 5)]
    return [nn.Parameter(place(i, torch.randn(s).double())) for i, s in enumerate(shapes)]


def backward(parameters, x, scale=lambda loss: loss):
    deep = F.linear(F.linear(x, parameters[0]).tanh(), parameters[1])
    scale((deep**2).sum() + (F.linear(x, parameters[2]) ** 2).sum()).backward()


DATA = [[R, S0], [R, S1], [R, R]]
CLIPS = {
    "norm": lambda parameters, **how: nn.utils.clip_grad_norm_(parameters, 1.0, **how),
    "value": lambda parameters, **how: nn.utils.clip_grad_value_(parameters, 0.5, **how),
}


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize(("clip", "num"), [("norm", 4), ("value", 3)])
def test_clipped_gradients_are_reduced_once(square, clip, num, foreach):
    """Three gradients; for the norm one more over the axis that shards two of them."""
    x = torch.randn(9, 5, dtype=torch.float64)
    alone, sharded = model_of(plain), model_of(laid(square, DATA))
    for parameters, batch in (
        (alone, x),
        (sharded, shardwise.distribute_tensor(x, square, [S0, R])),
    ):
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.5, nesterov=True)
        backward(parameters, batch)
        with CommDebugMode() as comm:
            CLIPS[clip](parameters, foreach=foreach)
            optimizer.step()
    assert comm.get_total_counts() == num
    for one, other in zip(sharded, alone, strict=True):
        torch.testing.assert_close(whole(one), other.detach())


def test_reduced_first_they_travel_together(square):
    sharded = model_of(laid(square, DATA))
    batch = shardwise.distribute_tensor(torch.randn(9, 5).double(), square, [S0, R])
    backward(sharded, batch)
    with CommDebugMode() as comm:
        shardwise.reduce_gradients(sharded)
        nn.utils.clip_grad_norm_(sharded, 1.0)
        torch.optim.SGD(sharded, lr=0.1).step()
    assert comm.get_total_counts() == 2


def test_a_write_through_an_alias_is_noticed(mesh):
    """The alias shares the terms, so the reduction that is remembered no longer holds."""
    x = shardwise.distribute_tensor(torch.ones(8, 2), mesh, [S0])
    weight = nn.Parameter(shardwise.distribute_tensor(torch.ones(1, 2), mesh, [R]))
    F.linear(x, weight).sum().backward()
    alias = weight.grad.detach()
    assert whole(torch.linalg.vector_norm(weight.grad, math.inf)) == 8
    alias.mul_(2)
    assert whole(weight.grad.abs()).tolist() == [[16, 16]]
    torch._foreach_mul_([alias], 2)
    assert whole(weight.grad.abs()).tolist() == [[32, 32]]
    weight.grad.clamp_(max=5)
    assert whole(alias.abs()).tolist() == [[5, 5]]
    assert weight.grad.placements == alias.placements
    assert weight.grad.placements[0].is_partial("sum")


# -- scaled gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("plan", [DATA, [[S0, S1], [S1, R], None]], ids=["data", "mixed"])
def test_grad_scaler(square, plan, clips, fused):
    """The third batch overflows: both skip it, and halve the scale."""

    def run(place, lay):
        parameters = model_of(place)
        optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        scales = []
        for number in range(5):
            optimizer.zero_grad()
            torch.manual_seed(number)
            x = torch.randn(9, 5, dtype=torch.float64) * (math.inf if number == 2 else 1.0)
            deep = F.linear(F.linear(lay(x), parameters[0]).tanh(), parameters[1])
            scaler.scale((deep**2).sum()).backward()
            last = x if plan[2] is None else lay(x)
            scaler.scale((F.linear(last, parameters[2]) ** 2).sum()).backward()
            if clips:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(parameters, 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return parameters, scales

    alone, expected = run(plain, lambda x: x)
    sharded, found = run(
        laid(square, plan), lambda x: shardwise.distribute_tensor(x, square, [S0, R])
    )
    assert found == expected
    for one, other in zip(sharded, alone, strict=True):
        torch.testing.assert_close(whole(one), other.detach())
