"""Which modules a plan changes, and what is said when it does not fit."""

import warnings

import pytest
import torch
from parallel_models import MLP, Block, TiedLM
from torch import nn

import shardwise
from shardwise import DTensor, LayoutError, Replicate, Shard, UnsupportedError
from shardwise.debug import CommDebugMode
from shardwise.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    input_reshard,
    parallelize_module,
)


def distributed(module):
    return [name for name, p in module.named_parameters() if isinstance(p, DTensor)]


def stack():
    return nn.Sequential(*(MLP() for _ in range(3)))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("1.up", ["1.up"]),
        ("*.up", ["0.up", "1.up", "2.up"]),
        ("[1-2].down", ["1.down", "2.down"]),
        ("?.u?", ["0.up", "1.up", "2.up"]),
        ("[!0].[du]*", ["1.up", "1.down", "2.up", "2.down"]),
    ],
)
def test_patterns(mesh, pattern, expected):
    model = parallelize_module(stack(), mesh, {pattern: ColwiseParallel()})
    assert distributed(model) == [f"{p}.{leaf}" for p in expected for leaf in ("weight", "bias")]


def test_mesh_of_the_context(mesh):
    with mesh:
        model = parallelize_module(nn.Linear(4, 4), parallelize_plan="colwise")
    assert model.weight.placements == (Shard(0),)


def test_no_mesh_at_all():
    with pytest.raises(shardwise.ArgumentError, match="No mesh was given"):
        parallelize_module(nn.Linear(4, 4), parallelize_plan="colwise")


def test_no_match_says_what_was_meant_and_what_applied(mesh):
    model = stack()
    plan = {"0.upp": "colwise", "*.down": "rowwise"}
    with pytest.warns(UserWarning, match=r"'0\.upp'; did you mean '0\.up'.*1 of 2 entries.* 3 mod"):
        parallelize_module(model, mesh, plan)
    assert len(distributed(model)) == 6


@pytest.mark.parametrize("plan", [{"0.upp": "colwise", "1.up": "colwise"}, {}, None])
def test_strict_raises_before_anything_changes(mesh, plan):
    model = stack()
    with pytest.raises(LayoutError):
        parallelize_module(model, mesh, plan, strict=True)
    assert not distributed(model)


@pytest.mark.parametrize("plan", [{}, None])
def test_empty_plan_warns(mesh, plan):
    with pytest.warns(UserWarning, match="empty"):
        parallelize_module(nn.Linear(4, 4), mesh, plan)


def test_a_match_does_not_warn(mesh):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallelize_module(MLP(), mesh, {"up": "colwise"})


@pytest.mark.parametrize(
    ("plan", "error", "message"),
    [
        ({"mlp": ColwiseParallel()}, UnsupportedError, r"'mlp' is a MLP; ColwiseParallel is for"),
        ({"norm1": RowwiseParallel()}, UnsupportedError, "'norm1' is a LayerNorm"),
        ({"mlp.*": "colwise", "mlp.up": "rowwise"}, LayoutError, r"'mlp\.up' matches .* and "),
        ({"mlp.up": "sideways"}, TypeError, r"'sideways' for 'mlp\.up'.*colwise, rowwise"),
        ({"mlp.up": 3}, TypeError, r"'mlp\.up' a int"),
        ([("mlp.up", "colwise")], TypeError, "list"),
    ],
)
def test_mistakes_name_the_path_and_change_nothing(mesh, plan, error, message):
    model = Block()
    if isinstance(plan, dict):
        plan = {"attention.q": ColwiseParallel(), **plan}
    with pytest.raises(error, match=message):
        parallelize_module(model, mesh, plan)
    assert not distributed(model)


def test_a_second_time_is_an_error(mesh):
    model = parallelize_module(MLP(), mesh, {"up": ColwiseParallel()})
    with pytest.raises(LayoutError, match="'up' is parallel already: ColwiseParallel"):
        parallelize_module(model, mesh, {"up": ColwiseParallel()})


def test_tied_weights_placed_apart_are_an_error(mesh):
    with pytest.raises(LayoutError, match=r"'embed\.weight' and 'head\.weight' are one parameter"):
        parallelize_module(TiedLM(), mesh, {"embed": "rowwise", "head": "rowwise"})


def test_embedding_with_max_norm(mesh):
    with pytest.raises(UnsupportedError, match=r"max_norm=1\.0"):
        parallelize_module(nn.Embedding(4, 4, max_norm=1.0), mesh, "rowwise")


class Two(nn.Module):
    def forward(self, a, b, *, scale=None, flag=None):
        return a, b


@pytest.mark.parametrize("dim", [None, 0, 1, -1])
def test_saved_inputs_are_sharded_until_backward(mesh, dim):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
    x = torch.randn(5, 6)
    expected = torch.autograd.grad(model(x).square().sum(), model[0].weight)[0]
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    assert input_reshard(model[0], mesh, dim) is model[0]
    loss = model(x).square().sum()
    with CommDebugMode() as comm:
        loss.backward()
    torch.testing.assert_close(model[0].weight.grad.full_tensor(), expected)
    gathered = [event for event in comm.events if event.kind == "all_gather_into_tensor"]
    assert len(gathered) == (dim is not None)
    if gathered:  # an uneven shard of the input, padded
        assert gathered[0].num_bytes == 4 * (2 * 6 if dim == 0 else 5 * 2)


