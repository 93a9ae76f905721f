"""Predicted bytes are those that a simulated step counts."""

import pytest
import torch

import shardwise
from shardwise.debug import CommDebugMode, events
from shardwise.embedding import SGD, EmbeddingBagCollection, Jagged, Plan, RowWiseAdagrad, Table
from shardwise.planner import Constants, price, workload
from shardwise.planner.costs import Setting
from shardwise.planner.price import shard_groups
from shardwise.simulation.local_tensor import LocalTensor

TABLES = [
    Table("user", 103, 16),
    Table("item", 64, 8, features=("seen", "bought")),
    Table("shop", 40, 12),
    Table("day", 7, 4),
]
BAGS, IDS = 6, 3
PLANS = {
    "table_wise": "table_wise",
    "row_wise": "row_wise",
    "column_wise": {"*": {"kind": "column_wise", "ranks": [0, 1]}},
    "mixed": {
        "user": {"kind": "grid", "ranks": [0, 1]},
        "item": "row_wise",
        "shop": {"kind": "column_wise", "ranks": [1]},
        "day": "data_parallel",
    },
}


def batch_of(num_ranks):
    """Ids that are spread evenly over the rows of each table, all ranks together."""
    total = num_ranks * BAGS * IDS
    values = []
    for table in TABLES:
        for _ in table.features:
            ids = torch.arange(total) * table.num_embeddings // total
            values.append(ids.view(num_ranks, -1))
    columns = [torch.cat([v[rank] for v in values]) for rank in range(num_ranks)]
    features = [f for t in TABLES for f in t.features]
    ids = LocalTensor.per_rank(lambda rank: columns[rank])
    return Jagged(features, ids, lengths=torch.full((len(features) * BAGS,), IDS))


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_predicted_bytes_are_counted_bytes(name, num_ranks, monkeypatch):
    sizes = []

    def all_parts(tensor):
        parts = tensor._parts if isinstance(tensor, LocalTensor) else [tensor]
        spread = len(parts) if len(parts) > 1 else 1
        own = [part.numel() * part.element_size() for part in parts]
        sizes.append(sum(own) if spread > 1 else own[0] * num_ranks)
        return own[0]

    monkeypatch.setattr(events, "_num_bytes", all_parts)
    plan = Plan.of(PLANS[name])
    with shardwise.simulate(num_ranks):
        mesh = shardwise.init_device_mesh("cpu", (num_ranks,))
        bags = EmbeddingBagCollection(TABLES, optimizer=SGD(0.1)).shard(mesh, plan)
        batch = batch_of(num_ranks)
        sizes.clear()
        with CommDebugMode():
            sum(rows.sum() for rows in bags(batch).values()).backward()
    work = workload(TABLES, batch=BAGS * num_ranks, ids_per_bag=IDS, repeated=0.0)
    setting = Setting(num_ranks, num_ranks, Constants.of("cpu"), "sgd")
    assert price(plan, work, setting).sent.sum() == pytest.approx(sum(sizes), rel=1e-12)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("num_ranks", [2, 16, 64])
def test_predicted_tables_are_those_held(name, num_ranks):
    plan = Plan.of(PLANS[name])
    work = workload(TABLES, batch=64)
    setting = Setting(num_ranks, num_ranks, Constants.of("cpu"), "rowwise_adagrad")
    priced = price(plan, work, setting)
    with shardwise.simulate(num_ranks):
        mesh = shardwise.init_device_mesh("cpu", (num_ranks,))
        bags = EmbeddingBagCollection(TABLES, optimizer=RowWiseAdagrad(0.1)).shard(mesh, plan)
        for rank in range(num_ranks):
            held = sum(p.to_local().on_rank(rank).numel() for p in bags.parameters())
            assert priced.tables[rank] == held * 4


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
@pytest.mark.parametrize("name", PLANS)
def test_shard_groups_are_the_cuts_of_a_plan(name, num_ranks):
    if num_ranks == 1 and name in ("column_wise", "mixed"):
        pytest.skip("names ranks that are not there")
    plan = Plan.of(PLANS[name])
    cuts = plan.cuts(TABLES, num_ranks)
    found = [[0] * num_ranks for _ in TABLES]
    for group in shard_groups(plan, TABLES, num_ranks):
        for rank in torch.arange(num_ranks)[group.ranks].tolist():
            found[group.table][rank] = group.size
    assert [tuple(each) for each in found] == [cut.sizes for cut in cuts]


def test_ten_thousand_ranks_in_seconds():
    tables = [Table(f"t{i}", 1_000_000 + i, 64) for i in range(200)]
    plan = Plan({"t1*": "row_wise", "*": {"kind": "grid", "ranks": list(range(64))}})
    setting = Setting(10_000, 8, Constants.of("cpu"))
    priced = price(plan, workload(tables, batch=1 << 20), setting)
    assert priced.memory.shape == (10_000,)
    assert priced.memory[0] > priced.memory[9_999] > 0
