"""fully_shard: one device's training, in shards; what is sent, kept and refused."""

import copy
import itertools
import math
import random

import pytest
import torch
from fully_sharded import (
    ALL_MESHES,
    IDS,
    NUM_RANKS,
    ODD,
    ODD_BATCHES,
    PLAN,
    Layer,
    Model,
    Odd,
    loss_of,
    mesh_of,
    own,
    sharded,
    train,
    train_odd,
    trained,
    trained_odd,
)
from parity import assert_gradients, gradients, parameters, through_file, whole
from torch import nn
from torch.distributed.fsdp import OffloadPolicy
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import DTensor, LayoutError, LocalTensor, Replicate
from shardwise.checkpoint import load, save
from shardwise.debug import CommDebugMode
from shardwise.errors import ArgumentError, LeafError, UnsupportedError
from shardwise.parallel import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    parallelize_module,
)
from shardwise.shard import ChunkShardingSpec, shard_parameter
from shardwise.training.fully_sharded.members import lengths_of, pack, rows_of, rows_per_chunk

GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"


def assert_alike(model, expected, **tolerance):
    found, wanted = parameters(model), parameters(expected)
    assert list(found) == list(wanted)
    assert_close(found, wanted, **tolerance)


@pytest.fixture(scope="module")
def expected():
    return train(Model(), IDS)


# -- parity ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL_MESHES)
def test_trains_as_one_device(name, expected):
    with shardwise.simulate(NUM_RANKS.get(name, 4)):
        found = trained(name)
    assert found.keys() == dict(expected.named_parameters()).keys()
    for name, parameter in expected.named_parameters():
        assert_close(found[name], parameter.detach(), rtol=0, atol=2e-5)


# -- what is sent ----------------------------------------------------------------------------------


def kinds(comm):
    return [event.kind for event in comm.events]


def test_one_gather_forward_and_backward_and_one_reduction_per_group():
    with shardwise.simulate(4):
        model = sharded(Model(), mesh_of(dp=4), reshard_after_forward=True)
        batch = own(IDS[0], 4)
        for _ in range(2):
            with CommDebugMode() as comm:
                loss_of(model, batch).backward()
            found = kinds(comm)
            assert found.count(GATHER) == 2 * 4
            assert found.count(SCATTER) == 4
            assert found.count("all_reduce") == 1  # of the scalar
        # The next group is gathered while one computes, and no more than one ahead.
        assert found[:2] == [GATHER] * 2


def test_layers_are_freed_but_not_what_backward_needs_first():
    with shardwise.simulate(4):
        model = sharded(Model(), mesh_of(dp=4))
        with CommDebugMode() as comm:
            loss_of(model, own(IDS[0], 4)).backward()
        assert kinds(comm).count(GATHER) == 4 + 3
        # From the second step on, what ran last is known: backward needs it at once.
        with CommDebugMode() as comm:
            loss_of(model, own(IDS[0], 4)).backward()
        assert kinds(comm).count(GATHER) == 4 + 2
        with CommDebugMode() as comm, torch.no_grad():
            model(IDS[0])
        assert kinds(comm).count(GATHER) == 4


def test_an_axis_of_one_rank_sends_nothing():
    with shardwise.simulate(1):
        model = sharded(Model(), mesh_of(rep=1, dp=1))
        with CommDebugMode() as comm:
            loss_of(model, IDS[0]).backward()
        assert kinds(comm) == []


class Untied(Model):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("reshards", [True, False, None])
def test_modules_that_run_one_after_another_are_one_group(reshards):
    alone = train(Untied(), IDS)
    with shardwise.simulate(4):
        model, mesh = Untied(), mesh_of(dp=4)
        for layer in model.layers:
            fully_shard(layer, mesh, reshard_after_forward=reshards)
        last = fully_shard([model.norm, model.head], mesh, reshard_after_forward=reshards)
        assert last == [model.norm, model.head]
        fully_shard(model, mesh, reshard_after_forward=reshards)
        batch = own(IDS[0], 4)
        for _ in range(2):
            with CommDebugMode() as comm:
                loss_of(model, batch).backward()
            model.zero_grad()
        num_kept = {True: 0, False: 5, None: 2}[reshards]  # the outermost, and what ran last
        assert kinds(comm).count(GATHER) == 10 - num_kept
        assert kinds(comm).count(SCATTER) == 5
        copied = copy.deepcopy(model)
        for each in (model, copied):
            train(each, [own(ids, 4) for ids in IDS])
            assert_alike(each, alone, rtol=0, atol=2e-5)
        with torch.no_grad():
            assert torch.allclose(whole(model(IDS[0])), alone(IDS[0]), atol=1e-4)


