"""Cross entropy by classes: one device's numbers, and only scalars per token are sent."""

import pytest
import torch
from parallel_models import TiedLM, whole
from torch.nn import functional as F

import shardwise
from shardwise import DTensor, Replicate, Shard, distribute_tensor
from shardwise.debug import CommDebugMode
from shardwise.parallel import (
    ColwiseParallel,
    loss_parallel,
    parallel_cross_entropy,
    parallelize_module,
)


def on_one_device(logits, target, **options):
    logits = logits.detach().clone().requires_grad_()
    loss = F.cross_entropy(logits, target, **options)
    loss.sum().backward()
    return loss.detach(), logits.grad


def by_classes(logits, target, mesh, placements, **options):
    sharded = distribute_tensor(logits, mesh, placements).requires_grad_()
    loss = parallel_cross_entropy(sharded, target, **options)
    loss.sum().backward()
    assert sharded.grad.placements == sharded.placements
    return whole(loss), whole(sharded.grad)


def assert_same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("num_classes", [12, 10, 3])
def test_classes_over_four_ranks(mesh, num_classes, weighted, smoothing, reduction):
    """12 classes divide by 4, 10 do not, 3 leave a rank without any."""
    logits, target = torch.randn(7, num_classes), torch.randint(num_classes, (7,))
    target[2] = -100
    options = {"reduction": reduction, "label_smoothing": smoothing}
    if weighted:
        options["weight"] = torch.rand(num_classes)
    expected = on_one_device(logits, target, **options)
    assert_same(by_classes(logits, target, mesh, [Shard(1)], **options), expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_probabilities_as_targets(mesh, reduction, weighted, smoothing):
    logits, target = torch.randn(5, 10), torch.rand(5, 10).softmax(1)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    if weighted:
        options["weight"] = torch.rand(10)
    expected = on_one_device(logits, target, **options)
    assert_same(by_classes(logits, target, mesh, [Shard(1)], **options), expected)


def test_classes_between_batch_and_positions(mesh):
    logits, target = torch.randn(3, 10, 4, 2), torch.randint(10, (3, 4, 2))
    expected = on_one_device(logits, target, ignore_index=4)
    assert_same(by_classes(logits, target, mesh, [Shard(1)], ignore_index=4), expected)


def test_one_token_without_a_batch(mesh):
    logits, target = torch.randn(10), torch.tensor(7)
    assert_same(by_classes(logits, target, mesh, [Shard(0)]), on_one_device(logits, target))


@pytest.mark.parametrize(
    "placements",
    [[Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(1), Shard(1)], [Replicate(), Shard(1)]],
)
def test_two_axes(square, placements):
    logits, target = torch.randn(5, 9), torch.randint(9, (5,))
    weight = torch.rand(9)
    batch = [Shard(0) if p == Shard(0) else Replicate() for p in placements]
    placed = distribute_tensor(target, square, batch)
    expected = on_one_device(logits, target, weight=weight)
    assert_same(by_classes(logits, placed, square, placements, weight=weight), expected)


def test_explicit_sizes(mesh):
    logits, target = torch.randn(5, 9), torch.randint(9, (5,))
    weight = torch.rand(9)
    expected = on_one_device(logits, target, weight=weight)
    placements = [Shard(1, sizes=(0, 6, 1, 2))]
    assert_same(by_classes(logits, target, mesh, placements, weight=weight), expected)


def test_a_sharded_weight(mesh):
    logits, target, weight = torch.randn(5, 9), torch.randint(9, (5,)), torch.rand(9)
    placed = distribute_tensor(weight, mesh, [Shard(0)])
    expected = on_one_device(logits, target, weight=weight)
    assert_same(by_classes(logits, target, mesh, [Shard(1)], weight=placed), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(mesh, dtype):
    logits, target = torch.randn(5, 9, dtype=dtype), torch.randint(9, (5,))
    expected = on_one_device(logits, target)
    assert_same(by_classes(logits, target, mesh, [Shard(1)]), expected)


def test_large_and_impossible_logits(mesh):
    logits, target = torch.randn(4, 8) * 1e4, torch.tensor([0, 3, 5, 7])
    logits[0, 3] = logits[1, 6] = -torch.inf
    expected = on_one_device(logits, target)
    assert_same(by_classes(logits, target, mesh, [Shard(1)]), expected)


@pytest.mark.parametrize(
    ("options", "num_scalars"),
    [({}, 3), ({"label_smoothing": 0.1}, 3), ({"weight": torch.ones(64)}, 4)],
)
def test_only_scalars_per_token_are_sent(mesh, options, num_scalars):
    num_tokens = 10
    logits = shardwise.randn(
        num_tokens, 64, device_mesh=mesh, placements=[Shard(1)], requires_grad=True
    )
    target = torch.randint(64, (num_tokens,))
    with loss_parallel(), CommDebugMode() as comm:
        loss = F.cross_entropy(logits, target, **options)
        forward = list(comm.events)
        loss.backward()
    assert [event.kind for event in forward] == ["all_reduce"] * 2
    assert sum(event.num_bytes for event in forward) == num_scalars * num_tokens * 4
    assert comm.events == forward


def test_the_context_takes_modules_and_plain_tensors_too(mesh):
    logits, target = torch.randn(4, 8), torch.randint(8, (4,))
    sharded = distribute_tensor(logits, mesh, [Shard(1)])
    loss_of = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    with loss_parallel():
        found = loss_of(sharded, target)
        torch.testing.assert_close(F.cross_entropy(logits, target).shape, torch.Size([]))
    torch.testing.assert_close(whole(found), loss_of(logits, target))


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=repr)
def test_the_context_refuses_logits_whose_classes_are_whole(mesh, placement):
    logits = distribute_tensor(torch.randn(4, 8), mesh, [placement])
    target = distribute_tensor(torch.arange(4), mesh, [Replicate()])
    with pytest.raises(ValueError, match="loss_parallel"), loss_parallel():
        F.cross_entropy(logits, target)


def test_a_head_that_keeps_its_logits_sharded(mesh):
    model = TiedLM()
    ids, target = torch.randint(11, (2, 5)), torch.randint(11, (2, 5))
    F.cross_entropy(model(ids).flatten(0, 1), target.flatten()).backward()
    expected = model.embed.weight.grad
    model.zero_grad()
    plan = {
        "embed": "rowwise",
        "mlp.up": "colwise",
        "mlp.down": "rowwise",
        "head": ColwiseParallel(use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    logits = model(ids)
    assert isinstance(logits, DTensor)
    with loss_parallel():
        F.cross_entropy(logits.flatten(0, 1), target.flatten()).backward()
    torch.testing.assert_close(whole(model.embed.weight.grad), expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"target": torch.tensor([1, 8, 0])}, IndexError, "from 0 to 8.* 8 classes"),
        ({"target": torch.tensor([1, 8])}, ValueError, r"need a target of shape \(3,\)"),
        ({"weight": torch.ones(7)}, ValueError, "one number per class, 8"),
        ({"reduction": "median"}, ValueError, "none, mean, sum"),
        ({"label_smoothing": 1.5}, ValueError, "between 0 and 1, found 1.5"),
        ({"logits": torch.ones(3, 8)}, TypeError, "takes a DTensor"),
        (
            {"weight": torch.ones(8, requires_grad=True)},
            shardwise.UnsupportedError,
            "no gradient for its weight",
        ),
    ],
)
def test_mistakes(mesh, change, error, message):
    given = {
        "logits": distribute_tensor(torch.ones(3, 8), mesh, [Shard(1)]),
        "target": torch.tensor([0, 1, 2]),
    } | change
    with pytest.raises(error, match=message):
        parallel_cross_entropy(**given)


