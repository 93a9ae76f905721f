"""How DTensors are made, and modules distributed."""

import warnings

import numpy as np
import pytest
import torch
from by_hand import value

import shardwise
from shardwise import DTensor, LocalTensor, Partial, Replicate, Shard
from shardwise.debug import CommDebugMode

broadcast, scatter = torch.ops.c10d_functional.broadcast, torch.ops.c10d.scatter_

LAYOUTS = [
    [Shard(0), Replicate()],
    [Shard(1), Shard(0)],
    [Shard(0), Shard(0)],
    [Replicate(), Shard(-1)],
    [Shard(0, sizes=(0, 5)), Shard(0)],
    None,
]


# -- distribute_tensor -----------------------------------------------------------------------


@pytest.mark.parametrize("placements", LAYOUTS)
def test_a_tensor_is_laid_out(square, placements):
    whole = torch.randn(5, 3)
    x = shardwise.distribute_tensor(whole, square, placements)
    assert x.shape == (5, 3)
    assert torch.equal(value(x), whole)
    assert torch.equal(x.full_tensor().agreed(), whole)


def test_ranks_get_the_values_of_the_source(mesh):
    """Every rank comes with other values."""
    mine = LocalTensor.per_rank(lambda rank: torch.arange(4) + 10 * rank)
    for source in (0, 2):
        x = shardwise.distribute_tensor(mine, mesh, [Shard(0)], src_data_rank=source)
        assert x.full_tensor().agreed().tolist() == [10 * source + i for i in range(4)]
    for bad in (-1, 4):
        with pytest.raises(ValueError, match="src_data_rank"):
            shardwise.distribute_tensor(mine, mesh, [Shard(0)], src_data_rank=bad)


@pytest.mark.parametrize("source", [-1, 1.5, 99])
def test_a_source_is_a_coordinate(mesh, source):
    with pytest.raises(shardwise.LayoutError, match=f"src_data_rank={source} is not a coordinate"):
        shardwise.distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=source)


def test_without_a_source_nothing_is_communicated(mesh):
    mine = LocalTensor.per_rank(lambda rank: torch.arange(4) + 10 * rank)
    with CommDebugMode() as comm:
        x = shardwise.distribute_tensor(mine, mesh, [Shard(0)], src_data_rank=None)
    assert comm.get_total_counts() == 0
    assert x.full_tensor().agreed().tolist() == [0, 11, 22, 33]


@pytest.mark.parametrize(
    ("placements", "expected"),
    [
        # Half of 4 by 4 floats, then a quarter.
        ([Shard(0), Shard(1)], [(scatter, "rows", 32), (scatter, "cols", 16)]),
        # What is replicated is sent after it was cut.
        ([Replicate(), Shard(0)], [(scatter, "cols", 32), (broadcast, "rows", 32)]),
        ([Replicate(), Replicate()], [(broadcast, "rows", 64), (broadcast, "cols", 64)]),
        ([Shard(0, sizes=(1, 3)), Partial()], [(scatter, "rows", 48), (broadcast, "cols", 16)]),
    ],
)
def test_a_rank_receives_no_more_than_its_part(square, placements, expected):
    whole = torch.arange(16.0).view(4, 4)
    with CommDebugMode() as comm:
        x = shardwise.distribute_tensor(whole, square, placements)
    assert [(event.kind, event.axis, event.num_bytes) for event in comm.events] == [
        (packet.__name__, axis, num_bytes) for packet, axis, num_bytes in expected
    ]
    assert not any(event.implicit for event in comm.events)
    assert torch.equal(value(x), whole)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.complex64, torch.float8_e5m2])
def test_any_dtype_is_laid_out(mesh, dtype):
    whole = torch.randint(0, 2, (5, 3)).to(dtype)
    for placement in (Shard(0), Shard(1), Replicate()):
        x = shardwise.distribute_tensor(whole, mesh, [placement])
        assert x.dtype == dtype
        found = torch.cat(
            [x.redistribute(placements=[Shard(0)]).to_local().on_rank(r) for r in range(4)]
        )
        assert torch.equal(found.view(torch.uint8), whole.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool, torch.float8_e4m3fn, torch.int16])
