"""The contract of gradients: one device's value, laid out like the leaf or Partial."""

import copy

import pytest
import torch
from parity import lay
from torch.nn import functional as F

import shardwise
from shardwise import Partial, Replicate, Shard
from shardwise.debug import CommDebugMode


def value(tensor):
    return tensor.full_tensor().detach().agreed()


@pytest.fixture
def layers(mesh):
    """A replicated layer after a batch-sharded step: its gradients are Partial."""
    model = shardwise.distribute_module(torch.nn.Linear(3, 3).double(), mesh)
    x = lay(torch.randn(8, 3, dtype=torch.float64), mesh, Shard(0))
    (model(x) ** 2).sum().backward()
    return model


def test_reduce_gradients_takes_one_collective(layers):
    before = {name: value(p.grad) for name, p in layers.named_parameters()}
    assert all(p.grad.placements == (Partial(),) for p in layers.parameters())
    with CommDebugMode() as comm:
        shardwise.reduce_gradients(layers.parameters())
    assert comm.get_total_counts() == 1
    for name, parameter in layers.named_parameters():
        assert parameter.grad.placements == (Replicate(),)
        torch.testing.assert_close(value(parameter.grad), before[name])


def test_reduce_gradients_takes_one_parameter(layers):
    shardwise.reduce_gradients(layers.weight)
    assert layers.weight.grad.placements == (Replicate(),)
    assert layers.bias.grad.placements == (Partial(),)


def test_reduced_gradients_are_written_once(layers):
    """In a simulated world the ranks share what was reduced: no write counts for each of them."""
    before = {name: value(p.grad) for name, p in layers.named_parameters()}
    shardwise.reduce_gradients(layers.parameters())
    for name, parameter in layers.named_parameters():
        parameter.grad.mul_(0.5)
        torch.testing.assert_close(value(parameter.grad), before[name] * 0.5)


def test_gradients_that_are_zeroed_in_place_train_as_on_one_device(mesh):
    alone = torch.nn.Linear(3, 2)
    model = shardwise.distribute_module(copy.deepcopy(alone), mesh)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (alone, model)]
    for _ in range(3):
        x = torch.randn(6, 3)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=False)
        for _ in range(2):
            (alone(x) ** 2).sum().backward()
            (model(lay(x, mesh, Shard(0))) ** 2).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    for expected, found in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(value(found), expected.detach())


def test_small_buckets_take_more_collectives(layers):
    with CommDebugMode() as comm:
        shardwise.reduce_gradients(layers.parameters(), bucket_bytes=1)
    assert comm.get_total_counts() == 2


def test_an_optimizer_reduces_all_gradients_together(layers):
    optimizer = torch.optim.AdamW(layers.parameters())
    with CommDebugMode() as comm:
        optimizer.step()
    assert comm.get_total_counts() == 1


def test_a_remembered_reduction_is_forgotten_when_the_gradient_changes(mesh):
    terms = shardwise.LocalTensor.per_rank(lambda rank: torch.ones(2) * rank)
    grad = shardwise.DTensor.from_local(terms, mesh, [Partial()])
    total = lay(torch.zeros(2), mesh, Replicate())
    total.add_(grad)
    grad.mul_(10)
    total.add_(grad)
    assert value(total).tolist() == [66, 66]
    grad.view(2, 1).zero_()
    total.add_(grad)
    assert value(total).tolist() == [66, 66]


@pytest.mark.parametrize(
    "placement", [Shard(0), Shard(1), Shard(0, sizes=(1, 0, 3, 1)), Replicate()]
)
def test_a_leaf_used_by_any_op_gets_a_gradient_of_its_placements(mesh, placement):
    whole = torch.randn(5, 6, dtype=torch.float64)
    leaf = lay(whole, mesh, placement).requires_grad_()
    x = lay(torch.randn(4, 6, dtype=torch.float64), mesh, Shard(0))
    loss = (x @ leaf.t()).exp().sum() + (leaf * 2).mean()
    loss.backward()
    alone = whole.clone().requires_grad_()
    ((value(x) @ alone.t()).exp().sum() + (alone * 2).mean()).backward()
    found = leaf.grad.placements[0]
    assert found == placement or (placement == Replicate() and found.is_partial())
    torch.testing.assert_close(value(leaf.grad), alone.grad)


