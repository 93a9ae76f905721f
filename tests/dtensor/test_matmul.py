"""Batched products are one op: batch dims are not folded, so that any may be sharded."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

import shardwise
from shardwise import Partial, Replicate, Shard, distribute_tensor
from shardwise.debug import CommDebugMode
from shardwise.testing.layouts import laid_out

pytestmark = pytest.mark.slow

SHAPES = [
    ((2, 6, 5, 3), (2, 6, 3, 4)),
    ((2, 6, 5, 3), (3, 4)),
    ((6, 5, 3), (3,)),
    ((5, 3), (2, 3, 4)),
    ((2, 1, 5, 3), (6, 3, 4)),
]


@pytest.mark.parametrize(("left", "right"), SHAPES)
@pytest.mark.parametrize("dim", [-1, 0, 1, 2])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_values_and_gradients_are_one_devices(left, right, dim, num_ranks):
    a = torch.randn(left, dtype=torch.float64, requires_grad=True)
    b = torch.randn(right, dtype=torch.float64, requires_grad=True)
    expected = a @ b
    seed = torch.randn_like(expected)
    expected.backward(seed)
    with shardwise.simulate(num_ranks):
        mesh = shardwise.init_device_mesh("cpu", (num_ranks,))
        a_placed = Shard(dim) if 0 <= dim < len(left) else Replicate()
        b_placed = Shard(dim) if 0 <= dim < len(right) else Replicate()
        da = distribute_tensor(a.detach(), mesh, [a_placed]).requires_grad_()
        db = distribute_tensor(b.detach(), mesh, [b_placed]).requires_grad_()
        out = da @ db
        assert_close(out.full_tensor(), expected.detach())
        out.backward(distribute_tensor(seed, mesh, [Replicate()]))
        assert_close(da.grad.full_tensor(), a.grad)
        assert_close(db.grad.full_tensor(), b.grad)


def test_a_product_per_head_does_not_communicate():
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cpu", (4,))
        q = shardwise.randn(2, 8, 5, 3, device_mesh=mesh, placements=[Shard(1)]).requires_grad_()
        k = shardwise.randn(2, 8, 5, 3, device_mesh=mesh, placements=[Shard(1)]).requires_grad_()
        with CommDebugMode() as comm:
            scores = q @ k.transpose(-1, -2)
            scores.backward(torch.ones_like(scores))
        assert comm.get_total_counts() == 0
        assert scores.placements == (Shard(1),)
        assert q.grad.placements == k.grad.placements == (Shard(1),)


def test_a_sharded_inner_dim_leaves_a_sum_to_be_made():
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        a = shardwise.randn(2, 3, 4, 6, device_mesh=mesh, placements=[Shard(3)])
        b = shardwise.randn(2, 3, 6, 5, device_mesh=mesh, placements=[Shard(2)])
        assert (a @ b).placements == (Partial(),)


def test_it_can_be_differentiated_twice():
    def penalty(a, b):
        out = (a @ b).square().sum()
        (grad,) = torch.autograd.grad(out, a, create_graph=True)
        return grad.square().sum()

    a, b = torch.randn(2, 4, 3), torch.randn(3, 5)
    plain = a.clone().requires_grad_(), b.clone().requires_grad_()
    penalty(*plain).backward()
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        da = distribute_tensor(a, mesh, [Shard(1)]).requires_grad_()
        db = distribute_tensor(b, mesh, [Shard(1)]).requires_grad_()
        penalty(da, db).backward()
        assert_close(da.grad.full_tensor(), plain[0].grad)
        assert_close(db.grad.full_tensor(), plain[1].grad)


# -- linear, in every dtype and with vectors -------------------------------------------------

LINEAR_SHAPES = [
    ((4, 3), (5, 3), None),
    ((2, 4, 3), (5, 3), (5,)),
    ((3,), (5, 3), (5,)),
    ((4, 3), (3,), None),
    ((2, 4, 3), (3,), ()),
    ((3,), (3,), ()),
    ((2, 4, 3), (5, 3), ()),
    ((2, 4, 3), (5, 3), (4, 5)),
]


def with_gradients(tensors):
    """The output, the gradients of something made of it, and of those in turn."""
    given = [t.requires_grad_() for t in tensors if t is not None]
    out = F.linear(*tensors)
    first = torch.autograd.grad((out * out.detach().conj()).sum().real, given, create_graph=True)
    size = sum((g * g.conj()).sum().real for g in first)
    return [out, *first, *torch.autograd.grad(size, given, allow_unused=True)]


@pytest.mark.parametrize("shapes", LINEAR_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_linear(square, shapes, dtype):
    values = [None if s is None else torch.randn(s, dtype=dtype) for s in shapes]
    expected = with_gradients([None if v is None else v.clone() for v in values])
    each = [
        [None]
        if shape is None
        else [Replicate(), Partial(), *(Shard(d) for d in range(len(shape)))]
        for shape in shapes
    ]
    for placements in itertools.product(*each):
        placed = [
            v if v is None else laid_out(v, square, [p, Replicate()])
            for v, p in zip(values, placements, strict=True)
        ]
        found = with_gradients(placed)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert_close(one.detach().full_tensor().agreed(), other.detach().resolve_conj())
        plain = [v if v is None else v.detach() for v in placed]
        with torch.inference_mode():
            again = F.linear(*plain)
        assert_close(again.full_tensor().agreed(), expected[0].detach())


def test_linear_says_what_does_not_fit(mesh):
    x = distribute_tensor(torch.ones(2, 3), mesh, [Shard(0)])
    vector = distribute_tensor(torch.ones(3), mesh, [Replicate()])
    for bias in (vector[0], vector[:2]):  # one device takes no bias here
        with pytest.raises(RuntimeError, match=r"must be (2D|a matrix)"):
            F.linear(x, vector, bias)
    with pytest.raises(RuntimeError, match="at least 1D"):
        F.linear(x, vector.sum())


KEPT = {
    "linear": lambda x, w: F.linear(x, w),
    "linear, a bias": lambda x, w: F.linear(x, w, w[0]),
    "matmul": lambda x, w: x[None] @ w,
    "matmul of batches": lambda x, w: x[None] @ w[None],
    "matmul, broadcast": lambda x, w: x[None, None] @ w[None],
    "einsum": lambda x, w: torch.einsum("ij,kj->ik", x, w),
}


@pytest.mark.parametrize("frozen", ["weight", "input"])
@pytest.mark.parametrize("name", KEPT)
def test_only_what_a_gradient_needs_is_kept(mesh, name, frozen):
    """An adapter on a frozen layer needs the layer's weight, and not its activations."""
    x = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])
    w = distribute_tensor(torch.randn(4, 4), mesh, [Replicate()])
    (x if frozen == "weight" else w).requires_grad_()
    before = (x if frozen == "weight" else w).clone()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = KEPT[name](before, w) if frozen == "weight" else KEPT[name](x, before)
    held = {t._local._parts[0].untyped_storage().data_ptr() for t in kept}
    assert before._local._parts[0].untyped_storage().data_ptr() not in held
    out.sum().backward()


