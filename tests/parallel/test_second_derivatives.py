"""Gradients of gradients through parallel layers: those of one device."""

from copy import deepcopy

import pytest
import torch
from parallel_models import Block, Mixture, TiedLM, sequence_plan, whole
from parallel_programs import PLAN
from parity import assert_gradients
from torch import nn
from torch.nn import functional as F

import shardwise
from shardwise import LocalTensor, Partial, Replicate, Shard, UnsupportedError
from shardwise.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    ReplicateParallel,
    RowwiseParallel,
    SequenceParallel,
    data_parallel,
    loss_parallel,
    parallel_cross_entropy,
    parallelize_module,
)

pytestmark = pytest.mark.slow


def penalized(model, x, power=2):
    """A loss and a penalty on the gradient of its input, as for a critic; backward of both."""
    loss = model(x).pow(2).mean()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    total = loss + 5 * grad.pow(power).sum()
    total.backward()
    return grad


def leaf(x):
    return x.detach().clone().requires_grad_()


class Tanh(nn.Module):
    """Three layers with a curvature between them."""

    def __init__(self, hidden=12):
        super().__init__()
        self.first, self.second = nn.Linear(6, hidden), nn.Linear(hidden, 6)
        self.norm, self.last = nn.LayerNorm(6), nn.Linear(6, 1)
        self.curve, self.between = nn.Tanh(), nn.Identity()

    def forward(self, x):
        x = self.between(self.second(self.curve(self.first(x))))
        return self.last(self.norm(torch.tanh(x)))


PLANS = {
    "colwise, rowwise": {"first": "colwise", "second": "rowwise"},
    "colwise": {"first": "colwise_rep"},
    "rowwise": {"second": "rowwise_rep"},
    "every layer": {
        "first": "colwise",
        "second": "rowwise",
        "norm": "replicate",
        "last": "replicate",
    },
    "distributed outputs": {
        "first": ColwiseParallel(use_local_output=False),
        "second": RowwiseParallel(use_local_output=False),
        "norm": ReplicateParallel(use_local_output=False),
        "last": "replicate",
    },
    "sequence": {
        "first": "colwise",
        "second": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "norm": SequenceParallel(),
        "last": "colwise_rep",
    },
    "local sequence": {
        "second": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=True),
        "last": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    },
    "input and output": {
        "": PrepareModuleInputOutput(
            input_layouts=Replicate(),
            desired_input_layouts=Shard(1),
            output_layouts=Shard(1),
            desired_output_layouts=Replicate(),
        ),
        "first": ColwiseParallel(input_layouts=Shard(1)),
        "second": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "norm": SequenceParallel(),
        "last": SequenceParallel(),
    },
    "pieces": {
        "curve": PrepareModuleInputOutput(
            input_layouts=Replicate(),
            desired_input_layouts=Shard(1),
            use_local_input=True,
            output_layouts=Shard(1),
            desired_output_layouts=Replicate(),
        ),
        "second": "rowwise_rep",
    },
    "local input": {
        "curve": PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
        ),
        "second": RowwiseParallel(input_layouts=Shard(1)),
    },
    "local output": {
        "first": "colwise",
        "curve": PrepareModuleOutput(output_layouts=Shard(-1), desired_output_layouts=Replicate()),
    },
    "terms of a sum": {
        "second": RowwiseParallel(input_layouts=Replicate(), output_layouts=Partial()),
        "between": PrepareModuleInput(
            input_layouts=Partial(), desired_input_layouts=Replicate(), use_local_output=True
        ),
    },
}


def expected_step(model, batches, power=2):
    """One device: the mean over ranks of the loss and the penalty that each has of its batch."""
    reference = deepcopy(model)
    total, grads = 0, []
    for batch in batches:
        x = leaf(batch)
        loss = reference(x).pow(2).mean()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        total = total + (loss + 5 * grad.pow(power).sum()) / len(batches)
        grads.append(grad.detach())
    total.backward()
    return reference, grads


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_penalty_of_a_plain_input(plan, num_ranks):
    model, batch = Tanh().double(), torch.randn(2, 6, 6).double()
    reference, (wanted,) = expected_step(model, [batch])
    with shardwise.simulate(num_ranks):
        mesh = shardwise.init_device_mesh("cpu", (num_ranks,))
        parallel = parallelize_module(model, mesh, plan)
        grad = penalized(parallel, leaf(batch))
        torch.testing.assert_close(whole(grad), wanted)
        assert_gradients(parallel, reference)