def test_gradients_accumulate_over_micro_batches(mesh):
    whole = torch.randn(3, 4, dtype=torch.float64)
    leaf, alone = lay(whole, mesh, Shard(0)).requires_grad_(), whole.clone().requires_grad_()
    for seed in range(3):
        batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)).double()
        F.linear(lay(batch, mesh, Shard(0)), leaf).pow(2).sum().backward()
        F.linear(batch, alone).pow(2).sum().backward()
    torch.testing.assert_close(value(leaf.grad), alone.grad)


def test_double_backward_of_a_linear_layer(mesh):
    weight, x = torch.randn(3, 4).double(), torch.randn(5, 4).double()

    def penalty(weight, x):
        loss = F.linear(x, weight).pow(3).sum()
        (grad,) = torch.autograd.grad(loss, weight, create_graph=True)
        return (grad**2).sum()

    alone = weight.clone().requires_grad_()
    penalty(alone, x).backward()
    leaf = lay(weight, mesh, Shard(0)).requires_grad_()
    penalty(leaf, lay(x, mesh, Shard(0))).backward()
    torch.testing.assert_close(value(leaf.grad), alone.grad)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=repr)
def test_double_backward_of_a_lookup(mesh, placement):
    table, ids = torch.randn(6, 4).double(), torch.tensor([1, 5, 1])

    def penalty(table, ids):
        loss = F.embedding(ids, table).pow(3).sum()
        (grad,) = torch.autograd.grad(loss, table, create_graph=True)
        return (grad**2).sum()

    alone = table.clone().requires_grad_()
    penalty(alone, ids).backward()
    leaf = lay(table, mesh, placement).requires_grad_()
    penalty(leaf, lay(ids, mesh, Replicate())).backward()
    torch.testing.assert_close(value(leaf.grad), alone.grad)


def test_hooks_see_global_gradients(mesh):
    seen = []
    leaf = lay(torch.ones(4, 4), mesh, Shard(0)).requires_grad_()
    y = leaf * 2
    y.register_hook(lambda grad: seen.append(tuple(grad.shape)))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert seen == [(4, 4), (4, 4)]
    assert torch.equal(value(leaf.grad), torch.full((4, 4), 4.0))


def test_micro_batches_are_reduced_once(mesh):
    """Three backward passes into one gradient, which stays Partial until it is used."""
    whole = torch.randn(4, 4, dtype=torch.float64)
    leaf, alone = lay(whole, mesh, Replicate()).requires_grad_(), whole.clone().requires_grad_()
    batches = [torch.randn(8, 4, dtype=torch.float64) for _ in range(3)]
    placed = [lay(batch, mesh, Shard(0)) for batch in batches]
    with CommDebugMode() as comm:
        for batch, x in zip(batches, placed, strict=True):
            F.linear(x, leaf).exp().sum().backward()
            F.linear(batch, alone).exp().sum().backward()
    assert not [event for event in comm.events if event.num_bytes >= whole.nbytes]
    assert leaf.grad.placements == (Partial(),)
    momentum = lay(torch.zeros(4, 4, dtype=torch.float64), mesh, Replicate())
    with CommDebugMode() as comm:
        momentum.add_(leaf.grad)
        momentum.addcmul_(leaf.grad, leaf.grad)
    assert [event.kind for event in comm.events] == ["all_reduce"]
    torch.testing.assert_close(value(leaf.grad), alone.grad)
    torch.testing.assert_close(value(momentum), alone.grad + alone.grad**2)


def test_autograd_grad_gives_dtensors(mesh):
    whole = torch.randn(4, 4, dtype=torch.float64)
    leaf, alone = lay(whole, mesh, Shard(0)).requires_grad_(), whole.clone().requires_grad_()
    first, second = leaf.exp().sum(), (leaf**3).sum()
    (one,) = torch.autograd.grad(first, leaf, retain_graph=True)
    (again,) = torch.autograd.grad(first, leaf)
    two, none = torch.autograd.grad(
        second, [leaf, lay(whole, mesh, Shard(0)).requires_grad_()], allow_unused=True
    )
    assert none is None
    assert leaf.grad is None
    for found, expected in ((one, alone.exp()), (again, alone.exp()), (two, 3 * alone**2)):
        assert found.placements == (Shard(0),)
        torch.testing.assert_close(value(found), expected.detach())
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(first, leaf)