@pytest.mark.parametrize("placements", [[Replicate(), Shard(1)], [Shard(0), Replicate()]])
def test_any_dtype_is_laid_out_unevenly_beside_replicas(square, dtype, placements):
    whole = torch.randint(0, 2, (3, 5)).to(dtype)
    found = shardwise.distribute_tensor(whole, square, placements).full_tensor().agreed()
    assert torch.equal(found.to(torch.complex64), whole.to(torch.complex64))


def test_a_part_does_not_keep_the_whole_alive(mesh):
    x = shardwise.distribute_tensor(torch.ones(400), mesh, [Shard(0)])
    assert x.to_local().on_rank(1).untyped_storage().nbytes() == 100 * 4


def test_the_input_is_not_touched_later(mesh):
    whole = torch.ones(4)
    for placement in (Shard(0), Replicate()):
        x = shardwise.distribute_tensor(whole, mesh, [placement])
        x.add_(1)
    assert torch.equal(whole, torch.ones(4))


def test_it_makes_a_leaf(mesh):
    x = shardwise.distribute_tensor(torch.ones(4, requires_grad=True), mesh, [Shard(0)])
    assert x.is_leaf
    assert x.requires_grad
    with pytest.raises(RuntimeError, match="detach"):
        shardwise.distribute_tensor(torch.ones(4, requires_grad=True) * 2, mesh, [Shard(0)] * 2)


def test_a_dtensor_comes_back_where_it_lies_already(mesh):
    x = shardwise.distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    assert shardwise.distribute_tensor(x, mesh, [Shard(0)]) is x
    with pytest.raises(ValueError, match="redistribute"):
        shardwise.distribute_tensor(x, mesh, [Replicate()])


def test_a_view_is_laid_out_by_value(mesh):
    whole = torch.randn(6, 4).t()[:, ::2]
    for placement in (Shard(0), Shard(1), Replicate()):
        x = shardwise.distribute_tensor(whole, mesh, [placement])
        assert torch.equal(value(x), whole)
        assert x.is_contiguous()
        assert x.to_local().on_rank(1).is_contiguous()


# -- factories -------------------------------------------------------------------------------


@pytest.mark.parametrize("placements", LAYOUTS)
@pytest.mark.parametrize("name", ["zeros", "ones", "rand", "randn"])
def test_factories_make_what_one_device_makes(square, name, placements):
    torch.manual_seed(3)
    expected = getattr(torch, name)(5, 3)
    torch.manual_seed(3)
    x = getattr(shardwise, name)(5, 3, device_mesh=square, placements=placements)
    assert torch.equal(value(x), expected)
    torch.manual_seed(3)
    again = getattr(shardwise, name)((5, 3), device_mesh=square, placements=placements)
    assert torch.equal(value(again), expected)


def test_full(square):
    x = shardwise.full((5, 3), 7, device_mesh=square, placements=[Shard(0), Shard(0)])
    assert torch.equal(value(x), torch.full((5, 3), 7))
    assert x.dtype == torch.int64
    assert shardwise.full((2,), 7.0, device_mesh=square).dtype == torch.float32


