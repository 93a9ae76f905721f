"""Lookups with sparse gradients in compiled code: one graph, and eager code's gradients."""

import pytest
import torch
from by_hand import lay, value
from compiled_programs import sparse_steps
from compiling import compiled
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

from shardwise import Replicate, Shard
from shardwise.debug import CommDebugMode
from shardwise.ops.lookup.row_sparse import RowSparse

pytestmark = pytest.mark.slow

R, S0, S1 = Replicate(), Shard(0), Shard(1)


@pytest.mark.parametrize("bags", [False, True], ids=["rows", "bags"])
@pytest.mark.parametrize(("placement", "ids_placement"), [(S0, S0), (S1, S0), (R, S0)])
def test_steps_as_on_one_device(pair, placement, ids_placement, bags):
    found, expected = sparse_steps(bags, placement, ids_placement)
    torch.testing.assert_close(found.agreed(), expected)


def lookup(ids, table):
    rows = F.embedding(ids, table, padding_idx=2, scale_grad_by_freq=True, sparse=True)
    return (rows.redistribute(placements=[R]) * 2).square().sum()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_gradients_are_those_of_eager_code(pair, backend):
    """Class, rows, values and collectives; added up over two backwards, and used by optimizers."""
    fast, counter = compiled(lookup, backend)
    start = torch.randn(11, 6)
    for kind in (torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad):
        tables = [lay(start.clone(), pair, [S0]).requires_grad_() for _ in range(2)]
        for sizes in ((5,), (7, 4), (9,)):
            for size in sizes:
                ids, sent = lay(torch.randint(0, 11, (size,)), pair, [R]), []
                for run, table in zip((lookup, fast), tables, strict=True):
                    with CommDebugMode() as comm:
                        run(ids, table).backward()
                    sent.append([event.kind for event in comm.events])
                assert sent[0] == sent[1]
            eager, found = (table.grad for table in tables)
            assert type(found) is type(eager) is RowSparse
            for one, other in ((found._rows, eager._rows), (found._local, eager._local)):
                for rank in range(2):
                    torch.testing.assert_close(one.on_rank(rank), other.on_rank(rank))
            for table in tables:
                kind([table], lr=0.1).step()
                table.grad = None
            torch.testing.assert_close(value(tables[1]), value(tables[0]))
    assert counter.frame_count == 2  # the first size, and all others


@pytest.mark.parametrize("placement", [S0, R])
def test_several_gradients_of_one_table(pair, placement):
    """Two lookups, of ids that lie otherwise, and the table as a matrix."""

    def several(ids, table, tied):
        rows = F.embedding(ids, table, sparse=True)
        whole = F.embedding(ids.redistribute(placements=[R]), table, sparse=True)
        return rows.sum() * whole.square().sum() + ((rows @ table.t()).sum() if tied else 0)

    fast = torch.compile(several, backend="aot_eager", fullgraph=True)
    start, ids = torch.randn(11, 6), torch.randint(0, 11, (8,))
    for tied in (False, True):
        one = start.clone().requires_grad_()
        rows = F.embedding(ids, one)
        (rows.sum() * rows.square().sum() + ((rows @ one.t()).sum() if tied else 0)).backward()
        for run in (several, fast):
            table = lay(start.clone(), pair, [placement]).requires_grad_()
            run(lay(ids, pair, [S0]), table, tied).backward()
            assert isinstance(table.grad, RowSparse) is not tied
            torch.testing.assert_close(table.grad.full_tensor().agreed(), one.grad)


def test_no_gradient_of_the_size_of_the_table(pair):
    num_rows = 1_000_000
    sizes = []

    def read(graph, inputs):
        for node in graph.graph.nodes:
            made = node.meta.get("val")
            if node.op == "call_function" and isinstance(made, torch.Tensor):
                sizes.append(made.shape[0] if made.dim() else 0)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=read, bw_compiler=read)
    fast = torch.compile(lookup, backend=backend, fullgraph=True)
    table = lay(torch.zeros(num_rows, 2), pair, [S0]).requires_grad_()
    fast(lay(torch.tensor([3, 999_999, 3, 7, 2]), pair, [R]), table).backward()
    assert table.grad._rows.on_rank(0).tolist() == [3, 3, 7]
    assert table.grad._rows.on_rank(1).tolist() == [499_999]
    known = [size for size in sizes if isinstance(size, int)]
    assert len(known) < len(sizes)  # those that the ids decide
    assert max(known) == 5


def test_a_graph_breaks_where_a_sparse_gradient_comes_in(pair):
    def doubled(ids, table):
        return table.grad * 2, F.embedding(ids, table, sparse=True) * 3

    table = lay(torch.randn(11, 6), pair, [S0]).requires_grad_()
    ids = lay(torch.tensor([3, 10, 3]), pair, [R])
    lookup(ids, table).backward()
    with pytest.raises(Exception, match="sparse Tensor"):
        torch.compile(doubled, backend="aot_eager", fullgraph=True)(ids, table)
    torch._dynamo.reset()
    expected = doubled(ids, table)
    found = torch.compile(doubled, backend="aot_eager")(ids, table)
    assert isinstance(found[0], RowSparse)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.full_tensor().agreed(), other.full_tensor().agreed())


def test_a_whole_step(pair):
    """Torch breaks the graph at `backward()` and in `step`; what runs there is left as it is."""
    start = torch.randn(11, 6)
    tables = [lay(start.clone(), pair, [S0]).requires_grad_() for _ in range(2)]
    optimizers = [torch.optim.Adagrad([table], lr=0.1) for table in tables]

    def step(ids, table, optimizer):
        optimizer.zero_grad()
        lookup(ids, table).backward()
        optimizer.step()

    fast = torch.compile(step, backend="aot_eager")
    for size in (5, 7):
        ids = lay(torch.randint(0, 11, (size,)), pair, [R])
        for run, *state in zip((step, fast), tables, optimizers, strict=True):
            run(ids, *state)
    torch.testing.assert_close(value(tables[1]), value(tables[0]))
