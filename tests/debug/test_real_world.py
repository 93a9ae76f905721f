"""CommDebugMode in a real world, here of one process: others' collectives, and torch.compile."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise
from shardwise import DTensor, Replicate, Shard
from shardwise.debug import CommDebugMode

c10d = torch.ops.c10d


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield shardwise.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    torch._dynamo.reset()
    dist.destroy_process_group()


@pytest.fixture
def first_of_two():
    """A mesh of two ranks, of which this process is the first; nobody answers."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield shardwise.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch._dynamo.reset()
    dist.destroy_process_group()


def all_gather(x, group):
    dist.all_gather([torch.empty_like(x)], x, group=group)


def reduce_scatter(x, group):
    dist.reduce_scatter(torch.empty_like(x), [x], group=group)


def all_to_all(x, group):
    dist.all_to_all_single(torch.empty_like(x), x, group=group)


def gather(x, group):
    dist.gather(x, [torch.empty_like(x)], group=group)


def scatter(x, group):
    dist.scatter(torch.empty_like(x), [x], group=group)


@pytest.mark.parametrize(
    ("collective", "packet"),
    [
        (lambda x, group: dist.all_reduce(x, group=group), c10d.allreduce_),
        (lambda x, group: dist.broadcast(x, 0, group=group), c10d.broadcast_),
        (lambda x, group: dist.reduce(x, 0, group=group), c10d.reduce_),
        (all_gather, c10d.allgather_),
        (reduce_scatter, c10d.reduce_scatter_),
        (all_to_all, c10d.alltoall_base_),
        (gather, c10d.gather_),
        (scatter, c10d.scatter_),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_collectives_that_write_in_place(alone, collective, packet):
    DTensor.from_local(torch.ones(1), alone, [Replicate()])  # the mesh is known
    with CommDebugMode() as comm:
        collective(torch.ones(6), alone.get_group())
    assert comm.get_comm_counts() == {packet: 1}
    (event,) = comm.events
    assert (event.num_bytes, event.axis, event.op, event.implicit) == (24, "tp", None, False)
    assert event.line.startswith("test_real_world.py:")


def test_functional_collectives_and_modes_inside_each_other(alone):
    with CommDebugMode() as outer, CommDebugMode() as inner:
        functional.all_reduce(torch.ones(6), "sum", alone) + 1
    for comm in (outer, inner):
        assert comm.get_comm_counts() == {torch.ops.c10d_functional.all_reduce: 1}


class Summed(nn.Module):
    """Plain tensors and a collective of the user's own."""

    def __init__(self, mesh):
        super().__init__()
        self.first, self.mesh = nn.Linear(4, 4, bias=False), mesh

    def forward(self, x):
        return functional.all_reduce(self.first(x), "sum", self.mesh) * 2


class Column(nn.Module):
    """Sharded tensors that are moved."""

    def __init__(self, mesh):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)
        for layer, placement in ((self.first, Shard(0)), (self.second, Shard(1))):
            placed = shardwise.distribute_tensor(layer.weight.detach(), mesh, [placement])
            layer.weight = nn.Parameter(placed)

    def forward(self, x):
        y = self.second(self.first(x).relu()).redistribute(placements=[Shard(1)])
        return y.redistribute(placements=[Replicate()])


def watched(model, x, backward):
    """The last of ten runs: a mode that comes and goes must not compile anything anew."""
    for _ in range(10):
        with CommDebugMode() as comm:
            loss = model(x).square().sum()
            if backward:
                loss.backward()
    return comm


# The compiler of earlier versions takes no placements.
new_compiler = pytest.mark.skipif(torch.__version__ < "2.13", reason="needs torch 2.13")


@pytest.mark.parametrize(
    ("make", "backward"),
    [
        (Summed, False),
        pytest.param(Column, False, marks=new_compiler),
        pytest.param(Column, True, marks=new_compiler),
    ],
)
def test_compiled_code_is_seen_when_it_runs(first_of_two, make, backward):
    x = torch.randn(2, 4)
    if make is Column:
        x = shardwise.distribute_tensor(x, first_of_two, [Replicate()])
    model = make(first_of_two)
    eager = watched(model, x, backward)
    compiled = watched(torch.compile(model, fullgraph=True, backend="aot_eager"), x, backward)
    assert eager.get_total_counts() >= 1
    assert compiled.get_comm_counts() == eager.get_comm_counts()
    assert compiled.get_total_bytes() == eager.get_total_bytes()
    phases = [sorted(event.phase for event in comm.events) for comm in (eager, compiled)]
    assert phases[0] == phases[1]
    assert {event.line.partition(":")[0] for event in compiled.events} == {"test_real_world.py"}
    assert compiled.get_parameter_info().keys() == eager.get_parameter_info().keys()
    assert compiled.get_sharding_info() == eager.get_sharding_info()


def test_compiling_counts_nothing(alone):
    compiled = torch.compile(
        lambda x: functional.all_reduce(x, "sum", alone) + 1, fullgraph=True, backend="aot_eager"
    )
    counts = []
    for _ in range(3):
        with CommDebugMode() as comm:
            compiled(torch.ones(4))
        counts.append(comm.get_total_counts())
    assert counts == [1, 1, 1]
