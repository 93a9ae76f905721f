"""Views, and writes to them: they act on the tensor, or they raise."""

import pytest
import torch
from parity import lay, whole

import shardwise
from shardwise import Partial, Replicate, Shard
from shardwise.debug import CommDebugMode


@pytest.mark.parametrize(
    "cut", [slice(0, 3), slice(2, 6), slice(1, 7, 2), slice(-3, None), slice(4, 4)], ids=str
)
def test_a_slice_of_a_sharded_dim_stays_sharded(mesh, cut):
    whole = torch.arange(14.0).view(7, 2)
    x = lay(whole, mesh, Shard(0))
    with CommDebugMode() as comm:
        part = x[cut]
    assert comm.get_total_counts() == 0
    assert part.placements[0].is_shard(0)
    assert torch.equal(part.full_tensor().agreed(), whole[cut])


def test_a_write_to_a_slice_reaches_the_tensor(mesh):
    whole = torch.arange(14.0).view(7, 2)
    x = lay(whole, mesh, Shard(0))
    x[1:6:2].zero_()
    whole[1:6:2] = 0
    assert torch.equal(x.full_tensor().agreed(), whole)


WRITES = [
    lambda x: x[3].zero_(),
    lambda x: x[0, 1].add_(1),
    lambda x: x.view(2, 7).add_(1),
    lambda x: x.view(-1)[3:9].mul_(2),
    lambda x: x[1:5][::3].copy_(x[0].clone()),
    lambda x: x[2].masked_fill_(x[3] > 6, 0.5),
    lambda x: x.t()[1:][:, 4].fill_(3),
]


@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_a_view_that_was_copied_reaches_the_tensor(mesh, write):
    whole = torch.arange(14.0).view(7, 2)
    x = lay(whole, mesh, Shard(0))
    row, flat = x[3], x.view(-1)
    write(x)
    write(whole)
    assert torch.equal(x.full_tensor().agreed(), whole)
    assert torch.equal(row.full_tensor().agreed(), whole[3])
    assert torch.equal(flat.full_tensor().agreed(), whole.view(-1))


def test_gradients_pass_a_write_to_a_view_that_was_copied(mesh):
    whole = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)
    factor = torch.randn(2, dtype=torch.float64, requires_grad=True)
    laid = lay(whole.detach(), mesh, Shard(0)).requires_grad_()
    laid_factor = lay(factor.detach(), mesh, Shard(0)).requires_grad_()
    for leaf, by in ((whole, factor), (laid, laid_factor)):
        x = leaf.sin()
        x[3].mul_(by)
        x.view(-1)[8:11].mul_(2)
        (x * x).sum().backward()
    torch.testing.assert_close(laid.grad.full_tensor().agreed(), whole.grad)
    torch.testing.assert_close(laid_factor.grad.full_tensor().agreed(), factor.grad)


def test_a_write_that_would_be_lost_is_refused(mesh):
    x = lay(torch.ones(7, 2), mesh, Shard(0))
    with pytest.raises(NotImplementedError, match="would write to a copy"):
        x.unbind(0)[3].zero_()
    with pytest.raises(NotImplementedError, match="would write to a copy"):
        x[3].normal_()
    copied = x[3].clone()
    copied.zero_()
    assert x.full_tensor().agreed().sum() == 14


def test_the_gradient_of_a_slice_goes_where_it_came_from(mesh):
    whole = torch.arange(14.0).view(7, 2)
    x = lay(whole, mesh, Shard(0)).requires_grad_()
    (x[1:6:2] ** 2).sum().backward()
    alone = whole.clone().requires_grad_()
    (alone[1:6:2] ** 2).sum().backward()
    assert x.grad.placements == (Shard(0),)
    assert torch.equal(x.grad.full_tensor().agreed(), alone.grad)


