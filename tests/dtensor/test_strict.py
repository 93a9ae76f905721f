"""Strict mode, and plain tensors among DTensors."""

import pytest
import torch
from parity import lay
from torch.nn import functional as F

import shardwise
from shardwise import Replicate, Shard
from shardwise.dtensor.operands import check_plain


def test_an_implicit_redistribution_raises_and_names_the_call_to_write(mesh):
    x, w = lay(torch.ones(4, 8), mesh, Shard(1)), lay(torch.ones(8, 4), mesh, Shard(1))
    with shardwise.explicit_redistribution():
        with pytest.raises(shardwise.RedistributionError) as caught:
            x @ w
        message = str(caught.value)
        assert "aten.mm.default" in message
        assert "bytes" in message
        assert "redistribute(placements=[" in message
        y = x.redistribute(placements=[Replicate()]) @ w
    assert torch.equal(y.full_tensor().agreed(), torch.full((4, 4), 8.0))


def test_what_communicates_nothing_is_allowed(mesh):
    x = lay(torch.ones(4, 8), mesh, Shard(0))
    with shardwise.explicit_redistribution():
        assert (x + x).placements == (Shard(0),)
        assert (x + lay(torch.ones(4, 8), mesh, Replicate())).placements == (Shard(0),)


def test_backward_is_strict_too(mesh):
    """The gradient of a column-parallel layer's input is a sum over the ranks."""
    x = lay(torch.ones(4, 8), mesh, Replicate()).requires_grad_()
    weight = lay(torch.ones(3, 8), mesh, Shard(0))
    with shardwise.explicit_redistribution():
        y = F.linear(x.tanh(), weight).sum()
        with pytest.raises(shardwise.RedistributionError, match="tanh_backward"):
            y.backward()


def test_the_gradient_of_a_leaf_is_not_moved_silently(mesh):
    """Sharded by rows, used by columns: the gradient would have to travel back."""
    leaf = lay(torch.ones(4, 8), mesh, Shard(0)).requires_grad_()
    other = lay(torch.ones(4, 8), mesh, Shard(1))
    loss = (leaf * other).sum()
    with (
        shardwise.explicit_redistribution(),
        pytest.raises(shardwise.RedistributionError) as caught,
    ):
        loss.backward(lay(torch.tensor(1.0), mesh, Replicate()))
    message = str(caught.value)
    for part in ("gradient of a leaf", "bytes per rank", "all_to_all", "leaf.redistribute("):
        assert part in message
    # What the message says is what helps.
    with shardwise.explicit_redistribution():
        used = leaf.redistribute(placements=[Shard(1)])
        (used * other).sum().backward(lay(torch.tensor(1.0), mesh, Replicate()))
    assert leaf.grad.placements == (Shard(0),)
    assert torch.equal(leaf.grad.full_tensor().agreed(), torch.ones(4, 8))


def test_strictness_ends_with_the_block(mesh):
    x, w = lay(torch.ones(4, 8), mesh, Shard(1)), lay(torch.ones(8, 4), mesh, Shard(1))
    with shardwise.explicit_redistribution():
        pass
    assert (x @ w).shape == (4, 4)


def test_plain_tensors_are_refused_unless_asked_for(mesh):
    x, plain = lay(torch.ones(4, 2), mesh, Shard(0)), torch.arange(2.0)
    for call in (lambda: x + plain, lambda: plain + x, lambda: torch.mul(x, plain)):
        with pytest.raises(shardwise.MixedTensorsError, match="implicit_replication"):
            call()
    with shardwise.implicit_replication():
        y = x + plain
    assert y.placements == (Shard(0),)
    assert torch.equal(y.full_tensor().agreed(), torch.ones(4, 2) + plain)


def test_the_error_names_the_argument(mesh):
    x, plain = lay(torch.ones(4, 2), mesh, Shard(0)), torch.ones(2)
    for call, name in (
        (lambda: x + plain, r"argument 1 \(other\)"),
        (lambda: plain + x, r"argument 0 \(self\)"),
        (lambda: torch.cat([x, plain[None]]), r"argument 0 \(tensors\)"),
        (lambda: torch.addmm(plain, x, x.t()), r"argument 0 \(self\)"),
    ):
        with pytest.raises(shardwise.MixedTensorsError, match=name):
            call()


def test_offsets_that_torch_makes_need_no_wrapping():
    """`F.embedding_bag` makes them out of the shape of 2-D ids."""
    offsets, op = torch.arange(0, 6, 2), torch.ops.aten._embedding_bag.default
    check_plain(op, offsets, 2)
    with pytest.raises(shardwise.MixedTensorsError, match=r"argument 1 \(indices\)"):
        check_plain(op, offsets, 1)


def test_numbers_and_scalar_tensors_need_no_wrapping(mesh):
    x = lay(torch.ones(4), mesh, Shard(0))
    for scalar in (2, 2.0, torch.tensor(2.0)):
        assert torch.equal((x * scalar).full_tensor().agreed(), torch.full((4,), 2.0))
