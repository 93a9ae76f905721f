"""Sharded modules in compiled code: one graph, with an op for each lookup and linear layer."""

import re

import pytest
import torch
import torch._functorch.config as functorch
from compiling import compiled
from found_again import assert_found_again
from shard_cases import chunks, per_rank
from shard_models import Collection, HalfAndHalf, Towers
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import DTensor, LocalTensor, Shard, effects
from shardwise.debug import CommDebugMode
from shardwise.ops.lookup.row_sparse import RowSparse
from shardwise.shard import ShardingPlan, shard_module, shard_tensor

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]

PLANS = {
    "rows": {"user.weight": chunks(0, 0, 1, 2, 3), "item.weight": chunks(0, 2, 0, 1)},
    "columns": {"user.weight": chunks(1, 0, 1, 2, 3), "item.weight": chunks(1, 3, 1)},
    "dense": {"dense.weight": chunks(0, 0, 1, 2, 3), "dense.bias": chunks(0, 1, 0)},
    "inputs": {"dense.weight": chunks(1, 2, 0, 1)},
}


def whole(grad):
    """All of a sharded gradient, or what rank 1 has of a plain one."""
    grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return grad.on_rank(1) if isinstance(grad, LocalTensor) else grad


def outcome(run, model, *batch):
    """What a forward and a backward give."""
    model.zero_grad()
    out = run(*batch)
    out.float().square().mean().backward()
    values = [out.detach().on_rank(rank) for rank in range(4)]
    return values + [whole(x.grad).clone() for x in model.parameters()]


def assert_as_eager(model, fast, *batch):
    expected = outcome(model, model, *batch)
    torch.testing.assert_close(outcome(fast, model, *batch), expected)


def ids_of(*shape, high=9):
    return per_rank(lambda r, g: torch.randint(0, high, shape, generator=g))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_towers_of_any_batch_size(world, plan):
    model = shard_module(Towers(), ShardingPlan(plan))
    fast, counter = compiled(model)
    for size in (5, 7, 13):
        assert_as_eager(model, fast, ids_of(size), ids_of(size, 3))
    assert counter.frame_count == 2  # the first batch size, and all others


def test_batches_of_other_sizes_on_each_rank(world):
    model = shard_module(Towers(), ShardingPlan(next(iter(PLANS.values()))))
    fast, counter = compiled(model)
    for sizes in ((3, 5, 2, 4), (4, 6, 7, 3), (8, 2, 5, 9)):
        users = per_rank(lambda r, g, s=sizes: torch.randint(0, 9, (s[r],), generator=g))
        items = per_rank(lambda r, g, s=sizes: torch.randint(0, 9, (s[r], 3), generator=g))
        assert_as_eager(model, fast, users, items)
    assert counter.frame_count == 2  # the first batches, and all others


