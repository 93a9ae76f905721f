"""Memory that is kept between steps is never shared with somebody who still reads it."""

import copy

import torch
from parity import through_file
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shardwise.embedding import EmbeddingBagCollection, Jagged, Table
from shardwise.lookup.optimizers import add_distinct_rows
from shardwise.lookup.scratch import Lent, table_memory


def test_memory_is_lent_again_when_nobody_holds_it():
    lent = Lent()
    address = lent.numbers(12, torch.float32).data_ptr()
    assert lent.numbers(10, torch.float32).data_ptr() == address


def test_memory_is_not_lent_while_a_view_of_it_lives():
    lent = Lent()
    row = lent.numbers(12, torch.float32).fill_(1.0).view(3, 4)[1].detach()
    lent.numbers(12, torch.float32).fill_(2.0)
    assert row.tolist() == [1.0] * 4


def test_a_gradient_that_is_kept_does_not_change_in_the_next_step():
    bags = EmbeddingBagCollection([Table("t", 50, 4)])
    grads = []
    for ids in ([3, 7, 7], [5, 9, 1]):
        bags.zero_grad()
        out = bags(Jagged(["t"], torch.tensor(ids), lengths=torch.tensor([1, 2])))["t"]
        out.mul(len(grads) + 1).sum().backward()
        grads.append(bags.parameter("t").grad)
    assert grads[0].to_dense()[:, 0].nonzero().view(-1).tolist() == [3, 7]
    assert grads[0].to_dense()[[3, 7], 0].tolist() == [1.0, 2.0]


def test_distinct_rows_are_added_whatever_the_target_looks_like():
    rows, values = torch.tensor([1, 4]), torch.randn(2, 3)
    for target in (torch.zeros(6, 3), torch.zeros(3, 6).t()):
        expected = target.clone().index_add_(0, rows, values, alpha=-0.5)
        assert torch.equal(add_distinct_rows(target, rows, values, -0.5), expected)


def test_large_tables_are_ordinary_tensors():
    """They lie in memory of their own, in huge pages where there are any."""
    shape, cpu = (40_000, 64), torch.device("cpu")
    zeros = table_memory(shape, torch.float32, cpu, zeros=True)
    assert zeros.shape == shape
    assert zeros.is_contiguous()
    assert not zeros.any()
    table = torch.nn.Parameter(table_memory(shape, torch.float32, cpu).fill_(2.0))
    del zeros
    copies = copy.deepcopy(table), through_file(table, weights_only=True)
    table.data[3] = 0
    for other in copies:
        assert torch.equal(other.detach(), torch.full(shape, 2.0))
    with FakeTensorMode():
        assert isinstance(table_memory(shape, torch.float32, cpu), FakeTensor)
    assert table_memory(shape, torch.float32, torch.device("meta")).is_meta