@pytest.mark.parametrize("op", [torch.exp, torch.tanh, lambda x: x @ x.t(), lambda x: x.softmax(1)])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=repr)
def test_double_backward(mesh, op, placement):
    whole = torch.randn(4, 6, dtype=torch.float64)

    def twice(x):
        (grad,) = torch.autograd.grad((op(x) ** 2).sum(), x, create_graph=True)
        (grad**2).sum().backward()
        return x.grad

    expected = twice(whole.clone().requires_grad_())
    found = twice(lay(whole, mesh, placement).requires_grad_())
    torch.testing.assert_close(value(found), expected)


def test_double_backward_through_a_move(mesh):
    whole = torch.randn(4, 6, dtype=torch.float64)

    def twice(x, move):
        (grad,) = torch.autograd.grad((move(x) ** 3).sum(), x, create_graph=True)
        (grad**2).sum().backward()
        return x.grad

    expected = twice(whole.clone().requires_grad_(), lambda x: x)
    for async_op in (False, True):
        found = twice(
            lay(whole, mesh, Shard(0)).requires_grad_(),
            lambda x, a=async_op: x.redistribute(placements=[Shard(1)], async_op=a),
        )
        torch.testing.assert_close(value(found), expected)


def test_hooks_may_change_gradients(mesh):
    leaf = lay(torch.ones(4, 4), mesh, Shard(0)).requires_grad_()
    leaf.register_hook(lambda grad: grad * 3)
    after = []
    leaf.register_post_accumulate_grad_hook(lambda p: after.append(p.grad.placements))
    (leaf * 2).sum().backward()
    assert torch.equal(value(leaf.grad), torch.full((4, 4), 6.0))
    assert after == [(Shard(0),)]


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=repr)
def test_what_a_hook_makes_of_a_gradient_lies_as_the_leaf_does(mesh, placement):
    leaf = lay(torch.ones(4, 4), mesh, placement).requires_grad_()
    weights = torch.arange(16.0).view(4, 4)
    for factor in (lay(weights, mesh, Shard(0)), lay(weights, mesh, Shard(1))):
        leaf.register_hook(lambda grad, by=factor: (grad.t() * by).t())
    leaf.sum().backward()
    assert leaf.grad.placements == (placement,)
    assert torch.equal(value(leaf.grad), weights.t().square())
    leaf.data = lay(torch.zeros(4, 4), mesh, Replicate())
    leaf.grad = None
    leaf.sum().backward()
    assert leaf.grad.placements == (Replicate(),)


@pytest.mark.parametrize(
    "op", [lambda x: torch.var_mean(x, 1), torch.unbind], ids=["var", "unbind"]
)
def test_hooks_are_told_of_results_that_nothing_used(mesh, op):
    """With None, as on one device, since the op has other results."""
    leaf = lay(torch.randn(4, 4), mesh, Shard(0)).requires_grad_()
    used, unused, *_ = op(leaf)
    seen = []
    unused.register_hook(seen.append)
    used.sum().backward()
    assert seen == [None]


def test_a_hook_on_a_leaf_without_entries(mesh):
    """Its gradient is `Partial(product)`, and the cheapest product of that is sharded."""
    leaf = lay(torch.ones(0, 1), mesh, Partial("product")).requires_grad_()
    leaf.register_hook(lambda grad: grad * 0.75)
    torch.cummin(leaf, 1)[0].sin().sum().backward()
    assert leaf.grad.placements == (Replicate(),)


