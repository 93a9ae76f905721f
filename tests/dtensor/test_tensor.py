"""A DTensor as a tensor among others: parameters, copies, pickles, optimizers, errors."""

import copy
import pickle

import pytest
import torch
from by_hand import lay, value
from parity import through_file
from torch import nn

import shardwise
from shardwise import DTensor, LocalTensor, Partial, Replicate, Shard
from shardwise.debug import CommDebugMode


def sharded_linear(mesh, placement=Shard(0)):  # noqa: B008 (a value, never changed)
    layer = nn.Linear(4, 6)
    for name, parameter in list(layer.named_parameters()):
        where = placement if name == "weight" else Replicate()
        placed = shardwise.distribute_tensor(parameter.detach(), mesh, [where])
        layer.register_parameter(name, nn.Parameter(placed))
    return layer


def test_it_has_the_face_of_the_global_tensor(square):
    x = lay(torch.arange(15.0).view(5, 3), square, [Shard(0), Shard(1)])
    assert x.shape == (5, 3)
    assert x.numel() == 15
    assert x.stride() == (3, 1)
    assert x.dtype == torch.float32
    assert x.device.type == "cpu"
    assert len(x) == 5


def test_repr(square):
    x = lay(torch.ones(4), square, [Shard(0), Replicate()]).requires_grad_()
    text = repr(x)
    for part in ("DTensor(", "(4,)", "[S(0), R]", "rows=2, cols=2", "requires_grad=True", "rank"):
        assert part in text


def test_a_number_is_read_from_any_layout(mesh):
    assert float(lay(torch.arange(5.0), mesh, [Shard(0)]).sum()) == 10
    assert lay(torch.tensor(3.0), mesh, [Partial()]).item() == 3
    assert bool(lay(torch.tensor(1), mesh, [Partial("max")]))


def test_it_is_written_in_place(mesh):
    for placement in (Shard(0), Replicate(), Partial()):
        x = lay(torch.arange(5.0), mesh, [placement])
        assert x.mul_(2) is x
        assert torch.equal(value(x), 2 * torch.arange(5.0))
        assert x.zero_() is x
        assert torch.equal(value(x), torch.zeros(5))
    x = lay(torch.arange(5.0), mesh, [Shard(0)])
    assert torch.equal(value(x.fill_(3)), torch.full((5,), 3.0))
    assert torch.equal(value(x.copy_(lay(torch.ones(5), mesh, [Replicate()]))), torch.ones(5))


# -- autograd --------------------------------------------------------------------------------


def test_requires_grad(mesh):
    x = shardwise.ones(8, device_mesh=mesh, placements=[Shard(0)])
    assert not x.requires_grad
    assert x.requires_grad_() is x
    (x * x * 3).sum().backward()
    assert isinstance(x.grad, DTensor)
    assert torch.equal(value(x.grad), torch.full((8,), 6.0))
    x.grad = None
    (x * 2).sum().backward()
    (x * 2).sum().backward()
    assert torch.equal(value(x.grad), torch.full((8,), 4.0))


def test_gradients_of_two_layouts_add_up(mesh):
    """One use wants the parameter gathered, the other sharded."""
    x = lay(torch.arange(5.0), mesh, [Shard(0)]).requires_grad_()
    (x.sum() + (x.redistribute(placements=[Replicate()]) * 3).sum()).backward()
    assert torch.equal(value(x.grad), torch.full((5,), 4.0))


# -- parameters and modules ------------------------------------------------------------------


def test_a_parameter_of_a_module(mesh):
    layer = sharded_linear(mesh)
    assert isinstance(layer.weight, nn.Parameter)
    assert isinstance(layer.weight, DTensor)
    assert layer.weight.placements == (Shard(0),)
    assert layer.weight.requires_grad
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]


def test_a_sharded_parameter_gets_a_gradient_of_its_placements(mesh):
    for placement in (Shard(0), Shard(1), Shard(0, sizes=(1, 5, 0, 0))):
        layer = sharded_linear(mesh, placement)
        layer(lay(torch.randn(5, 4), mesh, [Shard(0)])).sum().backward()
        assert layer.weight.grad.placements == (placement,)


