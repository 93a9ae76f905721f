"""Sizes that are symbols to the compiler: one graph serves them, and gives what eager code gives.

Pieces have two entries or more where graphs are counted: torch makes own graphs for 0 and 1.
"""

from functools import partial

import pytest
import torch
from by_hand import lay, value
from compiling import compiled
from torch.nn import functional as F

from shardwise import Replicate, Shard

pytestmark = pytest.mark.slow

R, S0, S2 = Replicate(), Shard(0), Shard(2)


def joined(x, w):
    y = torch.cat([x, x * 2]).repeat(1, 2) + torch.stack([x, x]).flatten(0, 1).tile(2)
    return y.unflatten(1, (5, -1)).transpose(0, 1).sum(0).t() @ y[:, ::2] + w.sum()


def losses(x, w):
    logits = F.layer_norm(F.linear(x, w), (7,))
    target = logits.detach().argmax(1)
    rows = F.nll_loss(logits.log_softmax(-1), target, reduction="none").cumsum(0)
    return F.cross_entropy(logits, target, label_smoothing=0.1) + rows


def picked(x, w):
    best = x.topk(3)
    rest = x.scatter(1, best[1], 0.0).gather(1, best[1].flip(1)) + x.sort(0)[0][:, :3]
    return F.pad(rest, (1, 1, 2, 0)).roll(1, 0) + F.embedding(best[1][:1, 0] % 7, w)[:, :5]


def spread(x, w):
    images = x.view(-1, 2, 5).unsqueeze(1).expand(-1, 3, -1, -1)
    wide = F.interpolate(images, scale_factor=2.0)
    wide = wide + F.conv2d(images.repeat(1, 1, 2, 2), w[:3, :3, None, None])
    return F.unfold(wide, 2).var(0) + F.adaptive_avg_pool2d(wide, 1).flatten(1).norm()


def outcome(fn, inputs):
    out = fn(*inputs)
    out = out if isinstance(out, torch.Tensor) else sum(each.sum() for each in out)
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    grads = torch.autograd.grad(out.sin().sum(), leaves)
    return [value(x.detach()) for x in (out, *grads)]


def assert_as_eager(fn, fast, inputs):
    torch.testing.assert_close(outcome(fast, inputs), outcome(fn, inputs))


@pytest.mark.parametrize("fn", [joined, losses, picked, spread], ids=lambda fn: fn.__name__)
def test_from_the_second_batch_size_on_a_graph_serves_all(pair, fn):
    fast, counter = compiled(fn)
    for rows in (8, 11, 23):
        x = lay(torch.randn(rows, 10), pair, [S0]).requires_grad_()
        w = lay(torch.randn(7, 10), pair, [R]).requires_grad_()
        assert_as_eager(fn, fast, (x, w))
    assert counter.frame_count == 2


@pytest.mark.parametrize("rows", [2, 0])
def test_batches_that_leave_ranks_without_rows(mesh, rows):
    x = lay(torch.randn(rows, 10), mesh, [S0]).requires_grad_()
    w = lay(torch.randn(7, 10), mesh, [R]).requires_grad_()
    fast = torch.compile(losses, backend="aot_eager", fullgraph=True, dynamic=True)
    assert_as_eager(losses, fast, (x, w))


ALIKE = {
    "merged": lambda x: x.flatten() * 2,
    "reshaped": lambda x: x.reshape(25, 5) * 2,
    "contracted": lambda x: torch.tensordot(x, x, dims=([0], [0])),
    "windows": lambda x: F.unfold(x.unsqueeze(1), 2),
    "tiled": lambda x: x.repeat(1, 2, 3).reshape(-1, 25, 6),
    "distance": lambda x: torch.dist(x, x * 2),
    "averaged": lambda x: F.huber_loss(x, x.sin()),
}