@pytest.mark.parametrize(("bucket_bytes", "expected"), [(1 << 20, 2), (400, 4), (1, 8)])
def test_gradients_are_bucketed_per_axis_and_dtype(square, bucket_bytes, expected):
    """Four gradients of 200 bytes, Partial over both axes: as many collectives as buckets."""
    parameters = [lay(torch.zeros(50), square, Replicate(), Replicate()) for _ in range(4)]
    for number, parameter in enumerate(parameters):
        terms = shardwise.LocalTensor.per_rank(
            lambda rank, n=number: torch.full((50,), rank + n + 0.0)
        )
        parameter.requires_grad_()
        parameter.grad = shardwise.DTensor.from_local(terms, square, [Partial(), Partial()])
    with CommDebugMode() as comm:
        shardwise.reduce_gradients(parameters, bucket_bytes=bucket_bytes)
        shardwise.reduce_gradients(parameters, bucket_bytes=bucket_bytes)
    assert comm.get_total_counts() == expected
    assert {event.op for event in comm.events} == {"reduce_gradients"}
    for number, parameter in enumerate(parameters):
        assert parameter.grad.placements == (Replicate(), Replicate())
        assert value(parameter.grad).unique().tolist() == [6 + 4 * number]


@pytest.mark.parametrize("plain", [0, 1])
@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (F.linear, [(5, 6), (3, 6)]),
        (F.linear, [(4, 5, 6), (3, 6)]),
        (torch.matmul, [(4, 5, 6), (4, 6, 2)]),
        (torch.matmul, [(4, 5, 6), (6,)]),
        (lambda x, w: F.batch_norm(x, None, None, w, None, True), [(6, 4), (4,)]),
        (lambda q, k: F.scaled_dot_product_attention(q, k, k), [(4, 5, 6), (4, 3, 6)]),
    ],
)
def test_plain_operands_that_are_the_same_everywhere_leave_the_gradient_alone(
    mesh, fn, shapes, plain
):
    values = [torch.randn(shape) for shape in shapes]
    alone = [x.clone().requires_grad_(i != plain) for i, x in enumerate(values)]
    fn(*alone).pow(2).sum().backward()
    shared = list(values)
    other = 1 - plain
    shared[other] = lay(values[other], mesh, Shard(0)).requires_grad_()
    with shardwise.implicit_replication():
        fn(*shared).pow(2).sum().backward()
    torch.testing.assert_close(value(shared[other].grad), alone[other].grad)


def test_plain_ids_that_are_the_same_everywhere(mesh):
    table, ids, offsets = torch.randn(9, 4), torch.tensor([1, 8, 0, 3]), torch.tensor([0, 3])
    alone, shared = table.clone().requires_grad_(), lay(table, mesh, Shard(0)).requires_grad_()
    with shardwise.implicit_replication():
        for weight in (alone, shared):
            bags = F.embedding_bag(ids, weight, offsets, per_sample_weights=table[0], mode="sum")
            (F.embedding(ids, weight).sum() + bags.pow(2).sum()).backward()
    torch.testing.assert_close(value(shared.grad), alone.grad)
    with pytest.raises(shardwise.MixedTensorsError, match="implicit_replication"):
        F.embedding(ids, shared)


