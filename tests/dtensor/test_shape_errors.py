"""Operands that do not fit raise what torch raises on one device, on every rank at once."""

import pytest
import torch
from torch.nn import functional as F

from shardwise import Replicate, Shard, distribute_tensor

REFUSED = {
    "add": lambda a, b: a + b,
    "mm": torch.mm,
    "bmm": torch.bmm,
    "linear": F.linear,
    "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b),
    "view": lambda a, b: a.view(7, 7),
    "permute": lambda a, b: a.permute(0, 0),
    "expand": lambda a, b: a.expand(9, 9),
    "select": lambda a, b: a[99],
    "narrow from a bool": lambda a, b: torch.narrow(a, 0, b[0, 0] > 9, 1),
    "narrow from a float": lambda a, b: torch.narrow(a, 0, b[0, 0], 1),
    "narrow from several": lambda a, b: torch.narrow(a, 0, b[0].long(), 1),
    "split": lambda a, b: a.split([1, 1], 0),
    "cat": lambda a, b: torch.cat([a, b], 0),
    "cat of numbers": lambda a, b: torch.cat([a.sum(), b.sum()]),
    "stack": lambda a, b: torch.stack([a, b]),
    "flip": lambda a, b: a.flip(6),
    "pad": lambda a, b: F.pad(a, (1,)),
    "sum": lambda a, b: a.sum(5),
    "amax": lambda a, b: a.amax(7),
    "amax of nothing": lambda a, b: a[:0].amax(0),
    "max of nothing": lambda a, b: a[:0].max(),
    "min of no columns": lambda a, b: a[:, :0].min(),
    "softmax": lambda a, b: a.softmax(9),
    "sort": lambda a, b: a.sort(4),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "gather": lambda a, b: a.gather(0, b),
    "index_select": lambda a, b: a.index_select(0, b),
    "take into its operand": lambda a, b: torch.take(b, a[0].long(), out=b),
    "copy_": lambda a, b: a.copy_(b),
    "layer_norm": lambda a, b: F.layer_norm(a, (99,)),
    "conv2d": F.conv2d,
    "mse_loss": F.mse_loss,
    "nll_loss": F.nll_loss,
    "cross_entropy": F.cross_entropy,
    "attention": lambda a, b: F.scaled_dot_product_attention(a, b, b),
    "solve": torch.linalg.solve,
    # Torch's shape functions raise another type than its kernels, or nothing at all.
    "complex of integers": lambda a, b: torch.complex(a, a.int()),
    "narrow_copy": lambda a, b: torch.narrow_copy(a, 2, 0, 1),
    "logcumsumexp": lambda a, b: torch.logcumsumexp(a, 3),
    "embedding of a number": lambda a, b: F.embedding(a.long(), b.sum()),
    "embedding of planes": lambda a, b: F.embedding(a.long(), b[None]),
    "complex into another type": lambda a, b: torch.complex(a, a, out=a.cdouble()),
    "aminmax into another type": lambda a, b: torch.aminmax(a, dim=0, out=(a[0].double(), a[0])),
    "sort into other indices": lambda a, b: torch.sort(a, 1, out=(a.clone(), a.int())),
    "multinomial into another type": lambda a, b: torch.multinomial(a.exp(), 6, out=a.double()),
    "tril into another type": lambda a, b: torch.tril(a, out=a.double()),
    "take into another type": lambda a, b: torch.take(b, a.long(), out=a.double()),
    "amax into another type": lambda a, b: torch.amax(a, 0, out=a[0].double()),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=repr)
def test_the_type_is_that_of_one_device(mesh, placement):
    a, b = torch.randn(4, 6), torch.randn(5, 3)
    for name, call in REFUSED.items():
        with pytest.raises(Exception) as expected:  # noqa: PT011 (whatever torch raises)
            call(a.clone(), b.clone())
        operands = [distribute_tensor(x.clone(), mesh, [placement]) for x in (a, b)]
        try:
            call(*operands)
        except expected.type:
            continue
        except Exception as error:
            pytest.fail(f"{name}: {type(error).__name__} instead of {expected.type.__name__}")
        pytest.fail(f"{name}: accepted, where one device raises {expected.type.__name__}")


def test_an_assertion_of_a_shape_function_is_no_type_of_torch(mesh):
    """Where the tensors are too large to ask the kernel."""
    table = distribute_tensor(torch.zeros(1, 300, 300), mesh, [Replicate()])
    ids = distribute_tensor(torch.zeros(2, dtype=torch.long), mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match="must be 2-D"):
        F.embedding(ids, table)


def test_a_call_that_is_refused_draws_no_number(mesh):
    a = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
    before = torch.default_generator.get_state()
    with pytest.raises(IndexError):
        torch.logcumsumexp(a, 3)
    out = torch.exp(a, out=a.double())  # which the kernel is asked about, and takes
    assert out.dtype is torch.double
    assert torch.equal(torch.default_generator.get_state(), before)


def test_a_bilinear_map_of_nothing_is_refused_as_on_one_device(mesh):
    plain = [torch.zeros(2, 3), torch.zeros(2, 0), torch.zeros(4, 3, 0)]
    with pytest.raises(RuntimeError, match="cannot reshape tensor of 0 elements"):
        F.bilinear(*plain)
    with pytest.raises(RuntimeError, match="cannot reshape tensor of 0 elements"):
        F.bilinear(*(distribute_tensor(x, mesh, [Replicate()]) for x in plain))
    nobody = [torch.zeros(0, 3), torch.zeros(0, 2), torch.zeros(4, 3, 2)]
    found = F.bilinear(*(distribute_tensor(x, mesh, [Replicate()]) for x in nobody))
    assert found.shape == F.bilinear(*nobody).shape


WHOLE = {
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x),
    "huber_loss": lambda x: F.huber_loss(x, x),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, x),
    "logsigmoid": F.logsigmoid,
    "hardswish": F.hardswish,
    "glu": lambda x: F.glu(x, 0),
    "prelu": lambda x: F.prelu(x, x[0]),
    "rms_norm": lambda x: F.rms_norm(x, (12,)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_integers_are_refused_where_one_device_has_no_kernel_for_them(mesh, name):
    whole = torch.arange(48).view(4, 12)
    with pytest.raises(Exception) as expected:  # noqa: PT011
        WHOLE[name](whole)
    for placement in (Replicate(), Shard(0), Shard(1)):
        x = distribute_tensor(whole, mesh, [placement])
        with pytest.raises(type(expected.value), match=r"implemented|cast"):
            WHOLE[name](x)
