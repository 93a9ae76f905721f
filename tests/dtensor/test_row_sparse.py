"""Gradients of tables that hold only the rows that have one."""

import pytest
import torch
from by_hand import lay, value
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise
from shardwise import Partial, Replicate, Shard

R, S0, S1 = Replicate(), Shard(0), Shard(1)
ROWS, COLUMNS = 11, 6
LINE = [
    ([S0], [R]),
    ([S0], [S0]),
    ([Shard(0, sizes=(0, 2, 9, 0))], [S0]),
    ([S1], [R]),
    ([S1], [S0]),
    ([R], [R]),
    ([R], [S0]),
]
GRID = [([R, S0], [S0, S0]), ([S0, R], [R, S0]), ([S0, S1], [S0, R]), ([R, S1], [S0, R])]


def gradients(mesh, placements, ids_placements, ids, **options):
    """The gradient on one device, dense, and that of a sharded table."""
    weight = torch.randn(ROWS, COLUMNS)
    one, sharded = weight.clone().requires_grad_(), lay(weight, mesh, placements).requires_grad_()
    upstream = torch.randn(*ids.shape, COLUMNS)
    F.embedding(ids, one, **options).backward(upstream)
    rows = F.embedding(lay(ids, mesh, ids_placements), sharded, sparse=True, **options)
    rows.backward(lay(upstream, mesh, [R] * mesh.ndim))
    return one.grad, sharded.grad


OPTIONS = [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("placements", "ids_placements"), LINE, ids=str)
def test_values_are_those_of_one_device(mesh, placements, ids_placements, options):
    ids = torch.cat([torch.randint(0, ROWS, (5, 3)), torch.full((1, 3), 3)])
    expected, found = gradients(mesh, placements, ids_placements, ids, **options)
    assert found.is_sparse
    assert found.layout is torch.sparse_coo
    assert found.placements == tuple(placements) or placements == [R]
    torch.testing.assert_close(value(found.to_dense()), expected)
    torch.testing.assert_close(found.full_tensor().agreed(), expected)
    once = found.coalesce()
    assert once.is_coalesced()
    torch.testing.assert_close(value(once.to_dense()), expected)


@pytest.mark.parametrize(("placements", "ids_placements"), GRID, ids=str)
def test_on_a_grid(square, placements, ids_placements):
    ids = torch.randint(0, ROWS, (7,))
    expected, found = gradients(square, placements, ids_placements, ids)
    torch.testing.assert_close(value(found.to_dense()), expected)
    torch.testing.assert_close(value(found.coalesce().to_dense()), expected)


OPTIMIZERS = {
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("placements", "ids_placements"), LINE, ids=str)
def test_training(mesh, placements, ids_placements, optimizer):
    make = OPTIMIZERS[optimizer]
    weight = torch.randn(ROWS, COLUMNS)
    one, sharded = nn.Parameter(weight.clone()), nn.Parameter(lay(weight, mesh, placements))
    steps = [make([one]), make([sharded])]
    # A step in which most ranks have no row, two lookups in one step, and one as usual.
    batches = [[torch.zeros(4, dtype=torch.long)], [torch.randint(0, ROWS, (5, 2))] * 2]
    batches.append([torch.randint(0, ROWS, (6,))])
    for lookups in batches:
        for ids in lookups:
            F.embedding(ids, one, sparse=True).pow(2).sum().backward()
            laid = lay(ids, mesh, ids_placements)
            F.embedding(laid, sharded, sparse=True).pow(2).sum().backward()
        for each in steps:
            each.step()
            each.zero_grad()
    torch.testing.assert_close(value(sharded.detach()), one.detach())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_table_that_all_ranks_share_is_stepped_once(mesh, optimizer):
    """In a simulated world it may be stored once, while each rank has a gradient of its own."""
    weight, ids = torch.randn(ROWS, COLUMNS), torch.tensor([1, 3, 3])
    one = nn.Parameter(weight.clone())
    shared = nn.Parameter(shardwise.distribute_tensor(weight, mesh, [R]))
    assert len(shared.to_local()._parts) == 1
    for table, found in ((one, ids), (shared, shardwise.distribute_tensor(ids, mesh, [R]))):
        F.embedding(found, table, sparse=True).sum().backward()
        OPTIMIZERS[optimizer]([table]).step()
    torch.testing.assert_close(value(shared.detach()), one.detach())


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that is made on a rank."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind is not torch.Tensor for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        is_view = any(each.alias_info is not None for each in func._schema.returns)
        if isinstance(out, torch.Tensor) and not is_view:  # or written to: no memory is made
            stored = out._values() if out.is_sparse else out
            self.num = max(self.num, stored.numel())
        return out