def used_twice(x, plain):
    """Beside DTensors, through an op on plain tensors alone, and in a number of plain ones."""
    total = (x * plain).pow(2).sum() + (x @ plain.tanh().t()).sum()
    total = total.full_tensor() if isinstance(total, shardwise.DTensor) else total
    return total + (plain**2).sum()


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
@pytest.mark.parametrize(
    ("fn", "shape"),
    [
        (used_twice, (8, 6)),
        (lambda x, p: torch.cat([x, p]).pow(2).sum(), (3, 6)),
        (lambda x, p: F.layer_norm(x, (6,), p).pow(3).sum(), (6,)),
        (lambda x, p: F.linear(x, p).pow(2).sum(), (5, 6)),
    ],
)
def test_the_gradient_of_a_plain_tensor_is_plain(mesh, fn, shape, placement):
    x, start = torch.randn(8, 6), torch.randn(shape)
    parameters = []
    for each in (x, lay(x, mesh, placement)):
        plain = torch.nn.Parameter(start.clone())
        optimizer = torch.optim.Adam([plain], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            with shardwise.implicit_replication():
                fn(each, plain).backward()
            assert type(plain.grad) is torch.Tensor
            optimizer.step()
        parameters.append(plain)
    torch.testing.assert_close(parameters[1].grad, parameters[0].grad)
    torch.testing.assert_close(*parameters)


def test_a_number_that_is_learnt(mesh):
    """Numbers need no wrapping, and their gradients of gradients are there too."""
    x = torch.randn(8, 3)
    found = []
    for each in (x, lay(x, mesh, Shard(0))):
        scale = torch.tensor(1.5, requires_grad=True)
        (grad,) = torch.autograd.grad((each * scale).pow(3).sum(), scale, create_graph=True)
        grad.pow(2).backward()
        assert type(grad) is type(scale.grad) is torch.Tensor
        found.append((grad.detach(), scale.grad))
    torch.testing.assert_close(*found)


def test_ranks_own_tensors_beside_a_distributed_one(mesh):
    mine = shardwise.LocalTensor.per_rank(lambda rank: torch.ones(4))
    x = lay(torch.ones(4), mesh, Shard(0))
    with pytest.raises(shardwise.MixedTensorsError, match="plain LocalTensor"):
        mine + x
    with shardwise.implicit_replication():
        assert torch.equal(value(mine + x), torch.full((4,), 2.0))


def test_a_tensor_that_has_the_shape_of_all_is_broadcast_to_itself(mesh):
    x = lay(torch.ones(3), mesh, Replicate()).requires_grad_()
    one, other = torch.broadcast_tensors(x, x[:1])
    assert one is x
    assert other.shape == (3,)
    assert torch.equal(value(torch.autograd.grad(x.sum(), one)[0]), torch.ones(3))


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Partial()], ids=repr)
def test_cat_gives_tensors_that_it_skips_a_distributed_gradient(mesh, placement):
    x = shardwise.DTensor.from_local(torch.zeros(0), mesh, [placement]).requires_grad_()
    y = shardwise.ones(4, device_mesh=mesh, placements=[Shard(0)]).requires_grad_()
    moved = x.redistribute(placements=[Replicate()]) * 1
    again = moved.redistribute(placements=[Shard(0)])
    for _ in range(2):
        torch.cat([again, x, y, moved]).sin().sum().backward(retain_graph=True)
    assert isinstance(x.grad, shardwise.DTensor)
    assert x.grad.shape == (0,)
    torch.testing.assert_close(value(y.grad), torch.ones(4).cos() * 2)


class WithoutGradient(torch.autograd.Function):
    """A user's function of which the input gets no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.parametrize(
    "op",
    [
        lambda w, x: F.linear(x, w),
        lambda w, x: x[None] @ w.t(),
        lambda w, x: torch.matmul(x[None, None], w.t()[None]),
        lambda w, x: torch.einsum("bk,nk->bn", x, w),
        lambda w, x: F.bilinear(x, x, w.expand(2, 4, 4)),
        lambda w, x: w.sgn(),
        lambda w, x: w.prod(0),
        lambda w, x: F.batch_norm(w[None], None, None, training=True),
        lambda w, x: F.instance_norm(w[None], weight=w[0], bias=w[1]),
        lambda w, x: F.cross_entropy(w, x[:, 0].new_zeros(4, dtype=torch.long)),
        lambda w, x: F.embedding(x.new_zeros(2, dtype=torch.long), w),
        lambda w, x: F.embedding_bag(x.new_zeros(2, 2, dtype=torch.long), w, mode="max"),
        lambda w, x: torch.normal(w, 1.0),
        lambda w, x: w.redistribute(placements=[Replicate()]).as_strided((2, 2), (1, 1)),
        lambda w, x: w.redistribute(placements=[Shard(1)]),
        lambda w, x: w.redistribute(placements=[Shard(1)], forward_dtype=torch.bfloat16),
        lambda w, x: w.redistribute(placements=[Shard(1)], backward_dtype=torch.bfloat16),
    ],
)
@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=repr)
def test_a_function_may_give_no_gradient(mesh, op, placement):
    w = lay(torch.rand(4, 4), mesh, placement).requires_grad_()
    x = lay(torch.rand(2, 4), mesh, Replicate())
    (WithoutGradient.apply(op(w, x)).sum() + w.sum()).backward()
    assert torch.equal(value(w.grad), torch.ones(4, 4))