def test_only_some_of_several_modules_are_called():
    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x, which):
            for name in which:
                x = self.get_submodule(name)(x)
            return x

    x, alone = torch.randn(4, 8), Either()
    with shardwise.simulate(2):
        model = Either()
        fully_shard([model.first, model.second], mesh_of(dp=2), reshard_after_forward=True)
        fully_shard(model, mesh_of(dp=2))
        for which in (["first"], ["second"], ["second", "first"], ["first", "first", "second"]):
            for each, batch in ((alone, x), (model, own(x, 2))):
                each.zero_grad()
                each(batch, which).pow(2).mean().backward()
            assert_gradients(model, alone)


def test_frozen_parameters_are_gathered_and_not_reduced():
    with shardwise.simulate(2):
        model = sharded(Model(), mesh_of(dp=2))
        batch = own(IDS[0], 2)
        loss_of(model, batch).backward()
        model.zero_grad()
        model.requires_grad_(False)
        model.layers[1].up.bias.requires_grad_(True)
        loss_of(model, batch).backward()  # the ranks compare what they froze
        model.zero_grad()
        with CommDebugMode() as comm:
            loss_of(model, batch).backward()
        sizes = [event.num_bytes for event in comm.events if event.kind == SCATTER]
        assert len(sizes) == 1
        assert sizes[0] < 200
        trained = [name for name, p in model.named_parameters() if p.grad is not None]
        assert trained == ["layers.1.up.bias"]
        alone = Model().requires_grad_(False)
        alone.layers[1].up.bias.requires_grad_(True)
        loss_of(alone, IDS[0]).backward()
        assert_close(whole(model.layers[1].up.bias.grad), alone.layers[1].up.bias.grad)


def test_gathered_parameters_are_views_of_one_buffer_that_is_freed():
    seen = []
    with shardwise.simulate(2):
        layer = fully_shard(Layer(), mesh_of(dp=2), reshard_after_forward=True)
        layer.up.register_forward_pre_hook(
            lambda m, _: seen.append([m.weight, layer.down.weight, layer.norm.bias])
        )
        out = layer(torch.ones(2, 8))
        storages = {x.untyped_storage().data_ptr() for x in seen[0]}
        assert storages == {0}
        assert len({x.untyped_storage()._cdata for x in seen[0]}) == 1
        out.sum().backward()
        assert seen[0][0].untyped_storage().nbytes() == 0
        assert isinstance(layer.up.weight, DTensor)


class Stack(nn.Module):
    """A few matrices; each token takes two of them."""

    num_experts = 3

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.matrices = nn.Parameter(torch.randn(3, 300, 300) / 20)

    def forward(self, tokens, experts, weights):
        return torch.einsum("tkio,ti,tk->to", self.matrices[experts], tokens, weights)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts, self.gate = Stack(), nn.Linear(300, 3)

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        return self.experts(x, chosen, weights)


def train_mixture(model, batches):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in batches:
        model(batch).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("num_axis", [1, 2, 3])