@pytest.mark.parametrize("names", [("dp", "tp"), ("tp", "dp")])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_penalty_of_each_ranks_own_batch(plan, names):
    """Over the data axis the ranks' losses and penalties differ; gradients are of their mean."""
    model, batch = Tanh().double(), torch.randn(4, 6, 6).double()
    batches = batch.chunk(2)
    reference, wanted = expected_step(model, batches)
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        parallel = parallelize_module(model, mesh, plan)
        if len(plan) < 4:
            data_parallel(parallel, mesh["dp"])
        row = [rank // 2 if names[0] == "dp" else rank % 2 for rank in range(4)]
        x = leaf(LocalTensor.per_rank(lambda rank: batches[row[rank]].clone()))
        grad = penalized(parallel, x)
        for rank in range(4):
            torch.testing.assert_close(grad.detach().on_rank(rank), wanted[row[rank]])
        assert_gradients(parallel, reference)


@pytest.mark.parametrize("placement", [Replicate(), Shard(1), Shard(2)], ids=str)
@pytest.mark.parametrize("name", ["every layer", "distributed outputs", "sequence"])
def test_penalty_of_a_distributed_input(name, placement):
    """A DTensor's gradient is global, and so is a penalty on it."""
    model, batch = Tanh().double(), torch.randn(4, 6, 6).double()
    reference, (wanted,) = expected_step(model, [batch])
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallel = parallelize_module(model, mesh, PLANS[name])
        x = shardwise.distribute_tensor(batch, mesh, [Shard(0), placement]).requires_grad_()
        loss = parallel(x).pow(2).mean()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + 5 * grad.pow(2).sum().full_tensor()).backward()
        torch.testing.assert_close(whole(grad), wanted)
        assert_gradients(parallel, reference)


def test_uneven_parts(mesh):
    model, batch = Tanh(hidden=6).double(), torch.randn(2, 6, 6).double()
    reference, (wanted,) = expected_step(model, [batch], power=3)
    parallel = parallelize_module(model, mesh, PLANS["colwise, rowwise"])
    grad = penalized(parallel, leaf(batch), power=3)
    torch.testing.assert_close(whole(grad), wanted)
    assert_gradients(parallel, reference)


@pytest.mark.parametrize("sequence", [False, True])
def test_a_transformer_block(mesh, sequence):
    plan = sequence_plan() if sequence else PLAN
    model, batch = Block().double(), torch.randn(2, 8, 8).double()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        reference, (wanted,) = expected_step(model, [batch])
        parallel = parallelize_module(model, mesh, plan)
        grad = penalized(parallel, leaf(batch))
    torch.testing.assert_close(whole(grad), wanted)
    assert_gradients(parallel, reference)


@pytest.mark.parametrize("num_experts", [8, 3])
def test_experts(mesh, num_experts):
    """3 experts leave a rank with none."""
    model, batch = Mixture(num_experts).double(), torch.randn(10, 8).double()
    reference, (wanted,) = expected_step(model, [batch])
    parallel = parallelize_module(model, mesh, {"experts": "experts", "router": "replicate"})
    grad = penalized(parallel, leaf(batch))
    torch.testing.assert_close(whole(grad), wanted)
    assert_gradients(parallel, reference)