def test_a_dim_of_size_1_that_stays_sends_nothing(mesh):
    x = shardwise.distribute_tensor(torch.arange(8.0).view(1, 8), mesh, [Shard(0)])
    with CommDebugMode() as comm:
        y = x.view(1, 2, 4)
    assert comm.get_total_counts() == 0
    assert y.placements == (Shard(0),)
    assert torch.equal(y.full_tensor().agreed(), torch.arange(8.0).view(1, 2, 4))


def test_split_and_cat_undo_each_other(mesh):
    whole = torch.arange(20.0).view(5, 4)
    x = lay(whole, mesh, Shard(0))
    with CommDebugMode() as comm:
        parts = x.split([1, 3, 1])
    assert comm.get_total_counts() == 0
    assert torch.equal(torch.cat(parts).full_tensor().agreed(), whole)


def test_a_sequence_shard_passes_a_linear_layer(mesh):
    """A view to two dims would have to gather it."""
    x = lay(torch.randn(2, 8, 6), mesh, Shard(1))
    layer = shardwise.distribute_module(torch.nn.Linear(6, 3), mesh)
    with CommDebugMode() as comm:
        y = layer(x)
    assert y.placements == (Shard(1),)
    assert comm.get_total_counts() == 0


def test_replicas_are_views_too(mesh):
    x = lay(torch.ones(4, 4), mesh, Replicate())
    x.t()[0].zero_()
    assert x.full_tensor().agreed()[:, 0].sum() == 0


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=repr)
def test_as_strided(mesh, placement):
    x = torch.randn(4, 6, requires_grad=True)
    placed = lay(x.detach(), mesh, placement).requires_grad_()
    windows = ((3, 4), (6, 1), 2)
    expected, found = x.as_strided(*windows), placed.as_strided(*windows)
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(whole(found), expected.detach())
    torch.testing.assert_close(whole(placed.grad), x.grad)
    torch.testing.assert_close(
        whole(placed.detach().t().as_strided((5, 2), (3, 7))),
        x.detach().t().as_strided((5, 2), (3, 7)),
    )


def test_the_gradient_of_as_strided_is_taken_again_as_that_of_a_view(mesh):
    """Nothing is saved that a second backward pass would miss; gradients of gradients follow."""
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    placed = lay(x.detach(), mesh, Shard(1)).requires_grad_()
    for leaf in (x, placed):
        view = leaf.as_strided((4, 2), (2, 1))
        view.tanh().sum().backward()
        view.sin().sum().backward()
        (grad,) = torch.autograd.grad(view.pow(3).sum(), leaf, create_graph=True)
        grad.square().sum().backward()
    torch.testing.assert_close(whole(placed.grad), x.grad)


def test_as_strided_is_a_copy_and_needs_the_whole_memory(mesh):
    placed = lay(torch.randn(4, 6), mesh, Shard(0))
    with pytest.raises(NotImplementedError, match="would write to a copy"):
        placed.as_strided((2,), (1,)).zero_()
    with pytest.raises(NotImplementedError, match="gaps or repeats"):
        placed[:, ::2].as_strided((2,), (1,))
    with pytest.raises(RuntimeError, match="out of bounds"):
        placed.as_strided((5, 6), (6, 1))


def test_repeated_zero_times(mesh):
    x = lay(torch.randn(5, 3), mesh, Shard(0)).requires_grad_()
    nothing = x.repeat(2, 0, 1)
    assert whole(nothing).shape == (2, 0, 3)
    nothing.sum().backward()
    assert x.grad.placements == (Shard(0),)
    assert not whole(x.grad).any()
    with pytest.raises(RuntimeError, match="repeat"):
        x.repeat(0)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex64], ids=str)
def test_pairs_of_an_empty_shard_have_no_place_in_memory(dtype):
    """An empty shard may begin at an odd place of a larger tensor."""
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        x = lay(torch.ones(1, 0, dtype=dtype), mesh, Partial()).requires_grad_()
        torch.view_as_real(x).sum([0, 1]).sin().sum().backward()
        assert x.grad.shape == (1, 0)
        flat = lay(torch.arange(8.0), mesh, Shard(0))
        assert flat[5:5].view(torch.float64).shape == (0,)
