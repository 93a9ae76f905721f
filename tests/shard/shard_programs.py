"""Programs with sharded tensors that run alike in both worlds."""

import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parity import through_file
from programs import mine
from shard_cases import chunks, stretches, tiles
from shard_models import BrokenOnRank, Collection, HalfAndHalf, Nested, Towers
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from shardwise.core.world import current_world
from shardwise.debug import CommDebugMode
from shardwise.errors import LayoutError
from shardwise.shard import (
    Shard,
    ShardedOptimizer,
    ShardedTensorMetadata,
    ShardingPlan,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
    full,
    init_from_local_shards,
    load_with_process_group,
    ones,
    randn,
    shard_module,
    shard_tensor,
    zeros,
)

SPECS = [
    chunks(0, 0, 1, 2, 3),
    chunks(0, 2, 0, 3),
    chunks(1, 3, 1, 0, 2),
    stretches(1, (11, 6), (1, 0, 4, 1)),
    tiles((11, 6)),
]


def seeded(rank):
    return torch.Generator().manual_seed(100 + rank)


def moves():
    """Every spec to every other; what each rank holds afterwards."""
    whole, found = torch.randn(11, 6), {}
    for a, source in enumerate(SPECS):
        st = shard_tensor(whole, source)
        found[f"{a} whole"] = st.full_tensor()
        for b, target in enumerate(SPECS):
            found[f"{a} to {b}"] = st.resharded(target)._local
    return found


def lookups(number, mode):
    st = shard_tensor(torch.randn(11, 6).requires_grad_(), SPECS[number])
    ids = mine(lambda rank: torch.randint(0, 11, (rank, 3), generator=seeded(rank)))
    rows = F.embedding(ids, st, max_norm=1.5)
    bags = F.embedding_bag(ids, st, mode=mode, padding_idx=2)
    (rows.sum() + bags.square().sum()).backward()
    return {"rows": rows, "bags": bags, "grad": st.grad._local, "table": st._local}


def weighted_bags(number):
    st = shard_tensor(torch.randn(11, 6).requires_grad_(), SPECS[number])
    lengths = [[2, 0, 3], [1], [0], [0, 4]]
    ids = mine(lambda rank: torch.randint(0, 11, (sum(lengths[rank]),), generator=seeded(rank)))
    offsets = mine(lambda rank: torch.tensor([0, *lengths[rank]]).cumsum(0))
    weights = mine(lambda rank: torch.randn(sum(lengths[rank]), generator=seeded(rank)))
    weights.requires_grad_()
    out = F.embedding_bag(
        ids, st, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
    )
    out.square().sum().backward()
    return {"out": out, "table grad": st.grad._local, "weights grad": weights.grad}


def training():
    """A few steps with the wrapper; the dense part is sharded too, so nothing is left to DDP."""
    model = Towers()
    plan = {
        "user.weight": chunks(0, 2, 0, 3, 1),
        "item.weight": chunks(1, 0, 1, 2, 3),
        "dense.weight": chunks(0, 1, 3),
        "dense.bias": chunks(0, 0, 1),
    }
    shard_module(model, ShardingPlan(plan))
    optimizer = ShardedOptimizer(dict(model.named_parameters()), torch.optim.AdamW, lr=0.05)
    found = {}
    for step in range(3):
        users = mine(
            lambda rank, s=step: torch.randint(0, 11, (rank + 1,), generator=seeded(rank + s))
        )
        items = mine(
            lambda rank, s=step: torch.randint(0, 9, (rank + 1, 2), generator=seeded(rank + s))
        )
        optimizer.zero_grad()
        loss = model(users, items).square().mean()
        loss.backward()
        optimizer.step()
        found[f"loss {step}"] = loss
    found |= {name: p.detach().full_tensor() for name, p in model.named_parameters()}
    return found


