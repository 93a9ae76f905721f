"""torchrec's names on shardwise; the same expressions in torchrec, where it is installed."""

import importlib.util

import pytest
import torch
from torch import nn

import shardwise
from shardwise import ArgumentError, BatchError, UnsupportedError, checkpoint
from shardwise.embedding import Adam, EmbeddingBagCollection, Jagged, RowWiseAdagrad, Table
from shardwise.interop import torchrec as names
from shardwise.shard import ShardedTensor

KEYS = ["user", "item"]
IDS, LENGTHS = torch.tensor([7, 8, 9, 1, 3]), torch.tensor([1, 0, 1, 3])
WEIGHTS = torch.arange(5.0)

needs_torchrec = pytest.mark.skipif(
    not importlib.util.find_spec("torchrec"), reason="torchrec is not installed"
)


def said(api):
    """What programs read of batches and outputs, by torchrec's names."""
    kjt = api.KeyedJaggedTensor(keys=KEYS, values=IDS, lengths=LENGTHS, weights=WEIGHTS)
    yield kjt.keys(), kjt.values(), kjt.lengths(), kjt.offsets(), kjt.weights()
    yield kjt.stride(), kjt.stride_per_key(), kjt.length_per_key(), kjt.offset_per_key()
    yield kjt["item"].to_dense(), kjt["item"].to_dense_weights(), kjt["user"].lengths()
    yield list(kjt.to_dict())
    yield kjt["item"].values(), kjt["item"].weights(), kjt["item"].lengths()
    turned = kjt.permute([1, 0])
    yield turned.keys(), turned.values(), turned.lengths(), turned.weights()
    for part in kjt.split([1, 1]):
        yield part.keys(), part.values(), part.lengths()
    by_offsets = api.KeyedJaggedTensor.from_offsets_sync(
        KEYS, IDS, offsets=torch.tensor([0, 1, 1, 2, 5])
    )
    yield by_offsets.lengths(), by_offsets.weights_or_none(), by_offsets.to("cpu").values()
    other = api.KeyedJaggedTensor.from_lengths_sync(["shop"], IDS[:2], torch.tensor([1, 1]))
    joined = api.KeyedJaggedTensor.concat([by_offsets, other])
    yield joined.keys(), joined.values(), joined.lengths()
    jagged = api.JaggedTensor.from_dense([IDS[:2], IDS[2:]])
    yield jagged.values(), jagged.lengths(), jagged.to_padded_dense(), jagged.offsets()
    yield jagged.to_padded_dense(2), jagged.to_padded_dense(4, padding_value=-1)
    square = torch.arange(6).view(2, 3)
    jagged = api.JaggedTensor.from_dense_lengths(square, lengths=torch.tensor([1, 3]))
    yield jagged.values(), jagged.to_dense()
    again = api.KeyedJaggedTensor.from_jt_dict({"a": jagged, "b": jagged})
    yield again.keys(), again.values(), again.lengths(), again.stride_per_key()
    parts = [torch.arange(4.0).view(2, 2), torch.ones(2, 3)]
    pooled = api.KeyedTensor.from_tensor_list(KEYS, parts)
    yield pooled.keys(), pooled.values(), pooled.length_per_key(), pooled.offset_per_key()
    yield pooled["item"], list(pooled.to_dict().values()), pooled.key_dim()
    same = api.KeyedTensor(KEYS, [2, 3], torch.cat(parts, 1))
    yield same["user"], api.KeyedTensor.regroup([same], [["item"], ["item", "user"]])


@pytest.mark.parametrize("types", [None, ["row_wise"]])
def test_the_planner_keeps_the_kernel_of_a_constraint(types):
    with shardwise.simulate(2):
        model = Model(names.EmbeddingBagCollection(tables=bag_configs()))
        dense = names.ParameterConstraints(sharding_types=types, compute_kernels=["dense"])
        constraints = dict.fromkeys(("t_user", "t_item"), dense)
        planner = names.EmbeddingShardingPlanner(constraints=constraints, batch_size=4)
        plan = planner.collective_plan(model)
        assert {each.compute_kernel for each in plan.plan["tables"].values()} == {"dense"}
        parallel = names.DistributedModelParallel(model, plan=plan, device="cpu")
        parallel(batches()[0]).mean().backward()
        assert all(table.grad is not None for table in model.tables.parameters())
        constraints["t_user"] = names.ParameterConstraints(types, ["fused_uvm"])
        planner = names.EmbeddingShardingPlanner(constraints=constraints, batch_size=4)
        with pytest.raises(UnsupportedError, match="fused_uvm"):
            planner.plan(model)