def test_sizes_may_be_integers_of_numpy(mesh):
    size, options = np.int64(4), {"device_mesh": mesh, "placements": [Shard(0)]}
    assert shardwise.zeros(size, **options).shape == (4,)
    assert shardwise.ones((size, 3), **options).shape == (4, 3)
    assert shardwise.full(size, 2.0, **options).tolist() == [2.0] * 4
    local = torch.ones(4 // mesh.size())
    x = DTensor.from_local(local, mesh, [Shard(0)], shape=(size,), stride=(size // 4,))
    plain = DTensor.from_local(local, mesh, [Shard(0)], shape=(4,), stride=(1,))
    assert x._layout is plain._layout


def test_empty_has_a_shape(mesh):
    x = shardwise.empty(5, 3, device_mesh=mesh, placements=[Shard(0)], dtype=torch.float64)
    assert x.shape == (5, 3)
    assert x.dtype == torch.float64
    assert x.to_local().on_rank(2).shape == (1, 3)


def test_options(mesh):
    x = shardwise.zeros(4, device_mesh=mesh, placements=[Shard(0)], requires_grad=True)
    assert x.requires_grad
    assert x.is_leaf
    with mesh:
        assert shardwise.ones(4, dtype=torch.int32).dtype == torch.int32


def test_one_device_draws_once(mesh):
    """Two draws after one seed continue the one device's stream."""
    torch.manual_seed(1)
    expected = [torch.rand(5), torch.randn(6)]
    torch.manual_seed(1)
    drawn = [
        shardwise.rand(5, device_mesh=mesh, placements=[Shard(0)]),
        shardwise.randn(6, device_mesh=mesh, placements=[Replicate()]),
    ]
    assert all(torch.equal(value(x), y) for x, y in zip(drawn, expected, strict=True))


@pytest.mark.parametrize("name", ["zeros", "rand"])
def test_a_new_tensor_is_not_partial(mesh, name):
    """Four ranks of ones would be a tensor of fours."""
    with pytest.raises(ValueError, match="shard or replicate"):
        getattr(shardwise, name)(4, device_mesh=mesh, placements=[Partial()])


def test_replicas_are_stored_once(square):
    """A world of many ranks must fit one process."""
    x = shardwise.ones(64, device_mesh=square, placements=[Shard(0), Replicate()])
    pointers = [x.to_local().on_rank(rank).data_ptr() for rank in range(4)]
    assert pointers[0] == pointers[1]
    assert pointers[0] != pointers[2]


# -- distribute_module -----------------------------------------------------------------------


def test_what_is_not_partitioned_is_replicated(mesh):
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6))
    model[0].bias.requires_grad_(False)

    def rows(name, module, device_mesh):
        assert device_mesh is mesh
        if name == "0":
            weight = shardwise.distribute_tensor(module.weight.detach(), device_mesh, [Shard(0)])
            module.register_parameter("weight", torch.nn.Parameter(weight))

    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert shardwise.distribute_module(model, mesh, rows) is model
    assert model[0].weight.placements == (Shard(0),)
    assert model[0].bias.placements == (Replicate(),)
    assert model[1].running_mean.placements == (Replicate(),)
    assert [p.requires_grad for p in model.parameters()] == [True, False, True, True]
    for name, tensor in model.state_dict().items():
        assert torch.equal(value(tensor), before[name]), name


def test_input_and_output_functions(mesh):
    def split(module, inputs, device_mesh):
        return shardwise.distribute_tensor(inputs[0], device_mesh, [Shard(0)])

    def gather(module, outputs, device_mesh):
        assert outputs.placements == (Shard(0),)
        return outputs.full_tensor()

    layer = torch.nn.Linear(3, 2)
    x = torch.randn(5, 3)
    expected = layer(x)
    shardwise.distribute_module(layer, mesh, input_fn=split, output_fn=gather)
    torch.testing.assert_close(layer(x).agreed(), expected)


def test_functions_without_the_module_are_deprecated(mesh):
    layer, x = torch.nn.Linear(3, 2), torch.randn(5, 3)
    expected = layer(x)
    with pytest.warns(FutureWarning, match=r"write input_fn\(module, inputs, mesh\)"):
        shardwise.distribute_module(
            layer,
            mesh,
            input_fn=lambda inputs, mesh: shardwise.distribute_tensor(inputs[0], mesh, [Shard(0)]),
        )
    with pytest.warns(FutureWarning, match=r"write output_fn\(module, outputs, mesh\)"):
        shardwise.distribute_module(
            layer, mesh, output_fn=lambda outputs, mesh: outputs.full_tensor()
        )
    torch.testing.assert_close(layer(x), expected)


def test_tied_parameters_stay_tied(mesh):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    shardwise.distribute_module(model, mesh)
    assert model[0].weight is model[1].weight


def test_quantized_tensors_are_refused():
    with warnings.catch_warnings():  # torch announces from 2.12 on that it will drop them
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, torch.qint8)
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        for make in (shardwise.distribute_tensor, shardwise.DTensor.from_local):
            for placement in (Shard(0), Replicate()):
                with pytest.raises(shardwise.UnsupportedError, match=r"scale.*x\.int_repr\(\)"):
                    make(quantized, mesh, [placement])