def sharders_and_outputs():
    model = Nested()
    outputs = {"head": chunks(1, 3, 0)}
    plan = ShardingPlan({"collection": HalfAndHalf()}, outputs, return_local_tensor=["head"])
    shard_module(model, plan)
    ids = mine(lambda rank: torch.randint(0, 10, (2, 2), generator=seeded(rank)))
    return {"out": model(ids)}


def pieces_of_ones_own():
    shards = []
    for rank in range(4):
        if _present(rank):
            piece = torch.full((2, 3), float(rank))
            shards.append(Shard.from_tensor_and_offsets(piece, [2 * rank, 0], rank))
    st = init_from_local_shards(shards, 8, 3)
    gathered = st.gather(2)
    assert (gathered is not None) == _present(2)
    return {"whole": st.full_tensor()}


def sparse_gradients():
    found = {}
    for dim in (0, 1):
        table = nn.Embedding(9, 6, sparse=True)
        shard_module(table, ShardingPlan({"weight": chunks(dim, 0, 1, 2, 3)}))
        optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
        for _ in range(2):
            ids = mine(lambda rank: torch.randint(0, 9, (rank, 2), generator=seeded(rank)))
            optimizer.zero_grad()
            table(ids).square().sum().backward()
            optimizer.step()
        found[f"dim {dim}"] = table.weight.detach().full_tensor()
    return found


def compiled():
    """Eager and compiled, in one graph, with batches of another size on each rank."""
    torch._dynamo.reset()
    model = Towers()
    model.item.sparse = True
    plan = {
        "user.weight": chunks(0, 1, 0),
        "item.weight": chunks(1, 0, 1),
        "dense.weight": chunks(1, 0, 1),
        "dense.bias": chunks(0, 1),
    }
    shard_module(model, ShardingPlan(plan))
    rank = dist.get_rank()
    fast, found_counts = torch.compile(model, backend="aot_eager", fullgraph=True), []
    for size in (rank + 2, 6 - rank, 4 * (rank == 1)):
        users = torch.randint(0, 11, (size,), generator=seeded(rank))
        items = torch.randint(0, 9, (size, 3), generator=seeded(rank))
        found, counts = [], []
        for run in (model, fast):
            model.zero_grad()
            with CommDebugMode() as comm:
                out = run(users, items)
                out.square().sum().backward()
            assert model.item.weight.grad.is_sparse
            found.append([out.detach(), *(p.grad._local.clone() for p in model.parameters())])
            found[-1].append(model.item.weight.grad._rows)
            counts.append(comm.get_total_counts())
        for eager, other in zip(*found, strict=True):
            torch.testing.assert_close(other, eager)
        found_counts.append(counts)
    users[: rank == 1] = 11
    with pytest.raises(IndexError, match="the ids of rank 1 run from"):
        fast(users, items)
    return found_counts


class TwoTables(nn.Module):
    """Lookups that do not depend on each other; the first is laid out."""

    def __init__(self):
        super().__init__()
        self.rows, self.bags = nn.Embedding(9, 6), nn.EmbeddingBag(9, 6)

    def forward(self, ids):
        rows = self.rows(ids).tanh() * 2
        return rows, rows.square().mean(), self.bags(ids.flatten()[:, None])


def laid_out(backend, local):
    """How many graphs a rank has compiled after batches of other sizes than those of others."""
    torch._dynamo.reset()
    tables = {"rows.weight": chunks(0, 0, 1), "bags.weight": chunks(1, 0, 1)}
    plan = ShardingPlan(tables, {"rows": chunks(1, 1, 0)}, ["rows"] if local else [])
    model, rank = shard_module(TwoTables(), plan), dist.get_rank()
    counter = CompileCounterWithBackend(backend)
    fast = torch.compile(model, backend=counter, fullgraph=True)
    for size in (5 + rank, 7 - rank, 4 * (rank == 1)):
        ids = torch.randint(0, 9, (size,), generator=seeded(rank))
        found = []
        for run in (model, fast, fast):
            model.zero_grad()
            with CommDebugMode() as comm:
                rows, loss, bags = run(ids)
                losses = [rows.square().sum(), bags.sum(), *([] if local else [loss])]
                torch.autograd.backward(losses)
            held = [getattr(x, "_local", x) for x in (rows.detach(), bags.detach())]
            held += [p.grad._local.clone() for p in model.parameters()]
            found.append((held, [(event.kind, event.num_bytes) for event in comm.events]))
        for held, events in found[1:]:
            torch.testing.assert_close(held, found[0][0])
            assert events == found[0][1]
    with pytest.raises(LayoutError, match="more than their first dim"):
        fast(torch.zeros(2, 2 + (rank == 1), dtype=torch.int64))
    return counter.frame_count


