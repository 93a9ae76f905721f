"""Conjugates, signs and zeros that torch puts off with a bit of the tensor: wrappers hold none."""

import pytest
import torch
from torch.nn import functional as F

import shardwise
from shardwise import DTensor, LocalTensor, Partial, Replicate, Shard, distribute_tensor

COMPLEX = torch.tensor([1 + 2j, 3 - 4j, 5 + 6j, -7 - 8j])
BITS = {
    "conjugate": COMPLEX.conj(),
    "negative": COMPLEX.conj().imag,
    "both": torch._neg_view(COMPLEX.conj()),
    "zeros": torch._efficientzerotensor((4,)),
}
VALUES = {name: x.clone().resolve_conj().resolve_neg() for name, x in BITS.items()}
# As one device has them: `clone` leaves what is zero without memory.
VALUES["zeros"] = torch.zeros(4)

PLACEMENTS = [Replicate(), Shard(0), Partial()]


def whole(x):
    return x.full_tensor().agreed()


def is_settled(x):
    parts = getattr(x, "_parts", (x,))
    return not any(p.is_conj() or p.is_neg() or p._is_zerotensor() for p in parts)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=repr)
@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("per_rank", [False, True])
def test_from_local(mesh, name, placement, per_rank):
    local = LocalTensor.per_rank(lambda rank: BITS[name]) if per_rank else BITS[name]
    x = DTensor.from_local(local, mesh, [placement])
    assert is_settled(x._local)
    expected = {"R": VALUES[name], "S": VALUES[name].repeat(4), "P": VALUES[name] * 4}
    for found, factor in ((x, 1), (x + x, 2)):
        assert torch.equal(whole(found), factor * expected[repr(placement)[0]])


@pytest.mark.parametrize("placement", PLACEMENTS, ids=repr)
@pytest.mark.parametrize("name", BITS)
def test_distribute_tensor(mesh, name, placement):
    x = distribute_tensor(BITS[name], mesh, [placement])
    assert is_settled(x._local)
    assert torch.equal(whole(x * 2), 2 * VALUES[name])


def test_a_local_tensor_computes_them(mesh):
    x = LocalTensor.per_rank(lambda rank: COMPLEX * (rank + 1))
    for found, expected in ((x.conj(), COMPLEX.conj()), (x.conj().imag, -COMPLEX.imag)):
        assert is_settled(found)
        assert torch.equal((found * 2).on_rank(1), 4 * expected)
    mapped = shardwise.local_map(torch.conj, [Shard(0)])
    y = distribute_tensor(COMPLEX, mesh, [Shard(0)])
    assert torch.equal(whole(mapped(y) * 2), 2 * COMPLEX.conj())


@pytest.mark.parametrize("part", [torch.conj, lambda x: x.conj().imag, lambda x: x.mH])
@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=repr)
def test_local_gradients(mesh, placement, part):
    def loss(x):
        return (part(x.view(4, 1)) * 2).sum().real

    x = distribute_tensor(COMPLEX, mesh, [placement]).requires_grad_()
    plain = COMPLEX.clone().requires_grad_()
    loss(plain).backward()
    loss(x.to_local()).backward() if placement.is_replicate() else loss(x).backward()
    assert is_settled(x.grad._local)
    assert torch.equal(whole(x.grad * 1), plain.grad)


def test_a_hook_may_put_them_off(mesh):
    x = distribute_tensor(COMPLEX, mesh, [Replicate()]).requires_grad_()
    plain = COMPLEX.clone().requires_grad_()
    for leaf, hook in (
        (x, lambda g: DTensor.from_local(g.to_local().conj(), mesh, [Replicate()])),
        (plain, torch.conj),
    ):
        y = leaf * 1
        y.register_hook(hook)
        (y * y).sum().abs().backward()
    torch.testing.assert_close(whole(x.grad * 1), plain.grad.resolve_conj())


# -- sgn: torch's formula for the gradient makes zeros without memory --------------------------

BEFORE = {
    "nothing": lambda x, w: x,
    "redistribute": lambda x, w: x.redistribute(placements=[Shard(1)]),
    "linear": F.linear,
    "batched": lambda x, w: x.expand(2, 4, 4) @ w,
    "layer_norm": lambda x, w: F.layer_norm(x, (4,), w[0]),
    "to_local": lambda x, w: x.to_local(),
    "full_tensor": lambda x, w: x.full_tensor(),
}


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=repr)
@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE.keys())
def test_the_gradient_of_sgn_is_zero(mesh, before, placement):
    x = distribute_tensor(torch.randn(4, 4), mesh, [placement]).requires_grad_()
    w = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])
    torch.sgn(before(x, w)).sum().backward()
    assert is_settled(x.grad._local)
    assert torch.equal(whole(x.grad + 1), torch.ones(4, 4))


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=repr)
@pytest.mark.parametrize("sgn", [torch.sgn, lambda x: (x * 1).sgn_()], ids=["sgn", "sgn_"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_sgn(mesh, placement, sgn, dtype):
    values = torch.tensor([1 + 2j, 3 - 4j, 1j, -7 - 8j, 2, -1j]).to(torch.complex128)
    values = values if dtype.is_complex else values.imag.clone()
    found = []
    for x in (values.clone(), distribute_tensor(values, mesh, [placement])):
        x.requires_grad_()
        y = sgn(x)
        (grad,) = torch.autograd.grad((y * x.detach()).sum().abs(), x, create_graph=True)
        (twice,) = torch.autograd.grad((grad * x).sum().abs(), x)
        found.append((y, grad, twice))
    for plain, distributed in zip(*found, strict=True):
        torch.testing.assert_close(whole(distributed.detach()), plain.detach())


@pytest.mark.parametrize("written", [0, 1], ids=["operand", "result"])
def test_sgn_keeps_what_one_device_keeps(mesh, written):
    x = distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)]).requires_grad_()
    operand = x * 1
    kept = (operand, torch.sgn(operand))
    with torch.no_grad():
        kept[written].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept[1].sum().backward()


