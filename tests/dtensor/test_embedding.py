"""Lookups in tables that are sharded row-wise, column-wise or not at all."""

import pytest
import torch
from by_hand import lay, value
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise
from shardwise import MaskPartial, Partial, Replicate, Shard

ROWS, COLUMNS = 11, 6
TABLES = [
    Shard(0),
    Shard(0, sizes=(0, 2, 9, 0)),
    Shard(1),
    Shard(1, sizes=(6, 0, 0, 0)),
    Replicate(),
]


def table(mesh, *placements, rows=ROWS):
    weight = torch.randn(rows, COLUMNS)
    return weight, shardwise.distribute_tensor(weight, mesh, placements).requires_grad_()


def some_ids(*shape):
    return torch.randint(0, ROWS, shape)


@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}], ids=str)
@pytest.mark.parametrize("ids_placement", [Replicate(), Shard(0)], ids=repr)
@pytest.mark.parametrize("placement", TABLES, ids=repr)
def test_rows_and_gradients_are_those_of_one_device(mesh, placement, ids_placement, options):
    weight, sharded = table(mesh, placement)
    weight.requires_grad_()
    ids = torch.cat([some_ids(5, 3), torch.full((1, 3), 3)])
    upstream = torch.randn(6, 3, COLUMNS)
    expected = F.embedding(ids, weight, **options)
    expected.backward(upstream)
    rows = F.embedding(lay(ids, mesh, [ids_placement]), sharded, **options)
    rows.backward(lay(upstream, mesh, [Replicate()]))
    assert torch.equal(value(rows), expected.detach())
    torch.testing.assert_close(value(sharded.grad), weight.grad)
    if placement.is_shard():
        assert sharded.grad.placements == (placement,)


@pytest.mark.parametrize(
    "placements",
    [
        [Shard(0), Shard(1)],
        [Shard(1), Shard(0)],
        [Shard(0), Shard(0)],
        [Shard(0), Replicate()],
        [Replicate(), Shard(1)],
    ],
)
def test_a_table_on_a_grid(square, placements):
    weight, sharded = table(square, *placements)
    weight.requires_grad_()
    ids = some_ids(7)
    upstream = torch.randn(7, COLUMNS)
    F.embedding(ids, weight).backward(upstream)
    rows = F.embedding(lay(ids, square, [Shard(0), Replicate()]), sharded)
    rows.backward(lay(upstream, square, [Shard(0), Shard(1)]))
    torch.testing.assert_close(value(rows), F.embedding(ids, weight).detach())
    torch.testing.assert_close(value(sharded.grad), weight.grad)
    for found, asked in zip(sharded.grad.placements, placements, strict=True):
        assert found == asked or asked.is_replicate()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3)], ids=str)
def test_ids_of_any_shape(mesh, shape):
    for placement in (Shard(0), Shard(1), Replicate()):
        weight, sharded = table(mesh, placement)
        ids = some_ids(*shape)
        rows = F.embedding(lay(ids, mesh, [Replicate()]), sharded)
        rows.sum().backward()
        assert torch.equal(value(rows), F.embedding(ids, weight))
        assert sharded.grad.shape == weight.shape


def test_the_gradient_of_a_row_wise_table_stays_on_its_ranks(mesh):
    _, sharded = table(mesh, Shard(0))
    F.embedding(lay(some_ids(4), mesh, [Replicate()]), sharded).sum().backward()
    assert sharded.grad.placements == (Shard(0),)
    shapes = [tuple(sharded.grad.to_local().on_rank(rank).shape) for rank in range(4)]
    assert shapes == [(3, COLUMNS), (3, COLUMNS), (3, COLUMNS), (2, COLUMNS)]


class Rows(TorchDispatchMode):
    """The first size of everything that is made on a rank."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind is not torch.Tensor for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim():
            self.seen.add(out.shape[0])
        return out


def test_no_rank_makes_rows_of_others(mesh):
    _, sharded = table(mesh, Shard(0), rows=400)
    ids = lay(some_ids(4), mesh, [Replicate()])
    with Rows() as rows:
        F.embedding(ids, sharded).sum().backward()
    assert 100 in rows.seen
    assert max(rows.seen) == 100


def test_an_id_out_of_range_is_an_error_as_on_one_device(mesh):
    for placement in (Shard(0), Shard(0, sizes=(11, 0, 0, 0)), Shard(1), Replicate()):
        _, sharded = table(mesh, placement)
        for bad in (ROWS, -1):
            ids = lay(torch.tensor([0, bad]), mesh, [Replicate()])
            with pytest.raises(IndexError, match="out of range"):
                F.embedding(ids, sharded)


# -- MaskPartial -----------------------------------------------------------------------------


@pytest.fixture
def looked_up(mesh):
    """The ids, the expected rows, and the rows as a row-wise lookup returns them."""
    weight, sharded = table(mesh, Shard(0))
    ids = torch.tensor([0, 10, 4, 4])
    return ids, weight[ids], F.embedding(lay(ids, mesh, [Replicate()]), sharded.detach())


def test_a_row_wise_lookup_returns_terms_of_a_sum(looked_up):
    _, _, rows = looked_up
    assert rows.placements == (MaskPartial(logical_shape=(ROWS, COLUMNS)),)
    assert rows.placements[0].is_partial("sum")


def test_rows_of_others_are_true_zeros(looked_up):
    """Rank r owns rows 3r to 3r+2, so a plain sum over ranks is right."""
    ids, expected, rows = looked_up
    local = rows.to_local()
    for rank in range(4):
        owned = (ids // 3 == rank).unsqueeze(-1)
        assert torch.equal(local.on_rank(rank), torch.where(owned, expected, 0.0))


def test_it_may_be_reduced_any_number_of_times(looked_up):
    _, expected, rows = looked_up
    for _ in range(2):
        assert torch.equal(
            rows.redistribute(placements=[Replicate()]).full_tensor().agreed(), expected
        )
        assert torch.equal(value(rows.redistribute(placements=[Shard(1)])), expected)
        assert torch.equal(value(rows.redistribute(placements=[Partial()])), expected)


def test_lookups_of_equal_tables_add_up(mesh):
    ids = lay(some_ids(5), mesh, [Replicate()])
    (one, first), (two, second) = table(mesh, Shard(0)), table(mesh, Shard(0))
    a, b = F.embedding(ids, first), F.embedding(ids, second)
    assert a.placements == b.placements
    total = a + b
    assert total.placements[0].is_partial("sum")
    torch.testing.assert_close(value(total), F.embedding(value(ids), one + two))


def test_lookups_of_other_tables_are_told_apart(mesh):
    ids = lay(some_ids(5), mesh, [Replicate()])
    larger = F.embedding(ids, table(mesh, Shard(0), rows=ROWS + 1)[1])
    assert larger.placements == (MaskPartial(logical_shape=(ROWS + 1, COLUMNS)),)


# -- what is refused -------------------------------------------------------------------------


def test_sparse_gradients_are_refused(mesh):
    _, sharded = table(mesh, Shard(0))
    with pytest.raises(NotImplementedError, match=r"sharding strategy.*sparse"):
        F.embedding(lay(some_ids(3), mesh, [Replicate()]), sharded, sparse=True)


def test_plain_ids_are_refused(mesh):
    _, sharded = table(mesh, Shard(0))
    with pytest.raises(shardwise.MixedTensorsError, match=r"from_local|distribute_tensor"):
        F.embedding(some_ids(3), sharded)