def making_and_keeping():
    """Factories, initialisation, comparison, gathering, and files of one's own pieces."""
    found = {}
    for number, spec in enumerate(SPECS):
        torch.manual_seed(3)
        drawn = randn(spec, 11, 6)
        found[f"{number} drawn"] = drawn._local
        found[f"{number} initialised"] = nn.init.kaiming_uniform_(zeros(spec, 11, 6))._local
        assert torch.equal(drawn, drawn.clone().resharded(SPECS[0]))
        assert not torch.allclose(drawn, full(spec, [11, 6], 0.5))
        out = torch.empty(11, 6, dtype=torch.float64) if _present(2) else None
        gathered = drawn.to(torch.float64).gather(2, out)
        assert gathered is out
        if out is not None:
            torch.manual_seed(3)
            assert torch.equal(out, torch.randn(11, 6).double())
        loaded = through_file({"drawn": drawn}, weights_only=True)["drawn"]
        assert loaded.sharding_spec() == spec
        assert torch.equal(loaded, drawn)
    return found


def state_of_another_plan():
    """Parameters and optimizer state, from one plan to another."""
    torch.manual_seed(1)
    models = [nn.EmbeddingBag(9, 6, max_norm=1.0, mode="max") for _ in range(2)]
    optimizers = []
    for model, spec in zip(models, (chunks(0, 3, 1, 0), chunks(1, 0, 1, 2, 3)), strict=True):
        shard_module(model, ShardingPlan({"weight": spec}))
        named = dict(model.named_parameters())
        optimizers.append(ShardedOptimizer(named, torch.optim.Adam, lr=0.1))
    found = {}
    for step in range(4):
        which = step // 2
        if step == 2:
            models[1].load_state_dict(models[0].state_dict())
            optimizers[1].load_state_dict(optimizers[0].state_dict())
        ids = mine(lambda rank, s=step: torch.randint(0, 9, (rank, 2), generator=seeded(rank + s)))
        optimizers[which].zero_grad()
        models[which](ids).square().sum().backward()
        optimizers[which].step()
        found[f"step {step}"] = models[which].weight.detach().full_tensor()
    return found


class Halves(ShardingSpec):
    """A spec of ones own, with torch's two methods: dim 0 in two halves, the second one first."""

    def build_metadata(self, tensor_sizes, tensor_properties):
        cut = tensor_sizes[0] // 2
        boxes = [
            ShardMetadata([0, 0], [cut, tensor_sizes[1]], "rank:1/cpu"),
            ShardMetadata([cut, 0], [tensor_sizes[0] - cut, tensor_sizes[1]], "rank:0/cpu"),
        ]
        return ShardedTensorMetadata(boxes, tensor_sizes, tensor_properties)

    def shard(self, tensor, src_rank=0, process_group=None):
        made = self.build_metadata(tensor.size(), TensorProperties.create_from_tensor(tensor))
        shards = [
            Shard(tensor[box.box.slices].clone(), box)
            for box in made.shards_metadata
            if _present(box.placement.rank())
        ]
        return init_from_local_shards(shards, tensor.size(), process_group=process_group)

    def __eq__(self, other):
        return type(other) is type(self)

    def __hash__(self):
        return hash(type(self))