def test_a_stack_of_few_matrices_is_split_inside_of_them(num_axis, tmp_path):
    alone, batches = Mixture().double(), torch.randn(3, 8, 300).double()
    train_mixture(alone, batches)
    with shardwise.simulate(4 * num_axis):
        mesh, model = mesh_of(dp=4, ep=num_axis), Mixture().double()
        parallelize_module(model, mesh, {"experts": "experts"})
        fully_shard(model, mesh["dp"])
        stack = model.experts.matrices
        assert [placement.dim for placement in stack.placements] == [1, 0]
        held = [shard.numel() for shard in stack._local._parts]
        assert max(held) < 0.3 * -(-3 // num_axis) * 300 * 300
        state = train_mixture(model, [own(each, 4, num_axis) for each in batches])
        assert_alike(model, alone, rtol=0, atol=1e-11)
        save(state, tmp_path / "saved")
    with shardwise.simulate(2):
        other = fully_shard(Mixture().double(), mesh_of(dp=2))
        state = {"model": other, "optimizer": torch.optim.AdamW(other.parameters())}
        load(state, tmp_path / "saved")
        assert_alike(other, alone, rtol=0, atol=1e-11)


def layer_shapes(width, inner, num_experts=1):
    matrices = [(width, width)] * 4 + [(inner, width)] * 2 + [(width, inner)]
    if num_experts > 1:
        matrices[4:] = [(num_experts, 2 * inner, width), (num_experts, width, inner)]
    return [*matrices, (width,), (width,)]


def with_biases(width):
    matrices = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    return [*matrices, *[(matrix[0],) for matrix in matrices], *[(width,)] * 4]


LAYERS = {
    "1024": layer_shapes(1024, 4096),
    "4096": layer_shapes(4096, 11008),
    "experts": layer_shapes(4096, 14336, 8),
    "many experts": layer_shapes(2048, 768, 128),
    "512 with biases": with_biases(512),
    "1024 with biases": with_biases(1024),
}


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8, 16, 32, 64, 96, 128, 256, 512])
@pytest.mark.parametrize("name", LAYERS)
def test_padding_is_at_most_one_percent(name, num_ranks):
    shapes = LAYERS[name]
    packings = pack(shapes, num_ranks)
    assert len(packings) <= 3
    assert_packed(shapes, num_ranks, packings)


@pytest.mark.parametrize("shape", [(1000, 512), (4040, 4040), (1531, 1531), (7, 3, 331), (64, 40)])
def test_padding_of_one_weight_whose_rows_do_not_divide(shape):
    for num_ranks in (2, 3, 7, 16, 64, 96, 128, 509, 512):
        packings = pack([shape], num_ranks)
        assert_packed([shape], num_ranks, packings)
        _, row = rows_of(shape, packings[0].dims[0])
        most = math.prod(shape) / num_ranks + row
        assert max(lengths_of(packings[0].ends)) < most + 4096 / num_ranks


def test_padding_of_drawn_groups():
    draw = random.Random(0)
    for _ in range(300):
        shapes = [
            tuple(int(6000 ** draw.random()) for _ in range(draw.choice((1, 2, 2, 3))))
            for _ in range(draw.choice((1, 1, 2, 5, 9)))
        ]
        num_ranks = draw.randint(2, 512)
        assert_packed(shapes, num_ranks, pack(shapes, num_ranks))


def assert_packed(shapes, num_ranks, packings):
    """Padding is at most 1%; parameters do not overlap, and chunks end between rows."""
    total = sum(map(math.prod, shapes))
    padding = sum(packing.ends[-1] for packing in packings) - total
    assert padding <= max(0.01 * total, 4096)
    assert sorted(number for p in packings for number in p.offsets) == list(range(len(shapes)))
    for packing in packings:
        assert len(packing.ends) == num_ranks
        spans = []
        for number, offset in packing.offsets.items():
            num, row = rows_of(shapes[number], packing.dims[number])
            assert sum(rows_per_chunk(offset, num, row, packing.ends)) == num
            spans.append((offset, offset + num * row))
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_one_buffer_where_it_has_little_padding():
    for num_ranks in (2, 4, 8, 16, 32, 64):
        assert len(pack(with_biases(512), num_ranks)) == 1


