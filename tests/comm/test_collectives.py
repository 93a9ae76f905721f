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


# -- the rest of torch.distributed -------------------------------------------------------------


def room(width=1):
    return LocalTensor.per_rank(lambda rank: torch.zeros(width))


ONE_TO_FOUR = [[1, 2, 3, 4]] * 4
COLUMNS = [[10.0**r * n for n in (1, 2, 3, 4)] for r in range(4)]


def gathered_rows(call):
    rows = [room() for _ in range(4)]
    call(rows)
    return [row.on_rank(2).item() for row in rows]


def written(call, out):
    call(out)
    return per_rank(out)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: gathered_rows(lambda rows: dist.all_gather(rows, numbers())), [1, 2, 3, 4]),
        (
            lambda: gathered_rows(
                lambda rows: dist.all_gather_coalesced([[row] for row in rows], [numbers()])
            ),
            [1, 2, 3, 4],
        ),
        (
            lambda: written(lambda out: dist.all_gather_into_tensor(out, numbers()), room(4)),
            ONE_TO_FOUR,
        ),
        (
            lambda: written(lambda out: dist.reduce_scatter_tensor(out, numbers(4)), room()),
            [[10], [100], [1000], [10000]],
        ),
        (
            lambda: written(
                lambda out: dist.reduce_scatter(out, list(numbers(4).split(1))), room()
            ),
            [[10], [100], [1000], [10000]],
        ),
        (
            lambda: written(lambda out: dist.all_to_all_single(out, numbers(4)), room(4)),
            COLUMNS,
        ),
        (
            lambda: gathered_rows(lambda rows: dist.all_to_all(rows, list(numbers(4).split(1)))),
            [100, 200, 300, 400],
        ),
        (lambda: written(lambda x: dist.reduce(x, 0), numbers()), [[10], [2], [3], [4]]),
        (lambda: written(lambda x: dist.all_reduce_coalesced([x]), numbers()), [[10]] * 4),
        (
            lambda: written(lambda x: dist.all_reduce(x, async_op=True).wait(), numbers()),
            [[10]] * 4,
        ),
        (
            lambda: written(
                lambda out: dist.scatter(out, [torch.full((1,), 7.0 * r) for r in range(4)]),
                room(),
            ),
            [[0], [7], [14], [21]],
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_torch_collectives(mesh, call, expected):
    assert call() == expected


def test_gather_to_the_rank_that_asks(mesh):
    rows = [torch.zeros(1) for _ in range(4)]
    dist.gather(numbers(), rows, dst=0)
    assert [row.item() for row in rows] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "call",
    [
        lambda: dist.gather(numbers(), None, dst=1),
        lambda: dist.scatter(numbers(), None, src=1),
        lambda: dist.send(numbers(), 1),
        lambda: dist.recv(numbers(), 1),
    ],
)
def test_what_depends_on_the_rank_that_asks_is_refused(mesh, call):
    with pytest.raises(NotImplementedError, match="simulated world"):
        call()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_objects(mesh):
    found = [None] * 4
    dist.all_gather_object(found, {"a": 1})
    assert found == [{"a": 1}] * 4
    shared = [{"b": 2}]
    dist.broadcast_object_list(shared, 0)
    assert shared == [{"b": 2}]


@pytest.mark.parametrize(
    ("reduce_op", "expected"),
    [(dist.ReduceOp.BAND, 0), (dist.ReduceOp.BOR, 7), (dist.ReduceOp.BXOR, 4)],
)
def test_bitwise_reductions(mesh, reduce_op, expected):
    x = LocalTensor.per_rank(lambda rank: torch.tensor([rank + 1]))
    dist.all_reduce(x, op=reduce_op)
    assert per_rank(x) == [[expected]] * 4


def test_functional_collectives_that_write(mesh):
    """What torch.compile's inductor makes of them."""
    name = mesh.get_group().group_name
    assert written(lambda x: ops.all_reduce_(x, "sum", name), numbers()) == [[10]] * 4
    assert written(lambda x: ops.all_reduce_coalesced_([x], "sum", name), numbers()) == [[10]] * 4
    assert written(lambda x: ops.broadcast_(x, 1, name), numbers()) == [[2]] * 4
    out = room(4)
    ops.all_gather_into_tensor_out(numbers(), 4, name, out=out)
    assert per_rank(out) == ONE_TO_FOUR


@pytest.mark.parametrize(
    ("collective", "width", "gradient"),
    [
        # Each rank's loss holds all four: four times the derivative of the square.
        (lambda x, mesh: functional.all_gather_tensor_autograd(x, 0, mesh), 1, [8]),
        (
            lambda x, mesh: functional.reduce_scatter_tensor_autograd(x, "sum", 0, mesh),
            4,
            [20, 200, 2000, 20000],
        ),
        (
            lambda x, mesh: functional.all_to_all_single_autograd(x, None, None, mesh),
            4,
            [2, 20, 200, 2000],
        ),
    ],
    ids=["gather", "scatter", "exchange"],
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_functional_collectives_with_gradients(mesh, collective, width, gradient):
    x = numbers(width).requires_grad_()
    collective(x, mesh).square().sum().backward()
    assert x.grad.on_rank(0).tolist() == gradient


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