def a_spec_of_ones_own():
    """It has the repr of any object, an address that differs between ranks."""
    whole = torch.arange(10.0).view(5, 2)
    st = shard_tensor(whole, Halves())
    layer = shard_module(nn.Linear(2, 5), ShardingPlan({"weight": Halves()}))
    return {
        "shards": st._local,
        "whole": st.full_tensor(),
        "made": ones(Halves(), 3, 2)._local,
        "weight": layer.weight.detach()._local,
    }


def in_checkpoints_of_torch(folder):
    """Every spec saved, and loaded into every other."""
    whole = torch.arange(66.0).view(11, 6)
    for number, spec in enumerate(SPECS):
        dcp.save({"w": shard_tensor(whole, spec)}, checkpoint_id=f"{folder}/{number}")
        for target in SPECS:
            st = zeros(target, 11, 6)
            dcp.load({"w": st}, checkpoint_id=f"{folder}/{number}")
            assert torch.equal(st, shard_tensor(whole, target)), f"{spec} to {target}"


def _present(rank):
    return current_world().simulated or dist.get_rank() == rank


def on_a_group():
    """Ranks 0 and 2 shard among themselves."""
    group, whole = dist.new_group([0, 2]), torch.arange(10.0).view(5, 2)
    st = shard_tensor(whole, chunks(0, 2, 0), 1, process_group=group)
    made = zeros(chunks(0, 2, 0), 5, 2, process_group=group)
    assert tuple((st + made).shape) == (5, 2)
    assert len(made.metadata().shards_metadata) == 2
    if not (_present(0) or _present(2)):
        assert st.local_shards() == (st + made).reshard(chunks(1, 0, 2)).local_shards() == []
        return
    gathered = st.gather(0)
    assert gathered is None or torch.equal(gathered, whole)
    assert torch.equal(F.embedding(torch.tensor([4, 0]), st), whole[[4, 0]])
    with load_with_process_group(group):
        loaded = pickle.loads(pickle.dumps(st))
    assert torch.equal(loaded, st)
    assert loaded.process_group.size() == 2


# -- bad input -------------------------------------------------------------------------------------


def disagreeing_specs():
    ranks = (0, 1) if dist.get_rank() == 2 else (1, 0)
    shard_module(Collection(), ShardingPlan({"tables.t0.weight": chunks(0, *ranks)}))


def disagreeing_sharders():
    ranks = (3, 2, 1, 0) if dist.get_rank() == 2 else (0, 1, 2, 3)
    shard_module(Nested(), ShardingPlan({"collection": HalfAndHalf(ranks)}))


def disagreeing_shapes():
    rows = 12 if dist.get_rank() == 1 else 11
    shard_module(nn.Embedding(rows, 4), ShardingPlan({"weight": chunks(0, 0, 1)}))


def one_rank_with_a_wrong_path():
    name = "wieght" if dist.get_rank() == 3 else "weight"
    shard_module(nn.Embedding(11, 4), ShardingPlan({name: chunks(0, 0, 1)}))


def one_rank_with_an_empty_plan():
    plan = {} if dist.get_rank() == 0 else {"weight": chunks(0, 0, 1)}
    shard_module(nn.Embedding(11, 4), ShardingPlan(plan))


def one_rank_whose_sharder_fails():
    shard_module(Nested(), ShardingPlan({"collection": BrokenOnRank(1, late=False)}))


def one_rank_whose_sharder_fails_late():
    shard_module(Nested(), ShardingPlan({"collection": BrokenOnRank(1, late=True)}))


def conflict_on_all_ranks():
    plan = {"collection": HalfAndHalf(), "collection.tables.t0.weight": chunks(0, 0)}
    shard_module(Nested(), ShardingPlan(plan))


def one_rank_with_bad_offsets():
    st = shard_tensor(torch.randn(11, 6), chunks(0, 0, 1, 2, 3))
    offsets = [0, 9] if dist.get_rank() == 1 else [0, 1]
    F.embedding_bag(torch.tensor([1, 2, 3]), st, torch.tensor(offsets))


