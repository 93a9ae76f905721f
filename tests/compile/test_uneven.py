"""Local tensors with other sizes on each rank, in compiled code of a simulated world."""

import pytest
import torch
from by_hand import value
from compiling import compiled
from torch import nn
from torch.nn import functional as F

from shardwise import DTensor, LocalTensor, Replicate, Shard, distribute_tensor, local_map
from shardwise.errors import RankMismatchError
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = pytest.mark.slow


def rows(sizes, width=4):
    return LocalTensor.per_rank(lambda rank: torch.randn(sizes[rank], width))


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, DTensor):
            assert one.placements == other.placements
            one, other = one._local, other._local
        assert one.ranks == other.ranks
        for rank in one.ranks:
            torch.testing.assert_close(one.on_rank(rank), other.on_rank(rank))


def results(fn, *inputs):
    """What `fn` puts out, and the gradients of its inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = fn(*leaves)
    outs = out if isinstance(out, tuple) else (out,)
    loss = sum(
        o.to_local().square().sum() if isinstance(o, DTensor) else o.square().sum() for o in outs
    )
    loss.backward()
    return [o.detach() for o in outs] + [leaf.grad for leaf in leaves]


def layer(x, w):
    """Elementwise, matrix and reducing ops, and ops that take sizes."""
    hidden = F.linear(x, w).relu().softmax(-1)
    joined = torch.cat([hidden, x[1:] * 2], 0)
    joined[1:].mul_(2)
    scores = (x.unsqueeze(0) @ x.t()).sum(1)
    return hidden.mean(0), joined.t().contiguous().flatten(), scores, x.t()


@pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="older torch asks for one size in a product of three dims, in eager code too",
)
@pytest.mark.parametrize("dynamic", [None, True], ids=["default", "dynamic"])
def test_ops_on_parts_of_other_sizes(pair, dynamic):
    fast, counter = compiled(layer, dynamic=dynamic)
    for sizes in ((3, 5), (4, 7), (5, 6), (9, 8)):
        x, w = rows(sizes), rows((4, 4))
        assert_same(results(fast, x, w), results(layer, x, w))
    assert counter.frame_count == (2 if dynamic is None else 1)


def test_empty_parts_and_parts_of_one(pair):
    fast, _ = compiled(lambda x: (x.sin() * 2).sum(0))
    for sizes in ((2, 0), (3, 1), (1, 4), (0, 2)):
        x = rows(sizes)
        assert_same(results(fast, x), results(lambda x: (x.sin() * 2).sum(0), x))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_uneven_shards_leave_and_enter(pair, backend):
    def through(x):
        local = x.sin().to_local().cos()
        return local * 2, DTensor.from_local(local, pair, [Shard(0)], shape=x.shape)

    fast, counter = compiled(through, backend)
    for size in (5, 7, 11):
        x = distribute_tensor(torch.randn(size, 4), pair, [Shard(0)])
        assert_same(results(fast, x), results(through, x))
    assert counter.frame_count == 2  # the first size, and all others


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_width_that_does_not_divide(pair, backend):
    """The hidden tensor is local between the layers: 4 columns on one rank, 3 on the other."""
    plain = nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Dropout(0.0), nn.Linear(7, 3))
    plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
    model = parallelize_module(plain, pair, plan)
    fast, counter = compiled(model, backend)
    for batch in (4, 5, 8):
        x, found = torch.randn(batch, 6), []
        for run in (model, fast):
            model.zero_grad()
            out = run(x)
            out.square().sum().backward()
            found.append([out.agreed().detach(), *(value(p.grad) for p in model.parameters())])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)
    assert counter.frame_count == 2


def test_functions_of_local_tensors(pair):
    product = local_map(torch.mm, [Shard(0)], ([Shard(0)], [Replicate()]), device_mesh=pair)
    fast, _ = compiled(lambda a, b: product(a, b).relu())
    for size in (5, 9, 13):
        a = distribute_tensor(torch.randn(size, 7), pair, [Shard(0)])
        b = distribute_tensor(torch.randn(7, 5), pair, [Replicate()])
        assert_same(results(fast, a, b), results(lambda a, b: product(a, b).relu(), a, b))


def test_other_parts_than_shard_splits(pair):
    """A function may put out parts of any size; the placement then lists them."""
    doubled = local_map(lambda x: torch.cat([x, x]), [Shard(0)], device_mesh=pair)
    shorter = local_map(lambda x: x[1:], [Shard(0)], device_mesh=pair)
    x = distribute_tensor(torch.randn(9, 2), pair, [Shard(0, sizes=(7, 2))])
    out = compiled(lambda x: shorter(x) * 2)[0](x)
    assert out.placements == (Shard(0, sizes=(6, 1)),)
    assert torch.equal(value(out), torch.cat([value(x)[1:7], value(x)[8:]]) * 2)
    with pytest.raises(Exception, match="they cannot change from call to call"):
        compiled(lambda x: doubled(x) * 2, dynamic=True)[0](
            distribute_tensor(torch.randn(9, 2), pair, [Shard(0)])
        )


def read_first(x):
    return x * x.shape[0]


def read_later(x):
    return (x * 2).sin() * (x * 2).size(0)


def read_by_torch(x):
    return F.layer_norm(x, x.stride()[1:]) * len(x)


@pytest.mark.parametrize("reads", [read_first, read_later, read_by_torch])
@pytest.mark.parametrize("dynamic", [None, True], ids=["default", "dynamic"])
def test_the_size_itself_is_not_known(pair, reads, dynamic):
    """As in eager code: no rank's size stands for those of others."""
    with pytest.raises(Exception, match="the ranks differ: rank 0 has"):
        compiled(reads, dynamic=dynamic)[0](rows((2, 3)))


def test_parts_that_differ_in_strides_alone(pair):
    x = LocalTensor.per_rank(lambda rank: torch.randn(4, 3 + rank)[:, :2])
    with pytest.raises(Exception, match=r"Call contiguous\(\) on it first"):
        compiled(lambda x: x * 2)[0](x)
    assert_same([compiled(lambda x: x * 2)[0](x.contiguous())], [x * 2])


def test_eager_functions_of_torch_get_no_size_that_stands_in(pair):
    """What the compiler notes down for an uneven tensor is no number of rows."""
    x = rows((3, 2))
    with pytest.raises(RankMismatchError, match="One value was asked for"):
        torch.vmap(lambda row: torch.ones(()))(x)
