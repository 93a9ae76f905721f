"""explain shows the plans that ran, with what they moved."""

import io

import pytest
import torch
from by_hand import lay
from rich.console import Console
from torch import nn
from torch.distributed import _functional_collectives as functional

import shardwise
from shardwise import LocalTensor, Partial, Replicate, Shard
from shardwise.comm.watch import watch
from shardwise.debug import CommDebugMode, cache_stats, explain
from shardwise.dtensor import autograd, tensor


def placements(layouts):
    return [layout.placements for layout in layouts]


@pytest.fixture
def operands(mesh):
    return lay(torch.ones(64, 4), mesh, [Shard(0)]), lay(torch.ones(4, 4), mesh, [Shard(0)])


def test_a_call_that_moves_an_input(operands):
    found = explain(torch.mm, *operands)
    (call,) = found
    assert call.op == "aten.mm.default"
    assert call.implicit
    assert placements(call.inputs) == [(Shard(0),), (Shard(0),)]
    assert placements(call.outputs) == [(Shard(0),)]
    stays, (moved,) = call.moves
    assert stays == ()
    assert (moved.step.kind, moved.step.axis, moved.num_bytes) == ("all_gather", 0, 16)
    assert moved.cost_s == call.cost_s == found.cost_s > 0
    assert found.num_bytes == call.num_bytes == 16
    assert torch.equal(found.result.full_tensor().agreed(), torch.full((64, 4), 4.0))


def test_the_plan_is_the_one_in_the_cache(operands):
    first = explain(torch.mm, *operands)[0]
    again = explain(torch.mm, *operands)[0]
    assert first.plan is again.plan
    assert first.plan in [entry.plan for entry in tensor._entries.values()]
    assert first.moves == again.moves


def test_calls_come_in_order_with_their_lines(mesh):
    x = lay(torch.ones(8, 4), mesh, [Shard(0)])

    def program():
        y = x.relu()
        z = y + 1
        return z.sum()

    calls = explain(program)
    assert [call.op for call in calls] == [
        "aten.relu.default",
        "aten.add.Tensor",
        "aten.sum.default",
    ]
    lines = [int(call.place.line.removeprefix("test_explain.py:")) for call in calls]
    assert lines == [lines[0], lines[0] + 1, lines[0] + 2]
    assert placements(calls[-1].outputs) == [(Partial(),)]
    assert not any(call.implicit or call.events for call in calls)


def test_explicit_redistributions_appear(square):
    x = lay(torch.ones(8, 4), square, [Shard(0), Partial()])
    found = explain(lambda: x.redistribute(placements=[Replicate(), Shard(0)]))
    (call,) = found
    assert (call.op, call.implicit, call.plan) == ("redistribute", False, None)
    assert placements(call.inputs) == [(Shard(0), Partial())]
    assert placements(call.outputs) == [(Replicate(), Shard(0))]
    (moves,) = call.moves
    assert [m.num_bytes for m in moves if m.step.communicates] == [
        event.num_bytes for event in call.events
    ]
    assert found.num_bytes > 0


def test_a_step_without_communication_sends_nothing(mesh):
    x = lay(torch.ones(8), mesh, [Replicate()])
    (call,) = explain(lambda: x.redistribute(placements=[Shard(0)]))
    ((move,),) = call.moves
    assert (move.step.kind, move.num_bytes, call.events) == ("slice", 0, ())


def test_a_reduction_that_is_remembered_is_not_shown_as_sent(mesh):
    grad = lay(torch.ones(8), mesh, [Partial()])
    x = lay(torch.ones(8), mesh, [Replicate()])
    found = explain(lambda: (x.add_(grad), x.add_(grad)))
    assert [call.moves[1][0].ran for call in found] == [True, False]
    assert len(found.events) == 1
    assert "done by an earlier call" in str(found)