def test_keys_may_be_left_out_and_repeated():
    kjt = names.KeyedJaggedTensor(keys=KEYS, values=IDS, lengths=LENGTHS, weights=WEIGHTS)
    nothing, everything = kjt.split([0, 2])
    assert (nothing.keys(), nothing.stride(), nothing.values().tolist()) == ([], 2, [])
    assert nothing.weights().dtype is WEIGHTS.dtype
    assert torch.equal(everything.values(), IDS)
    twice = kjt.permute([1, 1])
    assert (twice.keys(), twice.length_per_key()) == (["item", "item"], [4, 4])
    with pytest.raises(ArgumentError, match="asks for 3 keys of a batch that has 2"):
        kjt.split([2, 1])


def test_what_batches_and_outputs_say():
    found = list(said(names))
    assert found[1] == (2, [2, 2], [1, 4], [0, 1, 5])
    assert found[2][0][1].tolist() == [9, 1, 3]
    assert found[-4][0] == ["a", "b"]


@needs_torchrec
@pytest.mark.filterwarnings("ignore")
def test_torchrec_says_the_same():
    import torchrec

    for one, other in zip(said(names), said(torchrec), strict=True):
        assert repr(one) == repr(other)


def bag_configs(**options):
    return [
        names.EmbeddingBagConfig(
            num_embeddings=8, embedding_dim=4, name=f"t_{key}", feature_names=[key], **options
        )
        for key in KEYS
    ]


def batches():
    """Each rank's own batch, and all of them as one."""
    drawn = []
    for rank in range(2):
        draw = torch.Generator().manual_seed(rank)
        drawn.append(torch.randint(8, (6,), generator=draw))
    values = shardwise.LocalTensor.per_rank(lambda rank: drawn[rank])
    mine = names.KeyedJaggedTensor(KEYS, values, lengths=torch.tensor([1, 2, 3, 0]))
    bags = {"user": [[0], [1, 2]], "item": [[3, 4, 5], []]}
    lists = {
        key: [[int(ids[i]) for i in bag] for ids in drawn for bag in found]
        for key, found in bags.items()
    }
    return mine, Jagged.from_lists(lists)


class Model(nn.Module):
    def __init__(self, tables):
        super().__init__()
        self.tables = tables
        self.top = nn.Linear(8, 1, device=tables.device)

    def forward(self, batch):
        return self.top(self.tables(batch).values()).square().mean()


class Plain(Model):
    """The same on one device, with this package's own names."""

    def __init__(self, optimizer):
        nn.Module.__init__(self)
        tables = [Table(f"t_{key}", 8, 4, features=(key,)) for key in KEYS]
        self.tables = EmbeddingBagCollection(tables, output="tensor", optimizer=optimizer)
        self.top = nn.Linear(8, 1)

    def forward(self, batch):
        return self.top(self.tables(batch)).square().mean()


def plan_of(model, **kinds):
    plan = names.construct_module_sharding_plan(model.tables, kinds, world_size=2)
    return names.ShardingPlan(plan={"tables": plan})


def trained(model, batch, optimizer):
    losses = []
    for _ in range(3):
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses


@pytest.mark.parametrize(
    ("fused", "ours"),
    [
        (
            {"optimizer": names.EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1},
            RowWiseAdagrad(0.1),
        ),
        (
            {"optimizer": names.EmbOptimType.ADAM, "learning_rate": 0.1, "beta1": 0.8},
            Adam(0.1, betas=(0.8, 0.999)),
        ),
    ],
)
def test_a_model_trains_as_on_one_device(fused, ours):
    with shardwise.simulate(2):
        torch.manual_seed(0)
        plain = Plain(ours)
        model = Model(names.EmbeddingBagCollection(tables=bag_configs()))
        model.load_state_dict(plain.state_dict())
        kinds = {"t_user": names.row_wise(), "t_item": names.table_wise(rank=1)}
        parallel = names.DistributedModelParallel(
            model,
            plan=plan_of(model, **kinds),
            sharders=[names.EmbeddingBagCollectionSharder(fused_params=fused)],
            device="cpu",
        )
        dense = dict(names.in_backward_optimizer_filter(parallel.named_parameters()))
        assert list(dense) == ["top.weight", "top.bias"]
        wrapped = names.KeyedOptimizerWrapper(dense, lambda p: torch.optim.SGD(p, lr=0.1))
        optimizer = names.CombinedOptimizer([parallel.fused_optimizer, wrapped])
        mine, whole = batches()
        found = trained(parallel, mine, optimizer)
        expected = trained(plain, whole, torch.optim.SGD(plain.top.parameters(), lr=0.1))
        for one, other in zip(found, expected, strict=True):
            mean = (one.on_rank(0) + one.on_rank(1)) / 2
            torch.testing.assert_close(mean, other)
        for name, value in plain.state_dict().items():
            here = parallel.state_dict()[name]
            here = here.full_tensor() if isinstance(here, ShardedTensor) else here
            torch.testing.assert_close(here, value)