class Wide(nn.Module):
    """On 16 ranks, rows of dim 1 save padding; on 64, uneven chunks or a second buffer do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x):
        return self.down(self.up(x).relu())


@pytest.mark.parametrize(
    ("num_ranks", "many", "dim", "num_gathers"),
    [(16, 1 << 22, 1, 1), (64, 1 << 22, 1, 1), (64, 0, 0, 2)],
)
def test_rows_of_other_dims_and_several_buffers_train_alike(
    num_ranks, many, dim, num_gathers, monkeypatch
):
    monkeypatch.setattr("shardwise.training.fully_sharded.members.MANY", many)
    alone, batch = Wide(), torch.randn(num_ranks, 128)
    with shardwise.simulate(num_ranks):
        model = fully_shard(Wide(), mesh_of(dp=num_ranks))
        assert model.down.weight.placements[0].dim == dim
        with CommDebugMode() as comm:
            model(own(batch, num_ranks))
        assert kinds(comm) == [GATHER] * num_gathers
        for found, rows in ((alone, batch), (model, own(batch, num_ranks))):
            optimizer = torch.optim.AdamW(found.parameters())
            for _ in range(2):
                found(rows).pow(2).mean().backward()
                nn.utils.clip_grad_norm_(found.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        assert_alike(model, alone, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ODD)
def test_chunks_of_lengths_of_their_own_train_alike(name):
    expected = train_odd(Odd().double(), ODD_BATCHES)
    with shardwise.simulate(4):
        found, uneven = trained_odd(name)
    assert any(uneven)
    for name, parameter in expected.named_parameters():
        assert_close(found[name], parameter.detach(), rtol=0, atol=1e-11)


@pytest.mark.parametrize(("num_ranks", "shape"), [(16, (101, 103)), (64, (150, 170))])
def test_one_weight_on_many_ranks_is_sent_without_padding(num_ranks, shape, monkeypatch):
    monkeypatch.setattr("shardwise.training.fully_sharded.members.LITTLE", 0)
    alone = nn.Linear(shape[1], shape[0], bias=False)
    batch = torch.randn(num_ranks, shape[1])
    with shardwise.simulate(num_ranks):
        model = fully_shard(copy.deepcopy(alone), mesh_of(dp=num_ranks), reshard_after_forward=True)
        (buffer,) = model.__dict__["_shard_group"].parameters.buffers
        with CommDebugMode() as comm:
            model(own(batch, num_ranks)).pow(2).mean().backward()
        assert kinds(comm) == [GATHER, GATHER, SCATTER]
        alone(batch).pow(2).mean().backward()
        assert_close(whole(model.weight.grad), alone.weight.grad)
        held = [part.numel() for part in model.weight._local._parts]
        assert sum(held) == alone.weight.numel()
        assert buffer.whole.on_rank(0).numel() < alone.weight.numel() + num_ranks


def test_a_few_trained_parameters_of_a_group_are_reduced_without_padding(monkeypatch):
    monkeypatch.setattr("shardwise.training.fully_sharded.members.LITTLE", 0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 16, bias=False))
    model[0].requires_grad_(False)
    batch = torch.randn(8, 64)
    expected = torch.autograd.grad(model(batch).pow(2).mean(), model[1].weight)[0]
    with shardwise.simulate(8):
        fully_shard(model, mesh_of(dp=8))
        with CommDebugMode() as comm:
            model(own(batch, 8)).pow(2).mean().backward()
        assert_close(whole(model[1].weight.grad), expected)
    (sent,) = [event for event in comm.events if event.kind == SCATTER]
    assert sent.num_bytes <= 4 * (16 * 64 + 8 * 3)  # each chunk has a flag of its member, and two


# -- gradients -------------------------------------------------------------------------------------


def test_gradients_are_accumulated_in_shards_or_unreduced():
    alone = Model()
    for ids in IDS[:2]:
        loss_of(alone, ids).backward()
    expected = gradients(alone)
    with shardwise.simulate(4):
        for sync in (True, False):
            model = sharded(Model(), mesh_of(dp=4))
            model.set_requires_gradient_sync(sync)
            with CommDebugMode() as comm:
                loss_of(model, own(IDS[0], 4)).backward()
            assert (SCATTER in kinds(comm)) == sync
            assert (model.layers[0].up.weight.grad is None) != sync
            model.set_requires_gradient_sync(True)
            loss_of(model, own(IDS[1], 4)).backward()
            assert_close(gradients(model), expected)


class Twice(nn.Module):
    """One layer is called twice, one now and then, and one never."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.spare, self.unused = Layer(), Layer(), Layer()
        self.layers = [self.shared, self.spare, self.unused]

    def forward(self, x, spare=False):
        y = self.shared(x) + self.shared(2 * x)
        return self.spare(y) if spare else y


def test_modules_called_twice_or_not_at_all():
    x = torch.randn(4, 8)
    with shardwise.simulate(2):
        model, alone = sharded(Twice(), mesh_of(dp=2)), Twice()
        for spare in (False, True, False):
            model.zero_grad()
            alone.zero_grad()
            model(LocalTensor.per_rank(lambda r: x.chunk(2)[r]), spare).pow(2).mean().backward()
            alone(x, spare).pow(2).mean().backward()
            assert_gradients(model, alone)


