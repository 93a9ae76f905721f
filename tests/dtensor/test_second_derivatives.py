"""Gradients of gradients through the doors; see docs/concepts/gradients.md."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise
from shardwise import DTensor, LocalTensor, Partial, Replicate, Shard, UnsupportedError

pytestmark = pytest.mark.slow

WEIGHTS = torch.linspace(0.5, 2, 8, dtype=torch.float64)


def curved(whole):
    return (whole.pow(3) * WEIGHTS.reshape(whole.shape).to(whole.dtype)).sum()


def leaf(x):
    return x.detach().clone().requires_grad_()


def parts(num=4, size=8):
    return [torch.randn(size, dtype=torch.float64) for _ in range(num)]


def per_rank(values):
    return LocalTensor.per_rank(lambda rank: values[rank].clone())


def on_ranks(tensor, num=4):
    tensor = tensor.detach()
    return [tensor.on_rank(r) if isinstance(tensor, LocalTensor) else tensor for r in range(num)]


def curved_global(x):
    """The same of a DTensor: a number that every rank has."""
    weights = shardwise.distribute_tensor(WEIGHTS, x.device_mesh, [Replicate()])
    return (x.pow(3) * weights).sum().full_tensor()


@pytest.mark.parametrize(
    ("placement", "put_together"),
    [
        (Shard(0), lambda xs: torch.cat(list(xs))),
        (Partial(), lambda xs: sum(xs)),
        (Partial("avg"), lambda xs: sum(xs) / len(xs)),
    ],
    ids=["parts", "sum", "average"],
)
def test_from_local_of_what_ranks_own(mesh, placement, put_together):
    """A penalty on each rank's gradient; together they count as on one device."""
    values = parts(size=2 if placement.is_shard() else 8)
    alone = [leaf(x) for x in values]
    first = torch.autograd.grad(curved(put_together(alone)), alone, create_graph=True)
    penalty = sum(g.pow(3).sum() * (rank + 1) for rank, g in enumerate(first))
    second = torch.autograd.grad(penalty, alone)

    local = leaf(per_rank(values))
    x = DTensor.from_local(local, mesh, [placement])
    (grad,) = torch.autograd.grad(curved_global(x), local, create_graph=True)
    factor = LocalTensor.per_rank(lambda rank: torch.tensor(rank + 1.0).double())
    own = (grad.pow(3) * factor).sum()
    (found,) = torch.autograd.grad(own, local)
    for mine, one in zip(on_ranks(grad), first, strict=True):
        torch.testing.assert_close(mine, one.detach())
    torch.testing.assert_close(on_ranks(found), second)


def orders(fn, x, num=3):
    """The first derivatives of `fn`, each of a number made of the one before."""
    found, last = [], fn(x)
    for _ in range(num):
        (grad,) = torch.autograd.grad(last, x, create_graph=True)
        found.append(grad)
        last = grad.pow(3).sum()
    return found


def test_from_local_of_what_all_ranks_hold(mesh):
    """A plain tensor that every rank uses alike counts once."""
    (x,) = parts(1)
    expected = orders(curved, leaf(x))
    found = orders(lambda x: curved_global(DTensor.from_local(x, mesh, [Replicate()])), leaf(x))
    for mine, one in zip(found, expected, strict=True):
        assert type(mine) is torch.Tensor
        torch.testing.assert_close(mine, one)


