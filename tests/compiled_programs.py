"""Programs of compiled code, for processes of their own: those import them by name."""

import torch
import torch.distributed as dist
from torch import nn
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


def sparse_steps(bags, placement, ids_placement):
    """The table after three steps whose graph breaks at a lookup, and the same on one device."""
    torch._dynamo.reset()
    mesh = shardwise.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    kind = nn.EmbeddingBag if bags else nn.Embedding
    options = {"mode": "sum"} if bags else {}
    one, sharded = (kind(11, 6, sparse=True, **options) for _ in range(2))
    sharded.weight = nn.Parameter(distribute_tensor(one.weight.detach().clone(), mesh, [placement]))
    batches = torch.randint(0, 11, (3, 5, 2))

    def loss(model, ids):
        return (model(ids * 1).relu() * 2).square().sum()

    fast = torch.compile(loss, backend="aot_eager")
    steps = [torch.optim.SparseAdam(each.parameters(), lr=0.1) for each in (one, sharded)]
    for ids in batches:
        loss(one, ids).backward()
        fast(sharded, distribute_tensor(ids, mesh, [ids_placement])).backward()
        for each in steps:
            each.step()
            each.zero_grad()
    return sharded.weight.detach().full_tensor(), one.weight.detach()
