"""fully_shard in processes: the training of one device, and errors on all ranks."""

import functools

import pytest
import torch
import torch.distributed as dist
from fully_sharded import (
    IDS,
    ODD_BATCHES,
    Layer,
    Model,
    Odd,
    all_trained_odd,
    loss_of,
    mesh_of,
    own,
    train,
    train_odd,
    trained,
)
from launcher import Failure
from parity import parameters, whole
from torch import nn
from torch.testing import assert_close

import shardwise
from shardwise import DTensor
from shardwise.debug import CommDebugMode
from shardwise.errors import LayoutError
from shardwise.parallel import fully_shard
from shardwise.shard import ChunkShardingSpec, shard_parameter

pytestmark = pytest.mark.processes

NAMES = (
    "4",
    "4, never freed",
    "4, kept by 2",
    "replicas",
    "tensor parallel",
    "before the plan",
    "a part of the mesh",
)


def all_trained():
    return {name: trained(name) for name in NAMES}


def test_trains_as_one_device(processes):
    expected = train(Model(), IDS)
    for found in processes(all_trained, timeout_s=120):
        for mesh in NAMES:
            said = functools.partial("{}: {}".format, mesh)
            assert_close(found[mesh], parameters(expected), rtol=0, atol=2e-5, msg=said)


def test_chunks_of_lengths_of_their_own_train_alike(processes):
    expected = train_odd(Odd().double(), ODD_BATCHES)
    for found in processes(all_trained_odd, timeout_s=120):
        for way, (held, uneven) in found.items():
            assert any(uneven), way
            said = functools.partial("{}: {}".format, way)
            assert_close(held, parameters(expected), rtol=0, atol=1e-11, msg=said)


def overlapping():
    """Started collectives that are awaited later, and bytes that stay allocated."""
    layers = torch.nn.Sequential(Layer(), Layer(), Layer())
    mesh = mesh_of(dp=4)
    for layer in layers:
        fully_shard(layer, mesh, reshard_after_forward=True)
    fully_shard(layers, mesh, reshard_after_forward=True)
    states = []
    group = layers[1].__dict__["_shard_group"]
    layers[0].up.register_forward_pre_hook(lambda *_: states.append(group.parameters.state))
    for _ in range(2):
        layers(torch.ones(2, 8)).sum().backward()
    whole = [b.whole.untyped_storage().nbytes() for b in group.parameters.buffers]
    return states, whole


def test_the_next_group_is_gathered_meanwhile_and_freed(processes):
    for states, sizes in processes(overlapping):
        assert states == ["sharded", "started"]
        assert sizes == [0]


def gradients():
    model = fully_shard(Model(), mesh_of(dp=4))
    with CommDebugMode() as comm:
        loss_of(model, own(IDS[0], 4)).backward()
    found = {name: whole(p.grad) for name, p in model.named_parameters() if isinstance(p, DTensor)}
    return found, sorted({event.kind for event in comm.events})


def test_gradients_are_those_of_the_simulated_world_bit_for_bit(processes):
    with shardwise.simulate(4):
        expected, kinds = gradients()
    for found, sent in processes(gradients):
        assert sent == kinds
        assert all(torch.equal(found[name], grad) for name, grad in expected.items())


