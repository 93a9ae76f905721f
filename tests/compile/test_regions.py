"""What may stand inside a compiled region, next to ops: doors, placements, modules, optimizers."""

import contextlib
import copy

import pytest
import torch
from by_hand import value
from compiled_programs import made_inside
from compiling import compiled
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import DTensor, LocalTensor, Partial, Replicate, Shard, distribute_tensor, local_map
from shardwise.core.encode import decode_placements, encode_placements
from shardwise.debug import CommDebugMode
from shardwise.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

pytestmark = pytest.mark.slow

R, S0, S1 = Replicate(), Shard(0), Shard(1)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(10, 24), nn.Linear(24, 14)

    def forward(self, x):
        return self.second(self.first(x).relu())


def gradients(module):
    return [value(p.grad) for p in module.parameters()]


# -- doors -----------------------------------------------------------------------------------


def test_local_tensors_enter_and_leave(pair):
    def doubled(x):
        whole = DTensor.from_local(x, pair, [Shard(0)])
        return (whole.redistribute(placements=[Shard(1)]) * 2).to_local()

    fast, _ = compiled(doubled)
    parts = torch.randn(2, 3, 4)

    def run(fn):
        x = LocalTensor.per_rank(lambda rank: parts[rank].clone()).requires_grad_()
        y = fn(x)
        y.square().sum().backward()
        return y.detach(), x.grad

    for found, expected in zip(run(fast), run(doubled), strict=True):
        for rank in range(2):
            assert_close(found.on_rank(rank), expected.on_rank(rank))


def test_a_plain_tensor_that_all_ranks_hold(pair):
    def scaled(x, weight):
        return (DTensor.from_local(x, pair, [Replicate()]) @ weight).full_tensor()

    fast, _ = compiled(scaled)
    x = torch.randn(6, 10, requires_grad=True)
    weight = distribute_tensor(torch.randn(10, 14), pair, [S1])
    fast(x, weight).sum().backward()
    assert_close(x.grad, value(weight).sum(1).expand(6, 10))


def test_placements_are_read_and_compared(pair):
    def chosen(x):
        y = x * 2
        if y.placements == (Shard(0),) and x.placements[0].is_shard(0):
            return y.redistribute(placements=[Replicate()])
        return y

    fast, _ = compiled(chosen)
    x = torch.randn(6, 10)
    for placement in (S0, S1):
        laid = distribute_tensor(x, pair, [placement])
        assert fast(laid).placements == chosen(laid).placements
        assert_close(value(fast(laid)), x * 2)


def test_what_cannot_be_compiled_says_so(pair):
    with pytest.raises(Exception, match="outside torch"):
        compiled(lambda x: DTensor.from_local(x, pair, [R], run_check=True))[0](torch.randn(4))
    uneven = LocalTensor.per_rank(lambda rank: torch.randn(2 + rank))
    with pytest.raises(Exception, match="the ranks differ: rank 0 has"):  # no `shape`
        compiled(lambda x: DTensor.from_local(x, pair, [S0]))[0](uneven)


def test_data_is_not_assigned_inside(pair):
    def assign(x, y):
        x.data = y
        return x * 2

    x, y = (distribute_tensor(torch.randn(4, 2), pair, [S0]) for _ in range(2))
    with pytest.raises(Exception, match=r"Write the values, x\.data\.copy_\(y\)"):
        compiled(assign)[0](x, y)
    assert torch.equal(torch.compile(assign, backend="aot_eager")(x, y), y * 2)


@pytest.mark.parametrize("assigned", [True, False], ids=["assigned", "called"])
def test_a_leaf_made_in_between(pair, assigned):
    """The graph breaks there, as for plain tensors, and the gradient lies like the leaf."""

    def through_a_leaf(x):
        leaf = x * 2
        if assigned:
            leaf.requires_grad = True
        else:
            leaf.requires_grad_()
        return leaf, leaf * x

    x = distribute_tensor(torch.arange(6.0), pair, [S0])
    leaf, out = torch.compile(through_a_leaf, backend="aot_eager")(x)
    out.sum().backward()
    assert leaf.grad.placements == (S0,)
    assert torch.equal(value(leaf.grad), torch.arange(6.0))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_tensors_made_inside(pair, backend):
    eager, compiled = made_inside(backend)
    assert torch.equal(eager.pop(), compiled.pop())
    for (dtype, placements, whole), found in zip(eager, compiled, strict=True):
        assert found[:2] == (dtype, placements)
        assert torch.equal(found[2].agreed(), whole.agreed())


