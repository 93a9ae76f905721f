"""Picking and writing entries: what goes in place, what has no known shape, what is refused."""

import pytest
import torch
from parity import whole

from shardwise import (
    MixedTensorsError,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from shardwise.debug import CommDebugMode

ids = torch.tensor([[4, 0, 2], [1, 1, 3]])

WRITES = {
    "index_put_": lambda x, i, v: x.index_put_((i[0],), v[:3], accumulate=True),
    "setitem": lambda x, i, v: x.__setitem__((i[0],), v[:3]),
    "index_add_": lambda x, i, v: x.index_add_(0, i[0], v[:3]),
    "index_fill_": lambda x, i, v: x.index_fill_(0, i[0], 7.0),
    "scatter_": lambda x, i, v: x.scatter_(1, i, v[:2, :3]),
    "scatter_add_": lambda x, i, v: x.scatter_add_(0, i, v[:2, :3]),
    "masked_fill_": lambda x, i, v: x.masked_fill_(v > 0, 7.0),
    "masked_scatter_": lambda x, i, v: x.masked_scatter_(v > 0, v.exp()),
    "put_": lambda x, i, v: x.put_(i, v[:2, :3]),
}


@pytest.mark.parametrize(
    "placements",
    [[Shard(0), Replicate()], [Shard(1), Shard(0)], [Shard(0, sizes=(1, 4)), Shard(1)]],
    ids=str,
)
@pytest.mark.parametrize("name", WRITES)
def test_writes_in_place(square, name, placements):
    x, values = torch.randn(5, 6), torch.randn(5, 6)
    placed = distribute_tensor(x.clone(), square, placements)
    everywhere = [Replicate()] * 2
    here = placed._local
    WRITES[name](
        placed,
        distribute_tensor(ids, square, everywhere),
        distribute_tensor(values, square, everywhere),
    )
    WRITES[name](x, ids, values)
    torch.testing.assert_close(whole(placed), x)
    assert placed.placements == tuple(placements)
    assert placed._local is here


LISTS = {
    "rows": lambda x: x[[4, 0, -2]],
    "columns": lambda x: x[:, [1, 2]],
    "pairs": lambda x: x[[0, 3], [2, 1]],
    "a table of rows": lambda x: x[[[0, 1], [3, 4]], None],
    "flags": lambda x: x[[True, False, True, False, True]],
    "none": lambda x: x[[]],
    "a row": lambda x: x[2],
}


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=repr)
@pytest.mark.parametrize("name", LISTS)
def test_a_list_as_an_index(mesh, name, placement):
    x = torch.randn(5, 3, requires_grad=True)
    placed = distribute_tensor(x.detach(), mesh, [placement]).requires_grad_()
    LISTS[name](x).square().sum().backward()
    found = LISTS[name](placed)
    found.square().sum().backward()
    torch.testing.assert_close(whole(found), LISTS[name](x).detach())
    torch.testing.assert_close(whole(placed.grad), x.grad)


def test_writing_to_listed_rows(mesh):
    x = torch.randn(5, 3)
    placed = distribute_tensor(x.clone(), mesh, [Shard(0)])
    for each in (x, placed):
        each[[0, 4]] = 7.0
        each[1:, [2]] = 0.5
    torch.testing.assert_close(whole(placed), x)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=repr)
def test_writing_a_number_to_rows_of_a_column(mesh, placement):
    x = torch.randn(5, 3)
    placed = distribute_tensor(x.clone(), mesh, [placement])
    for each in (x, placed):
        each[[3, 0], 1] = 7.0
        each[-1, [0, 2]] = 3
    torch.testing.assert_close(whole(placed), x)


NUMBERS = [
    (0, 7.0),
    (-1, 2),
    ((2, 1), 5.0),
    ((-3, -1), True),
    ((slice(None), 2), 0.5),
    ((slice(1, 4), 0), torch.tensor(3.0)),
    ((..., 1), 9.0),
    ((4, ...), 1.5),
    ((1, slice(None, None, 2)), 4.0),
]


