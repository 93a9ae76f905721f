"""Sequences that are split over ranks."""

import copy
import pickle

import context_programs as programs
import pytest
import torch
from torch.nn import functional as F

import shardwise
from shardwise.errors import ArgumentError, LayoutError, UnsupportedError
from shardwise.parallel import context_parallel


@pytest.mark.parametrize("method", [None, "ring", "heads"])
@pytest.mark.parametrize("sizes", [(1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2), (2, 1, 2)], ids=str)
def test_as_on_one_device(sizes, method):
    with shardwise.simulate(torch.Size(sizes).numel()):
        programs.train(sizes, method)


def test_recomputed():
    with shardwise.simulate(2):
        programs.train((1, 2, 1), recompute=True)


@pytest.mark.processes
@pytest.mark.parametrize("sizes", [(1, 4, 1), (1, 2, 2)], ids=str)
def test_in_processes(processes, sizes):
    processes(programs.train, sizes, "ring")
    processes(programs.train, sizes, "heads")


@pytest.mark.processes
@pytest.mark.parametrize("heads", [(3, 3), (8, 2)])
def test_dtensors_in_processes(processes, heads):
    processes(programs.dtensors, *heads)


@pytest.fixture
def mesh():
    with shardwise.simulate(2):
        yield shardwise.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))


def test_given_positions_are_split(mesh):
    model, ids = programs.Model(), torch.randint(37, (2, 8))
    positions = torch.arange(3, 11)[None]
    expected = model(ids, positions)
    model = context_parallel(model, mesh, "layers.*")
    found = model(ids, position_ids=positions)
    torch.testing.assert_close(torch.cat([found.on_rank(0), found.on_rank(1)], 1), expected)


@pytest.mark.parametrize("method", ["ring", "heads"])
def test_autocast(mesh, method):
    """Rotated queries are wide where values are not, as on one device."""
    torch.manual_seed(0)
    model, ids = programs.Model(), torch.randint(37, (2, 8))
    exact = model(ids)
    with torch.autocast("cpu", torch.bfloat16):
        alone = model(ids)
        found = context_parallel(model, mesh, "layers.*", method=method)(ids)
    assert found.on_rank(1).dtype == alone.dtype
    ours = torch.cat([found.on_rank(0), found.on_rank(1)], 1)
    assert (ours - exact).abs().max() < 1.5 * (alone - exact).abs().max()
    found.float().sum().backward()
    assert model.embed.weight.grad is not None


def test_copies(mesh):
    model, ids = programs.Model(), torch.randint(37, (2, 8))
    model = context_parallel(model, mesh, "layers.*")
    expected = model(ids).on_rank(1)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(ids).on_rank(1), expected)
        other.layers[0].q.weight.data.zero_()
    torch.testing.assert_close(model(ids).on_rank(1), expected)


class Called(torch.nn.Module):
    """Attention with other arguments."""

    def forward(self, x, **options):
        keys = options.pop("keys", x)
        return F.scaled_dot_product_attention(x, keys, keys, **options)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"dropout_p": 0.1}, UnsupportedError, "dropout_p=0.1"),
        ({"attn_mask": torch.ones(4, 4)}, LayoutError, "whole sequence of 8 positions"),
        ({"keys": torch.ones(1, 2, 5, 4)}, UnsupportedError, "4 queries and 5 keys"),
        ({"keys": torch.ones(1, 1, 4, 4)}, LayoutError, "enable_gqa"),
        ({"keys": torch.ones(1, 2, 4, 4).double()}, ArgumentError, "one dtype"),
    ],
)
def test_what_attention_does_not_do(mesh, options, error, match):
    model = context_parallel(Called(), mesh, "", sequence_dims={"x": 2})
    with pytest.raises(error, match=match):
        model(torch.ones(1, 2, 8, 4), **options)


def test_mask_of_the_whole_sequence(mesh):
    x, mask = torch.randn(1, 2, 8, 4), torch.rand(8, 8) > 0.3
    expected = Called()(x, attn_mask=mask)
    model = context_parallel(Called(), mesh, "", sequence_dims={"x": 2})
    torch.testing.assert_close(model(x, attn_mask=mask).on_rank(1), expected[:, :, 4:])


class OnlyInput(torch.nn.Module):
    def forward(self, x):
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


def test_the_only_input_is_split(mesh):
    x = torch.randn(1, 8, 8)
    expected = OnlyInput()(x)
    model = context_parallel(OnlyInput(), mesh, "")
    torch.testing.assert_close(model(x).on_rank(1), expected[:, :, 4:])


def test_bad_use(mesh):
    with pytest.raises(ArgumentError, match="takes x, options; sequence_dims names none of them"):
        context_parallel(Called(), mesh, "")
    model = programs.Model()
    with pytest.raises(ArgumentError, match="no axis 'sp', only cp"):
        context_parallel(model, mesh, "layers.*", axis="sp")
    with pytest.raises(LayoutError, match="did you mean 'layers"):
        context_parallel(model, mesh, "layer.0")
    with pytest.raises(ArgumentError, match="sequence_dims names tokens"):
        context_parallel(model, mesh, "layers.*", sequence_dims={"tokens": 1})
    with pytest.raises(ArgumentError, match="'tree'"):
        context_parallel(model, mesh, "layers.*", method="tree")
    context_parallel(model, mesh, "layers.*")
    with pytest.raises(LayoutError, match="once"):
        context_parallel(model, mesh, "layers.*")
    other = torch.nn.Sequential(OnlyInput(), OnlyInput())
    with pytest.raises(ArgumentError, match="takes input, and no 'places'"):
        context_parallel(other, mesh, "0", sequence_dims={"input": 1}, positions="places")
    context_parallel(other, mesh, "0", sequence_dims={"input": -4})
    for again, path in ((other, "1"), (torch.nn.ModuleDict({"inner": other}), "inner.1")):
        with pytest.raises(LayoutError, match="splits its inputs already"):
            context_parallel(again, mesh, path)
    with pytest.raises(LayoutError, match=r"splits 'input' along dim -4, and it has shape \(1, 8"):
        other(torch.zeros(1, 8, 8))
    with pytest.raises(LayoutError, match=r"multiple of 2.*'input_ids': 7"):
        model(torch.zeros(1, 7, dtype=torch.int64))
