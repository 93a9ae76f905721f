"""A simulated world comes and goes, and leaves torch.distributed as it was."""

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise import LocalTensor, Partial, Shard, simulate


def ranks_seen():
    return LocalTensor.per_rank(lambda rank: torch.tensor(rank)).ranks


def round_trip(world_size):
    """Uses a mesh, a collective and a redistribution."""
    mesh = shardwise.init_device_mesh("cpu", (world_size,))
    whole = torch.arange(10.0)
    x = shardwise.distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(x.full_tensor().agreed(), whole)
    return x


def test_torch_distributed_answers_as_that_world():
    with simulate(4) as world:
        assert world.world_size == 4
        assert dist.is_initialized()
        assert dist.get_world_size() == 4
        assert dist.get_rank() == 0
        assert ranks_seen() == (0, 1, 2, 3)
        dist.barrier()
    assert not dist.is_initialized()


def test_as_a_decorator():
    @simulate(3)
    def program(base, *, factor):
        """Adds up ranks."""
        round_trip(3)
        return base + factor * dist.get_world_size()

    assert program.__name__ == "program"
    assert program.__doc__ == "Adds up ranks."
    assert [program(1, factor=2), program(2, factor=2)] == [7, 8]
    assert not dist.is_initialized()


def test_worlds_one_after_another():
    for size in (2, 5, 2):
        with simulate(size):
            round_trip(size)
            assert ranks_seen() == tuple(range(size))


def test_worlds_nest():
    with simulate(4):
        outer = round_trip(4)
        with simulate(2):
            round_trip(2)
            assert dist.get_world_size() == 2
            with simulate(6):
                round_trip(6)
            round_trip(2)
        assert dist.get_world_size() == 4
        # What was made before still works, collectives included.
        assert torch.equal((outer + outer).full_tensor().agreed(), 2 * torch.arange(10.0))
        round_trip(4)
    assert not dist.is_initialized()


def test_one_simulate_object_may_be_entered_again_inside_itself():
    world = simulate(3)
    with world, world:
        round_trip(3)
    assert not dist.is_initialized()


def test_an_error_inside_leaves_nothing_behind():
    @simulate(4)
    def program():
        round_trip(4)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        program()
    assert not dist.is_initialized()
    with simulate(2):
        round_trip(2)


