"""Predicted bytes are those that a simulated step counts."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.debug import CommDebugMode, events
from shardwise.embedding import (
    SGD,
    EmbeddingBagCollection,
    EmbeddingCollection,
    Jagged,
    Plan,
    RowWiseAdagrad,
    Table,
)
from shardwise.planner import Constants, price, workload
from shardwise.planner import plan as plan_tables
from shardwise.planner.costs import Kernel, Setting
from shardwise.planner.price import shard_groups
from shardwise.planner.workload import with_sample
from shardwise.simulation.local_tensor import LocalTensor

#: With more rows than a batch has ids, so that none repeat.
TABLES = [
    Table("user", 3090, 16),
    Table("item", 1920, 8, features=("seen", "bought")),
    Table("shop", 1200, 12),
    Table("day", 450, 4),
]
BAGS = 6
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


def batch_of(num_ranks, ids_per_bag):
    """Ids that are spread evenly over the rows of each table, all ranks together."""
    total = num_ranks * BAGS * ids_per_bag
    values = []
    for table in TABLES:
        for number in range(len(table.features)):
            ids = torch.arange(total) * table.num_embeddings // total + number
            values.append(ids.view(num_ranks, -1))
    columns = [torch.cat([v[rank] for v in values]) for rank in range(num_ranks)]
    features = [f for t in TABLES for f in t.features]
    ids = LocalTensor.per_rank(lambda rank: columns[rank])
    return Jagged(features, ids, lengths=torch.full((len(features) * BAGS,), ids_per_bag))


@pytest.fixture
def sizes(monkeypatch):
    """The bytes of every collective, of all ranks together."""
    found = []

    def all_parts(tensor):
        parts = tensor._parts if isinstance(tensor, LocalTensor) else [tensor]
        own = [part.numel() * part.element_size() for part in parts]
        found.append(sum(own) if len(parts) > 1 else own[0] * dist.get_world_size())
        return own[0]

    monkeypatch.setattr(events, "_num_bytes", all_parts)
    return found


# With one id per bag, tables that are split by rows exchange ids and rows instead of sums.
@pytest.mark.parametrize(
    ("name", "num_ranks", "ids_per_bag", "dtype"),
    [*itertools.product(PLANS, (2, 4, 8), (1, 3), (None, torch.bfloat16)), ("mixed", 64, 1, None)],
)
def test_predicted_bytes_are_counted_bytes(name, num_ranks, ids_per_bag, dtype, sizes):
    plan = Plan(Plan.of(PLANS[name]).entries, exchange_dtype=dtype)
    with shardwise.simulate(num_ranks):
        mesh = shardwise.init_device_mesh("cpu", (num_ranks,))
        bags = EmbeddingBagCollection(TABLES, optimizer=SGD(0.1)).shard(mesh, plan)
        batch = batch_of(num_ranks, ids_per_bag)
        sizes.clear()
        with CommDebugMode():
            sum(rows.sum() for rows in bags(batch).values()).backward()
    work = workload(TABLES, batch=BAGS * num_ranks, ids_per_bag=ids_per_bag, repeated=0.0)
    setting = Setting(num_ranks, num_ranks, Constants.of("cpu"), "sgd")
    assert price(plan, work, setting).sent.sum() == pytest.approx(sum(sizes), rel=1e-12)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_predicted_bytes_of_squares_of_split_rows(num_ranks, sizes):
    plan = Plan.of(PLANS["column_wise"])
    with shardwise.simulate(num_ranks):
        mesh = shardwise.init_device_mesh("cpu", (num_ranks,))
        bags = EmbeddingBagCollection(TABLES, optimizer=RowWiseAdagrad(0.1)).shard(mesh, plan)
        batch = batch_of(num_ranks, 1)
        sizes.clear()
        with CommDebugMode():
            sum(rows.sum() for rows in bags(batch).values()).backward()
    work = workload(TABLES, batch=BAGS * num_ranks, ids_per_bag=1, repeated=0.0)
    setting = Setting(num_ranks, num_ranks, Constants.of("cpu"), "rowwise_adagrad")
    assert price(plan, work, setting).sent.sum() == pytest.approx(sum(sizes), rel=1e-12)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_predicted_bytes_of_lookups_that_are_not_pooled(name, num_ranks, sizes):
    plan = Plan.of(PLANS[name])
    with shardwise.simulate(num_ranks):
        mesh = shardwise.init_device_mesh("cpu", (num_ranks,))
        rows = EmbeddingCollection(TABLES, optimizer=SGD(0.1)).shard(mesh, plan)
        batch = batch_of(num_ranks, 3)
        sizes.clear()
        with CommDebugMode():
            sum(each.values.sum() for each in rows(batch).values()).backward()
    work = workload(TABLES, batch=BAGS * num_ranks, ids_per_bag=3, repeated=0.0, pooled=False)
    setting = Setting(num_ranks, num_ranks, Constants.of("cpu"), "sgd", pooled=False)
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


@pytest.mark.parametrize("entry", ["row_wise", {"kind": "grid", "ranks": [1, 3]}])
@pytest.mark.parametrize("pooled", [True, False])
def test_a_sample_says_which_rows_are_busy(entry, pooled, sizes):
    """All ids are in the first quarter of the rows, so one rank looks all of them up."""
    table, holders = Table("user", 1000, 16), [0, 1, 2, 3] if entry == "row_wise" else [1, 3]
    plan = Plan({"user": entry})
    lengths = torch.full((64,), 4)
    busy = Jagged(["user"], torch.arange(256) % 250, lengths=lengths)
    even = Jagged(["user"], torch.arange(256) * 997 % 1000, lengths=lengths)
    setting = Setting(4, 4, Constants.of("cpu"), "sgd", pooled=pooled)
    prices = {}
    for name, batch in (("busy", busy), ("even", even)):
        work = with_sample(workload([table], pooled=pooled), [batch], num_ranks=4)
        prices[name] = price(plan, work, setting)
    first, *others = holders
    assert prices["busy"].seconds[first] > prices["even"].seconds[first]
    for rank in others:
        assert prices["busy"].seconds[rank] < prices["even"].seconds[rank]
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cpu", (4,))
        make = EmbeddingBagCollection if pooled else EmbeddingCollection
        bags = make([table], optimizer=SGD(0.1)).shard(mesh, plan)
        own = [busy.values[64 * rank : 64 * rank + 64] for rank in range(4)]
        ids = LocalTensor.per_rank(lambda rank: own[rank])
        batch = Jagged(["user"], ids, lengths=torch.full((16,), 4))
        sizes.clear()
        with CommDebugMode():
            found = bags(batch)["user"]
            (found if pooled else found.values).sum().backward()
    assert prices["busy"].sent.sum() == pytest.approx(sum(sizes), rel=1e-9)


def test_plans_of_a_sample_have_a_bound_that_holds():
    tables = [Table(f"t{i}", 4000 + i, 32) for i in range(6)]
    values = torch.cat([torch.arange(512) ** 2 % 500 for _ in tables])
    names = [table.name for table in tables]
    sample = [Jagged(names, values, lengths=torch.full((64 * len(names),), 8))]
    found = plan_tables(tables, 4, sample=sample)
    assert found.work.uses[0].shares(4)[0] == pytest.approx(1.0)
    assert found.bound_s <= found.cost_s
    for kind in ("row_wise", "table_wise", "column_wise"):
        other = price(Plan({"*": kind}), found.work, found.setting)
        assert found.bound_s <= other.step_s * (1 + 1e-9)


def repeating(num_ranks, ids_per_bag, tables):
    """Ids of which some are frequent, so that many repeat."""
    draw = torch.Generator().manual_seed(num_ranks * 10 + max(ids_per_bag))
    values, lengths = [], []
    for table, mean in zip(tables, ids_per_bag, strict=True):
        for _ in table.features:
            num = num_ranks * BAGS * mean
            values.append((torch.rand(num, generator=draw) ** 6 * table.num_embeddings).long())
            lengths.append(torch.full((num_ranks * BAGS,), mean))
    features = [f for t in tables for f in t.features]
    parts = [[v.view(num_ranks, -1)[rank] for v in values] for rank in range(num_ranks)]
    whole = Jagged(features, torch.cat(values), lengths=torch.cat(lengths))
    return whole, parts, torch.cat([each[:BAGS] for each in lengths])


# Tables of one width: those whose rows are split over the same ranks decide together.
ALIKE = [Table("user", 3090, 8), Table("item", 1920, 8, features=("seen", "bought"))]


@pytest.mark.parametrize(
    ("name", "num_ranks", "ids_per_bag"),
    [
        *itertools.product(["row_wise", "mixed"], [2, 8], [(1, 2), (2, 7), (12, 12)]),
        ("table_wise", 4, (1, 2)),
        ("mixed", 64, (12, 12)),
    ],
)
@pytest.mark.parametrize("pooled", [True, False])
def test_predicted_bytes_of_a_sample_with_repeated_ids(name, num_ranks, ids_per_bag, pooled, sizes):
    plan = Plan.of(
        PLANS[name] if name != "mixed" else {"user": "data_parallel", "item": "row_wise"}
    )
    whole, parts, lengths = repeating(num_ranks, ids_per_bag, ALIKE)
    make = EmbeddingBagCollection if pooled else EmbeddingCollection
    with shardwise.simulate(num_ranks):
        mesh = shardwise.init_device_mesh("cpu", (num_ranks,))
        tables = make(ALIKE, optimizer=SGD(0.1)).shard(mesh, plan)
        ids = LocalTensor.per_rank(lambda rank: torch.cat(parts[rank]))
        sizes.clear()
        with CommDebugMode():
            found = tables(Jagged(whole.features, ids, lengths=lengths)).values()
            sum((rows if pooled else rows.values).sum() for rows in found).backward()
    work = with_sample(workload(ALIKE, pooled=pooled), [whole], num_ranks=num_ranks)
    setting = Setting(num_ranks, num_ranks, Constants.of("cpu"), "sgd", pooled=pooled)
    assert price(plan, work, setting).sent.sum() == pytest.approx(sum(sizes), rel=1e-9)
    # The share of repeats alone does not tell which ids are frequent: they repeat more on a rank.
    alone = tuple(dataclasses.replace(use, sampled=None) for use in work.uses)
    without = price(plan, dataclasses.replace(work, uses=alone), setting)
    assert without.sent.sum() >= 0.98 * sum(sizes)


@pytest.mark.parametrize("parts", [2, 8, 64])
def test_repeats_of_parts_are_estimated_from_those_of_all(parts):
    """Of ids that are equally frequent, each part has as many different ones as estimated."""
    ids = torch.randint(3000, (64 * 200,), generator=torch.Generator().manual_seed(1))
    work = workload(
        [Table("user", 3000, 8)], batch=64, ids_per_bag=200, repeated=1 - len(ids.unique()) / 12800
    )
    found = sum(len(part.unique()) for part in ids.view(parts, -1))
    assert work.uses[0].different(parts) == pytest.approx(found, rel=0.03)


def test_an_update_is_priced_by_its_different_rows():
    zero = Kernel(0.0, 0.0, 0.0, 0.0, (1.0,), (0.0,))
    update = dataclasses.replace(zero, row_s=1.0, row_byte_s=0.5)
    # 10 different rows of 32 bytes, whatever the number of ids and bags.
    for ids, bags in ((10, 10), (1000, 50)):
        assert update.seconds(ids, bags, 32.0, 320.0) == pytest.approx(10 * 1.0 + 320 * 0.5)


def test_groups_of_tables_split_by_rows_are_asked_for_apart():
    constants = dataclasses.replace(Constants.of("cpu"), group_s=1.0, width_s=0.0)
    work = workload(TABLES, batch=64, ids_per_bag=3, repeated=0.0)

    def groups(plan):
        return price(Plan.of(plan), work, Setting(4, 4, constants, "sgd")).widths_s.max()

    assert groups("table_wise") == pytest.approx(0.0, abs=1e-3)
    assert groups("row_wise") == pytest.approx(len({t.embedding_dim for t in TABLES}), abs=1e-3)


def test_replicated_tables_cost_one_reduction_together():
    constants = dataclasses.replace(Constants.of("cpu"), copies_s=1.0, group_s=0.0, width_s=0.0)
    work = workload(TABLES, batch=64, ids_per_bag=3, repeated=0.0)
    name = TABLES[0].name

    def shared(plan, ranks=4):
        return price(Plan.of(plan), work, Setting(ranks, ranks, constants, "sgd")).widths_s.max()

    assert shared("table_wise") == 0.0
    assert shared({"*": "table_wise", name: "data_parallel"}) == 1.0
    assert shared("data_parallel") == 1.0
    assert shared("data_parallel", ranks=1) == 0.0


def test_narrow_rows_are_updated_by_another_kernel():
    zero = Kernel(0.0, 0.0, 0.0, 0.0, (1.0,), (0.0,))
    update = dataclasses.replace(zero, narrow_row_s=2.0)
    widths = np.array([32.0, 60.0, 64.0, 512.0])
    found = update.seconds(10.0, 10.0, widths, 5 * widths)
    assert found.tolist() == [10.0, 10.0, 0.0, 0.0]


def test_legs_to_split_rows_have_a_price_of_their_own():
    work = workload(TABLES, batch=64, ids_per_bag=3, repeated=0.0)
    plain = dataclasses.replace(Constants.of("cpu"), leg_s=1.0, split_leg_s=None)

    def asking(kind, constants):
        return price(Plan({"*": kind}), work, Setting(4, 4, constants, "sgd")).asking_s

    for kind, fewer in (("row_wise", True), ("column_wise", False)):
        before, after = (
            asking(kind, c) for c in (plain, dataclasses.replace(plain, split_leg_s=0.0))
        )
        assert before > sum(len(t.features) for t in TABLES)
        assert (after < 1.0) if fewer else after == before