def one_rank_with_a_bad_id():
    st = shard_tensor(torch.randn(11, 6), chunks(1, 0, 1, 2, 3))
    F.embedding(torch.tensor([1, 11 if dist.get_rank() == 3 else 2]), st)


def one_rank_without_a_batch():
    st = shard_tensor(torch.randn(11, 6), chunks(0, 0, 1, 2, 3))
    F.embedding(None if dist.get_rank() == 2 else torch.tensor([1]), st)


def disagreeing_sources():
    shard_tensor(torch.ones(8), chunks(0, 0, 1), src_rank=dist.get_rank() % 2)


def pieces_of_which_some_require_grad():
    values = torch.ones(2, requires_grad=dist.get_rank() == 1)
    piece = Shard.from_tensor_and_offsets(values, [2 * dist.get_rank()], dist.get_rank())
    init_from_local_shards([piece], 8)


def one_rank_with_pieces_that_overlap():
    start = 0 if dist.get_rank() == 1 else 2 * dist.get_rank()
    piece = Shard.from_tensor_and_offsets(torch.ones(2), [start], dist.get_rank())
    init_from_local_shards([piece], 8)


def sum_over_ranks():
    """Whether the processes still understand each other."""
    x = torch.tensor([dist.get_rank()])
    dist.all_reduce(x)
    return x.item()


