"""Moves that are started, and awaited when their result is first read."""

import pytest
import torch
import torch.distributed as dist
from by_hand import lay, value

import shardwise
from shardwise import Partial, Replicate, Shard
from shardwise.comm.collectives import Pending
from shardwise.debug import CommDebugMode

PLACES = [Replicate(), Shard(0), Shard(1), Shard(0, sizes=(1, 0, 3, 1)), Partial()]


@pytest.mark.parametrize("before", PLACES, ids=repr)
@pytest.mark.parametrize("after", PLACES, ids=repr)
def test_values_gradients_and_events_are_those_of_a_move_that_waits(mesh, before, after):
    whole, upstream = torch.randn(5, 3).round(), torch.randn(5, 3)
    seen = []
    for async_op in (False, True):
        x = lay(whole, mesh, [before]).requires_grad_()
        with CommDebugMode() as comm:
            moved = x.redistribute(placements=[after], async_op=async_op)
            moved.backward(lay(upstream, mesh, [Shard(1)]))
        assert moved.placements == (after,)
        assert torch.equal(value(moved), whole)
        torch.testing.assert_close(value(x.grad), upstream)
        seen.append([(e.kind, e.axis, e.num_bytes, e.phase, e.op) for e in comm.events])
    assert seen[0] == seen[1]


@pytest.fixture
def alone():
    """A real world of this one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield shardwise.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def started(mesh, **options):
    x = shardwise.distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)])
    return x.redistribute(placements=[Replicate()], async_op=True, **options)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: (x + 1).to_local() - 1,
        lambda x: x.to_local(),
        lambda x: x.full_tensor(),
        lambda x: torch.cat([x, x])[:3].to_local(),
        lambda x: x.redistribute(placements=[Shard(1)]).to_local(),
        lambda x: x.add_(1).sub_(1).to_local(),
        lambda x: x.clone().to_local(),
    ],
    ids=["op", "to_local", "full_tensor", "list", "move", "write", "clone"],
)
def test_the_first_read_waits_and_later_ones_find_the_tensor(alone, read):
    x = started(alone)
    assert type(x._local) is Pending
    for _ in range(2):
        found = read(x)
        assert type(x._local) is torch.Tensor
        assert type(found) is torch.Tensor
        assert torch.equal(found, torch.arange(6.0).view(3, 2))


def test_looking_at_it_does_not_wait(alone):
    x = started(alone)
    assert x.shape == (3, 2)
    assert x._local.shape == (3, 2)
    assert x._local.stride() == (2, 1)
    assert "Pending(shape=(3, 2)" in repr(x)
    assert type(x._local) is Pending
    assert x.sum().item() == 15


@pytest.mark.parametrize(
    "read",
    [
        torch.from_dlpack,
        lambda x: x.apply_(lambda value: value),
        lambda x: x.share_memory_(),
    ],
    ids=["dlpack", "apply", "share"],
)
def test_what_reads_memory_without_an_op_waits(alone, read):
    """Torch would end the process, as a tensor that is pending has no memory."""
    assert torch.equal(read(started(alone)._local), torch.arange(6.0).view(3, 2))


def test_where_nothing_is_sent_nothing_is_pending(alone):
    x = shardwise.distribute_tensor(torch.ones(4), alone, [Replicate()])
    assert type(x.redistribute(placements=[Shard(0)], async_op=True)._local) is torch.Tensor
    assert x.redistribute(placements=[Replicate()], async_op=True) is x


def test_gradients_are_started_too(alone):
    x = shardwise.distribute_tensor(torch.ones(3, 2), alone, [Shard(0)]).requires_grad_()
    y = x.redistribute(placements=[Shard(1)], async_op=True)
    seen = []
    x.register_hook(lambda grad: seen.append(type(grad._local)))
    (y * y).sum().backward()
    assert seen == [Pending]
    assert torch.equal(x.grad.to_local(), torch.full((3, 2), 2.0))


def test_what_is_pending_can_be_copied_saved_and_compiled(alone):
    import copy
    import pickle

    expected = torch.arange(6.0).view(3, 2)
    assert torch.equal(copy.deepcopy(started(alone)).to_local(), expected)
    assert torch.equal(pickle.loads(pickle.dumps(started(alone))).to_local(), expected)
    fast = torch.compile(lambda x: x * 2, backend="aot_eager", fullgraph=True)
    assert torch.equal(fast(started(alone)).to_local(), 2 * expected)
    torch._dynamo.reset()
