"""Collectives run on while branches that do not need them are computed."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from parallel_models import MLP
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise
from shardwise import DTensor, Replicate, Shard
from shardwise.comm.collectives import Pending
from shardwise.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)


@pytest.fixture
def alone():
    """A real world of this one process, with a mesh of two axes."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield shardwise.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


@pytest.fixture
def first_of_two():
    """A mesh of two ranks, of which this process is the first; nobody answers."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield shardwise.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


EVENTS = {
    "all_reduce": "start",
    "all_gather_into_tensor": "start",
    "reduce_scatter_tensor": "start",
    "wait_tensor": "wait",
    "addmm": "product",
    "mm": "product",
}


class Order(TorchDispatchMode):
    """The collectives, waits and matrix products, in the order in which they run."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types or Pending in types:
            return NotImplemented
        name = EVENTS.get(func._overloadpacket.__name__)
        # Without data is how the shape of what comes out is found, once.
        if name is not None and not args[0].is_meta:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


class Branches(nn.Module):
    """Two branches that read one tensor and meet in a sum, as parallel attention and MLP do."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.left, self.right = MLP(), MLP()

    def forward(self, x):
        x = self.norm(x)
        left, right = self.left(x), self.right(x)
        return left + right


PLAN = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}


def run(model, x):
    """The order of events forward and backward, and the gradients."""
    with Order() as forward:
        loss = model(x).pow(2).sum()
    with Order() as backward:
        loss.backward()
    return forward.seen, backward.seen


PRODUCTS = ["product"] * 2


def test_plain_outputs_are_awaited_where_branches_meet(first_of_two):
    model = parallelize_module(Branches(), first_of_two, PLAN, src_data_rank=None)
    forward, backward = run(model, torch.randn(5, 8))
    assert forward == [*PRODUCTS, "start", *PRODUCTS, "start", "wait", "wait"]
    # Both gradients of the norm's output are on their way before the first is waited for; the
    # third collective is the check, in the first pass, that the norm's gradients are alike.
    waits = [at for at, event in enumerate(backward) if event == "wait"]
    starts = [at for at, event in enumerate(backward) if event == "start"]
    assert waits[0] > starts[1]
    assert len(starts) == len(waits) == 3


def test_distributed_outputs_are_awaited_where_branches_meet(first_of_two):
    plan = {
        "*.up": ColwiseParallel(use_local_output=False),
        "*.down": RowwiseParallel(use_local_output=False),
    }
    model = parallelize_module(Branches(), first_of_two, plan, src_data_rank=None)
    with Order() as order:
        model(torch.randn(5, 8))
    assert order.seen == [*PRODUCTS, "start", *PRODUCTS, "start", "wait", "wait"]


def test_inputs_are_gathered_together(first_of_two):
    prepare = PrepareModuleInput(
        input_layouts=(Shard(0), Shard(0)), desired_input_layouts=(Replicate(), Replicate())
    )
    module = parallelize_module(nn.Bilinear(2, 2, 1), first_of_two, prepare, src_data_rank=None)
    module.forward = torch.mul
    with Order() as order:
        module(torch.ones(2, 2), torch.ones(2, 2))
    assert order.seen == ["start", "start", "wait", "wait"]


@pytest.fixture
def output(alone):
    """What a rowwise layer hands out, and its values."""
    layer = nn.Linear(4, 4, bias=False)
    x = torch.randn(3, 4)
    expected = layer(x)
    parallelize_module(layer, alone["tp"], "rowwise")
    out = layer(x)
    assert type(out) is Pending
    assert tuple(out.shape) == (3, 4)
    return out, expected


READS = {
    "op": lambda y: y * 1,
    "in place": lambda y: y.detach().mul_(1),
    "list": lambda y: torch.stack([y, y])[1],
    "kwargs": lambda y: torch.add(input=y, other=0),
    "numpy": lambda y: torch.from_numpy(y.detach().numpy()),
    "pickle": lambda y: pickle.loads(pickle.dumps(y.detach())),
    "deepcopy": lambda y: copy.deepcopy(y.detach()),
    "tolist": lambda y: torch.tensor(y.tolist()),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_an_output_on_its_way_reads_as_a_tensor(output, read):
    found, expected = output
    for _ in range(2):
        result = read(found)
        assert type(result) is torch.Tensor
        torch.testing.assert_close(result.detach(), expected.detach())


def test_an_output_without_gradients_reads_as_a_tensor(alone):
    layer = parallelize_module(nn.Linear(4, 4), alone["tp"], "rowwise")
    with torch.no_grad():
        out = layer(torch.ones(1, 4))
        assert type(out) is Pending
        assert out.numpy().shape == (1, 4)
        assert torch.equal(pickle.loads(pickle.dumps(out)), out)
        assert torch.equal(copy.deepcopy(out), out)
        twice = torch.compile(lambda y: y * 2, backend="aot_eager", fullgraph=True)
        assert torch.equal(twice(out), out + out)
    torch._dynamo.reset()


def test_the_gradient_of_a_leaf_is_there(alone):
    layer = parallelize_module(nn.Linear(4, 4), alone["tp"], "colwise")
    x = torch.randn(3, 4, requires_grad=True)
    layer(x).sum().backward()
    assert type(x.grad) is torch.Tensor


def test_a_gradient_on_its_way_to_compiled_code(alone):
    layer = parallelize_module(nn.Linear(4, 4), alone["tp"], "colwise")
    x = torch.randn(3, 4, requires_grad=True)
    before = torch.compile(torch.sin, backend="aot_eager", fullgraph=True)(x)
    kinds = []
    before.register_hook(lambda grad: kinds.append(type(grad)))
    layer(before).sum().backward()
    assert kinds == [Pending]
    weight = layer.weight.full_tensor().detach()
    torch.testing.assert_close(x.grad, weight.sum(0) * x.detach().cos())
    torch._dynamo.reset()