def test_experts_beside_a_data_axis():
    model, batches = Mixture().double(), torch.randn(20, 8).double().chunk(2)
    reference, wanted = expected_step(model, batches)
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh, {"experts": "experts", "router": "replicate"})
        x = leaf(LocalTensor.per_rank(lambda rank: batches[rank // 2].clone()))
        grad = penalized(model, x)
        torch.testing.assert_close(grad.detach().on_rank(3), wanted[1])
        assert_gradients(model, reference)


def language_step(model, ids, target, loss_of):
    """A penalty on what the loss says about the embeddings, as in adversarial training."""
    found = []
    hook = model.embed.register_forward_hook(lambda _, __, out: found.append(out))
    loss = loss_of(model(ids), target)
    hook.remove()
    (grad,) = torch.autograd.grad(loss, found[0], create_graph=True)
    penalty = grad.pow(2).sum()
    return loss, penalty


@pytest.mark.parametrize("by_classes", [False, True])
@pytest.mark.parametrize("embed", ["rowwise", "colwise"])
def test_vocabularies(mesh, embed, by_classes):
    """Uneven parts of a vocabulary; tied where the table and the head are split alike."""
    model = TiedLM().double()
    if embed == "colwise":
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    ids, target = torch.randint(11, (2, 4, 5))
    reference = deepcopy(model)

    def cross_entropy(logits, target):
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    loss, penalty = language_step(reference, ids, target, cross_entropy)
    (loss + 5 * penalty).backward()
    plan = {
        "embed": "embedding_rowwise" if embed == "rowwise" else "embedding_colwise",
        "mlp.up": "colwise",
        "mlp.down": "rowwise",
        "head": ColwiseParallel(use_local_output=False) if by_classes else "colwise_rep",
    }
    parallelize_module(model, mesh, plan)
    if by_classes:
        with loss_parallel():
            loss, penalty = language_step(model, ids, target, cross_entropy)
        loss = loss.full_tensor()
    else:
        loss, penalty = language_step(model, ids, target, cross_entropy)
    (loss + 5 * penalty).backward()
    assert_gradients(model, reference)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("soft", [False, True])
def test_loss_by_classes(square, soft, weighted, smoothing, reduction):
    """Second and third derivatives, with uneven classes and an ignored token."""
    x = torch.randn(4, 5, 2).double()
    target = torch.randint(5, (4, 2))
    target[0, 1] = -100
    if soft:
        target = torch.rand(4, 5, 2).double().softmax(1)
    weight = torch.rand(5).double() if weighted else None

    def derivatives(loss_of, x, target):
        loss = loss_of(x, target, weight, reduction=reduction, label_smoothing=smoothing)
        (first,) = torch.autograd.grad(loss.pow(2).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(3).sum(), x, create_graph=True)
        (third,) = torch.autograd.grad(second.pow(3).sum(), x)
        return first, second, third

    expected = derivatives(F.cross_entropy, leaf(x), target)
    placements = [Shard(0), Shard(1)]
    logits = shardwise.distribute_tensor(x, square, placements).requires_grad_()
    lie = placements if soft else [Shard(0), Replicate()]
    found = derivatives(
        parallel_cross_entropy, logits, shardwise.distribute_tensor(target, square, lie)
    )
    for mine, one in zip(found, expected, strict=True):
        torch.testing.assert_close(whole(mine), one)


def test_penalty_on_parameters():
    """Gradients of DTensor parameters are global; a penalty on them is one number."""
    model, batch = Tanh().double(), torch.randn(4, 6, 6).double()
    reference = deepcopy(model)

    def penalty_of(model, loss):
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return sum(grad.pow(2).sum() for grad in grads)

    loss = reference(batch).pow(2).mean()
    (loss + 5 * penalty_of(reference, loss)).backward()
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh, PLANS["every layer"])
        x = LocalTensor.per_rank(lambda rank: batch.chunk(2)[rank // 2])
        loss = model(x).pow(2).mean()
        (loss + 5 * penalty_of(model, loss).full_tensor()).backward()
        assert_gradients(model, reference)


def test_data_parallel(mesh):
    """Plain parameters: each rank has its own batch, loss and penalty."""
    model, batches = Tanh().double(), torch.randn(8, 6, 6).double().chunk(4)
    reference, _ = expected_step(model, batches)
    data_parallel(model, mesh)
    penalized(model, leaf(LocalTensor.per_rank(lambda rank: batches[rank].clone())))
    assert_gradients(model, reference)


def test_third_derivatives(mesh):
    model, batch = Tanh().double(), torch.randn(2, 6, 6).double()

    def derivatives(model, x):
        found, last = [], model(x).pow(2).sum()
        for _ in range(3):
            (grad,) = torch.autograd.grad(last, x, create_graph=True)
            found.append(grad)
            last = grad.pow(2).sum()
        return found

    expected = derivatives(model, leaf(batch))
    parallel = parallelize_module(model, mesh, PLANS["colwise, rowwise"])
    for mine, one in zip(derivatives(parallel, leaf(batch)), expected, strict=True):
        torch.testing.assert_close(whole(mine), one)


def test_hessians(mesh):
    model, x = Tanh().double(), torch.randn(1, 2, 6).double()
    functional = torch.autograd.functional

    def loss_of(model):
        return lambda x: model(x).pow(2).sum()

    expected = functional.hessian(loss_of(model), x)
    direction = torch.randn_like(x)
    _, product = functional.hvp(loss_of(model), x, direction)
    parallelize_module(model, mesh, PLANS["colwise, rowwise"])
    torch.testing.assert_close(whole(functional.hessian(loss_of(model), x)), expected)
    _, found = functional.hvp(loss_of(model), x, direction)
    torch.testing.assert_close(whole(found), product)


TRANSFORMS = {
    "grad": lambda fn, model, x: torch.func.grad(fn)(x),
    "hessian": lambda fn, model, x: torch.func.hessian(fn)(x),
    "vectorized": lambda fn, model, x: torch.autograd.functional.hessian(fn, x, vectorize=True),
    "of parameters": lambda fn, model, x: torch.func.grad(
        lambda held: torch.func.functional_call(model, held, (x,)).pow(2).sum()
    )(dict(model.named_parameters())),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_of_torch_func_are_refused(mesh, transform):
    """They wrap tensors so that nobody sees what they hold."""
    model, x = Tanh().double(), torch.randn(1, 2, 6).double()
    parallelize_module(model, mesh, PLANS["colwise, rowwise"])
    with pytest.raises(UnsupportedError, match=r"torch\.func's transforms"):
        transform(lambda x: model(x).pow(2).sum(), model, x)
