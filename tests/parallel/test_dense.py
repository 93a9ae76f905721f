"""Transformers on meshes that mix all axes train as on one device."""

import copy
import math

import pytest
import torch

import shardwise
from shardwise.debug import CommDebugMode

pytest.importorskip("transformers")
dense = pytest.importorskip("dense_programs")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("axes", dense.MESHES.values(), ids=dense.MESHES)
@pytest.mark.parametrize("name", dense.MODELS)
def test_trains_as_one_device(name, axes):
    with shardwise.simulate(math.prod(axes.values())):
        found = dense.on_mesh(name, axes)
    assert_same(found, dense.one_device(name))


@pytest.mark.processes
def test_in_processes(processes):
    for found in processes(dense.all_in_processes, timeout_s=240):
        for (name, mesh), parameters in found.items():
            assert mesh in dense.MESHES
            assert_same(parameters, dense.one_device(name))


def frozen(model):
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)


def recomputed(model):
    # Older versions of transformers have the second name only.
    old = model.gradient_checkpointing_enable
    getattr(model, "activation_checkpointing_enable", old)({"use_reentrant": False})


def in_halves(model, given, labels):
    """Two passes, of which the first keeps each rank's own gradients."""
    for last, half in enumerate(zip(given.chunk(2), labels.chunk(2), strict=True)):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(bool(last))
        (dense.loss_of(model, *half) / 2).backward()


def assert_alike(axes, change=lambda model: None, backward=dense.backward):
    """A Llama that was changed before it was sharded, or is trained in another way."""
    model, plan, *batches = dense.made("Llama")
    change(model)
    alone = copy.deepcopy(model)
    batches = [torch.cat([each, each.flip(0)], 1) for each in batches]
    expected = dense.steps(alone, zip(*batches, strict=True))
    with shardwise.simulate(math.prod(axes.values())):
        model = dense.sharded("Llama", model, plan, axes)
        found = dense.steps(model, dense.own_batches(axes, *batches), backward)
    assert_same(found, expected)


@pytest.mark.parametrize("mesh", ["fsdp x cp x tp", "fsdp x ep x sp"])
@pytest.mark.parametrize("change", [frozen, recomputed], ids=lambda change: change.__name__)
def test_changed_models(mesh, change):
    assert_alike(dense.MESHES[mesh], change)


@pytest.mark.parametrize("mesh", ["fsdp x cp x tp", "dp x fsdp x tp", "fsdp x ep x sp"])
def test_accumulated_gradients(mesh):
    assert_alike(dense.MESHES[mesh], backward=in_halves)


@pytest.mark.parametrize(
    "axes", [{"fsdp": 1, "cp": 1, "sp": 1}, {"dp": 2, "tp": 1}, {"ep": 1, "tp": 2}], ids=str
)
def test_an_axis_of_one_rank_sends_nothing(axes):
    name = "Mixtral"
    model, plan, *batches = dense.made(name)
    with shardwise.simulate(math.prod(axes.values())), CommDebugMode() as comm:
        model = dense.sharded(name, model, plan, axes)
        dense.steps(model, dense.own_batches(axes, *batches)[:2])
    assert {event.axis for event in comm.events} == {a for a, size in axes.items() if size > 1}


@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_compiled(name):
    """Its outputs hold a cache of keys and values, which get no gradient."""
    torch._dynamo.reset()

    def backward(model, given, labels):
        dense.loss_of(torch.compile(model, backend="aot_eager"), given, labels).backward()

    axes = dense.MESHES["fsdp x tp"]
    model, plan, *batches = dense.made(name)
    with shardwise.simulate(4):
        model = dense.sharded(name, model, plan, axes)
        found = dense.steps(model, dense.own_batches(axes, *batches), backward)
    assert_same(found, dense.one_device(name))
