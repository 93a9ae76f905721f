"""Collectives of compiled code in a simulated world, where the compiler sees no collectives."""

import pytest
import torch
from torch import nn
from torch.distributed import _functional_collectives as functional

import shardwise
from shardwise import DTensor, LocalTensor, Replicate, Shard
from shardwise.debug import CommDebugMode

pytestmark = pytest.mark.slow


@pytest.fixture
def pair(fresh_compiler):
    with shardwise.simulate(2):
        yield shardwise.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


class Layers(nn.Module):
    """By columns, then by rows; five rows are uneven on two ranks."""

    def __init__(self, mesh):
        super().__init__()
        self.first, self.second = nn.Linear(4, 5, bias=False), nn.Linear(5, 4, bias=False)
        for layer, placement in ((self.first, Shard(0)), (self.second, Shard(1))):
            placed = shardwise.distribute_tensor(layer.weight.detach(), mesh, [placement])
            layer.weight = nn.Parameter(placed)

    def forward(self, x):
        y = self.second(self.first(x).relu()).redistribute(placements=[Shard(1)])
        return y.redistribute(placements=[Replicate()]).square().sum()


def run(model, x):
    """The last of three runs: compiling counts nothing, and nothing is compiled anew."""
    for _ in range(3):
        model.zero_grad()
        with CommDebugMode() as comm:
            model(x).backward()
    grads = [p.grad.full_tensor().agreed().clone() for p in model.parameters()]
    return comm, grads


@pytest.mark.skipif(torch.__version__ < "2.13", reason="older compilers take no placements")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_communicates_what_eager_code_does(pair, backend):
    x = shardwise.distribute_tensor(torch.randn(6, 4), pair, [Replicate()])
    model = Layers(pair)
    eager, expected = run(model, x)
    compiled, found = run(torch.compile(model, fullgraph=True, backend=backend), x)
    assert eager.get_total_counts() >= 1
    assert compiled.get_comm_counts() == eager.get_comm_counts()
    assert compiled.get_total_bytes() == eager.get_total_bytes()
    seen = [
        sorted((e.kind, e.axis, e.phase, e.module) for e in c.events) for c in (eager, compiled)
    ]
    assert seen[0] == seen[1]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_users_own_collective(pair):
    def twice(x):
        return functional.all_reduce(functional.all_reduce(x, "sum", pair) * 2, "sum", pair)

    DTensor.from_local(torch.ones(1), pair, [Replicate()])  # the mesh is known
    x = LocalTensor.per_rank(lambda rank: torch.ones(3))
    fast = torch.compile(twice, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        with CommDebugMode() as comm:
            found = fast(x)
    assert found.agreed().tolist() == [8, 8, 8]
    assert [(e.kind, e.axis, e.num_bytes) for e in comm.events] == [("all_reduce", "tp", 12)] * 2
