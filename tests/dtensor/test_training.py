"""Models trained sharded take the steps that one device takes."""

import copy

import pytest
import torch
from parity import place, shard_by, train
from torch import nn
from torch.nn import functional as F

import shardwise
from shardwise import Replicate, Shard

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def compare(model, loss_of, batches, mesh, plan, batch_placements=None):
    sharded = shardwise.distribute_module(copy.deepcopy(model), mesh, shard_by(plan))
    expected = train(model, loss_of, batches)
    found = train(sharded, loss_of, place(batches, mesh, batch_placements))
    torch.testing.assert_close(found, expected)
    for name, parameter in sharded.named_parameters():
        asked = tuple(plan.get(name, [R] * mesh.ndim))
        assert parameter.placements == asked
        for of_grad, of_parameter in zip(parameter.grad.placements, asked, strict=True):
            assert of_grad == of_parameter or (of_parameter == R and of_grad.is_partial()), name


# -- two linear layers -----------------------------------------------------------------------


def mlp():
    """Ten hidden units: uneven on four ranks, on three and on two by two."""
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3)).double()


def squared_error(model, x, y):
    return ((model(x) - y) ** 2).mean()


def mlp_batches(size):
    return [
        (torch.randn(size, 6, dtype=torch.float64), torch.randn(size, 3, dtype=torch.float64))
        for _ in range(5)
    ]


COLUMN_ROW = {"0.weight": [S0], "0.bias": [S0], "2.weight": [S1]}
MLP_PLANS = {
    "replicated": {},
    "column then row": COLUMN_ROW,
    "row then column": {"0.weight": [S1], "2.weight": [S0], "2.bias": [S0]},
    "all by rows": {name: [S0] for name in ("0.weight", "0.bias", "2.weight", "2.bias")},
    "explicit sizes": {
        "0.weight": [Shard(0, (7, 0, 3, 0))],
        "0.bias": [Shard(0, (0, 10, 0, 0))],
        "2.weight": [Shard(1, (1, 2, 3, 4))],
    },
}


@pytest.mark.parametrize("batch", [R, S0], ids=["whole batch", "batch-sharded"])
@pytest.mark.parametrize("plan", MLP_PLANS.values(), ids=MLP_PLANS)
def test_mlp_on_one_axis(mesh, plan, batch):
    compare(mlp(), squared_error, mlp_batches(7), mesh, plan, [batch])


@pytest.mark.parametrize(
    "plan",
    [
        {"0.weight": [R, S0], "0.bias": [R, S0], "2.weight": [R, S1]},
        {"0.weight": [S0, S0], "0.bias": [S0, S0], "2.weight": [S0, S1]},
        {"0.weight": [S1, S0], "0.bias": [R, S0], "2.weight": [S0, S1], "2.bias": [S0, R]},
    ],
    ids=["data and tensor", "data sharded too", "grid"],
)
def test_mlp_on_two_axes(square, plan):
    """Axis 0 splits the batch, axis 1 the layers."""
    compare(mlp(), squared_error, mlp_batches(5), square, plan, [S0, R])


def test_mlp_on_three_ranks():
    with shardwise.simulate(3):
        mesh = shardwise.init_device_mesh("cpu", (3,))
        compare(mlp(), squared_error, mlp_batches(4), mesh, COLUMN_ROW, [S0])


def test_a_batch_smaller_than_the_mesh(mesh):
    """Two ranks have no example at all."""
    compare(mlp(), squared_error, mlp_batches(2), mesh, COLUMN_ROW, [S0])


# -- a table, a linear layer and cross entropy -----------------------------------------------


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 5)
        self.double()

    def forward(self, ids):
        return self.head(self.table(ids).mean(1))


def class_loss(model, ids, target):
    return F.cross_entropy(model(ids), target)


def class_batches(size):
    return [(torch.randint(0, 11, (size, 3)), torch.randint(0, 5, (size,))) for _ in range(5)]


CLASSIFIER_PLANS = {
    "row-wise": {"table.weight": [S0]},
    "row-wise, uneven": {"table.weight": [Shard(0, (0, 9, 1, 1))]},
    "on one rank": {"table.weight": [Shard(0, (11, 0, 0, 0))]},
    "column-wise": {"table.weight": [S1]},
    "column-wise into row-parallel": {"table.weight": [S1], "head.weight": [S1]},
    "row-wise into column-parallel": {
        "table.weight": [S0],
        "head.weight": [S0],
        "head.bias": [S0],
    },
    "replicated": {},
}


@pytest.mark.parametrize("batch", [R, S0], ids=["whole batch", "batch-sharded"])
@pytest.mark.parametrize("plan", CLASSIFIER_PLANS.values(), ids=CLASSIFIER_PLANS)
def test_classifier_on_one_axis(mesh, plan, batch):
    compare(Classifier(), class_loss, class_batches(6), mesh, plan, [batch])


@pytest.mark.parametrize(
    "plan",
    [{"table.weight": [R, S0]}, {"table.weight": [S0, S1]}, {"table.weight": [S0, S0]}],
    ids=["row-wise on one axis", "rows by columns", "rows on both"],
)
def test_classifier_on_two_axes(square, plan):
    compare(Classifier(), class_loss, class_batches(7), square, plan, [S0, R])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("placement", [R, S0, S1], ids=repr)
def test_cross_entropy_ignores_what_it_is_told_to(mesh, placement, reduction):
    logits = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 4, -100, 2, 1, -100, 3])
    expected = F.cross_entropy(logits, target, reduction=reduction)
    expected.sum().backward()
    placed = shardwise.distribute_tensor(logits.detach(), mesh, [placement]).requires_grad_()
    loss = F.cross_entropy(
        placed, shardwise.distribute_tensor(target, mesh, [R]), reduction=reduction
    )
    loss.sum().backward()
    torch.testing.assert_close(loss.full_tensor().agreed(), expected)
    torch.testing.assert_close(placed.grad.full_tensor().agreed(), logits.grad)


EMPTY_MEANS = [
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy_with_logits,
    F.kl_div,
]


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("loss", EMPTY_MEANS, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_the_mean_of_nothing_and_its_gradient(mesh, loss, shape):
    placed = shardwise.zeros(shape, device_mesh=mesh, placements=[S0]).requires_grad_()
    mean = loss(placed, torch.zeros_like(placed).detach())
    mean.backward()
    assert mean.full_tensor().agreed().isnan()
    assert placed.grad.shape == shape


@pytest.mark.parametrize("loss", [F.nll_loss, F.cross_entropy], ids=lambda loss: loss.__name__)
def test_targets_and_weights_that_one_device_refuses(mesh, loss):
    def place(x, placement=S0):
        return shardwise.distribute_tensor(x, mesh, [placement])

    for num_classes, wrong in ((3, 3), (3, -1), (0, 0)):
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            loss(place(torch.zeros(5, num_classes)), place(torch.full((5,), wrong)))
    nothing = place(torch.zeros(5, 0)).requires_grad_()
    ignored = loss(nothing, place(torch.full((5,), -100)), reduction="sum")
    ignored.backward()
    assert (ignored.full_tensor().agreed(), nothing.grad.shape) == (0, (5, 0))
    weight = place(torch.rand(3), R).requires_grad_()
    target = place(torch.zeros(5, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'weight'"):
        loss(place(torch.randn(5, 3)), target, weight=weight)
    with torch.no_grad():
        loss(place(torch.randn(5, 3)), target, weight=weight)
