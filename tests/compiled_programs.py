"""Programs of compiled code, for processes of their own: those import them by name."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

import shardwise
from shardwise import Replicate, Shard, distribute_tensor
from shardwise.debug import CommDebugMode


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