@pytest.mark.parametrize("dim", [1, -2])
def test_inputs_of_fewer_dims_are_kept_as_they_are(mesh, dim):
    layer = parallelize_module(nn.Linear(6, 8), mesh, "colwise_rep")
    y = input_reshard(layer, mesh, dim)(torch.ones(6))
    with CommDebugMode() as comm:
        y.sum().backward()
    assert not comm.events


def test_number_of_inputs(mesh):
    style = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    model = parallelize_module(nn.Sequential(Two()), mesh, {"0": style})
    with pytest.raises(LayoutError, match=r"Module '0' was called with 2 positional.* has 1"):
        model[0](torch.ones(2), torch.ones(2))


def test_number_of_outputs(mesh):
    style = PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())
    model = parallelize_module(nn.Sequential(Two()), mesh, {"0": style})
    with pytest.raises(LayoutError, match=r"Module '0' returned 2 outputs.* has 1"):
        model[0](torch.ones(2), torch.ones(2))


def test_layouts_that_do_not_pair_up():
    same = "input_layouts and desired_input_layouts should have same length!"
    with pytest.raises(AssertionError, match=same):
        PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(),))
    with pytest.raises(LayoutError, match="same keywords"):
        PrepareModuleInput(input_kwarg_layouts={"mask": Shard(0)})
    with pytest.raises(TypeError, match="go together"):
        PrepareModuleInput(input_layouts=Shard(0))


def test_keywords_and_none(mesh):
    seen = {}

    class Spy(Two):
        def forward(self, a, b, *, scale=None, flag=None):
            seen.update(a=a, b=b, scale=scale, flag=flag)
            return a

    style = PrepareModuleInput(
        input_layouts=(None, Shard(0)),
        desired_input_layouts=(None, Replicate()),
        input_kwarg_layouts={"scale": Shard(0), "flag": Replicate()},
        desired_input_kwarg_layouts={"scale": Replicate(), "flag": Shard(0)},
    )
    model = parallelize_module(Spy(), mesh, style)
    model("as it is", torch.ones(2, 3), scale=torch.ones(1))
    assert seen["a"] == "as it is"
    assert (seen["b"].shape, seen["b"].placements) == ((8, 3), (Replicate(),))
    assert (seen["scale"].shape, seen["scale"].placements) == ((4,), (Replicate(),))
    assert seen["flag"] is None
    with pytest.raises(TypeError, match=r"The root module: input 1 has a layout.*found str"):
        model(1, "no tensor")


def test_local_inputs(mesh):
    style = PrepareModuleInput(
        input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True
    )
    y = parallelize_module(nn.Identity(), mesh, style)(torch.ones(2, 3))
    assert not isinstance(y, DTensor)
    assert y.shape == (8, 3)


def test_a_whole_input_for_a_rowwise_layer_is_explained(mesh):
    model = parallelize_module(MLP(), mesh, {"down": RowwiseParallel()})
    with pytest.raises(LayoutError, match=r"Module 'down': the input is a plain tensor and each"):
        model.down(torch.ones(5, 12))


def test_nothing_is_sent_without_a_source_rank(mesh):
    with CommDebugMode() as comm:
        parallelize_module(
            Block(),
            mesh,
            {"norm1": SequenceParallel(), "mlp.up": "colwise", "mlp.down": "rowwise"},
            src_data_rank=None,
        )
    assert comm.get_total_counts() == 0


@pytest.mark.parametrize("source", [0, 2])
def test_every_rank_gets_the_values_of_the_source(mesh, source):
    values = shardwise.LocalTensor.per_rank(lambda rank: torch.full((4, 4), float(rank)))
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(values)
    parallelize_module(layer, mesh, "rowwise", src_data_rank=source)
    assert layer.weight.full_tensor().agreed().unique().tolist() == [source]


def test_a_style_of_ones_own(mesh):
    class Note(ParallelStyle):
        def _apply(self, module, device_mesh):
            module.note = (self.path, self.src_data_rank, device_mesh.ndim)
            return module

    model = parallelize_module(MLP(), mesh, {"*": Note()}, src_data_rank=1)
    assert (model.up.note, model.down.note) == (("up", 1, 1), ("down", 1, 1))


def test_an_error_inside_a_style_says_where(mesh):
    class Broken(ParallelStyle):
        def _apply(self, module, device_mesh):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken") as caught:
        parallelize_module(MLP(), mesh, {"up": Broken()})
    assert "'up'" in caught.value.__notes__[0]


def test_a_style_may_return_another_module(mesh):
    class Swap(ParallelStyle):
        def _apply(self, module, device_mesh):
            return nn.Identity()

    model = parallelize_module(MLP(), mesh, {"up": Swap()})
    assert isinstance(model.up, nn.Identity)
    assert isinstance(parallelize_module(MLP(), mesh, Swap()), nn.Identity)


def test_a_style_shows_what_it_was_given():
    style = ColwiseParallel(input_layouts=Shard(0), use_local_output=False)
    assert repr(style) == "ColwiseParallel(input_layouts=Shard(0), use_local_output=False)"
