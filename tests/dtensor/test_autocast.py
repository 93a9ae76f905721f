"""Under torch.autocast: the dtypes of one device, in what is said and in what is held."""

import pytest
import torch
from parity import whole
from torch.nn import functional as F

from shardwise import DTensor, Replicate, Shard, distribute_tensor

CALLS = {
    "einsum": lambda x, y, v: torch.einsum("ij,jk->ik", x, y),
    "einsum of three": lambda x, y, v: torch.einsum("ij,jk,kl->il", x, y, x),
    "einsum of a batch": lambda x, y, v: torch.einsum("bij,bjk->bik", x[None], y[None]),
    "einsum, element by element": lambda x, y, v: torch.einsum("ij,ij->ij", x, y),
    "einsum, outer": lambda x, y, v: torch.einsum("i,j->ij", v, v),
    "einsum of one": lambda x, y, v: torch.einsum("ij->j", x),
    "bilinear": lambda x, y, v: F.bilinear(x, y, x[None], v[:1]),
    "nll_loss": lambda x, y, v: F.nll_loss(x.bfloat16(), v.long().clamp(0, 3)),
    "nll_loss, a weight": lambda x, y, v: F.nll_loss(
        x.bfloat16(), v.long().clamp(0, 3), v.detach().abs().bfloat16(), reduction="none"
    ),
    "cross_entropy": lambda x, y, v: F.cross_entropy(x.bfloat16(), v.long().clamp(0, 3)),
    "index_copy": lambda x, y, v: x.half().index_copy(0, (v * 0).long()[:1], y.half()[:1]),
    "scatter": lambda x, y, v: x.half().scatter(0, (x * 0).long(), y.half()),
}


def held_dtypes(x):
    return {part.dtype for part in getattr(x._local, "_parts", (x._local,))}


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=repr)
@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_have_the_dtypes_of_one_device(mesh, name, placement):
    values = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4)
    found = []
    for distributed in (False, True):
        leaves = []
        for value in values:
            if distributed:
                place = placement if value.dim() > 1 or placement != Shard(1) else Replicate()
                value = distribute_tensor(value, mesh, [place])
            leaves.append(value.clone().requires_grad_())
        try:
            with torch.autocast("cpu", torch.bfloat16):
                result = CALLS[name](*leaves)
                loss = result.float().sum()
                loss.backward()  # inside too: what backward computes is not cast either
        except RuntimeError as error:
            found.append(str(error))
            continue
        found.append([result, *(leaf.grad for leaf in leaves)])
    one, many = found
    if isinstance(one, str):
        assert many == one
        return
    for expected, x in zip(one, many, strict=True):
        if expected is None:
            assert x is None
            continue
        assert isinstance(x, DTensor)
        assert x.dtype == expected.dtype
        assert held_dtypes(x) == {x.dtype}
        torch.testing.assert_close(whole(x), expected.detach(), rtol=0.05, atol=0.1)


@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=repr)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=repr)
def test_bilinear_rounds_as_torchs_kernel_does(mesh, dtype, placement, inside):
    """Autocast sees the products in the kernel; its formula for gradients has exact operands."""
    values = [torch.randn(shape).to(dtype) for shape in ((4, 3), (4, 5), (2, 3, 5), (2,))]
    found = []
    for lay in (torch.clone, lambda x: distribute_tensor(x, mesh, [placement])):
        leaves = [lay(value).requires_grad_() for value in values]
        with torch.autocast("cpu", torch.bfloat16):
            result = F.bilinear(*leaves)
            if inside:
                result.sin().sum().backward()
        if not inside:
            result.sin().sum().backward()
        found.append([result, *(leaf.grad for leaf in leaves)])
    (expected, *grads), (result, *others) = found
    if torch.__version__ >= "2.13":
        assert torch.equal(whole(result), expected)
    else:  # the kernel rounds in other places
        torch.testing.assert_close(whole(result), expected, rtol=2**-7, atol=2**-7)
        return
    narrow = torch.bfloat16 if inside and dtype != torch.float64 else dtype
    allowed = 8 * torch.finfo(narrow).eps
    for grad, other in zip(grads, others, strict=True):
        torch.testing.assert_close(whole(other), grad, rtol=allowed, atol=allowed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=repr)
def test_moving_a_tensor_casts_nothing(mesh, dtype):
    """Torch's own `cat` refuses half precision under autocast to bfloat16."""
    value = torch.randn(6, 5).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        x = distribute_tensor(value, mesh, [Shard(0)])
        for placement in (Shard(1), Replicate(), Shard(0)):
            x = x.redistribute(placements=[placement])
            assert x.dtype == dtype
            assert torch.equal(whole(x), value)