def test_a_state_dict_goes_round(mesh):
    layer, other = sharded_linear(mesh, Shard(0)), sharded_linear(mesh, Shard(1))
    assert not torch.equal(value(layer.weight), value(other.weight))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(value(other.weight), value(layer.weight))
    assert other.weight.placements == (Shard(1),)
    with torch.no_grad():
        other.weight.mul_(0)
    assert value(layer.weight).any(), "the values were copied, not shared"


def test_a_module_is_cast(mesh):
    layer = sharded_linear(mesh).double()
    assert layer.weight.dtype == torch.float64
    assert layer.weight.placements == (Shard(0),)
    assert layer.weight.to_local().on_rank(0).dtype == torch.float64


# -- copies ----------------------------------------------------------------------------------


def test_a_deep_copy_is_apart(mesh):
    x = lay(torch.arange(5.0), mesh, [Shard(0)]).requires_grad_()
    (x * 2).sum().backward()
    twin = copy.deepcopy(x)
    assert twin.requires_grad
    assert twin.placements == x.placements
    assert torch.equal(value(twin.grad), value(x.grad))
    with torch.no_grad():
        twin.mul_(0)
        twin.grad.mul_(0)
    assert torch.equal(value(x), torch.arange(5.0))
    assert torch.equal(value(x.grad), torch.full((5,), 2.0))


def test_a_module_is_deep_copied(mesh):
    layer = sharded_linear(mesh)
    tied = nn.ModuleList([layer, layer])
    twins = copy.deepcopy(tied)
    assert twins[0].weight is twins[1].weight
    assert twins[0].weight is not layer.weight
    assert isinstance(twins[0].weight, nn.Parameter)
    assert torch.equal(value(twins[0].weight), value(layer.weight))


def test_a_parameter_is_deep_copied_without_its_gradient(mesh):
    """As on one device, where other leaves keep it."""
    x = shardwise.ones(4, device_mesh=mesh, placements=[Shard(0)])
    local = LocalTensor.per_rank(lambda rank: torch.ones(rank))
    for leaf in (torch.ones(4), x, local):
        for made in (nn.Parameter(leaf), leaf.detach().requires_grad_()):
            made.sum().backward()
            assert (copy.deepcopy(made).grad is None) == isinstance(made, nn.Parameter)


def test_only_leaves_are_deep_copied(mesh):
    x = shardwise.ones(4, device_mesh=mesh, placements=[Shard(0)], requires_grad=True)
    with pytest.raises(shardwise.ShardwiseError, match="detach"):
        copy.deepcopy(x * 2)


@pytest.mark.parametrize("placement", [Shard(0), Shard(0, sizes=(0, 5, 0, 0)), Partial()])
def test_a_pickle_goes_round(mesh, placement):
    x = lay(torch.arange(5.0), mesh, [placement]).requires_grad_()
    back = pickle.loads(pickle.dumps(x))
    assert back.requires_grad
    assert back.placements == x.placements
    assert back.device_mesh == mesh
    assert torch.equal(value(back), torch.arange(5.0))
    # It meets the old one in an op without a fuss about meshes.
    assert torch.equal(value((back - x).detach()), torch.zeros(5))


def test_a_pickle_is_read_in_a_later_world():
    saved = []
    for _ in range(2):
        with shardwise.simulate(4):
            mesh = shardwise.init_device_mesh("cpu", (2, 2))
            x = lay(torch.arange(6.0), mesh, [Shard(0), Shard(0)])
            saved.append(pickle.dumps(x.redistribute(placements=[Shard(0)] * 2, order=[1, 0])))
            for back in map(pickle.loads, saved):
                assert torch.equal(back.full_tensor().agreed(), torch.arange(6.0))