@pytest.mark.parametrize("ids_placement", [R, S0], ids=repr)
@pytest.mark.parametrize("placement", [S0, S1, R], ids=repr)
def test_a_step_costs_what_the_batch_costs(mesh, placement, ids_placement):
    """Nothing that is made is as large as a rank's part of the table, 10,000 rows."""
    weight = nn.Parameter(lay(torch.randn(40_000, 4), mesh, [placement]))
    optimizer = torch.optim.SparseAdam([weight], lr=0.1)
    ids = lay(torch.randint(0, 40_000, (16,)), mesh, [ids_placement])
    F.embedding(ids, weight, sparse=True).sum().backward()
    optimizer.step()  # makes the states, which are as large as the table
    optimizer.zero_grad()
    with Largest() as largest:
        F.embedding(ids, weight, sparse=True).sum().backward()
        optimizer.step()
    assert 16 <= largest.num <= 16 * 4 * 8


def test_with_a_dense_gradient_of_the_same_table(mesh):
    """A tied output head has a dense gradient; the sum is dense."""
    weight = torch.randn(ROWS, COLUMNS)
    one, sharded = weight.clone().requires_grad_(), lay(weight, mesh, [S0]).requires_grad_()
    ids = torch.randint(0, ROWS, (5,))
    F.linear(F.embedding(ids, one), one).pow(2).sum().backward()
    rows = F.embedding(lay(ids, mesh, [R]), sharded, sparse=True)
    F.linear(rows, sharded).pow(2).sum().backward()
    assert not sharded.grad.is_sparse
    torch.testing.assert_close(value(sharded.grad), one.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ids_placements", [[R], [S0]], ids=str)
def test_added_to_terms(mesh, ids_placements):
    """As where a dense gradient that was not reduced yet is accumulated."""
    expected, found = gradients(mesh, [R], ids_placements, torch.tensor([1, 4, 1, 9]))
    terms = shardwise.LocalTensor.per_rank(lambda rank: torch.full((ROWS, COLUMNS), rank + 1.0))
    dense = shardwise.DTensor.from_local(terms, mesh, [Partial()])
    assert dense.add_(found, alpha=2) is dense
    torch.testing.assert_close(value(dense), 10 + 2 * expected)


@pytest.mark.parametrize("first", ["table", "head"])
@pytest.mark.parametrize("placement", [S0, S1, R], ids=repr)
def test_a_scaler_finds_an_infinity_of_one_rank(mesh, placement, first):
    """Among sparse and dense gradients, in any order."""
    weight, ids = torch.randn(ROWS, COLUMNS), lay(torch.tensor([0, 10, 0]), mesh, [R])
    for factor in (1.0, torch.inf):
        table, head = (
            nn.Parameter(lay(x, mesh, [p])) for x, p in ((weight, placement), (weight.t(), R))
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = torch.optim.SGD([table, head] if first == "table" else [head, table], lr=0.5)
        scale = lay(torch.tensor([1.0, factor, 1.0]), mesh, [R])
        rows = F.embedding(ids, table, sparse=True)
        scaler.scale(((rows @ head.detach()).sum(1) * scale).sum() + head.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        expected = weight.clone()
        if factor == 1.0:
            expected[0] -= weight.sum(0)
            expected[10] -= weight.sum(0) / 2
        torch.testing.assert_close(value(table.detach()), expected)
        assert scaler.get_scale() == (4.0 if factor == 1.0 else 2.0)


def test_to_local_is_a_sparse_tensor(mesh):
    expected, found = gradients(mesh, [S0], [R], torch.tensor([0, 10, 0]))
    local = found.to_local()
    for rank, rows in enumerate(expected.split(3)):
        torch.testing.assert_close(local.on_rank(rank).to_dense(), rows)


def test_arithmetic_and_what_is_refused(mesh):
    expected, found = gradients(mesh, [S0], [R], torch.tensor([0, 10, 0]))
    torch.testing.assert_close(value((-found).to_dense()), -expected)
    torch.testing.assert_close(value((found * 3 / 2).to_dense()), expected * 1.5)
    torch.testing.assert_close(value((found + found).to_dense()), 2 * expected)
    dense = lay(torch.ones(ROWS, COLUMNS), mesh, [S0])
    torch.testing.assert_close(value(dense + found), expected + 1)
    torch.testing.assert_close(value(found + dense), expected + 1)
    copy = found.clone()
    copy.zero_()
    assert not value(copy.to_dense()).any()
    torch.testing.assert_close(value(found.to_dense()), expected)
    with pytest.raises(NotImplementedError, match=r"row-sparse DTensor.*to_dense"):
        found.exp()
    with pytest.raises(shardwise.LayoutError, match="must have the same placements"):
        lay(torch.ones(ROWS, COLUMNS), mesh, [S1]).add_(found)