@pytest.mark.parametrize("placements", [["S0"], ["S1"], ["S0", "S1"], ["S0", "S0"], ["S1", "R"]])
def test_writing_a_number_to_a_position(placements):
    """It is written where it lies: nothing moves, whoever has it."""
    placed_at = {"S0": Shard(0), "S1": Shard(1), "R": Replicate()}
    with simulate(4):
        mesh = init_device_mesh("cpu", (4,) if len(placements) == 1 else (2, 2))
        x = torch.randn(5, 3)
        placed = distribute_tensor(x.clone(), mesh, [placed_at[p] for p in placements])
        with CommDebugMode() as comm:
            for index, value in NUMBERS:
                if placements == ["S0", "S0"] and type(index) is tuple and slice(1, 4) in index:
                    continue  # a slice of a dim that two axes split is a copy
                x[index] = value
                placed[index] = value
        assert not comm.events
        torch.testing.assert_close(whole(placed), x, rtol=0, atol=0)
        for outside in (5, (0, 3), (-6, 0), (0, 0, 0)):
            with pytest.raises(IndexError):
                placed[outside] = 1.0


@pytest.mark.parametrize(
    "write",
    ["x[3, :2] -= 1", "x[0, 1] += 1", "x[:, 0] *= 2", "x[-1] += 2", "x[..., 1, 1:] += 1"],
)
def test_a_row_that_is_changed_where_it_lies(mesh, write):
    """Python writes the row to its own place afterwards, which is not memory that overlaps."""
    x = torch.arange(16.0).view(4, 4)
    placed = distribute_tensor(x.clone(), mesh, [Replicate()])
    exec(write, {"x": x})
    exec(write, {"x": placed})
    assert torch.equal(whole(placed), x)


def test_a_plain_index_is_refused(mesh):
    """It may differ between ranks; a list cannot."""
    placed = distribute_tensor(torch.randn(5, 3), mesh, [Shard(0)])
    with pytest.raises(MixedTensorsError, match="plain Tensor"):
        placed[torch.tensor([0, 2])]


def test_a_lookup_along_a_sharded_dim_gathers_nothing(mesh):
    x = distribute_tensor(torch.randn(7, 3), mesh, [Shard(0)])
    rows = distribute_tensor(torch.tensor([6, 0, 6, 2]), mesh, [Replicate()])
    for call in (lambda: x[rows], lambda: x.index_select(0, rows)):
        with CommDebugMode() as comm:
            found = call()
        assert not comm.events
        assert found.placements[0].is_partial("sum")
        torch.testing.assert_close(whole(found), whole(x)[whole(rows)])


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=repr)
def test_an_index_out_of_range_raises_what_one_device_raises(mesh, placement):
    x, far = torch.randn(4, 3), torch.tensor([1, 4])
    placed, index = (
        distribute_tensor(x, mesh, [placement]),
        distribute_tensor(far, mesh, [Replicate()]),
    )
    for call in (
        lambda x, i: x[i],
        lambda x, i: x.index_select(0, i),
        lambda x, i: x.gather(0, i[:, None]),
        lambda x, i: x.scatter(0, i[:, None], 1.0),
        lambda x, i: x.take(i + 10),
    ):
        with pytest.raises((IndexError, RuntimeError)) as expected:
            call(x, far)
        with pytest.raises(expected.type):
            call(placed, index)