def test_inductor(world):
    model = shard_module(nn.EmbeddingBag(9, 6), ShardingPlan({"weight": chunks(0, 1, 0, 2)}))
    fast, _ = compiled(model, "inductor")
    assert_as_eager(model, fast, ids_of(5, 3))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_with_all_that_they_take(world, dim, mode):
    """Offsets, weights, padding and rows of a maximal norm, which a call writes to."""
    models = [nn.EmbeddingBag(9, 6, mode=mode, padding_idx=2, max_norm=1.0) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        shard_module(model, ShardingPlan({"weight": chunks(dim, 3, 1, 0)}))
    ids, offsets = ids_of(8), per_rank(lambda r, g: torch.tensor([0, r, 3, 8]))
    weights = per_rank(lambda r, g: torch.rand(8, generator=g)) if mode == "sum" else None

    def bags(model, ids, offsets, weights):
        return F.embedding_bag(
            ids,
            model.weight,
            offsets,
            1.0,
            mode=mode,
            padding_idx=2,
            include_last_offset=True,
            per_sample_weights=weights,
        )

    fast, _ = compiled(bags)
    found = []
    for model, run in zip(models, (bags, fast), strict=True):
        found.append([])
        for _ in range(2):
            own = None if weights is None else weights.detach().requires_grad_()
            out = run(model, ids, offsets, own)
            out.square().sum().backward()
            found[-1] += [out.detach(), model.weight.detach().full_tensor()]
            found[-1].append(model.weight.grad.full_tensor())
            found[-1] += [] if own is None else [own.grad]
            with torch.no_grad():
                model.weight.mul_(3)
    for eager, other in zip(*found, strict=True):
        for rank in range(4):
            torch.testing.assert_close(other.on_rank(rank), eager.on_rank(rank))


def test_gradients_by_frequency_and_padding(world):
    model = nn.Embedding(9, 6, padding_idx=2, scale_grad_by_freq=True)
    shard_module(model, ShardingPlan({"weight": chunks(0, 0, 1, 2, 3)}))
    fast, _ = compiled(model)
    assert_as_eager(model, fast, ids_of(5, 2, 3))


def test_autocast(world):
    model = nn.Linear(6, 4, bias=False)
    shard_module(model, ShardingPlan({"weight": chunks(0, 1, 2)}))
    fast, _ = compiled(model)
    x = per_rank(lambda r, g: torch.randn(3, 6, generator=g))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fast(x).dtype == torch.bfloat16
        assert_as_eager(model, fast, x)


def test_a_custom_sharder(world):
    model = nn.ModuleDict({"tables": Collection()})
    shard_module(model, ShardingPlan({"tables": HalfAndHalf()}))
    fast, _ = compiled(model["tables"])
    assert_as_eager(model["tables"], fast, ids_of(3, 2))


def test_training_steps(world):
    models = [Towers(), Towers()]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        shard_module(model, ShardingPlan(PLANS["rows"]))
    fast, _ = compiled(models[1])
    for model, run in zip(models, (models[0], fast), strict=True):
        optimizer = torch.optim.AdamW([model.user.weight, model.item.weight], lr=0.1, foreach=False)
        for size in (5, 7):
            model.zero_grad()
            run(ids_of(size), ids_of(size, 3)).square().mean().backward()
            optimizer.step()
    for name in ("user", "item"):
        tables = [getattr(model, name).weight.detach().full_tensor() for model in models]
        torch.testing.assert_close(tables[1].agreed(), tables[0].agreed())


@functorch.patch(donated_buffer=False)  # which torch asks for where a graph is retained
def test_what_is_kept_for_backward_goes_with_the_graph(world):
    """Backward runs as often as the graph is there for it, without another exchange of ids."""
    model = nn.Embedding(9, 6, max_norm=1.0)
    shard_module(model, ShardingPlan({"weight": chunks(0, 0, 1, 2, 3)}))
    fast, ids = compiled(model)[0], ids_of(5)
    assert_as_eager(model, fast, ids)
    assert not effects._kept
    out, counts = fast(ids).sum(), []
    assert len(effects._kept) == 1
    (expected,) = torch.autograd.grad(model(ids).sum(), model.weight)
    for retained in (True, False):
        with CommDebugMode() as comm:
            (grad,) = torch.autograd.grad(out, model.weight, retain_graph=retained)
        counts.append(comm.get_total_counts())
        assert torch.equal(grad.full_tensor().agreed(), expected.full_tensor().agreed())
    assert counts == [1, 1]
    assert not effects._kept
    fast(ids)
    assert not effects._kept


def test_a_copy_of_what_was_saved_is_refused(world):
    model = shard_module(nn.Embedding(9, 6), ShardingPlan({"weight": chunks(0, 0, 1, 2, 3)}))
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        out = compiled(model)[0](ids_of(5))
    with pytest.raises(shardwise.ShardwiseError, match=r"a sharded module.*which were copied"):
        out.sum().backward()


def test_without_gradients(world):
    """Nothing is kept for a backward that cannot come."""
    model = shard_module(nn.Embedding(9, 6), ShardingPlan({"weight": chunks(0, 0, 1, 2, 3)}))
    fast, ids = compiled(model)[0], ids_of(5)
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            out = fast(ids)
            assert torch.equal(out.on_rank(1), model(ids).on_rank(1))
            assert not effects._kept


def test_a_plain_output_is_local_already(world):
    plan = ShardingPlan({"0.weight": chunks(0, 0, 1, 2, 3)}, return_local_tensor=["0", ""])
    model = shard_module(nn.Sequential(nn.Embedding(9, 6), nn.ReLU()), plan)
    fast, _ = compiled(model)
    assert_as_eager(model, fast, ids_of(5))


def test_checkpoints_stand_around_it(world):
    model = Towers()
    shard_module(model, ShardingPlan({"user.weight": chunks(0, 0, 1, 2, 3)}))

    def inside(ids):
        return checkpoint(lambda ids: model.user(ids).relu(), ids, use_reentrant=False)

    def around(ids):
        rows = model.user(ids)
        return checkpoint(
            lambda rows: model.dense(rows.repeat(1, 2)).relu(), rows, use_reentrant=False
        )

    with pytest.raises(Exception, match="inside activation checkpointing"):
        compiled(inside)[0](ids_of(5))
    outs = [run(ids_of(5)) for run in (around, compiled(around)[0])]
    grads = [torch.autograd.grad(o.square().sum(), model.user.weight)[0] for o in outs]
    torch.testing.assert_close(whole(grads[1]), whole(grads[0]))


def test_export_is_refused(world):
    model = shard_module(nn.Embedding(9, 6), ShardingPlan({"weight": chunks(0, 0, 1, 2, 3)}))
    with pytest.raises(NotImplementedError, match="cannot ask other ranks"):
        torch.export.export(model, (ids_of(5),), strict=False)


def test_elementwise_ops_keep_the_spec(world):
    st = shard_tensor(torch.randn(11, 6), chunks(0, 2, 0, 1))
    doubled = compiled(lambda x: x.tanh() * 2)[0](st)
    assert doubled.sharding_spec() == st.sharding_spec()
    assert torch.equal(doubled, st.tanh() * 2)


LAID_OUT = {"rows": (chunks(0, 2, 0, 1, 3), "mean"), "columns": (chunks(-1, 0, 1, 2, 3), "sum")}


@pytest.mark.parametrize(("spec", "reduction"), LAID_OUT.values(), ids=LAID_OUT.keys())
def test_local_tensors_of_outputs_that_are_laid_out(world, spec, reduction):
    plan = ShardingPlan({"0.weight": chunks(0, 0, 1, 2, 3)}, {"0": spec}, ["0"])
    model = nn.Sequential(nn.Embedding(9, 8), nn.Tanh())
    shard_module(model, plan, grad_reduction=reduction)
    fast, counter = compiled(model)
    for size in (5, 7, 13, 0, 1):
        assert_as_eager(model, fast, ids_of(size))
    assert counter.frame_count == 4  # the first size, 0, 1 and all others
    counts = []
    for run in (model, fast):
        with CommDebugMode() as comm:
            run(ids_of(7)).sum().backward()
        counts.append(comm.get_comm_counts())
    assert counts[0] == counts[1]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_local_tensors_on_every_backend(world, backend):
    plan = ShardingPlan({"0.weight": chunks(1, 3, 0)}, {"0": chunks(0, 0, 1, 2, 3)}, ["0"])
    model = shard_module(nn.Sequential(nn.Linear(6, 5), nn.Tanh()), plan)
    fast, _ = compiled(model, backend)
    assert_as_eager(model, fast, per_rank(lambda r, g: torch.randn(3, 6, generator=g)))


def test_an_output_that_is_one_tensor_on_all_ranks(world):
    """Its gradient is not: each rank has the losses of its own block."""
    spec = chunks(0, 0, 1, 2, 3)
    model = shard_module(nn.Linear(6, 5, bias=False), ShardingPlan({}, {"": spec}, [""]))
    found = []
    for run in (model, compiled(model)[0]):
        model.zero_grad()
        x = torch.linspace(-1, 1, 18).view(3, 6).requires_grad_()
        out = run(x) * per_rank(lambda r, g: torch.tensor(float(r)))
        out.square().sum().backward()
        found.append([out.detach().on_rank(2), *(x.grad.on_rank(rank) for rank in range(4))])
    torch.testing.assert_close(found[1], found[0])


class Doubled(nn.Module):
    """Puts out a sharded tensor."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4))

    def forward(self, x):
        return self.weight * 2


def test_a_sharded_output(world):
    """Its sizes are known, so it is moved in the graph."""
    for output_plan in (None, {"0": chunks(1, 0, 1, 2, 3)}):
        plan = ShardingPlan({"0.weight": chunks(0, 1, 0, 2, 3)}, output_plan, ["0"])
        model = shard_module(nn.Sequential(Doubled(), nn.Tanh()), plan)
        assert_as_eager(model, compiled(model)[0], ids_of(5))


class Joined(nn.Module):
    """Puts out a DTensor without a spec, as large as what is brought."""

    def __init__(self):
        super().__init__()
        self.mesh = shardwise.init_device_mesh("cpu", (4,))
        self.scale = nn.Linear(6, 6)

    def forward(self, x):
        return DTensor.from_local(self.scale(x), self.mesh, [Shard(0)]) * 2


def test_a_dtensor_of_changing_size(world):
    model = nn.Sequential(Joined(), nn.Tanh())
    shard_module(model, ShardingPlan({"0.scale.weight": chunks(0, 1, 0)}, None, ["0"]))
    fast, counter = compiled(model)
    for size in (5, 7, 9):
        x = per_rank(lambda r, g, size=size: torch.randn(size, 6, generator=g))
        outs = [run(x) for run in (model, fast)]
        grads = [torch.autograd.grad(o.square().sum(), model[0].scale.weight)[0] for o in outs]
        torch.testing.assert_close(outs[1].on_rank(2), outs[0].on_rank(2))
        torch.testing.assert_close(whole(grads[1]), whole(grads[0]))
    assert counter.frame_count == 2


def test_inductor_keeps_the_order_of_exchanges(world):
    """Sorted for the least memory, they would run in another order on another rank."""
    model = shard_module(Towers(), ShardingPlan(PLANS["rows"]))

    def two(users, items):
        return model.user(users).tanh() * 2, model.item(items)

    def step():
        one, other = compiled(two, "inductor")[0](ids_of(5), ids_of(5, 3))
        (one.sum() + other.sum()).backward()

    _, codes = run_and_get_code(step)
    found = [re.findall(r"shardwise\.(effect\w*).*?\"what\": \"(\w+)", code) for code in codes]
    assert found == [
        [("effect", "embedding"), ("effect", "embedding_bag")],
        [("effect_backward", "embedding_bag"), ("effect_backward", "embedding")],
    ]


def laid_out_rows(spec):
    plan = ShardingPlan({"0.weight": chunks(0, 0, 1, 2, 3)}, {"0": spec})
    return shard_module(nn.Sequential(nn.Embedding(9, 6), nn.Tanh()), plan)


def test_compiled_code_is_found_again(world):
    model = laid_out_rows(chunks(0, 1, 0))
    ids = ids_of(5)
    expected = model(ids).square().sum().item()

    def run():
        model.zero_grad()
        loss = torch.compile(model, fullgraph=True)(ids).square().sum()
        loss.backward()
        assert loss.item() == pytest.approx(expected)

    assert_found_again(run)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_outputs_that_are_laid_out(world, backend):
    """How it is cut is known when the code runs: then it is a sharded tensor as any other."""
    model = laid_out_rows(chunks(0, 1, 0))
    fast, counter = compiled(model, backend)
    for size in (5, 7, 1, 13) if backend == "aot_eager" else (5,):
        found = []
        for run in (model, fast, fast):
            model.zero_grad()
            with CommDebugMode() as comm:
                out = run(ids_of(size))
                out.square().sum().backward()
            grad = model[0].weight.grad.full_tensor().agreed().clone()
            found.append((out.detach(), grad, comm.get_comm_counts()))
        for out, grad, counts in found[1:]:
            assert torch.allclose(out, found[0][0])
            assert out.sharding_spec() == chunks(0, 1, 0)
            torch.testing.assert_close(grad, found[0][1])
            assert counts == found[0][2]
    assert counter.frame_count == (3 if backend == "aot_eager" else 1)


def test_losses_of_outputs_that_are_laid_out(world):
    """Sums, means and blocks, inside the region; other ops say that they have to stand outside."""
    model = laid_out_rows(chunks(0, 0, 1, 2, 3))

    def losses(ids):
        out = model(ids)
        other = (out * out.detach() + torch.ones_like(out)) / 3
        return out.square().sum() + other.mean() + model[0](ids).sum(), out.local_tensor() * 2

    fast, _ = compiled(losses)
    for size in (5, 7):
        found = []
        for run in (losses, fast):
            model.zero_grad()
            loss, block = run(ids_of(size))
            (loss.full_tensor() + block.square().sum()).backward()
            found.append([whole(loss), block.on_rank(2), whole(model[0].weight.grad).clone()])
        torch.testing.assert_close(found[1], found[0])
    beyond = [lambda x: x @ x.t(), lambda x: x.full_tensor()]
    if torch.__version__ >= "2.13":  # older compilers take no specs
        beyond.append(lambda x: x.resharded(chunks(1, 0)))
    for fn in beyond:
        fast, _ = compiled(lambda ids, fn=fn: fn(model(ids)))
        with pytest.raises(Exception, match="depends on what other ranks put out"):
            fast(ids_of(5))


def test_gradients_of_sharded_tensors_that_are_put_out(world):
    """They may come as DTensors of another kind than the one that was put out."""
    st = shard_tensor(torch.randn(8, 4), chunks(0, 2, 0, 1, 3)).requires_grad_()
    compiled(lambda x: x.tanh() * 2)[0](st).sum().backward()
    expected = 2 * (1 - st.detach().full_tensor().agreed().tanh() ** 2)
    torch.testing.assert_close(st.grad.full_tensor().agreed(), expected)


# torch looks at every tensor that crosses a break, also at those that have no `grad`.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_what_breaks_the_graph(world):
    """What others bring decides about a size here, so Python runs it; the rest is compiled."""
    model = laid_out_rows(chunks(0, 1, 0, 1))
    expected = model(ids_of(5))
    assert torch.equal(torch.compile(model, backend="aot_eager")(ids_of(5)), expected)
    with pytest.raises(Exception, match="names every rank once"):
        compiled(model)[0](ids_of(5))

    rows = laid_out_rows(chunks(0, 0, 1, 2, 3))

    def products(ids):
        return (rows(ids) @ rows(ids).t()).full_tensor()

    found = torch.compile(products, backend="aot_eager")(ids_of(5))
    torch.testing.assert_close(found.agreed(), products(ids_of(5)).agreed())

    uneven = ShardingPlan({}, {"": chunks(0, 1, 0)}, [""])
    layer, x = shard_module(nn.Linear(6, 5), uneven), per_rank(lambda r, g: torch.ones(3, 6))
    expected = layer(x)
    for rank in range(4):
        found = torch.compile(layer, backend="aot_eager")(x)
        assert torch.equal(found.on_rank(rank), expected.on_rank(rank))
    with pytest.raises(Exception, match="one graph cannot have a size per rank"):
        compiled(layer)[0](x)


@pytest.mark.parametrize(
    ("dim", "backend", "sizes"),
    [(0, "aot_eager", (5, 7, 13)), (1, "aot_eager", (5, 7, 13)), (0, "inductor", (5,))],
)
def test_sparse_gradients(world, dim, backend, sizes):
    """Two lookups and bags in one table; added up over backwards, then used by an optimizer."""

    def both(ids, table):
        rows = F.embedding(ids, table, sparse=True, padding_idx=2, scale_grad_by_freq=True)
        return rows.sum(1) * F.embedding_bag(ids, table, sparse=True)

    fast, counter = compiled(both, backend)
    start = torch.randn(9, 6)
    spec = chunks(dim, 0, 1, 2, 3)
    tables = [shard_tensor(start.clone().requires_grad_(), spec) for _ in range(2)]
    for size in sizes:
        ids = ids_of(size, 3)
        for run, table in zip((both, fast), tables, strict=True):
            run(ids, table).square().mean().backward()
        if size == 7:
            continue
        eager, found = (table.grad for table in tables)
        assert type(found) is type(eager) is RowSparse
        for one, other in ((found._rows, eager._rows), (found._local, eager._local)):
            assert one.ranks == other.ranks
            for rank in range(4):
                torch.testing.assert_close(*(x.on_rank(rank).sort(0).values for x in (one, other)))
        for table in tables:
            torch.optim.SparseAdam([table], lr=0.1).step()
            table.grad = None
        weights = [table.detach().full_tensor().agreed() for table in tables]
        torch.testing.assert_close(weights[1], weights[0])
    assert counter.frame_count == min(len(sizes), 2)  # the first batch size, and all others
