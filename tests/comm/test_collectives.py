"""A user's own collectives on LocalTensors, against a computation by hand."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

import shardwise
from shardwise import LocalTensor

ops = torch.ops._c10d_functional


def wait(x):
    return ops.wait_tensor(x)


def per_rank(x):
    return [x.on_rank(rank).tolist() for rank in x.ranks]


def numbers(width=1):
    """Rank r holds r+1, 10(r+1), …"""
    return LocalTensor.per_rank(lambda rank: (rank + 1.0) * 10.0 ** torch.arange(width))


@pytest.mark.parametrize(
    ("reduce_op", "result"),
    [("sum", 10.0), ("avg", 2.5), ("product", 24.0), ("max", 4.0), ("min", 1.0)],
)
def test_all_reduce(mesh, reduce_op, result):
    reduced = wait(ops.all_reduce(numbers(), reduce_op, mesh.get_group().group_name))
    assert per_rank(reduced) == [[result]] * 4


def test_all_reduce_leaves_its_input(mesh):
    x = numbers()
    ops.all_reduce(x, "sum", mesh.get_group().group_name).add_(1)
    assert per_rank(x) == [[1], [2], [3], [4]]


def test_all_gather(mesh):
    gathered = wait(ops.all_gather_into_tensor(numbers(), 4, mesh.get_group().group_name))
    assert per_rank(gathered) == [[1, 2, 3, 4]] * 4


def test_reduce_scatter(mesh):
    x = LocalTensor.per_rank(lambda rank: torch.arange(8.0) + rank)
    scattered = wait(ops.reduce_scatter_tensor(x, "sum", 4, mesh.get_group().group_name))
    assert per_rank(scattered) == [[6, 10], [14, 18], [22, 26], [30, 34]]


def test_all_to_all(mesh):
    x = LocalTensor.per_rank(lambda rank: torch.arange(4) + 10 * rank)
    ones = [1] * 4
    moved = wait(ops.all_to_all_single(x, ones, ones, mesh.get_group().group_name))
    assert per_rank(moved) == [[r, 10 + r, 20 + r, 30 + r] for r in range(4)]


def test_broadcast(mesh):
    assert per_rank(wait(ops.broadcast(numbers(), 2, mesh.get_group().group_name))) == [[3]] * 4


def test_along_each_axis_of_a_mesh():
    """Ranks 0 1 2 / 3 4 5."""
    with shardwise.simulate(6):
        mesh = shardwise.init_device_mesh("cpu", (2, 3))
        down, across = (mesh.get_group(axis).group_name for axis in (0, 1))
        x = LocalTensor.per_rank(lambda rank: torch.tensor([float(rank)]))
        assert per_rank(wait(ops.all_reduce(x, "sum", down))) == [[3], [5], [7]] * 2
        assert per_rank(wait(ops.all_reduce(x, "sum", across))) == [[3]] * 3 + [[12]] * 3
        gathered = wait(ops.all_gather_into_tensor(x, 2, down))
        assert per_rank(gathered) == [[0, 3], [1, 4], [2, 5]] * 2
        gathered = wait(ops.all_gather_into_tensor(x, 3, across))
        assert per_rank(gathered) == [[0, 1, 2]] * 3 + [[3, 4, 5]] * 3


def test_a_value_that_ranks_share_counts_once_per_rank(mesh):
    same = torch.ones(1)
    shared = LocalTensor.per_rank(lambda rank: same)
    assert per_rank(wait(ops.all_reduce(shared, "sum", mesh.get_group().group_name))) == [[4]] * 4
    assert same.item() == 1


# -- torch's own spellings: right, or an error; never the input as if nothing had been asked ------


def test_torch_functional_collectives(mesh):
    assert per_rank(functional.all_reduce(numbers(), "sum", mesh) + 0) == [[10]] * 4
    assert per_rank(functional.broadcast(numbers(), 1, mesh) + 0) == [[2]] * 4


def test_torch_collectives_in_place(mesh):
    x = numbers()
    dist.all_reduce(x)
    assert per_rank(x) == [[10]] * 4
    x = numbers()
    dist.broadcast(x, 2)
    assert per_rank(x) == [[3]] * 4


def right_or_refused(call, expected):
    try:
        found = call()
    except shardwise.ShardwiseError:
        return
    assert found == expected


def test_coalesced_collectives(mesh):
    right_or_refused(
        lambda: [
            per_rank(x + 0) for x in functional.all_reduce_coalesced([numbers()], "sum", mesh)
        ],
        [[[10]] * 4],
    )


def test_splits_that_only_one_rank_would_give(mesh):
    """`permute_tensor` asks for its rank and sends everything to one other."""
    right_or_refused(
        lambda: per_rank(functional.permute_tensor(numbers(), [1, 2, 3, 0], mesh) + 0),
        [[4], [1], [2], [3]],
    )


def test_a_plain_tensor_is_the_same_on_every_rank(mesh):
    """So its sum over four ranks is four times its value."""
    name = mesh.get_group().group_name
    right_or_refused(lambda: wait(ops.all_reduce(torch.ones(1), "sum", name)).tolist(), [4])

    def in_place():
        plain = torch.ones(1)
        dist.all_reduce(plain)
        return plain.tolist()

    right_or_refused(in_place, [4])


def test_a_group_that_leaves_the_others_open_is_refused(mesh):
    group = dist.new_group([0, 3])
    with pytest.raises(NotImplementedError, match=r"mesh\.get_group"):
        ops.all_reduce(numbers(), "sum", group.group_name)