@pytest.mark.parametrize("name", ALIKE)
def test_dims_of_one_size(pair, name):
    """They are one symbol, and their products are powers of it."""
    fast = torch.compile(ALIKE[name], backend="aot_eager", fullgraph=True, dynamic=True)
    assert_as_eager(ALIKE[name], fast, (lay(torch.randn(5, 5, 5), pair, [S0]).requires_grad_(),))


def test_a_view_that_merges_whole_dims_serves_all_sizes(pair):
    """Only a dim that is cut is asked whether the cut divides it."""

    def fn(x):
        return x.flatten(0, 1).sin().unflatten(0, (-1, x.shape[1]))

    fast, counter = compiled(fn, dynamic=True)
    for batch, length in ((3, 8), (6, 7), (2, 11)):
        x = lay(torch.randn(batch, length, 9), pair, [S2]).requires_grad_()
        assert_as_eager(fn, fast, (x,))
    assert counter.frame_count == 1


def test_a_place_that_changes_is_read_and_written(pair):
    """As in a cache of keys: one graph for all places of a dim that is whole."""

    def fn(cache, key, place):
        cache = cache.clone()
        cache[:, place : place + 2] = key
        return cache * 2, cache.narrow(1, place, 3)

    fast, counter = compiled(fn)
    cache = lay(torch.randn(6, 20), pair, [S0]).requires_grad_()
    key = lay(torch.randn(6, 2), pair, [S0]).requires_grad_()
    for place in (3, 2, 5, 8):
        assert_as_eager(partial(fn, place=place), partial(fast, place=place), (cache, key))
    assert counter.frame_count == 2


def test_sizes_that_went_through_floats(pair):
    def fn(x):
        return F.interpolate(x, scale_factor=0.8, mode="bilinear")

    fast = torch.compile(fn, backend="aot_eager", fullgraph=True, dynamic=True)
    uneven = Shard(0, sizes=(2, 0))
    assert_as_eager(fn, fast, (lay(torch.randn(2, 3, 10, 9), pair, [uneven]).requires_grad_(),))


def test_fewer_groups_than_ranks(mesh):
    """A Shard names no sizes that are symbols, so groups are not cut then."""

    def fn(x, w, groups):
        return F.group_norm(F.conv1d(x, w, groups=groups), groups)

    fast = torch.compile(fn, backend="aot_eager", fullgraph=True, dynamic=True)
    x = lay(torch.randn(3, 4, 8), mesh, [Shard(1)]).requires_grad_()
    assert_as_eager(fn, fast, (x, lay(torch.randn(6, 2, 3), mesh, [R]), 2))


READ_BY_BACKWARD = {
    "cumprod": lambda x: x.cumprod(1),
    "sgn": lambda x: x.sgn() * x,
    "householder": lambda x: torch.linalg.householder_product(x, x[0, :4]),
    "pooled": lambda x: F.fractional_max_pool2d(
        x.unsqueeze(1).unsqueeze(1), (1, 2), (1, 2), _random_samples=x.new_full((len(x), 1, 2), 0.5)
    ),
}


@pytest.mark.parametrize("name", READ_BY_BACKWARD)
def test_sizes_that_only_backward_reads(pair, name):
    """Torch fixes them in backward, when the outputs of forward are known already."""
    fn = READ_BY_BACKWARD[name]
    fast = torch.compile(fn, backend="aot_eager", fullgraph=True, dynamic=True)
    assert_as_eager(fn, fast, (lay(torch.randn(7, 4), pair, [S0]).requires_grad_(),))


def kept_rows(x, w):
    rows = x[x[:, 0] > 0]
    joined = torch.cat([rows, w]).view(-1, 2, 5).mean((0, 2))
    return F.linear(rows, w).softmax(-1).mean(0).sum() + joined


def groups(x, w):
    kinds, kind, count = torch.unique(x[:, 0].int(), return_inverse=True, return_counts=True)
    sums = torch.zeros_like(x[:1]).expand(kinds.shape[0], 10).index_add(0, kind, x)
    rows, columns = (x > 0).nonzero().unbind(1)
    return (sums / count.unsqueeze(1)).flatten().mean() + x[rows, columns].mean() + w