def test_what_an_unsynced_pass_found_is_reduced_by_the_next_even_if_that_finds_none():
    x = torch.randn(4, 8)
    with shardwise.simulate(2):
        model, alone = sharded(Twice(), mesh_of(dp=2)), Twice()
        mine = LocalTensor.per_rank(lambda rank: x.chunk(2)[rank])
        for spare in (True, False):
            model.set_requires_gradient_sync(not spare)
            model(mine, spare).pow(2).mean().backward()
            alone(x, spare).pow(2).mean().backward()
        assert_gradients(model, alone)


class Branches(nn.Module):
    """A parameter that a module does not use in a step has no gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.first(x)


def test_a_parameter_that_no_rank_uses_has_no_gradient():
    with shardwise.simulate(2):
        model = fully_shard(Branches(), mesh_of(dp=2))
        model(torch.ones(2, 4)).sum().backward()
        assert model.second.weight.grad is None
        assert model.first.weight.grad is not None


def test_unfrozen_later():
    alone = Model()
    loss_of(alone, IDS[0]).backward()
    with shardwise.simulate(2):
        model = sharded(Model().requires_grad_(False), mesh_of(dp=2))
        model(own(IDS[0], 2))
        model.requires_grad_(True)
        loss_of(model, own(IDS[0], 2)).backward()
        assert_gradients(model, alone)


@pytest.mark.parametrize("way", ["around", "around, reentrant", "inside"])
def test_activation_checkpointing(way):
    alone = Model()
    loss_of(alone, IDS[0]).backward()
    with shardwise.simulate(2):
        model = sharded(Model(), mesh_of(dp=2))
        if way == "inside":
            for layer in model.layers:
                layer.up = Around(layer.up, reentrant=False)
        else:
            reentrant = way.endswith("reentrant")
            model.layers = nn.ModuleList(Around(layer, reentrant) for layer in model.layers)
        loss_of(model, own(IDS[0], 2)).backward()
        found = {n.replace(".inner.", "."): g for n, g in gradients(model).items()}
        assert_close(found, gradients(alone))


class Around(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
def test_a_penalty_on_gradients_of_inputs():
    def penalized(model, x):
        x = x.clone().requires_grad_()
        loss = model(x).pow(2).mean()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + grad.pow(2).sum() * x.shape[0]).backward()

    x, alone = torch.randn(1, 8), Layer()
    with shardwise.simulate(2):
        model = fully_shard(copy.deepcopy(alone), mesh_of(dp=2), reshard_after_forward=True)
        penalized(model, x)
        penalized(alone, x)
        assert_gradients(model, alone)
        with pytest.raises(UnsupportedError, match="create_graph=True"):
            model(x).sum().backward(create_graph=True)


# -- dtypes and devices ----------------------------------------------------------------------------


def test_mixed_precision():
    seen = []
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    with shardwise.simulate(2):
        layer = fully_shard(Layer(), mesh_of(dp=2), mp_policy=policy)
        layer.up.register_forward_pre_hook(lambda m, args: seen.append((m.weight, args[0])))
        out = layer(torch.randn(4, 8))
        assert out.dtype == torch.float32
        assert {x.dtype for x in seen[0]} == {torch.bfloat16}
        with CommDebugMode() as comm:
            out.sum().backward()
        assert layer.up.weight.dtype == layer.up.weight.grad.dtype == torch.float32
        (event,) = [event for event in comm.events if event.kind == SCATTER]
        num = sum(p.numel() for p in layer.parameters())
        assert event.num_bytes >= 4 * num / 2


@pytest.mark.parametrize("statistics", [torch.float32, torch.bfloat16])
def test_parameters_beside_running_statistics_have_their_dtype(statistics):
    """Kernels take no others; on one device too."""
    alone = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    model, x = copy.deepcopy(alone), torch.randn(5, 4)
    alone.bfloat16()[1].to(statistics)
    with shardwise.simulate(2):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        fully_shard(model, mesh_of(dp=2), mp_policy=policy)
        for name in ("running_mean", "running_var"):
            setattr(model[1], name, getattr(model[1], name).to(statistics))
        for _ in range(2):
            found, expected = model(x), alone(x.bfloat16())
            assert torch.equal(found.agreed() if type(found) is LocalTensor else found, expected)
            found.float().square().sum().backward()
            expected.float().square().sum().backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        scale = model[1].weight.grad.full_tensor().agreed()
        torch.testing.assert_close(scale, alone[1].weight.grad.float(), rtol=2e-2, atol=2e-2)


def test_offloaded_shards_train_alike():
    alone = Model()
    loss_of(alone, IDS[0]).backward()
    with shardwise.simulate(2):
        model = sharded(Model(), mesh_of(dp=2), offload_policy=CPUOffloadPolicy())
        loss_of(model, own(IDS[0], 2)).backward()
        assert model.embed.weight.grad.device.type == "cpu"
        assert_gradients(model, alone)


def test_torchs_policy_that_offloads_nothing():
    with shardwise.simulate(2):
        layer = fully_shard(Layer(), mesh_of(dp=2), offload_policy=OffloadPolicy())
        assert layer.__dict__["_shard_group"].parameters.offload is None


def test_parameters_of_two_dtypes():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64)

        def forward(self, x):
            return self.b(self.a(x).double())

    alone, x = Both(), torch.randn(2, 4)
    alone(x).sum().backward()
    with shardwise.simulate(2):
        model = fully_shard(Both(), mesh_of(dp=2))
        model(x).sum().backward()
        assert_gradients(model, alone)


def test_values_are_made_after_the_module_was_sharded():
    with torch.device("meta"):
        model = Model()
    values = Model().state_dict()
    alone = Model()
    loss_of(alone, IDS[0]).backward()
    with shardwise.simulate(2):
        model = sharded(model, mesh_of(dp=2))
        with pytest.raises(LayoutError, match=r"meta device.*to_empty"):
            model(IDS[0])
        model.to_empty(device="cpu")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if isinstance(parameter, DTensor):
                    mesh, placements = parameter.device_mesh, parameter.placements
                    value = shardwise.distribute_tensor(values[name], mesh, placements)
                else:
                    value = values[name]
                parameter.copy_(value)
        loss_of(model, own(IDS[0], 2)).backward()
        assert_gradients(model, alone)


# -- copies, files, other uses ---------------------------------------------------------------------


@pytest.mark.parametrize("way", [copy.deepcopy, through_file], ids=["deepcopy", "file"])
def test_a_copy_trains_alike_and_apart(way, expected):
    with shardwise.simulate(2):
        model = sharded(Model(), mesh_of(dp=2))
        loss_of(model, own(IDS[0], 2)).backward()
        model.zero_grad()
        copied = way(model)
        train(copied, [own(ids, 2) for ids in IDS])
        assert_alike(copied, expected, rtol=0, atol=2e-5)
        assert_alike(model, Model())


def test_state_dicts_hold_dtensors_and_load():
    with shardwise.simulate(2):
        model, other = sharded(Model(), mesh_of(dp=2)), Model()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(2)
        other = sharded(other, mesh_of(dp=2))
        state = other.state_dict()
        assert all(isinstance(x, DTensor) for n, x in state.items() if n != "scale")
        model.load_state_dict(state)
        assert torch.equal(whole(model(IDS[0])), whole(other(IDS[0])))
        layer = fully_shard(Layer(), mesh_of(dp=2))
        layer.load_state_dict(other.layers[0].state_dict(), assign=True)
        x = torch.ones(2, 8)
        assert torch.equal(whole(layer(x)), whole(other.layers[0](x)))


def test_averaged_weights():
    with shardwise.simulate(2):
        model = sharded(Model(), mesh_of(dp=2))
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        alone = Model()
        other = torch.optim.swa_utils.AveragedModel(
            alone, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        for ids in IDS[:2]:
            train(model, [own(ids, 2)])
            average.update_parameters(model)
            train(alone, [ids])
            other.update_parameters(alone)
        assert_alike(average.module, other.module, rtol=0, atol=2e-5)
        assert torch.allclose(whole(average(IDS[0])), other(IDS[0]), atol=1e-4)


def test_converted_after_it_was_sharded():
    with shardwise.simulate(2):
        model = sharded(Model(), mesh_of(dp=2)).double()
        alone = Model().double()
        loss_of(model, own(IDS[0], 2)).backward()
        loss_of(alone, IDS[0]).backward()
        assert_gradients(model, alone)


def test_gathered_by_hand():
    with shardwise.simulate(2):
        layer = fully_shard(Layer(), mesh_of(dp=2), reshard_after_forward=True)
        layer.unshard()
        with CommDebugMode() as comm:
            layer(torch.ones(2, 8)).sum().backward()
        assert GATHER not in kinds(comm)
        layer.reshard()
        with CommDebugMode() as comm:
            layer(torch.ones(2, 8))
        assert GATHER in kinds(comm)


def test_updates_are_seen_by_what_stayed_gathered():
    with shardwise.simulate(2):
        layer = fully_shard(nn.Linear(2, 2), mesh_of(dp=2), reshard_after_forward=False)
        layer(torch.ones(1, 2))
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.fill_(1)
        assert whole(layer(torch.ones(1, 2))).tolist() == [[3.0, 3.0]]


def test_recurrent_layers():
    torch.manual_seed(0)
    alone = nn.LSTM(4, 3)
    x = torch.randn(5, 2, 4)
    with shardwise.simulate(2):
        layer = fully_shard(copy.deepcopy(alone), mesh_of(dp=2))
        layer(x)[0].pow(2).mean().backward()
        alone(x)[0].pow(2).mean().backward()
        assert_gradients(layer, alone)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled(expected):
    with shardwise.simulate(2):
        model = sharded(Model(), mesh_of(dp=2))
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for ids in IDS:
            loss_of(compiled, own(ids, 2)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        assert_alike(model, expected, rtol=0, atol=2e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo does
def test_layers_that_are_compiled_one_by_one(expected):
    with shardwise.simulate(4):
        mesh, model = mesh_of(dp=2, tp=2), Model()
        parallelize_module(model, mesh, PLAN)
        for name, layer in list(model.layers.named_children()):
            compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
            model.layers.register_module(name, fully_shard(compiled, mesh["dp"]))
        train(fully_shard(model, mesh["dp"]), [own(ids, 2, 2) for ids in IDS])
        found = [whole(parameter) for parameter in model.parameters()]
    for tensor, parameter in zip(found, expected.parameters(), strict=True):
        assert_close(tensor, parameter.detach(), rtol=0, atol=2e-5)


# -- what is refused -------------------------------------------------------------------------------


def test_a_parameter_in_two_groups():
    with shardwise.simulate(2):
        model = Model()
        fully_shard(model.embed, mesh_of(dp=2))
        with pytest.raises(LayoutError, match=r"'weight' is in another group already, as 'weight'"):
            fully_shard(model.head, mesh_of(dp=2))
        with pytest.raises(LayoutError, match=r"'head\.weight' is in another group already"):
            fully_shard(model, mesh_of(dp=2))


def test_a_tie_that_would_be_lost():
    with shardwise.simulate(2):
        model = Model()
        mesh = mesh_of(dp=2)
        fully_shard(model, mesh, ignored_params=[model.embed.weight])
        fully_shard(model.embed, mesh)
        with pytest.raises(LayoutError, match=r"'head\.weight' is shared with a module"):
            model(IDS[0])


@pytest.mark.parametrize("ignored", [["up.weight"], torch.ones(2), 3])
def test_what_is_ignored_are_parameters(ignored):
    with shardwise.simulate(2), pytest.raises(TypeError, match="ignored_params are parameters"):
        fully_shard(Layer(), mesh_of(dp=2), ignored_params=ignored)


def test_a_module_sharded_twice():
    with shardwise.simulate(2):
        layer = fully_shard(Layer(), mesh_of(dp=2))
        with pytest.raises(LayoutError, match="Layer is fully sharded already"):
            fully_shard(layer, mesh_of(dp=2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"mp_policy": torch.bfloat16},
            "mp_policy is a MixedPrecisionPolicy, found",
        ),
        (
            {"mp_policy": MixedPrecisionPolicy("bf16")},
            "param_dtype is a floating dtype",
        ),
        ({"offload_policy": True}, "offload_policy is a CPUOffloadPolicy or None, found True"),
    ],
)
def test_options_of_another_type(options, words):
    with shardwise.simulate(2), pytest.raises(ArgumentError, match=words):
        fully_shard(Layer(), mesh_of(dp=2), **options)


def test_modules_that_are_never_called():
    with shardwise.simulate(2):
        layers = torch.nn.ModuleList([Layer(), Layer()])
        for never_called in (layers, [layers, Layer()]):
            with pytest.raises(ArgumentError, match="a ModuleList is never called"):
                fully_shard(never_called, mesh_of(dp=2))
        assert fully_shard(list(layers), mesh_of(dp=2))


WAYS_TO_REPLACE = {
    "assigned": lambda layer: setattr(layer.up, "weight", nn.Parameter(torch.zeros(10, 8))),
    "none": lambda layer: setattr(layer.up, "weight", None),
    "deleted": lambda layer: delattr(layer.up, "weight"),
    "popped": lambda layer: layer.up._parameters.pop("weight"),
    "normed": lambda layer: nn.utils.parametrizations.weight_norm(layer.up),
    "loaded": lambda layer: layer.load_state_dict(Layer().state_dict(), assign=True),
    "called": lambda layer: torch.func.functional_call(
        layer, {"up.weight": torch.zeros(10, 8)}, (torch.ones(2, 8),)
    ),
}


@pytest.mark.parametrize("way", [None, copy.deepcopy], ids=["itself", "a copy"])
@pytest.mark.parametrize("name", WAYS_TO_REPLACE)
def test_a_parameter_cannot_be_replaced(name, way):
    """The module stays as it was, and trains on."""
    alone = Layer()
    with shardwise.simulate(2):
        layer = fully_shard(copy.deepcopy(alone), mesh_of(dp=2))
        if way is not None:
            layer = way(layer)
            layer(torch.ones(2, 8))
        held = layer.up.weight
        with pytest.raises((LayoutError, RuntimeError), match=r"'up.weight' is fully sharded, and"):
            WAYS_TO_REPLACE[name](layer)
        assert layer.up.weight is held
        layer(torch.ones(2, 8)).sum().backward()
        alone(torch.ones(2, 8)).sum().backward()
        assert_close(whole(held.grad), alone.up.weight.grad)


def test_a_parameter_that_was_replaced_behind_its_module():
    with shardwise.simulate(2):
        layer = fully_shard(Layer(), mesh_of(dp=2))
        layer.up._parameters.update(weight=nn.Parameter(torch.zeros(10, 8)))
        with pytest.raises(LayoutError, match=r"'up.weight' is fully sharded, and its module is g"):
            layer(torch.ones(2, 8))


@pytest.mark.parametrize("reshards", [True, False, None])
def test_a_step_between_forward_and_backward(reshards):
    with shardwise.simulate(2):
        layer = fully_shard(Layer(), mesh_of(dp=2), reshard_after_forward=reshards)
        loss = layer(torch.ones(2, 8)).sum()
        with torch.no_grad():
            layer.up.weight.mul_(2)
        with pytest.raises(LeafError, match="between forward and backward"):
            loss.backward()


@pytest.mark.parametrize("number", [3, -1])
def test_a_number_of_ranks_that_does_not_divide(number):
    with (
        shardwise.simulate(4),
        pytest.raises(LayoutError, match=f"reshard_after_forward={number} does not divide"),
    ):
        fully_shard(Layer(), mesh_of(dp=4), reshard_after_forward=number)


def test_an_axis_that_layers_are_split_along():
    with shardwise.simulate(2):
        mesh = mesh_of(tp=2)
        model = parallelize_module(Model(), mesh, PLAN)
        before = [type(p) for p in model.parameters()]
        with pytest.raises(LayoutError, match="cannot be a data axis"):
            fully_shard(model, mesh)
        assert [type(p) for p in model.parameters()] == before


def test_replicas_start_alike():
    with shardwise.simulate(2):
        layer = nn.Linear(2, 2)
        layer.weight = nn.Parameter(
            LocalTensor.per_rank(lambda rank: torch.full((2, 2), rank + 1.0))
        )
        fully_shard(layer, mesh_of(dp=2))
        assert whole(layer.weight).tolist() == [[1.0, 1.0], [1.0, 1.0]]
        assert layer.bias.placements != (Replicate(),)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 2, 0)])
def test_its_state_loads_into_a_weight_that_shard_module_has_split(order):
    with shardwise.simulate(4):
        model = fully_shard(nn.Linear(8, 12, bias=False), mesh_of(dp=4))
        other = nn.Linear(8, 12, bias=False)
        spec = ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/cpu" for rank in order])
        shard_parameter(other, "weight", spec)
        other.load_state_dict(model.state_dict())
        assert torch.equal(whole(other.weight), whole(model.weight))
