"""torch.compile in real processes: ranks whose shards differ in length stay in step."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import shardwise
from shardwise import Replicate, Shard, distribute_tensor
from shardwise.debug import CommDebugMode

pytestmark = pytest.mark.processes


def lookup(ids, table):
    return F.embedding(ids, table).redistribute(placements=[Replicate()]) * 2


def run(fn, ids, table):
    with CommDebugMode() as comm:
        out = fn(ids, table)
        (grad,) = torch.autograd.grad(out.square().sum(), table)
    kinds = sorted((event.kind, event.num_bytes) for event in comm.events)
    return out.to_local().detach(), grad.full_tensor(), kinds


def uneven_lookups(backend, totals):
    """Per number of ids: how many this rank has, and what the compiled code did."""
    torch._dynamo.reset()
    mesh = shardwise.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    table = distribute_tensor(torch.randn(11, 6), mesh, [Shard(0)]).requires_grad_()
    fast = torch.compile(lookup, backend=backend, fullgraph=True)  # dynamic=None, the default
    found = []
    for total in totals:
        ids = distribute_tensor(torch.randint(0, 11, (total,)), mesh, [Shard(0)])
        expected = run(lookup, ids, table)
        run(fast, ids, table)  # compiling may count nothing
        result = run(fast, ids, table)
        for one, other in zip(result[:2], expected[:2], strict=True):
            torch.testing.assert_close(one, other)
        found.append((len(ids.to_local()), result[2]))
    return found


def test_ranks_with_other_numbers_of_ids_stay_in_step(processes):
    """The second length makes sizes symbolic, on some ranks earlier than on others."""
    answers = processes(uneven_lookups, "aot_eager", (8, 9, 5, 2, 1, 13), timeout_s=300)
    for by_rank in zip(*answers, strict=True):
        sent = {tuple(kinds) for _, kinds in by_rank}
        assert len(sent) == 1
        assert sent != {()}
    assert [[held for held, _ in answer] for answer in answers] == [
        [2, 3, 2, 1, 1, 4],
        [2, 3, 2, 1, 0, 4],
        [2, 3, 1, 0, 0, 4],
        [2, 0, 0, 0, 0, 1],
    ]