def test_from_local_with_gradients_that_are_terms(mesh):
    """The ranks' gradients are terms of a sum, until they are added."""
    (x,) = parts(1)

    def split(x):
        whole = DTensor.from_local(x, mesh, [Replicate()], grad_placements=[Partial()])
        return curved_global(whole.redistribute(placements=[Shard(0)]))

    def added(terms):
        return DTensor.from_local(terms, mesh, [Partial()]).full_tensor()

    local = leaf(per_rank([x] * 4))
    (terms,) = torch.autograd.grad(split(local), local, create_graph=True)
    (found,) = torch.autograd.grad(added(terms).pow(3).sum(), local)
    (first, second) = orders(curved, leaf(x), num=2)
    torch.testing.assert_close(added(terms).detach().agreed(), first.detach())
    torch.testing.assert_close(added(found).detach().agreed(), second.detach())


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Partial()], ids=str)
def test_to_local_and_back(mesh, placement):
    """What each rank does to its part; a Partial's terms are only scaled."""
    (x,) = parts(1)

    def bent(x):
        return x.pow(2) if not placement.is_partial() else 2 * x

    def through(x):
        there = x.redistribute(placements=[placement])
        back = DTensor.from_local(bent(there.to_local()), mesh, [placement])
        return curved_global(back)

    expected = orders(lambda x: curved(bent(x)), leaf(x))
    found = orders(through, shardwise.distribute_tensor(x, mesh, [Shard(0)]).requires_grad_())
    for mine, one in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.full_tensor().detach().agreed(), one.detach())


def test_to_local_for_each_ranks_own_work(mesh):
    """Each rank has its own factor; its gradient is a term, and so is what comes back to it."""
    (x,) = parts(1)
    factors = parts(4)

    def alone(x):
        return sum((x.pow(3) * f).sum() for f in factors)

    def together(x):
        own = x.to_local(grad_placements=[Partial()])
        terms = (own.pow(3) * per_rank(factors)).sum()
        return DTensor.from_local(terms, mesh, [Partial()]).full_tensor()

    expected = orders(alone, leaf(x))
    found = orders(
        lambda x: together(x), shardwise.distribute_tensor(x, mesh, [Replicate()]).requires_grad_()
    )
    for mine, one in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.full_tensor().detach().agreed(), one.detach())


def test_terms_of_a_maximum_have_no_second_derivative(mesh):
    x = shardwise.distribute_tensor(parts(1)[0], mesh, [Replicate()]).requires_grad_()
    largest = x.redistribute(placements=[Partial("max")]).to_local()
    scale = leaf(torch.ones(()).double())
    with pytest.raises(UnsupportedError, match="depends on the values"):
        torch.autograd.grad((largest * scale).sum(), x, create_graph=True)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy(mesh, weighted, smoothing, placement):
    x = torch.randn(6, 5).double()
    target, weight = torch.tensor([0, 4, -100, 2, 2, 1]), torch.rand(5).double()

    def loss_of(lay):
        given = lay(weight) if weighted else None
        return lambda x: F.cross_entropy(x, lay(target), given, label_smoothing=smoothing).pow(2)

    expected = orders(loss_of(lambda t: t), leaf(x))
    whole = [Replicate()]
    found = orders(
        loss_of(lambda t: shardwise.distribute_tensor(t, mesh, whole)),
        shardwise.distribute_tensor(x, mesh, [placement]).requires_grad_(),
    )
    for mine, one in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.full_tensor().detach().agreed(), one.detach())


def test_what_is_not_differentiated_again_is_not_left_out(mesh):
    """Also where only some tensors are asked for, and where the gradient that comes is constant."""
    layer = shardwise.distribute_module(nn.LSTM(3, 2), mesh)
    x = shardwise.randn(4, 2, 3, device_mesh=mesh, placements=[Replicate()], requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x)[0].sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="a recurrent layer is not differentiated again"):
        torch.autograd.grad(grad.pow(2).sum() + x.sum(), x)
    table = shardwise.randn(6, 3, device_mesh=mesh, placements=[Shard(0)], requires_grad=True)
    ids = shardwise.distribute_tensor(torch.tensor([[1, 2], [5, 0]]), mesh, [Replicate()])
    (grad,) = torch.autograd.grad(
        F.embedding_bag(ids, table).pow(2).sum(), table, create_graph=True
    )
    with pytest.raises(UnsupportedError, match="an embedding bag is not differentiated again"):
        torch.autograd.grad(grad.pow(2).sum() + table.sum(), table)