ALONG_A_DIM = {
    "gather": lambda x, i, rows, s: x.gather(0, i),
    "scatter": lambda x, i, rows, s: x.scatter(0, i, s),
    "scatter a number": lambda x, i, rows, s: x.scatter(0, i, 2.0),
    "scatter_": lambda x, i, rows, s: x.clone().scatter_(0, i, s),
    "scatter_add": lambda x, i, rows, s: x.scatter_add(0, i, s),
    "scatter_reduce": lambda x, i, rows, s: x.scatter_reduce(0, i, s, "amax"),
    "index_select": lambda x, i, rows, s: x.index_select(0, rows),
    "index_add": lambda x, i, rows, s: x.index_add(0, rows, s),
    "index_add_": lambda x, i, rows, s: x.clone().index_add_(0, rows, s),
    "index_copy": lambda x, i, rows, s: x.index_copy(0, rows, s),
    "index_reduce": lambda x, i, rows, s: x.index_reduce(0, rows, s, "amax"),
    "index_fill": lambda x, i, rows, s: x.index_fill(0, rows, 2.0),
    "masked_scatter": lambda x, i, rows, s: x.masked_scatter(i > -9, rows.to(x.dtype)),
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("bad", [-1, -5, 4])
@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 3, 2)], ids=repr)
@pytest.mark.parametrize("name", ALONG_A_DIM)
def test_every_layout_refuses_what_one_device_refuses(mesh, name, shape, bad):
    """Negative indices too, which only some ops count from the end."""
    call, x, s = ALONG_A_DIM[name], torch.randn(shape), torch.randn(shape)
    i = torch.zeros(shape, dtype=torch.long)
    i[3] = bad
    rows = torch.tensor([0, 1, 2, bad])
    try:
        expected = call(x, i, rows, s)
    except (IndexError, RuntimeError) as error:
        expected = type(error)
    for px in (Replicate(), Shard(0), Shard(len(shape) - 1)):
        for pi in (Replicate(), Shard(0)):
            placed = [distribute_tensor(t, mesh, [p]) for t, p in ((x, px), (i, pi), (rows, pi))]
            placed.append(distribute_tensor(s, mesh, [px]))
            if isinstance(expected, torch.Tensor):
                torch.testing.assert_close(whole(call(*placed)), expected)
                continue
            with pytest.raises(expected) as found:
                call(*placed)
            assert found.type is expected


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=repr)
def test_results_whose_shape_depends_on_values(mesh, placement):
    x = torch.randn(5, 3)
    placed = distribute_tensor(x, mesh, [placement]).requires_grad_()
    for call in (
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.nonzero(),
        lambda x: torch.where(x > 0)[1],
        lambda x: torch.argwhere(x > 1),
    ):
        found = call(placed)
        assert found.placements == (Replicate(),)
        torch.testing.assert_close(whole(found), call(x))
    placed[placed > 0].sum().backward()
    torch.testing.assert_close(whole(placed.grad), (x > 0).float())


def test_a_write_to_a_sum_that_is_not_reduced_yet(mesh):
    x = torch.randn(4, 3)
    partial = distribute_tensor(x, mesh, [Shard(0)]).sum(0)
    assert partial.placements[0].is_partial()
    partial.index_fill_(0, distribute_tensor(torch.tensor([1, 0]), mesh, [Replicate()]), 1.0)
    torch.testing.assert_close(whole(partial), torch.tensor([1.0, 1.0, x.sum(0)[2]]))


def test_masked_scatter_refuses_a_source_that_is_too_short(mesh):
    x, mask = (distribute_tensor(t, mesh, [Shard(0)]) for t in (torch.zeros(6), torch.ones(6)))
    with pytest.raises(RuntimeError, match="6 true entries, but the source has only 5"):
        x.masked_scatter(mask.bool(), distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]))


def test_the_gradient_of_a_number_that_fills_rows(mesh):
    """Torch counts the rows that are named, each once."""
    number = torch.tensor(2.0)
    x = distribute_tensor(torch.randn(5, 3), mesh, [Shard(0)])
    rows = distribute_tensor(torch.tensor([4, 0, 4]), mesh, [Replicate()])
    filling = distribute_tensor(number, mesh, [Replicate()]).requires_grad_()
    x.index_fill(0, rows, filling).sum().backward()
    assert whole(filling.grad).item() == 6


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=repr)
def test_a_view_of_picked_entries_is_written_to(placement):
    """The entries lie in memory as on one device, or view() would refuse them."""
    x, row = torch.randn(2, 3), torch.tensor([2, 0])
    expected = x.unfold(0, 2, 1)[:, row]
    expected.view(-1)[:2].mul_(-1.5)
    with simulate(2):
        mesh = init_device_mesh("cpu", (2,))
        placed = distribute_tensor(x, mesh, [placement])
        found = placed.unfold(0, 2, 1)[:, distribute_tensor(row, mesh, [Replicate()])]
        found.view(-1)[:2].mul_(-1.5)
        torch.testing.assert_close(whole(found), expected)