def test_a_pickle_needs_a_world_that_is_large_enough():
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cpu", (4,))
        saved = pickle.dumps(shardwise.ones(4, device_mesh=mesh, placements=[Shard(0)]))
    with pytest.raises(shardwise.WorldError, match="process group"):
        pickle.loads(saved)
    with shardwise.simulate(2), pytest.raises((shardwise.WorldError, RuntimeError)):
        pickle.loads(saved)


@pytest.mark.parametrize(
    "change",
    [
        lambda held, mesh, layout: (("simulated", [p[:1] for p in held[1]], *held[2:]), layout),
        lambda held, mesh, layout: (("simulated", [p.int() for p in held[1]], *held[2:]), layout),
        lambda held, mesh, layout: (
            ("simulated", [p.to_sparse() for p in held[1]], *held[2:]),
            layout,
        ),
        lambda held, mesh, layout: (("simulated", held[1], held[2], [9] * 4), layout),
        lambda held, mesh, layout: (("simulated", held[1][:1], held[2][:1], [0]), layout),
        lambda held, mesh, layout: (held, (*layout[:2], (80,), *layout[3:])),
        lambda held, mesh, layout: (held, ((Shard(3),), *layout[1:])),
        lambda held, mesh, layout: (held, ((Replicate(), Replicate()), *layout[1:])),
        lambda held, mesh, layout: (held, (*layout[:2], (-8,), *layout[3:])),
        lambda held, mesh, layout: (held, (*layout[:3], (1, 1), layout[4])),
    ],
    ids=[
        "shapes",
        "dtypes",
        "sparse",
        "places",
        "ranks",
        "size",
        "dim",
        "axes",
        "negative",
        "strides",
    ],
)
def test_a_pickle_that_contradicts_itself_is_refused(mesh, change):
    x = lay(torch.arange(8.0), mesh, [Shard(0)])
    rebuild, (held, grid, layout, *rest) = x.__reduce_ex__(2)
    assert torch.equal(value(rebuild(held, grid, layout, *rest)), torch.arange(8.0))
    held, layout = change(held, grid, layout)
    with pytest.raises(shardwise.LayoutError):
        rebuild(held, grid, layout, *rest)


def test_torch_save_goes_round(mesh):
    back = through_file(sharded_linear(mesh).state_dict())
    assert back["weight"].placements == (Shard(0),)