def test_state_dicts_have_shards_and_load(tmp_path):
    with shardwise.simulate(2):
        model = Model(names.EmbeddingBagCollection(tables=bag_configs()))
        kinds = {"t_user": names.column_wise(ranks=[0, 1]), "t_item": names.row_wise()}
        parallel = names.DistributedModelParallel(model, plan=plan_of(model, **kinds), device="cpu")
        state = parallel.state_dict()
        assert list(state)[:2] == [f"tables.embedding_bags.t_{key}.weight" for key in KEYS]
        for shard in state["tables.embedding_bags.t_user.weight"].local_shards():
            shard.tensor.fill_(shard.metadata.shard_offsets[1])
        expected = torch.tensor([0.0, 0.0, 2.0, 2.0]).expand(8, 4)
        weight = model.tables.parameter("t_user")
        assert torch.equal(weight.detach().full_tensor(), expected)
        kept = {name: value.clone() for name, value in state.items()}
        nn.init.zeros_(weight)
        parallel.load_state_dict(kept)
        assert torch.equal(weight.detach().full_tensor(), expected)
        checkpoint.save({"model": parallel}, tmp_path / "saved")
        nn.init.zeros_(weight)
        checkpoint.load({"model": parallel}, tmp_path / "saved")
        assert torch.equal(weight.detach().full_tensor(), expected)


def test_dense_tables_have_gradients():
    with shardwise.simulate(2):
        model = Model(names.EmbeddingBagCollection(tables=bag_configs()))
        kinds = {"t_user": names.row_wise(compute_kernel="dense"), "t_item": names.data_parallel()}
        parallel = names.DistributedModelParallel(model, plan=plan_of(model, **kinds), device="cpu")
        parallel(batches()[0]).backward()
        assert all(p.grad is not None for p in parallel.parameters())
        assert not parallel.fused_optimizer.optimizers


def test_without_a_plan_the_planner_finds_one():
    with shardwise.simulate(2):
        tables = names.EmbeddingBagCollection(tables=bag_configs(), device="meta")
        model = Model(tables)
        names.apply_optimizer_in_backward(torch.optim.Adagrad, tables.parameters(), {"lr": 0.1})
        constraints = {"t_user": names.ParameterConstraints(sharding_types=["row_wise"])}
        planner = names.EmbeddingShardingPlanner(
            names.Topology(world_size=2, compute_device="cpu"), constraints=constraints
        )
        plan = planner.collective_plan(model, names.get_default_sharders())
        assert plan.plan["tables"]["t_user"].sharding_type == "row_wise"
        plan.plan["tables"]["t_item"] = names.ParameterSharding("data_parallel", "fused")
        parallel = names.DistributedModelParallel(model, plan=plan, device="cpu")
        assert model.tables.optimizer.settings.lr == 0.1
        assert not model.top.weight.is_meta
        parallel(batches()[0]).backward()
        names.DistributedModelParallel(Model(names.EmbeddingBagCollection(bag_configs())))


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam], ids=lambda o: o.__name__
)
def test_tables_are_updated_in_backward_on_one_device_too(optimizer):
    batch = names.KeyedJaggedTensor(KEYS, IDS % 8, lengths=LENGTHS)

    def train(shard):
        torch.manual_seed(0)
        model = Model(names.EmbeddingBagCollection(tables=bag_configs()))
        names.apply_optimizer_in_backward(optimizer, model.tables.parameters(), {"lr": 0.1})
        before = model.tables.parameter("t_user").detach().clone()
        trained = names.DistributedModelParallel(model, device="cpu") if shard else model
        for _ in range(2):
            trained(batch).backward()
        assert all(p.grad is None for p in model.tables.parameters())
        after = model.tables.parameter("t_user").detach()
        return after.full_tensor().agreed() - before if shard else after - before

    with shardwise.simulate(2):
        sharded = train(True)
    assert sharded.any()
    torch.testing.assert_close(train(False), sharded)


def test_a_chosen_optimizer_is_left_out_where_tables_are_dense():
    with shardwise.simulate(2):
        model = Model(names.EmbeddingBagCollection(tables=bag_configs()))
        names.apply_optimizer_in_backward(torch.optim.SGD, model.tables.parameters(), {"lr": 0.1})
        model(names.KeyedJaggedTensor(KEYS, IDS % 8, lengths=LENGTHS)).backward()
        kinds = dict.fromkeys(("t_user", "t_item"), names.row_wise(compute_kernel="dense"))
        parallel = names.DistributedModelParallel(model, plan=plan_of(model, **kinds), device="cpu")
        parallel(batches()[0]).backward()
        assert all(p.grad is not None for p in model.tables.parameters())