def long_chunks():
    """Gathered three times, twice into the same memory; chunks are long enough for broadcasts."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        for axes, kept in (({"dp": 4}, True), ({"dp": 4}, 2), ({"rep": 2, "shard": 2}, True)):
            torch.manual_seed(0)
            layer = torch.nn.Linear(400, 400, dtype=dtype)
            fully_shard(layer, mesh_of(**axes), reshard_after_forward=kept)
            batch = torch.randn(4, 400, dtype=dtype)
            for _ in range(2):
                with CommDebugMode() as comm:
                    layer(own(batch, 4)).abs().sum().backward()
            key = str((dtype, axes, kept))
            found[key] = whole(layer.weight.grad), comm.get_total_counts()
    return found


def test_long_chunks_are_gathered_in_place(processes):
    with shardwise.simulate(4):
        expected = long_chunks()
    for found in processes(long_chunks):
        for key, (grad, count) in expected.items():
            assert torch.equal(found[key][0], grad), key
            assert found[key][1] == count, key


def with_other_options():
    rank = torch.distributed.get_rank()
    with_error = None
    try:
        fully_shard(Layer(), mesh_of(dp=4), prefetch=rank)
    except LayoutError as error:
        with_error = str(error)
    layer = fully_shard(Layer(), mesh_of(dp=4))
    fully_shard(layer, mesh_of(dp=4))
    return with_error


def test_mistakes_are_errors_on_all_ranks(processes):
    found = processes.run(with_other_options)
    assert all(isinstance(each, Failure) for each in found)
    assert {each.kind for each in found} == {LayoutError}
    assert all("fully sharded already" in each.message for each in found)


class Waves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tall = torch.nn.Parameter(torch.randn(7, 5, dtype=torch.complex64))
        self.flat = torch.nn.Parameter(torch.randn(9, dtype=torch.complex64))

    def forward(self, x):
        return (self.tall * x).abs().sum() * self.flat.sum().abs()


def complex_gradients():
    torch.manual_seed(0)
    model, (mesh, xs) = Waves(), (mesh_of(dp=4), torch.randn(4, 5))
    loss = sum(model(x) for x in xs) / 4
    expected = torch.autograd.grad(loss, list(model.parameters()))
    fully_shard(model, mesh)
    model(xs[torch.distributed.get_rank()]).backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), grad)


def test_complex_gradients(processes):
    processes(complex_gradients)


def other_ranks():
    """A parameter on a mesh of ranks that the given mesh does not have."""
    mesh = mesh_of(a=2, b=2)
    layer = torch.nn.Linear(4, 4)
    half = shardwise.init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    layer = shardwise.distribute_module(layer, half)
    fully_shard(layer, mesh["b"])


def test_a_mesh_of_other_ranks(processes):
    found = processes.run(other_ranks)
    assert all(isinstance(each, Failure) for each in found)
    assert {each.kind for each in found} == {LayoutError}


def loaded_into_another_order():
    model = fully_shard(torch.nn.Linear(8, 12, bias=False), mesh_of(dp=4))
    other = torch.nn.Linear(8, 12, bias=False)
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/cpu" for rank in (3, 1, 2, 0)])
    shard_parameter(other, "weight", spec)
    other.load_state_dict(model.state_dict())
    return torch.equal(whole(other.weight), whole(model.weight))


def test_its_state_loads_into_a_weight_with_ranks_in_another_order(processes):
    assert processes(loaded_into_another_order) == [True] * 4


def stages():
    """Each stage of a pipeline shards layers of its own over its data axis."""
    mesh = mesh_of(pp=2, dp=2)
    torch.manual_seed(0)
    first, second, third = (torch.nn.Linear(4, n) for n in (4, 3, 2))
    mine = ([first], [second, third])[mesh.get_local_rank("pp")]
    x = torch.randn(2, 4)
    for layer in mine:
        expected = torch.autograd.grad(layer(x).sum(), list(layer.parameters()))
        fully_shard(layer, mesh["dp"])
        layer(x.chunk(2)[mesh.get_local_rank("dp")]).sum().backward()
        for parameter, grad in zip(layer.parameters(), expected, strict=True):
            torch.testing.assert_close(whole(parameter.grad), grad / 2)
    return [tuple(layer.weight.shape) for layer in mine]


def test_stages_of_a_pipeline_shard_layers_of_their_own(processes):
    one, other = [(4, 4)], [(3, 4), (2, 4)]
    assert processes(stages) == [one, one, other, other]


class TwoDtypes(nn.Module):
    """Parameters in two buffers, of which a call may use one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.narrow, self.wide = nn.Linear(4, 4), nn.Linear(4, 4).double()

    def forward(self, x, both):
        found = self.narrow(x).double()
        return (self.wide(found) if both else found).sum()


def one_dtype_on_one_rank():
    model = fully_shard(TwoDtypes(), mesh_of(dp=2))
    rank = dist.get_rank()
    model(torch.ones(2, 4) + rank, both=rank == 1).backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def test_a_rank_that_uses_parameters_of_one_dtype(two_processes):
    alone = TwoDtypes()
    losses = [alone(torch.ones(2, 4) + rank, both=rank == 1) for rank in range(2)]
    (sum(losses) / 2).backward()
    for found in two_processes(one_dtype_on_one_rank):
        for name, parameter in alone.named_parameters():
            assert_close(found[name], parameter.grad)


def test_no_rank_uses_parameters_of_one_dtype():
    with shardwise.simulate(2):
        model = fully_shard(TwoDtypes(), mesh_of(dp=2))
        model(torch.ones(2, 4), both=False).backward()
        assert {n for n, p in model.named_parameters() if p.grad is not None} == {
            "narrow.weight",
            "narrow.bias",
        }