@pytest.fixture
def gloo_alone():
    """A real process group of this one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_real_process_group_is_set_aside_and_comes_back(gloo_alone):
    real_mesh = shardwise.init_device_mesh("cpu", (1,))
    before = shardwise.distribute_tensor(torch.arange(4.0), real_mesh, [Shard(0)])
    with simulate(4):
        assert dist.get_world_size() == 4
        round_trip(4)
        with pytest.raises(shardwise.WorldError):
            shardwise.distribute_tensor(torch.ones(4), real_mesh, [Shard(0)])
    assert dist.group.WORLD is gloo_alone
    assert dist.get_world_size() == 1
    ones = torch.ones(3)
    dist.all_reduce(ones)  # the real group still talks
    assert torch.equal(ones, torch.ones(3))
    assert torch.equal(before.full_tensor(), torch.arange(4.0))
    assert type(before.full_tensor()) is torch.Tensor
    after = dist.new_group([0])
    dist.all_reduce(ones, group=after)


def test_tensors_of_a_past_world_say_so():
    with simulate(4):
        mesh = shardwise.init_device_mesh("cpu", (4,))
        x = shardwise.ones(8, device_mesh=mesh, placements=[Shard(0)])
    with pytest.raises(shardwise.WorldError, match="world"):
        x.full_tensor()
    with simulate(4), pytest.raises(shardwise.WorldError, match="world"):
        x.full_tensor()


def test_tensors_of_two_worlds_do_not_mix():
    with simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        old = shardwise.ones(8, device_mesh=mesh, placements=[Shard(0)])
        old_part = LocalTensor.per_rank(lambda rank: torch.ones(2))
    with simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        new = shardwise.ones(8, device_mesh=mesh, placements=[Shard(0)])
        with pytest.raises(shardwise.ShardwiseError):
            old + new
        with pytest.raises(shardwise.WorldError):
            old_part + LocalTensor.per_rank(lambda rank: torch.ones(2))
        with pytest.raises(shardwise.WorldError):
            shardwise.DTensor.from_local(old_part, mesh, [Shard(0)])


@pytest.mark.parametrize("size", [0, -1, 2.0, "4", True])
def test_the_number_of_ranks_is_a_positive_int(size):
    with pytest.raises(TypeError, match="number of ranks"):
        simulate(size)


def test_without_a_world_the_error_says_how_to_get_one():
    with pytest.raises(shardwise.WorldError, match="simulate"):
        LocalTensor.per_rank(lambda rank: torch.ones(1))


def test_a_mesh_larger_than_the_world_is_refused():
    with simulate(2):
        mesh = shardwise.DeviceMesh("cpu", [0, 1, 2, 3], _init_backend=False)
        with pytest.raises(shardwise.WorldError, match=r"names rank 3.* 2 ranks"):
            shardwise.distribute_tensor(torch.ones(4), mesh, [Shard(0)])


# -- submeshes ------------------------------------------------------------------------------


def test_a_sub_mesh_is_a_mesh(square):
    """Each rank slices the mesh, and gets the row that it is in."""
    cols = square["cols"]
    x = shardwise.distribute_tensor(torch.arange(6.0), cols, [Shard(0)])
    local = x.to_local()
    assert local.ranks == (0, 1, 2, 3)
    assert [local.on_rank(rank).tolist() for rank in (1, 2)] == [[3, 4, 5], [0, 1, 2]]
    assert x.full_tensor().agreed().tolist() == [0, 1, 2, 3, 4, 5]


def test_values_on_a_sub_mesh_may_differ_between_its_rows(square):
    local = LocalTensor.per_rank(lambda rank: torch.full((2,), float(rank)))
    for axis, sums in (("cols", [1, 1, 5, 5]), ("rows", [2, 4, 2, 4])):
        x = shardwise.DTensor.from_local(local, square[axis], [Partial()])
        total = x.full_tensor()
        assert [total.on_rank(rank)[0].item() for rank in range(4)] == sums
        with pytest.raises(shardwise.RankMismatchError, match="the ranks differ"):
            x.sum().item()


@pytest.mark.parametrize("ranks", [(2, 0), (0, 1, 3), (3, 1)], ids=str)
def test_a_mesh_of_some_ranks_in_any_order(ranks):
    with simulate(4):
        mesh = shardwise.DeviceMesh("cpu", list(ranks))
        x = shardwise.distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
        assert x.to_local().ranks == ranks
        assert x.to_local().on_rank(ranks[0])[0] == 0
        assert x.to_local().on_rank(ranks[-1])[-1] == 5
        assert x.full_tensor().agreed().tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_chunks_of_a_collective_are_equal():
    with simulate(4):
        empty = torch.ones(0)
        dist.all_to_all_single(empty, torch.ones(0))
        with pytest.raises(shardwise.LayoutError, match="5 is not a multiple of 4"):
            dist.all_to_all_single(torch.zeros(5), torch.zeros(5))
        with pytest.raises(shardwise.LayoutError, match="5 is not a multiple of 4"):
            dist.reduce_scatter_tensor(torch.zeros(1), torch.zeros(5))


def test_lists_of_a_collective_have_a_tensor_per_rank():
    few = [torch.zeros(2) for _ in range(3)]
    with simulate(4):
        with pytest.raises(shardwise.LayoutError, match="list of 4 tensors, one per rank, found 3"):
            dist.all_gather(few, torch.zeros(2))
        with pytest.raises(shardwise.LayoutError, match="list of 4 tensors, one per rank, found 3"):
            dist.scatter(torch.zeros(2), few, src=0)
        with pytest.raises(shardwise.LayoutError, match="4 ranks has no rank 7"):
            dist.broadcast(torch.zeros(2), 7)


def test_a_group_of_another_backend_is_simulated_too():
    """Programs make a gloo group beside NCCL's; a real one would wait for processes."""
    with simulate(4):
        for options in ({"backend": "gloo"}, {"ranks": [0, 2], "backend": "gloo"}):
            group = dist.new_group(**options)
            assert dist.get_backend(group) == "shardwise_simulated"
        x = LocalTensor.per_rank(lambda rank: torch.tensor([rank]))
        dist.all_reduce(x, group=group)
        assert [x.on_rank(rank).item() for rank in range(4)] == [2, 4, 2, 4]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.get_backend(dist.new_group(backend="gloo")) == "gloo"
    finally:
        dist.destroy_process_group()