CONSTANT = {
    "prod": lambda x, lay: x[:1].prod(),
    "prod of a dim": lambda x, lay: x.reshape(1, -1).prod(0),
    "nll_loss": lambda x, lay: F.nll_loss(x.reshape(4, 2), lay(torch.tensor([1, 0, 0, 1]))),
    "nll_loss of one": lambda x, lay: F.nll_loss(x, lay(torch.tensor(3)), reduction="sum"),
}


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
@pytest.mark.parametrize("name", CONSTANT)
def test_constant_gradients_are_differentiated_again(mesh, name, placement):
    def second(x, lay):
        (grad,) = torch.autograd.grad(CONSTANT[name](x, lay).sum(), x, create_graph=True)
        return grad, torch.autograd.grad(grad.square().sum(), x)[0]

    value = parts(1)[0]
    expected = second(leaf(value), lambda t: t)
    found = second(
        shardwise.distribute_tensor(value, mesh, [placement]).requires_grad_(),
        lambda t: shardwise.distribute_tensor(t, mesh, [Replicate()]),
    )
    for mine, one in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.detach().full_tensor().agreed(), one.detach())


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial()], ids=str)
@pytest.mark.parametrize(
    "product", [torch.prod, lambda x: x.prod(0), lambda x: x.prod(-1, keepdim=True)]
)
@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_products(mesh, product, placement, zeros):
    value = torch.rand(3, 4).double() + 0.5
    value.view(-1)[:zeros] = 0

    def loss(x):
        return product(x).square().sum() + product(x).sum()

    expected = orders(loss, leaf(value))
    placed = shardwise.distribute_tensor(value, mesh, [Replicate()])
    found = orders(loss, placed.redistribute(placements=[placement]).requires_grad_())
    for mine, one in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.full_tensor().detach().agreed(), one.detach())


NORMS = {
    "batch norm": lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
    "frozen batch norm": lambda x, w, b: F.batch_norm(
        x, w.detach() * 0, w.detach().abs() + 1, w, b
    ),
    "instance norm": lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
    "group norm": lambda x, w, b: F.group_norm(x, 4, w, b),
    "layer norm": lambda x, w, b: F.layer_norm(x, (4,), w, b),
    "rms norm": lambda x, w, b: F.rms_norm(x, (4,), w),
    "linear": lambda x, w, b: F.linear(x, w.diag_embed(), b),
}


@pytest.mark.parametrize("needs", ["x", "w", "xb", "wb", "xw", "xwb"])
@pytest.mark.parametrize("norm", NORMS)
def test_a_gradient_has_a_graph_where_one_device_has_one(mesh, norm, needs):
    values = [torch.randn(8, 4, 4), torch.randn(4), torch.randn(4)]
    layouts = [Shard(0), Replicate(), Replicate()]
    plain = [
        leaf(v.double()).requires_grad_(n in needs) for v, n in zip(values, "xwb", strict=True)
    ]
    laid = [
        shardwise.distribute_tensor(x.detach(), mesh, [p]).requires_grad_(x.requires_grad)
        for x, p in zip(plain, layouts, strict=True)
    ]
    found = []
    for operands in (plain, laid):
        loss = NORMS[norm](*operands).sum()
        wanted = [x for x in operands if x.requires_grad]
        grads = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
        found.append([g is not None and g.requires_grad for g in grads])
    assert found[0] == found[1]


def test_batch_norm_with_a_bias_alone(mesh):
    """Torch's own second backward leaves the bias out where there is no weight."""
    x, bias = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)

    def penalty(out, bias):
        (grad,) = torch.autograd.grad(out.sin().sum(), bias, create_graph=True)
        return grad.square().sum()

    alone = leaf(bias)
    scale = (x.var(0, unbiased=False) + 1e-5).rsqrt()
    penalty((x - x.mean(0)) * scale + alone, alone).backward()

    ours = shardwise.distribute_tensor(bias, mesh, [Replicate()]).requires_grad_()
    parts = shardwise.distribute_tensor(x, mesh, [Shard(0)])
    out = F.batch_norm(parts, None, None, bias=ours, training=True)
    penalty(out, ours).full_tensor().backward()
    torch.testing.assert_close(ours.grad.full_tensor().agreed(), alone.grad)
