"""What planning decides is found again in the next world, and nothing of a world is kept."""

import gc
import weakref

import pytest
import torch
from torch.nn import functional as F

import shardwise
from shardwise import Partial, Replicate, Shard, distribute_tensor
from shardwise.debug import CommDebugMode
from shardwise.dispatch import catalog, plan
from shardwise.dispatch.rule import Choice, LocalCall, Rule

R, S0, S1 = Replicate(), Shard(0), Shard(1)


@pytest.fixture
def decided(monkeypatch):
    """The ops that were decided since, not found; no earlier decision is known."""
    ops = []
    propagate = plan.propagate

    def noted(rule, call, *args, **kwargs):
        ops.append(call.op)
        return propagate(rule, call, *args, **kwargs)

    monkeypatch.setattr(plan, "propagate", noted)
    monkeypatch.setattr(plan, "_decisions", {})
    return ops


def steps(mesh):
    """A lookup, a product that communicates, a view, writes, and the gradients."""
    x = distribute_tensor(torch.randn(6, 5), mesh, [S0])
    w = distribute_tensor(torch.randn(5, 5), mesh, [S1]).requires_grad_()
    ids = distribute_tensor(torch.arange(6) % 5, mesh, [R])
    out = F.softmax(x @ w, 1) + F.embedding(ids, w)
    out.view(3, 10).sum(0).square().sum().backward()
    return x, w, out.add_(x)


def played(size):
    torch.manual_seed(0)
    with shardwise.simulate(size), CommDebugMode() as comm:
        _, w, out = steps(shardwise.init_device_mesh("cpu", (size,)))
        results = [out.full_tensor().tolist(), w.grad.full_tensor().tolist()]
    return results, [str(event) for event in comm.events]


def test_the_next_world_finds_what_was_decided(decided):
    results, events = played(4)
    assert len(decided) > 10
    decided.clear()
    again, events_again = played(4)
    assert not decided
    assert events_again == events
    assert again == results


def test_a_world_of_another_size_decides_for_itself(decided):
    played(4)
    ops = set(decided)
    decided.clear()
    played(3)
    assert set(decided) == ops


def test_layouts_and_tensors_are_let_go(decided, monkeypatch):
    def keeps_its_call(call):
        yield Choice((S0,), (S0,), LocalCall(lambda x: x.tanh() if call.args else None))

    monkeypatch.setitem(catalog.CATALOG, torch.ops.aten.tanh.default, Rule(keeps_its_call, ""))
    catalog.find_rule.cache_clear()
    with shardwise.simulate(4):
        tensors = steps(shardwise.init_device_mesh("cpu", (4,)))
        tensors = (*tensors, tensors[0].tanh())
        held = [weakref.ref(each) for x in tensors for each in (x, x._layout, x._local)]
    del tensors
    known = plan._decisions
    monkeypatch.undo()
    catalog.find_rule.cache_clear()
    gc.collect()
    assert known
    assert not [each for ref in held if (each := ref()) is not None]


def test_there_are_only_so_many(decided, monkeypatch):
    monkeypatch.setattr(plan, "_MAX_DECISIONS", 5)
    played(4)
    assert 0 < len(plan._decisions) <= 5


def test_other_arguments_are_decided_anew(decided):
    """Equal values of other types, placements, and the dtype that numbers get."""

    def divided():
        with shardwise.simulate(4):
            mesh = shardwise.init_device_mesh("cpu", (4,))
            x = distribute_tensor(torch.arange(8), mesh, [S0])
            return [(x + y).dtype for y in (1, 1.0, True)] + [(x / 2).dtype]

    assert divided() == [torch.int64, torch.float32, torch.int64, torch.float32]
    torch.set_default_dtype(torch.float64)
    try:
        assert divided() == [torch.int64, torch.float64, torch.int64, torch.float64]
    finally:
        torch.set_default_dtype(torch.float32)
    assert divided() == [torch.int64, torch.float32, torch.int64, torch.float32]


def test_a_write_that_is_refused_is_refused_in_each_world(decided):
    for _ in range(2):
        with shardwise.simulate(4):
            mesh = shardwise.init_device_mesh("cpu", (4,))
            x = distribute_tensor(torch.ones(4), mesh, [Partial()]).expand(3, 4)
            with pytest.raises(shardwise.UnsupportedError, match="one entry stands for all"):
                x.mul_(2)
