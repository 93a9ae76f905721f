"""Lookups in tables that are sharded row-wise, column-wise or not at all."""

import pytest
import torch
from by_hand import lay, value
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise
from shardwise import MaskPartial, Partial, Replicate, Shard
from shardwise.debug import CommDebugMode, explain

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


@pytest.mark.parametrize("ids_placement", [Replicate(), Shard(0)], ids=repr)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=repr)
def test_fewer_rows_and_columns_than_ranks(mesh, placement, ids_placement):
    weight = torch.randn(2, 3)
    sharded = shardwise.distribute_tensor(weight, mesh, [placement]).requires_grad_()
    weight.requires_grad_()
    ids = torch.tensor([[1, 0], [1, 1], [0, 1]])
    F.embedding(ids, weight).pow(2).sum().backward()
    rows = F.embedding(lay(ids, mesh, [ids_placement]), sharded)
    rows.pow(2).sum().backward()
    assert torch.equal(value(rows), weight.detach()[ids])
    torch.testing.assert_close(value(sharded.grad), weight.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("placement", [p for p in TABLES if p.is_shard(0)], ids=repr)
def test_many_ids_at_once(mesh, placement, dtype):
    """Only the rows that a rank owns are read; the others are true zeros."""
    weight = torch.randn(ROWS, COLUMNS).to(dtype)
    weight[:, 0] = torch.inf
    sharded = lay(weight, mesh, [placement])
    ids = some_ids(41, 25)
    rows = F.embedding(lay(ids, mesh, [Replicate()]), sharded)
    assert torch.equal(value(rows), weight[ids])
    local = rows.to_local()
    held = torch.stack([local.on_rank(rank) != 0 for rank in range(4)])
    assert torch.equal(held.sum(0), torch.ones_like(weight[ids], dtype=torch.long))


def test_what_a_step_communicates(mesh):
    """Column-wise nothing; row-wise one all-reduce when the rows are gathered, none in backward."""
    for placement, sent in ((Shard(1), []), (Shard(0), ["all_reduce"])):
        _, sharded = table(mesh, placement)
        with CommDebugMode() as comm:
            rows = F.embedding(lay(some_ids(5, 2), mesh, [Replicate()]), sharded)
            assert not comm.events
            if placement.is_shard(0):
                assert isinstance(rows.placements[0], MaskPartial)
                rows = rows.redistribute(placements=[Replicate()])
            rows.pow(2).sum().backward()
        assert [event.kind for event in comm.events] == sent
        assert sharded.grad.placements == (placement,)


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


@pytest.mark.parametrize("ids_placement", [Replicate(), Shard(0)], ids=repr)
def test_an_id_out_of_range_is_an_error_as_on_one_device(mesh, ids_placement):
    for placement in (Shard(0), Shard(0, sizes=(11, 0, 0, 0)), Shard(1), Replicate()):
        _, sharded = table(mesh, placement)
        for bad in (ROWS, -1):
            ids = lay(torch.tensor([0, bad]), mesh, [ids_placement])
            with pytest.raises(IndexError, match="out of range"):
                F.embedding(ids, sharded)


# -- ids move, tables do not -----------------------------------------------------------------


def large_batch(mesh, per_rank=400):
    """A table whose rows are long enough that exchanging ids is cheaper than gathering them.

    Id 7 occurs very often: in float64 the order of its sums does not show.
    """
    weight = torch.randn(1000, 64, dtype=torch.float64)
    ids = torch.randint(0, 1000, (per_rank * mesh.size(), 2))
    ids[: ids.shape[0] // 2] = 7
    return weight, lay(weight, mesh, [Shard(0)]).requires_grad_(), ids


def test_ids_are_exchanged_where_that_is_cheaper(mesh):
    weight, sharded, ids = large_batch(mesh)
    with CommDebugMode() as comm:
        rows = F.embedding(lay(ids, mesh, [Shard(0)]), sharded)
    assert rows.placements == (Shard(0),)
    assert torch.equal(value(rows), weight[ids])
    assert [event.kind for event in comm.events] == ["all_to_all_single"] * 3
    # Rank 0 asks for one row, id 7, and nobody asks for much of its 250.
    counts, wanted, given = (event.num_bytes for event in comm.events)
    assert counts == 4 * 3 * 8
    assert wanted == 8
    assert given <= (1 + 1 + 250 + 250) * 64 * 8


def test_few_ids_are_gathered(mesh):
    """Two collectives instead of three; the rows are reduce-scattered to where the ids lie."""
    _, sharded = table(mesh, Shard(0))
    ids = some_ids(8)
    with CommDebugMode() as comm:
        rows = F.embedding(lay(ids, mesh, [Shard(0)]), sharded)
    assert rows.placements == (Shard(0),)
    kinds = [event.kind for event in comm.events]
    assert kinds == ["all_gather_into_tensor", "reduce_scatter_tensor"]


@pytest.mark.parametrize("padding_idx", [None, 7])
def test_gradients_go_back_to_the_owners(mesh, padding_idx):
    weight, sharded, ids = large_batch(mesh)
    weight.requires_grad_()
    upstream = torch.randn(*ids.shape, 64, dtype=torch.float64)
    F.embedding(ids, weight, padding_idx).backward(upstream)
    rows = F.embedding(lay(ids, mesh, [Shard(0)]), sharded, padding_idx)
    with CommDebugMode() as comm:
        rows.backward(lay(upstream, mesh, [Shard(0)]), retain_graph=True)
    assert [event.kind for event in comm.events] == ["all_to_all_single"]
    assert sharded.grad.placements == (Shard(0),)
    torch.testing.assert_close(value(sharded.grad), weight.grad)
    rows.backward(lay(upstream, mesh, [Replicate()]))  # again, and from another layout
    torch.testing.assert_close(value(sharded.grad), 2 * weight.grad)


def test_exchanged_gradients_by_frequency_and_twice_differentiated(mesh):
    weight, sharded, ids = large_batch(mesh)
    weight.requires_grad_()
    laid = lay(ids, mesh, [Shard(0)])
    F.embedding(ids, weight, scale_grad_by_freq=True).sum().backward()
    F.embedding(laid, sharded, scale_grad_by_freq=True).sum().backward()
    torch.testing.assert_close(value(sharded.grad), weight.grad)

    def penalty(ids, table):
        (grad,) = torch.autograd.grad(
            F.embedding(ids, table).pow(2).sum(), table, create_graph=True
        )
        return torch.autograd.grad(grad.pow(2).sum(), table)[0]

    torch.testing.assert_close(value(penalty(laid, sharded)), penalty(ids, weight))


@pytest.mark.parametrize("placements", [[Replicate(), Shard(0)], [Shard(0), Shard(1)]], ids=str)
def test_ids_are_exchanged_on_a_grid(square, placements):
    weight = torch.randn(1000, 512)
    sharded = lay(weight, square, placements).requires_grad_()
    ids = torch.randint(0, 1000, (4000,))
    with CommDebugMode() as comm:
        rows = F.embedding(lay(ids, square, [Shard(0), Shard(0)]), sharded)
    assert "all_to_all_single" in [event.kind for event in comm.events]
    rows.sum().backward()
    assert torch.equal(value(rows), weight[ids])
    expected = torch.bincount(ids, minlength=1000).float().unsqueeze(1).expand(-1, 512)
    assert torch.equal(value(sharded.grad), expected)
    ids[-1], ids[0] = 1000, 0
    with pytest.raises(IndexError, match="from 0 to 1000"):
        F.embedding(lay(ids, square, [Shard(0), Shard(0)]), sharded)


def test_an_exchange_is_no_redistribution_that_strict_mode_allows(mesh):
    _, sharded, ids = large_batch(mesh)
    laid = lay(ids, mesh, [Shard(0)])
    with shardwise.explicit_redistribution():
        with pytest.raises(shardwise.RedistributionError, match=r"all_to_all.*ids.redistribute"):
            F.embedding(laid, sharded)
        F.embedding(laid.redistribute(placements=[Replicate()]), sharded)
        # A replicated table and sharded ids: only the range of ids is compared.
        F.embedding(laid, lay(torch.randn(1000, 4), mesh, [Replicate()]))


def test_an_exchange_is_explained(mesh):
    _, sharded, ids = large_batch(mesh)
    found = explain(F.embedding, lay(ids, mesh, [Shard(0)]), sharded.detach())
    (call,) = found
    assert call.op == "routed_lookup"
    assert len(call.events) == 3
    assert all(event.implicit for event in call.events)
    assert call.cost_s > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("placement", TABLES, ids=repr)
def test_floating_dtypes_and_short_ids(mesh, placement, dtype):
    weight = torch.randn(ROWS, COLUMNS).to(dtype)
    for ids_placement in (Replicate(), Shard(0)):
        one, sharded = weight.clone().requires_grad_(), lay(weight, mesh, [placement])
        sharded.requires_grad_()
        ids = torch.arange(8, dtype=torch.int32)
        expected = F.embedding(ids, one)
        expected.sum().backward()
        rows = F.embedding(lay(ids, mesh, [ids_placement]), sharded)
        rows.sum().backward()
        assert torch.equal(value(rows), expected.detach())
        assert torch.equal(value(sharded.grad), one.grad)


# -- rows of a maximal norm ------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [2.0, 1.0, torch.inf])
@pytest.mark.parametrize("ids_placement", [Replicate(), Shard(0)], ids=repr)
@pytest.mark.parametrize("placement", [p for p in TABLES if not p.is_shard(1)], ids=repr)
def test_rows_are_scaled_down_as_on_one_device(mesh, placement, ids_placement, norm_type):
    weight, sharded = table(mesh, placement)
    weight.requires_grad_()
    ids = torch.tensor([4, 4, 0, 10, 7])
    options = {"max_norm": 1.5, "norm_type": norm_type, "padding_idx": 0}
    expected = F.embedding(ids, weight, **options)
    expected.sum().backward()
    rows = F.embedding(lay(ids, mesh, [ids_placement]), sharded, **options)
    rows.sum().backward()
    assert torch.equal(value(rows), expected.detach())
    assert torch.equal(value(sharded.detach()), weight.detach())
    torch.testing.assert_close(value(sharded.grad), weight.grad)


def test_a_norm_needs_all_columns(mesh):
    _, sharded = table(mesh, Shard(1))
    message = r"aten.embedding_renorm_.default does not have a sharding strategy registered\."
    with pytest.raises(NotImplementedError, match=message):
        F.embedding(lay(some_ids(3), mesh, [Replicate()]), sharded, max_norm=1.0)


# -- tied weights ----------------------------------------------------------------------------


@pytest.mark.parametrize("ids_placement", [Replicate(), Shard(0)], ids=repr)
@pytest.mark.parametrize("placement", TABLES, ids=repr)
def test_a_table_may_be_the_output_head_too(mesh, placement, ids_placement):
    weight, sharded = table(mesh, placement)
    weight.requires_grad_()
    ids = some_ids(6)
    F.linear(F.embedding(ids, weight), weight).pow(2).sum().backward()
    rows = F.embedding(lay(ids, mesh, [ids_placement]), sharded)
    F.linear(rows, sharded).pow(2).sum().backward()
    torch.testing.assert_close(value(sharded.grad), weight.grad, rtol=1e-4, atol=1e-4)
    assert sharded.grad.placements == (placement,) or placement == Replicate()


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


def test_plain_ids_are_refused(mesh):
    _, sharded = table(mesh, Shard(0))
    with pytest.raises(shardwise.MixedTensorsError, match=r"from_local|distribute_tensor"):
        F.embedding(some_ids(3), sharded)
