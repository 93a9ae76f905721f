"""CommDebugMode sees every collective, whoever asks for it."""

import pytest
import torch
from by_hand import lay
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.nn import functional as F

import shardwise
from shardwise import LocalTensor, Partial, Replicate, Shard
from shardwise.debug import CommDebugMode

c10d = torch.ops.c10d_functional


def test_counts_are_keyed_as_torch_keys_them(mesh):
    x = lay(torch.ones(8, 4), mesh, [Shard(0)])
    with CommDebugMode() as comm:
        x.full_tensor()
        x.redistribute(placements=[Shard(1)])
        x.sum().full_tensor()
    assert comm.get_comm_counts() == {
        c10d.all_gather_into_tensor: 1,
        c10d.all_to_all_single: 1,
        c10d.all_reduce: 1,
    }
    assert comm.get_total_counts() == 3
    assert comm.get_comm_counts()[c10d.broadcast] == 0


def test_bytes_are_those_that_a_rank_puts_in(mesh):
    x = lay(torch.ones(8, 4), mesh, [Shard(0)])
    with CommDebugMode() as comm:
        x.full_tensor()
    assert comm.get_total_bytes() == 2 * 4 * 4
    with CommDebugMode() as comm:
        lay(torch.ones(8, dtype=torch.float64), mesh, [Partial()]).full_tensor()
    assert comm.get_total_bytes() == 8 * 8


def test_events_name_the_axis(square):
    x = lay(torch.ones(4, 4), square, [Shard(0), Partial()])
    with CommDebugMode() as comm:
        x.full_tensor()
    assert {(event.kind, event.axis) for event in comm.events} == {
        ("all_gather_into_tensor", "rows"),
        ("all_reduce", "cols"),
    }
    assert sum(event.num_bytes for event in comm.events) == comm.get_total_bytes()


def test_local_ops_count_nothing(mesh):
    x = lay(torch.ones(8, 4), mesh, [Shard(0)])
    with CommDebugMode() as comm:
        (x * 2 + x).relu().sum(1).redistribute(placements=[Shard(0)])
        lay(torch.ones(8, 4), mesh, [Replicate()]).redistribute(placements=[Shard(0)])
    assert comm.get_total_counts() == 0
    assert comm.get_total_bytes() == 0


def test_a_users_own_collective_is_counted(mesh):
    mine = LocalTensor.per_rank(lambda rank: torch.ones(3))
    with CommDebugMode() as comm:
        functional.all_reduce(mine, "sum", mesh)
        torch.ops._c10d_functional.broadcast(mine, 0, mesh.get_group().group_name)
    assert comm.get_comm_counts() == {c10d.all_reduce: 1, c10d.broadcast: 1}
    assert comm.get_total_bytes() == 2 * 3 * 4


def test_backward_is_counted(mesh):
    """Column then row: one all-reduce forward, one backward for the input."""
    first, second = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)
    for layer, placement in ((first, Shard(0)), (second, Shard(1))):
        placed = shardwise.distribute_tensor(layer.weight.detach(), mesh, [placement])
        layer.weight = nn.Parameter(placed)
    x = lay(torch.randn(2, 4), mesh, [Replicate()]).requires_grad_()
    with CommDebugMode() as forward:
        y = second(first(x).relu()).redistribute(placements=[Replicate()])
    with CommDebugMode() as backward:
        y.sum().backward()
        x.grad.full_tensor()
    assert forward.get_comm_counts() == {c10d.all_reduce: 1}
    assert backward.get_comm_counts() == {c10d.all_reduce: 1}


@pytest.mark.parametrize(
    ("placement", "expected"),
    [(Shard(0), {c10d.all_reduce: 1}), (Shard(1), {c10d.all_gather_into_tensor: 1})],
)
def test_a_lookup_of_a_sharded_table(mesh, placement, expected):
    """Row-wise sums rows, column-wise gathers them; neither moves the table or its gradient."""
    table = lay(torch.randn(11, 8), mesh, [placement]).requires_grad_()
    ids = lay(torch.tensor([0, 10, 3]), mesh, [Replicate()])
    with CommDebugMode() as comm:
        rows = F.embedding(ids, table).redistribute(placements=[Replicate()])
    assert comm.get_comm_counts() == expected
    with CommDebugMode() as comm:
        rows.backward(lay(torch.ones(3, 8), mesh, [Replicate()]))
    assert comm.get_total_counts() == 0


def test_a_mode_starts_afresh_each_time(mesh):
    x = lay(torch.ones(8), mesh, [Shard(0)])
    comm = CommDebugMode()
    with comm:
        x.full_tensor()
        x.full_tensor()
    assert comm.get_total_counts() == 2
    with comm:
        x.full_tensor()
    assert comm.get_total_counts() == 1
    x.full_tensor()
    assert comm.get_total_counts() == 1


def test_modes_nest(mesh):
    x = lay(torch.ones(8), mesh, [Shard(0)])
    with CommDebugMode() as outer:
        x.full_tensor()
        with CommDebugMode() as inner:
            x.full_tensor()
    assert inner.get_total_counts() == 1
    assert outer.get_total_counts() == 2


def test_counting_changes_no_numbers(mesh):
    x = lay(torch.randn(7, 3), mesh, [Shard(0)])
    plain = (x @ x.t()).full_tensor().agreed()
    with CommDebugMode():
        counted = (x @ x.t()).full_tensor().agreed()
    assert torch.equal(plain, counted)