@pytest.mark.parametrize("fn", [kept_rows, groups], ids=lambda fn: fn.__name__)
def test_sizes_that_only_values_tell(pair, fn):
    """Nothing is asked of them: whether they are equal, or divide, is taken for a no."""
    fast = torch.compile(fn, backend="aot_eager", fullgraph=True, dynamic=True)
    x = lay(torch.randn(11, 10), pair, [S0]).requires_grad_()
    assert_as_eager(fn, fast, (x, lay(torch.randn(6, 10), pair, [R]).requires_grad_()))


def test_explicit_sizes_are_numbers(mesh):
    def fn(x, index):
        return x.gather(0, index) * 2

    uneven = Shard(1, sizes=(4, 0, 0, 1))
    fast = torch.compile(fn, backend="aot_eager", fullgraph=True, dynamic=True)
    x = lay(torch.randn(10, 5), mesh, [uneven]).requires_grad_()
    assert_as_eager(fn, fast, (x, lay(torch.randint(0, 10, (6, 5)), mesh, [uneven])))


def test_backward_that_calls_such_an_op_fixes_no_size(pair):
    """The gradient of `abs` calls `sgn`, and nobody asks for the gradient of that."""

    def fn(x):
        return F.softsign(x)

    fast, counter = compiled(fn, dynamic=True)
    for rows in (5, 9, 13):
        assert_as_eager(fn, fast, (lay(torch.randn(rows, 4), pair, [S0]).requires_grad_(),))
    assert counter.frame_count == 1


@pytest.mark.parametrize("orders", [(3, 4, 5), (2.5, 3.5, 4.5)], ids=["ints", "floats"])
def test_orders_of_norms_that_change(pair, orders):
    """How a norm is put together from those of shards depends on its order: a graph for each."""

    def fn(x, order):
        return torch.linalg.vector_norm(x, order) + torch.renorm(x, order, 1, 0.5).sum()

    fast = torch.compile(fn, backend="aot_eager", fullgraph=True)
    x = lay(torch.randn(7, 4), pair, [S0])
    for order in orders:
        torch.testing.assert_close(value(fast(x, order)), value(fn(x, order)))


def test_sizes_that_a_program_brings_and_that_are_one(pair):
    def fn(x, sizes):
        return torch.split_with_sizes_copy(x, sizes, 1)

    fast = torch.compile(fn, backend="aot_eager", fullgraph=True, dynamic=True)
    x = lay(torch.randn(6, 5), pair, [S0])
    for sizes in ([1, 3, 1], [1, 2, 2], [2, 1, 2]):
        for found, expected in zip(fast(x, sizes), fn(x, sizes), strict=True):
            torch.testing.assert_close(value(found), value(expected))


def test_the_gradient_where_values_decide_a_size(pair):
    def fn(x, times):
        return torch.repeat_interleave(x, times, dim=1)

    fast = torch.compile(fn, backend="aot_eager", fullgraph=True, dynamic=True)
    x = lay(torch.randn(5, 3), pair, [S0]).requires_grad_()
    assert_as_eager(fn, fast, (x, lay(torch.tensor([2, 0, 3]), pair, [R])))


def test_a_size_that_equals_that_of_the_gradient(pair):
    """The compiler has a symbol for each, finds them equal, and keeps one, by a hash of names.

    It keeps the gradient's where the argument is called W.
    """

    def fn(ids, W):
        return F.embedding_bag(ids, W, mode="sum")

    fast = torch.compile(fn)  # inductor reads sizes by their symbols
    ids = lay(torch.randint(100, (6, 4)), pair, [R])
    for rows in (100, 200):
        table = lay(torch.randn(rows, 5), pair, [S0]).requires_grad_()
        fast(ids, table).sum().backward()
        with torch.no_grad():
            torch.testing.assert_close(value(fast(ids, table)), value(fn(ids, table)))