def test_tables_of_one_collection_have_one_optimizer():
    model = Model(names.EmbeddingBagCollection(tables=bag_configs()))
    first, second = model.tables.parameters()
    names.apply_optimizer_in_backward(torch.optim.SGD, [first], {"lr": 0.1})
    names.apply_optimizer_in_backward(torch.optim.SGD, [second], {"lr": 0.2})
    with pytest.raises(UnsupportedError, match="make a collection for each"):
        model(names.KeyedJaggedTensor(KEYS, IDS % 8, lengths=LENGTHS))


def test_rows_that_are_not_pooled():
    with shardwise.simulate(2):
        configs = [names.EmbeddingConfig(8, 4, "word", feature_names=["word"])]
        model = nn.Sequential(names.EmbeddingCollection(tables=configs))
        plan = names.construct_module_sharding_plan(
            model[0], {"word": names.row_wise()}, world_size=2
        )
        parallel = names.DistributedModelParallel(
            model, plan=names.ShardingPlan(plan={"0": plan}), device="cpu"
        )
        batch = names.KeyedJaggedTensor(["word"], IDS[:1], lengths=torch.tensor([1, 0]))
        found = parallel(batch)["word"]
        assert isinstance(found, names.JaggedTensor)
        assert found.lengths().tolist() == [1, 0]
        assert found.values().shape == (1, 4)


def test_values_at_the_start():
    tables = names.EmbeddingBagCollection(bag_configs(init_fn=lambda w: w.fill_(3.0)))
    assert tables.parameter("t_user").eq(3).all()
    tables = names.EmbeddingBagCollection(bag_configs(weight_init_min=2.0, weight_init_max=2.5))
    assert tables.parameter("t_item").ge(2).all()
    half = names.EmbeddingBagCollection(bag_configs(data_type=names.DataType.FP16))
    assert half.parameter("t_item").dtype == torch.float16


def test_weights_of_ids_are_used_when_asked_for():
    kjt = names.KeyedJaggedTensor(KEYS, IDS % 8, weights=WEIGHTS, lengths=LENGTHS)
    torch.manual_seed(0)
    plain = names.EmbeddingBagCollection(bag_configs())
    torch.manual_seed(0)
    weighted = names.EmbeddingBagCollection(bag_configs(), is_weighted=True)
    row = plain.parameter("t_user")[7].detach()
    assert torch.equal(plain(kjt)["user"][0].detach(), row)
    assert torch.equal(weighted(kjt)["user"][0].detach(), row * 0)
    bare = names.KeyedJaggedTensor(KEYS, IDS % 8, lengths=LENGTHS)
    with pytest.raises(BatchError, match="weighted, the batch has none"):
        weighted(bare)


def test_what_is_not_there_says_what_to_write():
    with pytest.raises(UnsupportedError, match="table_row_wise"):
        names.grid_shard([0])
    with pytest.raises(UnsupportedError, match="'fused', or 'dense'"):
        names.row_wise(compute_kernel="fused_uvm")
    with pytest.raises(UnsupportedError, match="exchange_dtype"):
        names.EmbeddingBagCollectionSharder(qcomm_codecs_registry={})
    with pytest.raises(UnsupportedError, match="cache_load_factor: leave them out"):
        names.sharding.fused_optimizer({"cache_load_factor": 0.1})
    with pytest.raises(UnsupportedError, match="found LBFGS"):
        names.apply_optimizer_in_backward(torch.optim.LBFGS, [], {})
    with pytest.raises(UnsupportedError, match="index_select"):
        names.KeyedJaggedTensor(KEYS, IDS, lengths=LENGTHS, inverse_indices=(KEYS, IDS))
    with pytest.raises(ArgumentError, match="EmbeddingCollection"):
        names.EmbeddingBagCollection(bag_configs(pooling=names.PoolingType.NONE))
    with pytest.raises(UnsupportedError, match="planner"):
        names.EmbeddingShardingPlanner(proposer=object())
    with shardwise.simulate(2):
        model = Model(names.EmbeddingBagCollection(bag_configs()))
        mixed = plan_of(model, t_user=names.row_wise(), t_item=names.data_parallel())
        with pytest.raises(UnsupportedError, match=r"\['t_item'\] are dense .* two collections"):
            names.DistributedModelParallel(model, plan=mixed, device="cpu")
        with pytest.raises(ArgumentError, match=r"names \['t_user'\], the collection has"):
            plan_of(model, t_user=names.row_wise())
        elsewhere = names.ShardingPlan(plan={"ebc": {}})
        with pytest.raises(ArgumentError, match=r"names \['ebc'\].* at \['tables'\]"):
            names.DistributedModelParallel(model, plan=elsewhere, device="cpu")