def test_sgn_of_zeros_and_integers(mesh):
    x = torch.tensor([-3, 0, 5])
    assert torch.equal(whole(torch.sgn(distribute_tensor(x, mesh, [Shard(0)]))), x.sgn())
    y = distribute_tensor(x.to(torch.complex64), mesh, [Shard(0)]).requires_grad_()
    (torch.sgn(y) * 1j).sum().real.backward()
    plain = x.to(torch.complex64).requires_grad_()
    (torch.sgn(plain) * 1j).sum().real.backward()
    torch.testing.assert_close(whole(y.grad), plain.grad)


@pytest.mark.parametrize("placement", [*PLACEMENTS, Shard(1)], ids=repr)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.conj().mul_(2j),
        lambda x: x.conj()[1].add_(2j),
        lambda x: x.mH[0].add_(1j),
        lambda x: x.conj().imag.mul_(2),
        lambda x: torch._neg_view(x).add_(1),
    ],
)
def test_a_write_reaches_the_tensor(mesh, placement, grad, write):
    plain = COMPLEX.view(2, 2).clone().requires_grad_(grad)
    x = distribute_tensor(plain.detach(), mesh, [placement]).requires_grad_(grad)
    found = []
    for given in (plain, x):
        y = given * 1
        before = y.conj()
        write(y)
        found.append((y, before + 0))
        if grad:
            (y.abs() ** 2).sum().backward()
    for expected, ours in zip(*found, strict=True):
        torch.testing.assert_close(whole(ours.detach()), expected.detach())
    if grad:
        torch.testing.assert_close(whole(x.grad * 1), plain.grad.resolve_conj())


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=repr)
def test_a_second_derivative_that_does_not_exist(mesh, placement):
    """Of layer_norm without a weight: its bias has no gradient, or one of zeros."""
    for lay in (lambda x: x.clone(), lambda x: distribute_tensor(x, mesh, [placement])):
        x, bias = lay(torch.arange(8.0).view(4, 2)), lay(torch.ones(2)).requires_grad_()
        y = F.layer_norm(x, (2,), None, bias)
        y = y.full_tensor() if isinstance(y, DTensor) else y
        (grad,) = torch.autograd.grad(y.sin().sum(), bias, create_graph=True)
        grad.square().sum().backward()
        assert bias.grad is None or not whole(bias.grad).any()


def test_a_gradient_that_torch_gives_as_plain_zeros(mesh):
    """Of copysign, with respect to the signs."""
    x = distribute_tensor(torch.tensor([1.0, -2, 3, -4]), mesh, [Replicate()]).requires_grad_()
    torch.copysign(x, x.redistribute(placements=[Partial("avg")])).sum().backward()
    torch.testing.assert_close(whole(x.grad), torch.ones(4))


RESOLVED = {
    "conj": lambda x: x.conj().resolve_conj(),
    "conj twice": lambda x: x.conj().conj().resolve_conj(),
    "conj, a view": lambda x: x.conj()[1:].resolve_conj(),
    "adjoint": lambda x: x.view(2, 2).mH.resolve_conj(),
    "nothing": lambda x: x.resolve_conj().resolve_neg(),
    "imag of conj": lambda x: x.conj().imag.resolve_neg(),
    "real of conj": lambda x: x.conj().real.resolve_neg(),
    "imag": lambda x: x.imag.resolve_neg(),
    "neg of conj": lambda x: x.conj().resolve_neg(),
    "ifft": lambda x: torch.fft.ifft(x.real),
    "ihfft": lambda x: torch.fft.ihfft(x.real),
    "hfft": lambda x: torch.fft.hfft(x),
}


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=repr)
@pytest.mark.parametrize("call", RESOLVED.values(), ids=RESOLVED.keys())
def test_what_is_resolved_is_a_copy_where_one_device_makes_one(mesh, placement, call):
    x = distribute_tensor(COMPLEX, mesh, [placement])
    plain = COMPLEX.clone()
    for again in (torch.Tensor.resolve_conj, torch.resolve_conj, torch.resolve_neg):
        ours, theirs = call(x), call(plain)
        found, expected = again(ours), again(theirs)
        assert (found is ours) == (expected is theirs)
        found.mul_(2)
        expected.mul_(2)
        for one, other in ((x, plain), (ours, theirs), (found, expected)):
            torch.testing.assert_close(whole(one), other.resolve_conj().resolve_neg())