def input_that_trains_on_some_ranks(dim, frozen):
    """In four processes: the gradients of a linear layer whose input is constant on ranks 1, 2."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 5)
    weight = layer.weight.detach().clone()
    layer.requires_grad_(not frozen)
    shard_module(layer, ShardingPlan({"weight": chunks(dim, 0, 1, 2, 3)}))
    rank = torch.distributed.get_rank()
    x = torch.ones(rank + 1, 6, requires_grad=rank in (0, 3))
    layer(x).sum().backward()
    if rank in (0, 3):
        torch.testing.assert_close(x.grad, weight.sum(0).expand(rank + 1, 6))
    if not frozen:
        whole = layer.weight.grad.full_tensor()
        torch.testing.assert_close(whole, torch.full((5, 6), 10 / 4))


def layer_that_trains_on_one_rank(dim, trained):
    """In two processes: the gradients of a linear layer that rank 1 alone wants."""
    layer, last = nn.Linear(6, 5), dist.get_rank() == 1
    spec = {"weight": chunks(dim, 0, 1), "bias": chunks(0, 1, 0)}
    shard_module(layer, ShardingPlan(spec)).requires_grad_(requires_grad=False)
    layer.get_parameter(trained).requires_grad_(last)
    layer(torch.ones(3, 6)).sum().backward()
    for parameter in layer.parameters():
        if last and parameter is layer.get_parameter(trained):
            mine = parameter.grad.local_tensor()
            torch.testing.assert_close(mine, torch.full_like(mine, 3))
        else:
            assert parameter.grad is None


def weights_that_train_on_some_ranks(dim):
    """In four processes: the gradients of weights of ids, which rank 2 has, of a frozen table."""
    torch.manual_seed(0)
    table = nn.EmbeddingBag(7, 6, mode="sum").requires_grad_(requires_grad=False)
    rows = table.weight.clone()
    shard_module(table, ShardingPlan({"weight": chunks(dim, 0, 1, 2, 3)}))
    ids, weights = torch.tensor([[1, 4], [6, 0]]), None
    if dist.get_rank() == 2:
        weights = torch.ones(2, 2, requires_grad=True)
    table(ids, per_sample_weights=weights).sum().backward()
    if weights is not None:
        torch.testing.assert_close(weights.grad, rows[ids].sum(2))


#: Bags of a sharded module where only rank 1 trains something: options, and whether that is the
#: table or weights of ids.
TRAINED_ALONE = {
    "table, sum": ({"mode": "sum"}, "table"),
    "table, max": ({"mode": "max"}, "table"),
    "table, by frequency": ({"mode": "sum", "scale_grad_by_freq": True}, "table"),
    "table, padding and max_norm": ({"mode": "sum", "padding_idx": 1, "max_norm": 1.0}, "table"),
    "weights, by frequency": ({"mode": "sum", "scale_grad_by_freq": True}, "weights"),
    "weights, padding and max_norm": (
        {"mode": "sum", "padding_idx": 1, "max_norm": 1.0},
        "weights",
    ),
}


def bags_that_train_on_one_rank(dim, name):
    """In two processes: the gradients that rank 1 alone wants."""
    options, what = TRAINED_ALONE[name]
    torch.manual_seed(0)
    ids, last = torch.tensor([[1, 4], [6, 4]]), dist.get_rank() == 1
    weights = torch.full((2, 2), 0.5) if what == "weights" else None
    alone, module = (nn.EmbeddingBag(7, 6, **options).requires_grad_(False) for _ in range(2))
    module.load_state_dict(alone.state_dict())
    shard_module(module, ShardingPlan({"weight": chunks(dim, 0, 1)}))
    own = None if weights is None else weights.clone()
    if what == "table":
        alone.weight.requires_grad_()
        module.weight.requires_grad_(last)
    else:
        weights.requires_grad_()
        own.requires_grad_(last)
    if what == "table" and "scale_grad_by_freq" in options:  # torch's bags use another row's count
        F.embedding(ids, alone.weight, scale_grad_by_freq=True).sum().backward()
    else:
        alone(ids, per_sample_weights=weights).sum().backward()
    module(ids, per_sample_weights=own).sum().backward()
    if not last:
        return
    if what == "weights":
        torch.testing.assert_close(own.grad, weights.grad)
        return
    found, expected = module.weight.grad._local, alone.weight.grad
    torch.testing.assert_close(found, expected.tensor_split([4] if not dim else 2, dim)[1])


def _laid_out():
    """A layer without sharded weights, whose output is laid out over both ranks."""
    layer = nn.Linear(6, 6)
    spec = {"": chunks(0, 0, 1)}
    return shard_module(layer, ShardingPlan({}, output_plan=spec, return_local_tensor=[""]))


def _sharded(layer):
    return shard_module(layer, ShardingPlan({"weight": chunks(0, 0, 1)}))


#: Modules whose backward needs all ranks, and an input of each.
NEED_ALL_RANKS = {
    "embedding": (lambda: _sharded(nn.Embedding(7, 6)), torch.tensor([1, 6])),
    "bags": (lambda: _sharded(nn.EmbeddingBag(7, 6, mode="sum")), torch.tensor([[1, 6]])),
    "max": (lambda: _sharded(nn.EmbeddingBag(7, 6, mode="max")), torch.tensor([[1, 6]])),
    "linear": (lambda: _sharded(nn.Linear(6, 5)), torch.ones(2, 6)),
    "output": (_laid_out, torch.ones(2, 6)),
}


def without_backward_on_one_rank(name, how, compiled):
    """In two processes, rank 0 records no backward, and rank 1 does."""
    torch._dynamo.reset()
    make, given = NEED_ALL_RANKS[name]
    module, first = make(), dist.get_rank() == 0
    if how == "frozen":
        module.requires_grad_(not first)
    run = torch.compile(module, backend="aot_eager") if compiled else module
    with torch.set_grad_enabled(how == "frozen" or not first):
        run(given).sum().backward()


def output_that_trains_on_one_rank():
    """In two processes: the gradients of a layer that rank 1 alone trains, laid out over both."""
    module, last = _laid_out(), dist.get_rank() == 1
    module.requires_grad_(last)
    module(torch.ones(2, 6)).sum().backward()
    if last:
        torch.testing.assert_close(module.bias.grad, torch.full((6,), 2.0))
    else:
        assert module.bias.grad is None