def test_targets_of_one_byte(mesh):
    logits, target = torch.randn(6, 10), torch.tensor([0, 9, 3, 8, 2, 5], dtype=torch.uint8)
    expected = on_one_device(logits, target)
    assert_same(by_classes(logits, target, mesh, [Shard(1)]), expected)


def test_weights_of_less_precision_than_the_logits(mesh):
    """In a second derivative too; torch takes only weights of the logits' dtype."""
    logits, target = torch.randn(3, 8, dtype=torch.float64), torch.tensor([1, 7, 4])
    weight = torch.rand(8)

    def penalty(loss_of, logits, weight):
        (grad,) = torch.autograd.grad(loss_of(logits, target, weight), logits, create_graph=True)
        grad.square().sum().backward()
        return whole(logits.grad)

    sharded = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
    expected = penalty(F.cross_entropy, logits.requires_grad_(), weight.double())
    torch.testing.assert_close(penalty(parallel_cross_entropy, sharded, weight), expected)


@pytest.mark.parametrize("size", [4, 2], ids=["whole", "shard"])
def test_a_plain_target_for_a_sharded_batch(square, size):
    logits = distribute_tensor(torch.ones(4, 8), square, [Shard(0), Shard(1)])
    target = torch.zeros(size, dtype=torch.long)
    with pytest.raises(shardwise.MixedTensorsError, match="batch is sharded") as error:
        parallel_cross_entropy(logits, target)
    assert "DTensor.from_local(target, logits.device_mesh, [Shard(0), Replicate()])" in str(
        error.value
    )
    if size == 2:
        target = DTensor.from_local(target, logits.device_mesh, [Shard(0), Replicate()])
        torch.testing.assert_close(
            whole(parallel_cross_entropy(logits, target)), torch.tensor(8.0).log()
        )