def test_a_sum_by_einsum_keeps_nothing_for_backward(mesh):
    x = shardwise.distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]).requires_grad_()
    total = torch.einsum("ij->", x)
    for _ in range(2):
        total.backward()
    assert torch.equal(x.grad.full_tensor().agreed(), torch.full((4, 2), 2.0))


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=repr)
def test_what_einsum_sums_up_first_may_be_written_to(mesh, placement):
    plain, vector = torch.arange(20.0).view(5, 4), torch.ones(3, requires_grad=True)
    x = distribute_tensor(plain, mesh, [placement])
    y = distribute_tensor(vector.detach(), mesh, [Replicate()]).requires_grad_()
    for a, b in ((plain, vector), (x, y)):
        out = torch.einsum("ij,k->kj", a, b)
        a.zero_()
        out.square().sum().backward()
    assert_close(y.grad.full_tensor().agreed(), vector.grad)


@pytest.mark.parametrize("product", [F.linear, lambda x, w: x @ w.t()], ids=["linear", "matmul"])
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Shard(2)], ids=repr)
def test_what_torch_copies_to_fold_it_may_be_written_to(mesh, placement, product):
    plain, weight = torch.rand(2, 3, 4), torch.rand(5, 4, requires_grad=True)
    x = distribute_tensor(plain, mesh, [placement])
    w = distribute_tensor(weight.detach(), mesh, [Replicate()]).requires_grad_()
    for a, b in ((plain, weight), (x, w)):
        out = product(a[:, 1:], b)
        a.zero_()
        out.square().sum().backward()
    assert_close(w.grad.full_tensor().agreed(), weight.grad)
    for a, b in ((plain, weight), (x, w)):  # no copy: one device keeps the tensor itself
        out = product(a, b)
        a.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.square().sum().backward()


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
def test_a_hook_survives_a_write_to_a_product_of_vector_and_matrix(placement):
    v, m = torch.randn(4), torch.randn(4, 6)

    def gradient(vector, matrix):
        out = vector @ matrix
        out.register_hook(lambda grad: -2 * grad)
        out.mul_(3)
        out.sum().backward()
        return matrix.grad

    expected = gradient(v, m.clone().requires_grad_())
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        vector = distribute_tensor(v, mesh, [placement])
        matrix = distribute_tensor(m, mesh, [placement]).requires_grad_()
        assert_close(gradient(vector, matrix).full_tensor(), expected)