def test_training_is_explained_with_modules_and_phases(mesh):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    for layer, placement in ((model[0], Shard(0)), (model[2], Shard(1))):
        for name, parameter in list(layer.named_parameters()):
            to = placement if name == "weight" or placement == Shard(0) else Replicate()
            placed = shardwise.distribute_tensor(parameter.data, mesh, [to])
            layer.register_parameter(name, nn.Parameter(placed))
    x = lay(torch.randn(4, 8), mesh, [Shard(0)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train():
        model(x).redistribute(placements=[Replicate()]).square().mean().backward()
        optimizer.step()

    with CommDebugMode() as comm:
        found = explain(train)
    assert found.events == [e for call in found for e in call.events] == comm.events
    assert found.num_bytes == comm.get_total_bytes()
    linear = [call for call in found if call.op == "aten.linear.default"]
    assert [call.place.module for call in linear] == ["0", "2"]
    backward = [call for call in found if call.place.phase == "backward"]
    assert {call.place.module for call in backward if call.op == "linear_weight_grad"} == {"0", "2"}
    assert not any("add_" in call.op for call in found)  # the step ran on local tensors


def test_collectives_that_no_plan_made_have_their_own_entry(mesh):
    mine = LocalTensor.per_rank(lambda rank: torch.ones(3))
    layer = shardwise.distribute_module(nn.Linear(3, 3), mesh)
    layer(lay(torch.ones(4, 3), mesh, [Shard(0)])).square().sum().backward()

    def program():
        functional.all_reduce(mine, "sum", mesh)
        shardwise.reduce_gradients(layer.parameters())

    found = explain(program)
    assert [(call.op, call.implicit) for call in found if call.events] == [
        ("all_reduce", False),
        ("reduce_gradients", False),
    ]
    assert found[0].num_bytes == 12
    assert "called directly" in str(found)


def test_the_text_has_a_line_for_each_call_and_each_move(operands):
    x, w = operands
    text = str(explain(lambda: (x @ w).full_tensor()))
    lines = text.splitlines()
    assert lines[0] == "forward"
    assert lines[1].startswith("  1  aten.mm.default  64x4 [S(0)], 4x4 [S(0)] -> 64x4 [S(0)]")
    assert lines[2].strip() == (
        "input 1: all_gather over '0', S(0) -> R, 16 bytes, about 20.0 µs (implicit)"
    )
    assert lines[3].startswith("  2  redistribute")
    assert lines[4].strip().startswith("all_gather over '0', S(0) -> R, 256 bytes, about")
    assert lines[5].startswith("2 calls, 2 collectives (1 implicit), 272 bytes per rank, about")
    assert len(lines) == 6


def test_the_table_shows_the_same(operands):
    console = Console(width=200, file=io.StringIO())
    console.print(explain(torch.mm, *operands))
    printed = console.file.getvalue()
    assert "64x4 [S(0)], 4x4 [S(0)] -> 64x4 [S(0)]" in printed
    assert "input 1: all_gather over '0'" in printed


def test_a_function_without_distributed_tensors():
    found = explain(lambda: torch.ones(3) + 1)
    assert len(found) == 0
    assert str(found) == "0 calls, 0 collectives (0 implicit), 0 bytes per rank, about 0.0 µs"


def test_explanations_inside_each_other(operands):
    x, w = operands
    inside = []

    def program():
        x.relu()
        inside.append(explain(torch.mm, x, w))
        return x + 1

    found = explain(program)
    assert [call.op for call in inside[0]] == ["aten.mm.default"]
    assert [call.op for call in found] == [
        "aten.relu.default",
        "aten.mm.default",
        "aten.add.Tensor",
    ]
    assert len(found.events) == len(inside[0].events) == 1


def test_nothing_is_left_behind(operands):
    x, w = operands
    table, move = tensor._entries, autograd.move
    with pytest.raises(ZeroDivisionError):
        explain(lambda: (x @ w) / (1 // 0))
    assert (tensor._entries, autograd.move) == (table, move)
    assert tensor._entries is table
    assert (watch.on, watch.notes, watch.watchers) == (False, None, 0)


def test_explaining_plans_nothing_anew(operands):
    torch.mm(*operands)
    before = cache_stats()
    explain(torch.mm, *operands)
    after = cache_stats()
    assert (after.misses, after.size) == (before.misses, before.size)
    assert after.hits == before.hits + 1


def test_a_world_that_comes_and_goes_inside():
    def program():
        with shardwise.simulate(2):
            mesh = shardwise.init_device_mesh("cpu", (2,))
            return (lay(torch.ones(4), mesh, [Shard(0)]) + 1).full_tensor().agreed()

    found = explain(program)
    assert [call.op for call in found] == ["aten.add.Tensor", "redistribute"]
    assert found.result.tolist() == [2.0] * 4
    assert cache_stats().size == 0
