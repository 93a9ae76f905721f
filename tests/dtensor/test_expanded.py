"""Tensors of which one entry stands for many: their copies and gradients have an entry for each."""

import copy

import pytest
import torch
from by_hand import lay

import shardwise
from shardwise import DTensor, Partial, Replicate, Shard

COLUMN, WEIGHTS = torch.arange(5.0).view(5, 1), torch.arange(20.0).view(5, 4)

EXPANDED = {
    "expand": lambda x, other: x.expand(5, 4),
    "expand_as": lambda x, other: x.expand_as(other),
    "broadcast_to": lambda x, other: torch.broadcast_to(x, (5, 4)),
    "broadcast_tensors": lambda x, other: torch.broadcast_tensors(x, other)[0],
    "meshgrid": lambda x, other: torch.meshgrid(x.view(5), other[0], indexing="ij")[0],
    "transposed": lambda x, other: x.t().expand(4, 5).t(),
}


def weighted(local, mesh, placements):
    """The sum of all ranks' shares: each has the gradient that it holds of WEIGHTS."""
    return (local * lay(WEIGHTS, mesh, placements).to_local()).sum()


def moved(y, mesh, placement):
    return weighted(y.redistribute(placements=[placement]).to_local(), mesh, [placement])


READ = {
    "full_tensor": lambda y, mesh: (y.full_tensor() * WEIGHTS).sum(),
    "terms": lambda y, mesh: weighted(
        y.full_tensor(grad_placements=[Partial()]), mesh, [Partial()]
    ),
    "to_local": lambda y, mesh: weighted(
        y.to_local(), mesh, [Replicate() if p.is_partial() else p for p in y.placements]
    ),
    "rows": lambda y, mesh: moved(y, mesh, Shard(0)),
    "columns": lambda y, mesh: moved(y, mesh, Shard(1)),
    "whole": lambda y, mesh: moved(y, mesh, Replicate()),
    "another dtype": lambda y, mesh: (
        y.redistribute(placements=[Replicate()], forward_dtype=torch.float64).to_local() * WEIGHTS
    ).sum(),
}


@pytest.mark.parametrize("placement", [Shard(0), Replicate(), Partial()], ids=repr)
@pytest.mark.parametrize("expand", EXPANDED.values(), ids=EXPANDED.keys())
@pytest.mark.parametrize("read", READ.values(), ids=READ.keys())
def test_the_gradient_counts_every_position(mesh, placement, expand, read):
    leaf = lay(COLUMN, mesh, [Replicate() if placement.is_partial() else placement])
    leaf.requires_grad_()
    x = leaf.redistribute(placements=[placement])
    y = expand(x, lay(WEIGHTS, mesh, [Replicate()]))
    read(y, mesh).backward()
    torch.testing.assert_close(leaf.grad.full_tensor().agreed(), WEIGHTS.sum(1, keepdim=True))


SUMMED = {
    "to_local": lambda x: x.to_local().sum(),
    "full_tensor": lambda x: x.full_tensor().sum(),
    "from_local": lambda x: DTensor.from_local(
        x.to_local(), x.device_mesh, x.placements, shape=x.shape
    ).sum(),
}


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=repr)
@pytest.mark.parametrize("read", SUMMED.values(), ids=SUMMED.keys())
def test_gradients_of_sums_add_up_in_a_leaf(mesh, placement, read):
    """Torch expands the gradient of a sum; a leaf adds to its own in place."""
    leaf = lay(WEIGHTS.clone(), mesh, [placement]).requires_grad_()
    for _ in range(2):
        read(leaf).backward()
    with torch.no_grad():
        leaf.grad.mul_(0.5)
    torch.testing.assert_close(leaf.grad.full_tensor().agreed(), torch.ones(5, 4))


def test_the_gradient_of_a_plain_tensor_counts_every_position(mesh):
    x = COLUMN.clone().requires_grad_()
    with shardwise.implicit_replication():
        (lay(WEIGHTS, mesh, [Shard(0)]) * x.expand(5, 4)).sum().backward()
    torch.testing.assert_close(x.grad, WEIGHTS.sum(1, keepdim=True))


@pytest.mark.parametrize("target", [Shard(0), Shard(1), Replicate()], ids=repr)
@pytest.mark.parametrize("source", [Shard(0), Replicate()], ids=repr)
def test_what_was_moved_is_written_to_as_a_clone(mesh, source, target):
    y = lay(COLUMN, mesh, [source]).expand(5, 4).redistribute(placements=[target])
    weights = lay(WEIGHTS, mesh, [target])
    with pytest.raises(shardwise.UnsupportedError, match="one entry stands for all"):
        y.add_(weights)
    assert torch.equal(y.clone().add_(weights).full_tensor().agreed(), COLUMN + WEIGHTS)


@pytest.mark.parametrize("source", [Shard(0), Replicate()], ids=repr)
def test_a_write_to_one_of_many_reaches_all(mesh, source):
    y = lay(COLUMN, mesh, [source]).expand(5, 4).redistribute(placements=[Shard(0)])
    y[:, 2].fill_(7.0)
    assert torch.equal(y.full_tensor().agreed(), torch.full((5, 4), 7.0))


def test_a_deep_copy_is_written_to_as_a_clone(mesh):
    """It lies as the tensor does, in memory of its own, as on one device."""
    x = lay(COLUMN, mesh, [Shard(0)])
    y, weights = copy.deepcopy(x.expand(5, 4)), lay(WEIGHTS, mesh, [Shard(0)])
    assert y.stride() == copy.deepcopy(COLUMN.expand(5, 4)).stride()
    with pytest.raises(shardwise.UnsupportedError, match="one entry stands for all"):
        y.add_(weights)
    x.zero_()
    assert torch.equal(y.clone().add_(weights).full_tensor().agreed(), COLUMN + WEIGHTS)


@pytest.mark.parametrize("rows", [4, 1], ids=["full", "empty on some ranks"])
def test_a_write_to_one_entry_that_stands_for_many_is_refused(mesh, rows):
    x = lay(torch.zeros(rows, 1), mesh, [Shard(0)])
    for _ in range(2):
        with pytest.raises(shardwise.UnsupportedError, match=r"add_\.Tensor.*along dim 1"):
            x.expand(rows, 4).add_(1.0)
    x.expand(rows, 4).fill_(3.0)  # the same for all: torch allows it
    assert x.full_tensor().agreed().tolist() == [[3.0]] * rows