def test_leaves_are_made_outside(pair):
    """As for plain tensors: the graph breaks there."""

    def made():
        leaf = shardwise.full((6,), 2.0, device_mesh=pair, requires_grad=True)
        return leaf, leaf * 3

    leaf, out = torch.compile(made, backend="aot_eager")()
    out.sum().backward()
    assert torch.equal(value(leaf.grad), torch.full((6,), 3.0))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="without fullgraph"):
        compiled(made)[0]()
    with pytest.raises(Exception, match="outside torch"):
        compiled(lambda x: distribute_tensor(x, pair, [S0]))[0](torch.ones(4).requires_grad_())


def test_placements_as_numbers():
    placements = [Shard(1, sizes=(3, 0)), R, Partial("max"), Shard(2)]
    assert decode_placements(encode_placements(placements)) == placements
    assert decode_placements(encode_placements(None)) is None


def test_functions_of_local_tensors(pair):
    product = local_map(torch.mm, [S0], ([S0], [R]), device_mesh=pair)
    fast, counter = compiled(lambda a, b: product(a, b).relu())
    for size in (8, 12, 20):
        a = distribute_tensor(torch.randn(size, 7), pair, [S0]).requires_grad_()
        b = distribute_tensor(torch.randn(7, 5), pair, [R])
        out = fast(a, b)
        assert out.placements == (S0,)
        assert torch.equal(out, product(a, b).relu())
        assert_close(*(torch.autograd.grad(x.sum(), a) for x in (out, (a @ b).relu())))
    assert counter.frame_count == 2  # the first size, and all others


# -- modules and optimizers ------------------------------------------------------------------


def test_a_parallelized_module_of_any_batch_size(pair):
    model = parallelize_module(
        Layers(), pair, {"first": ColwiseParallel(), "second": RowwiseParallel()}
    )
    fast, counter = compiled(model)
    for rows in (7, 9, 12, 15):
        x = torch.randn(rows, 10)
        grads = []
        for run in (model, fast):
            model.zero_grad()
            out = run(x)
            out.square().sum().backward()
            grads.append([out.agreed().detach(), *gradients(model)])
        assert_close(*grads)
    assert counter.frame_count == 2  # the first batch size, and all others


def test_layers_are_computed_again(pair):
    """Activation checkpointing, with dropout: backward draws what forward drew."""
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    model = parallelize_module(Layers(), pair, plan)

    def layers(x):
        return checkpoint(lambda x: F.dropout(model(x), 0.4), x, use_reentrant=False)

    fast, _ = compiled(layers)
    for rows in (6, 7):
        x, found = torch.randn(rows, 10), []
        for run in (layers, fast):
            model.zero_grad()
            torch.manual_seed(5)
            run(x).square().sum().backward()
            found.append(gradients(model))
        assert_close(*found)


@pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="older compilers describe a parameter and its gradient by one set of parts",
)
def test_training_on_after_a_backward(pair):
    """The gradient of a replicated parameter is Partial: it has more parts than the parameter."""
    models = [shardwise.distribute_module(Layers(), pair) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    fast, _ = compiled(models[1])
    fast_step = torch.compile(optimizers[1].step, backend="aot_eager")
    for rows in (6, 8):
        x = distribute_tensor(torch.randn(rows, 10), pair, [S0])
        for optimizer, run, step in zip(
            optimizers, (models[0], fast), (optimizers[0].step, fast_step), strict=True
        ):
            run(x).square().mean().backward()
            step()
            optimizer.zero_grad()
    assert_close(*([value(p.detach()) for p in model.parameters()] for model in models))


# torch looks at every tensor that crosses a break, also at those that have no `grad`.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_a_whole_step_in_one_region(pair, eager):
    """The graph breaks at `backward`; what autograd then calls runs as it is."""
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    models = [parallelize_module(Layers(), pair, plan) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def step(model, optimizer, x):
        forward = torch.compiler.disable(model.forward) if eager else model
        forward(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    fast = torch.compile(step, backend="aot_eager")
    for rows in (6, 7):
        x = torch.randn(rows, 10)
        for run, model, optimizer in zip((step, fast), models, optimizers, strict=True):
            run(model, optimizer, x)
    assert_close(*([value(p.detach()) for p in model.parameters()] for model in models))


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "around"])
def test_autocast(pair, inside):
    def layer(x, weight):
        if not inside:
            return F.linear(x, weight)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.linear(x, weight)

    x = distribute_tensor(torch.randn(6, 10), pair, [S0])
    weight = distribute_tensor(torch.randn(14, 10), pair, [R]).requires_grad_()
    found = []
    for run in (layer, compiled(layer)[0]):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
            out = run(x, weight)
        assert out.dtype == torch.bfloat16
        (grad,) = torch.autograd.grad(out.float().square().sum(), weight)
        found.append((value(out), value(grad)))
    assert_close(*found)


def test_batch_statistics_of_any_batch_size(pair):
    model = shardwise.distribute_module(nn.BatchNorm1d(3), pair)
    other = copy.deepcopy(model)
    fast, counter = compiled(other)
    for rows in (5, 7, 12):
        x = distribute_tensor(torch.randn(rows, 3, 4), pair, [S0])
        assert_close([value(fast(x).detach())], [value(model(x).detach())])
    assert_close([*map(value, other.buffers())], [*map(value, model.buffers())])
    assert counter.frame_count == 2


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_padding_of_any_batch_size(pair, mode):
    def pad(x):
        return F.pad(x, (2, 1), mode=mode)

    fast, counter = compiled(pad)
    for rows in (5, 7, 12):
        x = distribute_tensor(torch.randn(rows, 3, 4), pair, [S0])
        assert_close([value(fast(x))], [value(pad(x))])
    assert counter.frame_count == 2


def test_classes_are_sharded_in_a_compiled_loss(pair):
    def loss(logits, target):
        with loss_parallel():
            return F.cross_entropy(logits, target, ignore_index=3, label_smoothing=0.1)

    fast, _ = compiled(loss)
    logits = distribute_tensor(torch.randn(6, 11), pair, [S1]).requires_grad_()
    target = distribute_tensor(torch.randint(0, 11, (6,)), pair, [R])
    with CommDebugMode() as comm:
        expected = loss(logits, target)
    eager = [event.kind for event in comm.events]
    fast(logits, target)
    with CommDebugMode() as comm:
        found = fast(logits, target)
    assert sorted(event.kind for event in comm.events) == sorted(eager)
    for one in (found, expected):
        assert one.placements == (R,)
    assert_close(
        [value(found.detach()), value(torch.autograd.grad(found, logits)[0])],
        [value(expected.detach()), value(torch.autograd.grad(expected, logits)[0])],
    )


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "around"])
def test_a_model_within_loss_parallel(pair, inside):
    """Methods that the compiler cannot follow where a mode of torch is on."""

    def heads(x):
        with loss_parallel() if inside else contextlib.nullcontext():
            return x.unflatten(-1, (-1, 5)) * 2

    x = distribute_tensor(torch.randn(6, 10), pair, [S0])
    with contextlib.nullcontext() if inside else loss_parallel():
        assert torch.equal(compiled(heads)[0](x), heads(x))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_losses_of_sharded_batches(pair, reduction):
    """One graph for batches of several sizes: torch's shape of a loss without data is not used."""

    def loss(logits, target):
        return F.cross_entropy(logits, target, reduction=reduction).sum()

    fast, counter = compiled(loss, dynamic=True)
    for rows in (15, 17):
        logits = distribute_tensor(torch.randn(rows, 11), pair, [S0]).requires_grad_()
        target = distribute_tensor(torch.randint(0, 11, (rows,)), pair, [S0])
        found = []
        for run in (loss, fast):
            out = run(logits, target)
            found.append((value(out.detach()), value(torch.autograd.grad(out, logits)[0])))
        assert_close(*found)
    assert counter.frame_count == 1


# -- sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [S0, R], ids=repr)
def test_small_sizes_in_any_order(pair, placement):
    """Two rows on two ranks after five: each piece has size 1, the whole a symbol."""

    def layer(x, weight):
        return F.linear(x, weight).relu()

    fast, _ = compiled(layer)
    weight = distribute_tensor(torch.randn(14, 10), pair, [S0]).requires_grad_()
    for rows in (5, 0, 1, 2, 9):
        x = distribute_tensor(torch.randn(rows, 10), pair, [placement])
        found = []
        for run in (layer, fast):
            out = run(x, weight)
            found.append((value(out), value(torch.autograd.grad(out.sum(), weight)[0])))
        assert_close(*found)
