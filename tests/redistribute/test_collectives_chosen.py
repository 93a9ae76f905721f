"""Which collectives a redistribution runs: what a user pays for."""

import pytest
import torch
from by_hand import lay

import shardwise
from shardwise import Partial, Replicate, Shard
from shardwise.debug import CommDebugMode

functional = torch.ops.c10d_functional
NOTHING: dict = {}
GATHER = {functional.all_gather_into_tensor: 1}
REDUCE = {functional.all_reduce: 1}
SCATTER = {functional.reduce_scatter_tensor: 1}
EXCHANGE = {functional.all_to_all_single: 1}


def collectives(mesh, shape, before, after, order=None):
    x = lay(torch.ones(shape), mesh, before)
    with CommDebugMode() as comm:
        x.redistribute(placements=after, order=order)
    return dict(comm.get_comm_counts())


@pytest.mark.parametrize("shape", [(8, 8), (7, 5), (2, 3)], ids=str)
@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (Shard(0), Shard(1), EXCHANGE),
        (Shard(1), Shard(0), EXCHANGE),
        (Shard(0), Replicate(), GATHER),
        (Shard(0), Partial(), GATHER),
        (Partial(), Shard(0), SCATTER),
        (Partial("max"), Shard(1), SCATTER),
        (Partial(), Replicate(), REDUCE),
        (Partial("avg"), Replicate(), REDUCE),
        (Replicate(), Shard(0), NOTHING),
        (Replicate(), Shard(1), NOTHING),
        (Replicate(), Partial(), NOTHING),
        (Partial(), Partial(), NOTHING),
        (Shard(1), Shard(1), NOTHING),
    ],
)
def test_one_axis(mesh, shape, before, after, expected):
    assert collectives(mesh, shape, [before], [after]) == expected


def test_explicit_sizes_cost_the_same(mesh):
    sized = Shard(0, sizes=(1, 0, 3, 3))
    for before, after, expected in [
        (sized, Shard(1), EXCHANGE),
        (Shard(1), sized, EXCHANGE),
        (sized, Replicate(), GATHER),
        (Partial(), sized, SCATTER),
        (Replicate(), sized, NOTHING),
    ]:
        assert collectives(mesh, (7, 5), [before], [after]) == expected


@pytest.mark.parametrize("sizes", [(13, 1, 1, 1), (1, 0, 13, 2)], ids=str)
def test_an_exchange_between_explicit_sizes_sends_no_padding(mesh, sizes):
    x = torch.arange(16.0 * 6).view(16, 6)
    for before, after in [(Shard(0, sizes), Shard(1)), (Shard(1), Shard(0, sizes))]:
        laid = lay(x, mesh, [before])
        with CommDebugMode() as comm:
            moved = laid.redistribute(placements=[after])
        (event,) = comm.events
        first = sizes[0] * 6 if before.dim == 0 else 16 * 2  # what rank 0 holds
        assert event.num_bytes == 4 * first
        assert torch.equal(moved.full_tensor().agreed(), x)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([Shard(0), Shard(0)], [Shard(0), Replicate()], GATHER),
        ([Shard(0), Replicate()], [Shard(0), Shard(0)], NOTHING),
        ([Shard(0), Shard(0)], [Shard(0), Shard(1)], EXCHANGE),
        ([Shard(0), Partial()], [Shard(0), Shard(0)], SCATTER),
        ([Partial(), Shard(1)], [Replicate(), Shard(1)], REDUCE),
        ([Partial(), Partial()], [Shard(0), Shard(1)], {functional.reduce_scatter_tensor: 2}),
        ([Shard(0), Shard(1)], [Replicate()] * 2, {functional.all_gather_into_tensor: 2}),
        ([Replicate()] * 2, [Shard(1), Shard(0)], NOTHING),
    ],
)
def test_two_axes(square, before, after, expected):
    assert collectives(square, (8, 8), before, after) == expected


def test_only_the_axis_that_changes_is_used(square):
    x = lay(torch.ones(8, 8), square, [Shard(0), Partial()])
    with CommDebugMode() as comm:
        x.redistribute(placements=[Shard(0), Replicate()])
    assert [event.axis for event in comm.events] == ["cols"]


def test_every_rank_sends_only_its_part(mesh):
    """A shard of 2 by 8 floats is gathered, and exchanged, by sending it once."""
    x = lay(torch.ones(8, 8), mesh, [Shard(0)])
    for after in (Replicate(), Shard(1)):
        with CommDebugMode() as comm:
            x.redistribute(placements=[after])
        assert comm.get_total_bytes() == 2 * 8 * 4


def test_swapping_the_order_moves_data(square):
    """Ranks 1 and 2 hold each other's part; nothing else would have to move."""
    x = lay(torch.arange(8.0), square, [Shard(0), Shard(0)])
    swapped = x.redistribute(placements=[Shard(0), Shard(0)], order=[1, 0])
    assert swapped.to_local().on_rank(1).tolist() == [4, 5]
    assert swapped.to_local().on_rank(2).tolist() == [2, 3]


def test_the_same_question_gives_the_same_answer():
    """Ranks that chose different ways would hang: a plan depends on nothing but the layouts."""
    runs = []
    for _ in range(2):
        with shardwise.simulate(12):
            mesh = shardwise.init_device_mesh("cpu", (2, 3, 2), mesh_dim_names=("a", "b", "c"))
            x = lay(torch.ones(12, 12, 12), mesh, [Shard(0), Shard(1), Partial()])
            with CommDebugMode() as comm:
                x.redistribute(placements=[Shard(2), Shard(0), Shard(1)])
            runs.append(list(comm.events))
    assert runs[0] == runs[1]