def test_a_layer_that_only_learns_its_bias_keeps_nothing_for_backward():
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        x, weight = (distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]) for _ in range(2))
        bias = distribute_tensor(torch.zeros(4), mesh, [Replicate()]).requires_grad_()
        out = F.linear(x, weight, bias)
        out.sum().backward()
        out.sum().backward()  # as on one device, where nothing was freed
        assert_close(bias.grad.full_tensor(), torch.full((4,), 8.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("x", "stack", "out"),
    [
        (Replicate(), Shard(2), Shard(1)),
        (Shard(1), Shard(1), Partial()),
        (Replicate(), Replicate(), Replicate()),
        (Shard(0), Replicate(), Replicate()),  # groups may lie on several ranks: gathered
    ],
)
def test_products_of_groups(x, stack, out, dtype):
    """Groups of rows, each with a matrix of its own, and the gradients."""
    torch.manual_seed(0)
    ends = torch.tensor([4, 4, 10, 16], dtype=torch.int32)
    given = [torch.randint(-2, 3, s).to(dtype) for s in ((16, 32), (4, 32, 32))]
    grad = torch.randint(-1, 2, (16, 32)).to(dtype)
    alone = [g.clone().requires_grad_() for g in given]
    expected = torch.ops.aten._grouped_mm(*alone, ends)
    expected.backward(grad)
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        laid = [
            shardwise.distribute_tensor(g, mesh, [p]).requires_grad_()
            for g, p in zip(given, (x, stack), strict=True)
        ]
        where = shardwise.distribute_tensor(ends, mesh, [Replicate()])
        found = torch.ops.aten._grouped_mm(*laid, where)
        assert found.placements == (out,)
        found.backward(shardwise.distribute_tensor(grad, mesh, [Replicate()]))
        torch.testing.assert_close(found.full_tensor().agreed(), expected, rtol=0, atol=0)
        for many, one in zip(laid, alone, strict=True):
            torch.testing.assert_close(many.grad.full_tensor().agreed(), one.grad, rtol=0, atol=0)


def test_a_second_derivative_of_linear_keeps_what_it_needs():
    """The input is not needed where the gradient of the result is a constant: it may change."""
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        x, weight = (
            shardwise.distribute_tensor(torch.ones(3, 3), mesh, [Replicate()]).requires_grad_()
            for _ in range(2)
        )
        (grad,) = torch.autograd.grad(F.linear(x, weight).sum(), weight, create_graph=True)
        with torch.no_grad():
            x.mul_(2)
        (grad * 5).sum().backward()
        assert torch.equal(x.grad.full_tensor().agreed(), torch.full((3, 3), 15.0))
