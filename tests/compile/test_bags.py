"""Bags in compiled code: the results and gradients of eager code, whatever form their graph has."""

import pytest
import torch
from by_hand import lay, value
from compiling import compiled
from torch.nn import functional as F

from shardwise import Replicate, Shard

pytestmark = pytest.mark.slow

R, S0, S1 = Replicate(), Shard(0), Shard(1)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def _threads(request):
    """One thread of a CPU has another graph; see Note [One op of a graph]."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def bags(ids, table, starts, weights, mode, padding_idx):
    options = {"mode": mode, "padding_idx": padding_idx, "per_sample_weights": weights}
    return F.embedding_bag(ids, table, starts, **options)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False)])
@pytest.mark.parametrize("starts", [None, (0, 2, 2, 9)], ids=["lengths", "offsets"])
@pytest.mark.parametrize("placement", [S0, S1, R], ids=repr)
def test_as_eager(pair, placement, starts, mode, weighted):
    """Three rows and columns on two ranks; a table of one row, of which a rank has none."""
    shape = (4, 3) if starts is None else (12,)
    for rows, padding_idx in ((3, None), (3, 1), (1, None)):
        whole, found = torch.randn(rows, 3), []
        ids = lay(torch.randint(0, rows, shape), pair, [R])
        offsets = starts and lay(torch.tensor(starts), pair, [R])
        weights = lay(torch.rand(shape), pair, [R]) if weighted else None
        for run in (bags, compiled(bags)[0]):
            table = lay(whole, pair, [placement]).requires_grad_()
            out = run(ids, table, offsets, weights, mode, padding_idx)
            out.redistribute(placements=[R]).square().sum().backward()
            found.append((value(out), value(table.grad)))
        torch.testing.assert_close(found[1], found[0])