# -- optimizers ------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=repr)
def test_adam_takes_the_steps_of_one_device(mesh, placement):
    whole = torch.randn(5, 3)
    alone = nn.Parameter(whole.clone())
    sharded = nn.Parameter(shardwise.distribute_tensor(whole, mesh, [placement]))
    for parameter in (alone, sharded):
        optimizer = torch.optim.AdamW([parameter], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (parameter * parameter).sum().backward()
            optimizer.step()
    torch.testing.assert_close(value(sharded), alone.detach())


# -- errors ----------------------------------------------------------------------------------


def test_plain_tensors_are_refused(mesh):
    x = shardwise.ones(4, device_mesh=mesh, placements=[Shard(0)])
    for call in (lambda: x + torch.ones(4), lambda: torch.mul(torch.ones(4), x)):
        with pytest.raises(shardwise.MixedTensorsError, match=r"shape \(4,\).*distribute_tensor"):
            call()
    assert torch.equal(value(x + torch.tensor(2.0)), torch.full((4,), 3.0))


def test_sizes_are_compared_with_a_plain_tensor(mesh):
    x = shardwise.distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    assert torch.ones(4, 2).is_same_size(x)
    assert x.is_same_size(x)
    assert not x.is_same_size(torch.ones(1, 2))


def test_a_plain_target_is_told_of_loss_parallel(mesh):
    logits = shardwise.distribute_tensor(torch.randn(4, 8), mesh, [Shard(1)])
    with pytest.raises(NotImplementedError, match=r"^cross_entropy or nll_loss got.*loss_parallel"):
        torch.nn.functional.cross_entropy(logits, torch.arange(4))


def test_two_meshes_do_not_mix(mesh):
    square = shardwise.init_device_mesh("cpu", (2, 2))
    x = shardwise.ones(4, device_mesh=mesh, placements=[Shard(0)])
    y = shardwise.ones(4, device_mesh=square, placements=[Shard(0), Replicate()])
    with pytest.raises(ValueError, match=r"two meshes.*from_local"):
        x + y
    there = DTensor.from_local(y.full_tensor(), mesh, [Replicate()])
    assert torch.equal(value(x + there), torch.full((4,), 2.0))
    with shardwise.simulate(4):
        again = shardwise.init_device_mesh("cpu", (4,))
        with pytest.raises(ValueError, match="outlive"):
            x + shardwise.ones(4, device_mesh=again, placements=[Shard(0)])


def test_the_class_is_not_called(mesh):
    with pytest.raises(TypeError, match="distribute_tensor"):
        DTensor(torch.ones(4), mesh, [Shard(0)])


def test_a_saved_tensor_is_loaded_without_running_code(square, tmp_path):
    x = shardwise.distribute_tensor(torch.randn(5, 4), square, [Shard(0, sizes=(4, 1)), Shard(1)])
    layer = shardwise.distribute_module(torch.nn.Linear(4, 3), square)
    torch.save({"x": x, "layer": layer.state_dict()}, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["x"].placements == x.placements
    assert torch.equal(state["x"].full_tensor().agreed(), x.full_tensor().agreed())
    layer.load_state_dict(state["layer"])


def test_printing_shows_the_layout_and_sends_nothing(square):
    for placements in ([Shard(0), Shard(1)], [Partial(), Replicate()], [Shard(0), Partial()]):
        local = LocalTensor.per_rank(lambda rank: torch.full((2, 2), float(rank)))
        if placements[1] == Replicate():
            local = LocalTensor.per_rank(lambda rank: torch.full((2, 2), float(rank // 2)))
        x = shardwise.DTensor.from_local(local, square, placements)
        with CommDebugMode() as comm:
            for text in (repr(x), str(x), f"{x}"):
                assert "placements=" in text
                assert "rank 0" in text
                assert "shape=" in text
        assert comm.get_total_counts() == 0


def test_data_and_detach_share_values_and_forget_history(mesh):
    x = shardwise.distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]).requires_grad_()
    for alias in (x.detach(), x.data):
        assert isinstance(alias, shardwise.DTensor)
        assert not alias.requires_grad
        assert alias.placements == (Shard(0),)
        alias.mul_(2)
    assert torch.equal(x.detach().full_tensor().agreed(), torch.full((4, 2), 4.0))


def test_data_is_assigned_with_its_layout(mesh):
    parameter = torch.nn.Parameter(lay(torch.randn(6, 4), mesh, [Shard(0)]))
    new = torch.arange(6, dtype=torch.float64).reshape(3, 2)
    parameter.data = lay(new, mesh, [Shard(1)])
    assert parameter.placements == (Shard(1),)
    assert torch.equal(value(parameter.detach()), new)
    (parameter * 2).sum().backward()
    assert parameter.grad.placements == (Shard(1),)
    assert torch.equal(value(parameter.grad), torch.full((3, 2), 2.0, dtype=torch.float64))
    with pytest.raises(shardwise.MixedTensorsError, match="distribute_tensor"):
        parameter.data = new


def test_data_of_a_frozen_tensor_stays_frozen(mesh):
    x = lay(torch.zeros(4), mesh, [Shard(0)]).requires_grad_().requires_grad_(False)
    x.data = lay(torch.ones(4), mesh, [Shard(0)])
    assert not x.requires_grad
    assert value(x).tolist() == [1, 1, 1, 1]


def test_a_vector_becomes_the_parameters(mesh):
    layer = shardwise.distribute_module(torch.nn.Linear(3, 2), mesh)
    vector = torch.nn.utils.parameters_to_vector(layer.parameters())
    torch.nn.utils.vector_to_parameters(vector * 0 + 3, layer.parameters())
    assert value(layer.weight.detach()).tolist() == [[3, 3, 3], [3, 3, 3]]


def test_requires_grad_may_be_assigned(mesh):
    weight = lay(torch.randn(6, 4), mesh, [Shard(0)])
    weight.requires_grad = True
    (lay(torch.ones(5, 6), mesh, [Shard(0)]) @ weight).sum().backward()
    assert weight.grad.placements == (Shard(0),)
    weight.requires_grad = False
    assert not weight.requires_grad


def test_a_given_stride_is_kept(mesh):
    local = LocalTensor.per_rank(lambda rank: torch.arange(6.0).view(3, 2).t())
    x = shardwise.DTensor.from_local(local, mesh, [Shard(1)], shape=(2, 12), stride=(1, 2))
    assert (x.shape, x.stride()) == ((2, 12), (1, 2))
    assert x.full_tensor().agreed().shape == (2, 12)


# -- a sum in another dtype ------------------------------------------------------------------

TERMS = {
    "fractions": torch.tensor([0.5, 0.25, 0.75, 0.5]),
    "cancelling": torch.tensor([1.0, -1.0, 2.0, -2.0]),
    "small": torch.tensor([2049.0, 2049.0, 1.0, 1.0]),
}
CASTS = {
    "long": lambda s: s.long(),
    "bool": lambda s: s.bool(),
    "half": lambda s: s.half(),
    "double": lambda s: s.double(),
    "int8": lambda s: s.to(torch.int8),
    "copy_": lambda s: torch.zeros_like(s, dtype=torch.int64).copy_(s),
    "fill_": lambda s: torch.zeros_like(s, dtype=torch.int64).fill_(s.sum()),
    "sum": lambda s: s.sum(dtype=torch.int64),
    "cumsum": lambda s: s.reshape(-1).cumsum(0, dtype=torch.int64),
    "mean": lambda s: s.mean(dtype=torch.half),
    "times an integer": lambda s: torch.ones_like(s, dtype=torch.int64) * s.sum(),
    "beside halves": lambda s: s.reshape(-1).half() * s.sum(),
    "scattered": lambda s: torch.slice_scatter(
        torch.zeros_like(s.reshape(-1), dtype=torch.int64), s.reshape(-1)
    ),
    "together": lambda s: torch.cat([s.reshape(-1).long(), s.reshape(-1)]),
}


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS.keys())
@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS.keys())
@pytest.mark.parametrize("shape", [(4,), (4, 1)], ids=["a number", "with dims"])
def test_terms_are_added_before_they_are_rounded(mesh, shape, cast, terms):
    plain = terms.view(shape).sum(0)
    x = shardwise.distribute_tensor(terms.view(shape), mesh, [Shard(0)]).sum(0)
    assert x.placements == (Partial(),)
    found, expected = cast(x), cast(plain)
    assert found.dtype == expected.dtype
    assert torch.equal(found.full_tensor().agreed(), expected)


def test_a_number_of_a_wider_type_does_not_reduce_a_sum(mesh):
    """It counts in the type of the tensor with dims; what is Partial passes in its own."""
    x = shardwise.distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]).sum(0)
    wide = shardwise.distribute_tensor(torch.tensor(2.0, dtype=torch.float64), mesh, [Replicate()])
    assert (x * wide).placements == (Partial(),)
    assert (x.double() * wide).placements == (Partial(),)
    assert (x.sum() * x.new_ones(3).long()).placements == (Partial(),)


def test_a_dim_of_size_1_is_not_split():
    """One rank would compute all of it, while the others wait."""
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cpu", (4,))
        x = shardwise.ones(1, 8, 16, device_mesh=mesh, placements=[Shard(2)])
        assert x.softmax(2).placements == (Shard(1),)
        assert x[:, 0].softmax(1).placements == (Replicate(),)
        # Where it is split already, it stays.
        alone = shardwise.ones(1, 8, device_mesh=mesh, placements=[Shard(0)])
        whole = shardwise.ones(1, 8, device_mesh=mesh, placements=[Replicate()])
        assert (alone + whole).placements == (Shard(0),)
