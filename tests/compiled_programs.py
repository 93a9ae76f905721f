"""Programs of compiled code, for processes of their own: those import them by name."""

import io

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import shardwise
from shardwise import DTensor, Replicate, Shard, distribute_tensor
from shardwise.debug import CommDebugMode
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


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


def graphs_of_batches(rows):
    """How many graphs there are after each batch: it is multiplied and gathered."""

    def fn(x, w):
        return (x @ w).relu().redistribute(placements=[Replicate()]).softmax(0)

    torch._dynamo.reset()
    mesh = shardwise.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    w = distribute_tensor(torch.randn(6, 5, dtype=torch.float64), mesh, [Shard(0)]).requires_grad_()
    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(fn, backend=counter, fullgraph=True)
    counts = []
    for batch in rows:
        x = distribute_tensor(
            torch.randn(batch, 6, dtype=w.dtype), mesh, [Shard(0)]
        ).requires_grad_()
        found, expected = (torch.autograd.grad(f(x, w).square().sum(), (x, w)) for f in (fast, fn))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.full_tensor(), other.full_tensor())
        counts.append(counter.frame_count)
    return counts


def sparse_steps(bags, placement, ids_placement, backend="aot_eager"):
    """The table after three steps with sparse gradients, compiled, and the same on one device."""
    torch._dynamo.reset()
    mesh = shardwise.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    kind = nn.EmbeddingBag if bags else nn.Embedding
    options = {"mode": "sum"} if bags else {}
    one, sharded = (kind(11, 6, sparse=True, **options) for _ in range(2))
    sharded.weight = nn.Parameter(distribute_tensor(one.weight.detach().clone(), mesh, [placement]))
    batches = [torch.randint(0, 11, (size, 2)) for size in (5, 8, 13)]

    def loss(model, ids):
        return (model(ids * 1).relu() * 2).square().sum()

    fast = torch.compile(loss, backend=backend, fullgraph=True)
    steps = [torch.optim.SparseAdam(each.parameters(), lr=0.1) for each in (one, sharded)]
    for ids in batches:
        loss(one, ids).backward()
        fast(sharded, distribute_tensor(ids, mesh, [ids_placement])).backward()
        assert sharded.weight.grad.is_sparse
        for each in steps:
            each.step()
            each.zero_grad()
    return sharded.weight.detach().full_tensor(), one.weight.detach()


class Moving(nn.Module):
    """Columns of the input meet columns of the weight, and each rank keeps some rows of the sum."""

    def __init__(self, mesh):
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.randn(6, 12), mesh, [Shard(1)]))

    def forward(self, x):
        terms = F.linear(x.redistribute(placements=[Shard(1)]), self.weight)
        return terms.redistribute(placements=[Shard(0)])


def collectives_of_graphs():
    """Per model: the collectives in its graphs, those that eager code issues, and compiled code."""
    torch._dynamo.reset()
    mesh = shardwise.init_device_mesh("cpu", (dist.get_world_size(),))
    x = distribute_tensor(torch.randn(8, 12), mesh, [Shard(0)])
    layers = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 14))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    models = [
        (parallelize_module(layers, mesh, plan), x.full_tensor()),
        (Moving(mesh), x),
    ]
    return [_collectives(model, x.requires_grad_()) for model, x in models]


def _collectives(model, x):
    marks = []

    def read(graph, inputs):
        names = [str(node.target).split(".") for node in graph.graph.nodes]
        marks.extend(name[1] for name in names if name[0] == "_c10d_functional")
        return make_boxed_func(graph.forward)

    def step(run):
        with CommDebugMode() as comm:
            run(x).square().mean().backward()
        return sorted(event.kind for event in comm.events)

    expected = step(model)
    model.zero_grad()
    backend = aot_autograd(fw_compiler=read, bw_compiler=read)
    fast = torch.compile(model, backend=backend, fullgraph=True)
    step(fast)
    model.zero_grad()
    return sorted(marks), expected, step(fast)


def made_inside(backend):
    """What factories give in a region and outside, and where they leave the generator."""
    torch._dynamo.reset()
    mesh = shardwise.init_device_mesh("cpu", (dist.get_world_size(),))  # new to the region
    rows = {"device_mesh": mesh, "placements": [Shard(0)]}

    def made(x):
        mask = distribute_tensor(torch.ones(x.shape[0], 5).tril(), mesh, [Shard(1)])
        return (
            x + shardwise.zeros(x.shape, **rows) + shardwise.rand(x.shape, **rows),
            x * shardwise.full((7, 5), 2, **rows) - shardwise.ones(5, device_mesh=mesh),
            shardwise.randn(3, 16, device_mesh=mesh, placements=[Shard(1)]) * 2,
            shardwise.randint(2, 90, (7, 5), **rows) + shardwise.empty(7, 5, **rows).fill_(3),
            shardwise.randperm(9, device_mesh=x.device_mesh, placements=[Shard(0)]),
            mask * torch.rand_like(x) + x.new_zeros(7, 5) + torch.full_like(x, 4),
        )

    options = {"options": {"fallback_random": True}} if backend == "inductor" else {}
    fast = torch.compile(made, backend=backend, fullgraph=True, **options)
    x = distribute_tensor(torch.arange(35.0).view(7, 5), mesh, [Shard(0)])
    found = []
    for run in (made, fast):
        torch.manual_seed(0)
        outs = run(x)
        found.append([(o.dtype, o.placements, o.full_tensor()) for o in outs])
        found[-1].append(torch.get_rng_state())
    return found


class DoorsAndLayers(nn.Module):
    """Makes DTensors of plain ones, of a mesh that the program names."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        layers = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 14))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        self.layers = parallelize_module(layers, mesh, plan)

    def forward(self, x):
        rows = DTensor.from_local(x, self.mesh, [Replicate()]).redistribute(placements=[Shard(0)])
        ones = shardwise.ones(6, 10, device_mesh=self.mesh)
        return self.layers((rows * 2 + ones).full_tensor())


def exported(x, mesh):
    """A program as a file, and what it gives."""
    program, file = torch.export.export(DoorsAndLayers(mesh), (x,)), io.BytesIO()
    torch.export.save(program, file)
    return file.getvalue(), program.module()(x).detach()


def loaded(file, x):
    """What a program gives where nobody has made its mesh."""
    return torch.export.load(io.BytesIO(file)).module()(x).detach()


def beside_a_gradient():
    """Inductor, sizes that are symbols, and an input whose gradient adds up."""
    torch._dynamo.reset()
    mesh = shardwise.init_device_mesh("cpu", (dist.get_world_size(),))
    x = distribute_tensor(torch.ones(9, 4), mesh, [Shard(0)]).requires_grad_()
    fast = torch.compile(lambda x: x * 3, dynamic=True, fullgraph=True)
    for run in (torch.square, fast):
        run(x).sum().backward()
    return x.grad.full_tensor()
