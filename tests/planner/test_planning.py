"""plan(): from tables to a plan that shards them."""

from dataclasses import replace

import pytest
import torch

import shardwise
from shardwise.embedding import EmbeddingBagCollection, Jagged, Plan, Table
from shardwise.errors import ArgumentError, LayoutError
from shardwise.planner import Constants, NoPlanFits, plan, price, workload
from shardwise.planner.exact import find_highs
from shardwise.planner.explaining import bars, choices, compare, describe_result, limits, to_dict
from shardwise.planner.planning import UNLIMITED, make_problem, make_setting, plan_of
from shardwise.planner.solve import solve

TABLES = [
    Table("user", 200_000, 64),
    Table("item", 50_000, 64, features=("seen", "bought")),
    Table("shop", 5_000, 32),
    Table("day", 7, 16),
]
FIGURES = {"batch": 4096, "ids_per_bag": 4.0, "repeated": 0.5}


def test_a_plan_shards_the_tables():
    found = plan(TABLES, 4, **FIGURES)
    assert found.plan.cuts(TABLES, 4)
    assert found.cost_s >= found.bound_s > 0
    assert found.gap < 0.02
    assert found.cost_s == pytest.approx(found.solution.cost_s, rel=1e-3)
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cpu", (4,))
        small = [Table(t.name, min(t.num_embeddings, 100), t.embedding_dim) for t in TABLES]
        bags = EmbeddingBagCollection(small).shard(mesh, plan(small, mesh, **FIGURES).plan)
        batch = Jagged.from_lists({t.name: [[1, 2]] for t in small})
        assert bags(batch)["user"].shape == (1, 64)


def test_never_dearer_than_table_wise():
    for ranks in (2, 3, 8):
        found = plan(TABLES, ranks, **FIGURES)
        assert found.table_wise_s is not None
        assert found.cost_s <= found.table_wise_s * (1 + 1e-9)
        alone = price(Plan({"*": "table_wise"}), found.work, found.setting)
        assert alone.step_s == pytest.approx(found.table_wise_s, rel=1e-6)


def test_memory_is_kept():
    free = plan(TABLES, 4, **FIGURES)
    limit = float(free.price.memory.max()) * 0.9
    tight = plan(TABLES, 4, memory=limit, **FIGURES)
    assert tight.price.memory.max() <= limit
    assert tight.cost_s >= free.bound_s


def test_too_little_memory_says_what_would_do():
    with pytest.raises(NoPlanFits, match=r"per rank would do, or \d+ ranks") as caught:
        plan(TABLES, 2, memory=30e6, **FIGURES)
    # Not even the outputs fit.
    with pytest.raises(NoPlanFits, match=r"alone take .* per rank would do"):
        plan(TABLES, 2, memory=1000, **FIGURES)
    least = str(caught.value).split(" MB per rank would do")[0].rsplit(" ", 1)[1]
    assert plan(TABLES, 2, memory=1.01 * float(least) * 1e6, **FIGURES).gap < 0.5


def test_the_same_plan_each_time_and_without_a_solver():
    first, second = (plan(TABLES, 4, **FIGURES).plan for _ in range(2))
    assert first == second
    without = plan(TABLES, 4, solver=False, **FIGURES)
    assert without.solution.solver == "own search"
    assert without.gap < 0.1


def test_a_missing_solver_is_no_error(monkeypatch):
    import shardwise.planner.solve as module

    monkeypatch.setattr(module, "find_highs", lambda: None)
    assert plan(TABLES, 4, gap=0.0, **FIGURES).solution.solver == "own search"
    monkeypatch.undo()
    if find_highs() is not None:
        assert plan(TABLES, 4, gap=0.0, **FIGURES).gap < 0.02


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch": 0}, "batch"),
        ({"ids_per_bag": float("nan")}, "ids_per_bag"),
        ({"repeated": 1.5}, "repeated"),
        ({"repeated": {"nobody": 0.5}}, "names no table"),
        ({"optimizer": "lion"}, "optimizer"),
        ({"memory": -1}, "memory"),
        ({"memory": float("nan")}, "memory"),
        ({"hosts": 3}, "hosts"),
        ({"constants": "nowhere.json"}, "no file of constants"),
        ({"constants": None}, "constants are Constants"),
        ({"gap": "small"}, "gap is a number"),
        ({"gap": None}, "gap is a number"),
        ({"seconds": "3"}, "seconds is a number"),
        ({"dtype": "float32"}, "dtype is that of the tables"),
        ({"sample": 3}, "sample gives batches"),
    ],
)
def test_bad_figures(given, message):
    with pytest.raises((ArgumentError, LayoutError), match=message):
        plan(TABLES, 4, **{**FIGURES, **given})


def test_no_tables_and_no_ranks():
    with pytest.raises(ArgumentError, match="at least one Table"):
        plan([], 4)
    with pytest.raises(ArgumentError, match="a list of Tables"):
        plan(TABLES[0], 4)
    with pytest.raises(ArgumentError, match="at least one rank"):
        plan(TABLES, 0)


def test_explanations():
    found = plan(TABLES, 4, batch=4096, memory=100e6)
    text = describe_result(found)
    assert "lower bound" in text
    assert "gap" in text
    assert "assumed, since nobody gave it: ids_per_bag of all tables" in text
    assert limits(found)
    each = choices(found)
    assert {c.table for c in each} == {t.name for t in TABLES}
    assert all(c.next_cost_s is None or c.next_cost_s >= found.bound_s for c in each)
    assert bars(found.price, found.memory).count("\n") == 4
    other = compare(found, Plan({"*": "row_wise"}), "rows")
    assert other.ratio(found) >= found.bound_s / found.cost_s
    assert to_dict(found, [other])["compared"][0]["plan"] == "rows"


def test_a_plan_of_other_tables_is_refused():
    found = plan(TABLES, 4, **FIGURES)
    with pytest.raises(LayoutError, match="does not fit the tables"):
        compare(found, Plan({"somebody": "row_wise"}), "other")


def test_kinds_may_be_ruled_out(tmp_path):
    from shardwise.planner import read_tables

    file = tmp_path / "tables.toml"
    file.write_text(
        'format = "shardwise tables 1"\nbatch = 4096\n'
        '[tables.a]\nrows = 100000\ndim = 64\nkinds = ["row_wise"]\n'
        '[tables.b]\nrows = 100000\ndim = 64\nkinds = ["column_wise"]\nmax_column_cuts = 2\n'
    )
    found = plan(read_tables(file), 4)
    assert found.plan.entries["a"] == "row_wise"
    assert len(found.plan.entries["b"]["ranks"]) == 2


def test_constants_are_files(tmp_path):
    constants = Constants.of("cpu")
    constants.save(tmp_path / "mine.json")
    assert Constants.of(tmp_path / "mine.json") == constants
    (tmp_path / "bad.json").write_text((tmp_path / "mine.json").read_text().replace("{", "[", 1))
    with pytest.raises(LayoutError):
        Constants.of(tmp_path / "bad.json")
    assert Constants.of("h200").name


def test_unpooled_collections_are_priced_by_ids():
    work = workload([Table("a", 1000, 8)], batch=64, ids_per_bag=3.0, repeated=0.0, pooled=False)
    found = plan(work, 2)
    assert found.price.rows_sent.sum() in (0.0, 64 * 3 * 8 * 4)


def test_many_tables_take_seconds():
    tables = [Table(f"t{i}", 1000 + 97 * i, 16 * (1 + i % 4)) for i in range(300)]
    found = plan(tables, 32, hosts=4, batch=8192, gap=0.02)
    assert found.gap <= 0.02
    assert torch.get_num_threads() >= 1


def test_every_holder_has_a_shard_on_any_number_of_ranks():
    work = workload([Table("user", 10**8, 64)], **FIGURES)
    (options,) = make_problem(work, make_setting(40_000, 1, "cpu", "sgd"), UNLIMITED).options
    assert max(option.num_shards for option in options) == 32_768
    assert all(option.num_shards in (0, option.what.holders) for option in options)


def test_a_narrower_exchange_is_chosen_where_it_is_allowed_and_faster():
    network = replace(Constants.of("cpu"), owner_byte_s=4e-9)
    plain = plan(TABLES, 4, constants=network, **FIGURES)
    assert plain.plan.exchange_dtype is None
    rounded = plan(TABLES, 4, exchange_dtype=torch.bfloat16, constants=network, **FIGURES)
    assert rounded.plan.exchange_dtype == torch.bfloat16
    assert rounded.cost_s < plain.cost_s
    assert rounded.bound_s <= rounded.cost_s
    assert rounded.price.rows_sent.sum() < plain.price.rows_sent.sum()
    assert "sent as bfloat16" in describe_result(rounded)
    slow = replace(network, round_byte_s=1e-6)
    kept = plan(TABLES, 4, exchange_dtype=torch.bfloat16, constants=slow, **FIGURES)
    assert kept.plan.exchange_dtype is None
    assert kept.cost_s == pytest.approx(plain.cost_s)
    assert "would take longer" in describe_result(kept)


def test_tables_that_are_narrow_already_are_not_rounded():
    with pytest.raises(ArgumentError, match="exchange_dtype"):
        plan(TABLES, 4, dtype=torch.bfloat16, exchange_dtype=torch.float16, **FIGURES)


@pytest.mark.parametrize("memory", [None, 46e6])
def test_of_plans_within_the_gap_the_one_with_the_fewest_kernel_calls_is_taken(memory):
    draw = torch.Generator().manual_seed(3)
    rows = (10 ** (2 + 3 * torch.rand(30, generator=draw))).long().tolist()
    tables = [Table(f"t{i}", n, (16, 32, 64, 128)[i % 4]) for i, n in enumerate(rows)]
    ids = {f"t{i}": 1.0 + i % 11 for i in range(30)}
    work = workload(tables, batch=2048, ids_per_bag=ids, repeated=0.5)
    found = plan(work, 4, gap=0.02, memory=memory)
    problem = make_problem(work, found.setting, memory or UNLIMITED)
    before = plan_of(solve(problem, gap=0.02).assignment, work, found.setting)
    assert found.price.expected_s < 0.97 * price(before, work, found.setting).expected_s
    assert found.gap <= 0.02
    assert found.price.step_s == pytest.approx(found.solution.cost_s, rel=1e-9)
    assert found.price.memory.max() <= (memory or UNLIMITED)
    assert found.plan == plan(work, 4, gap=0.02, memory=memory).plan
    # Without time the first plan is the answer.
    assert plan(work, 4, gap=0.02, memory=memory, seconds=0.0).gap < 1


def test_no_table_is_replicated_where_that_costs_a_reduction_of_its_own():
    tables = [Table(f"big{i}", 50_000, 32) for i in range(8)]
    tables += [Table(f"small{i}", 20 + i, 32) for i in range(3)]
    work = workload(tables, batch=2048, ids_per_bag=4.0, repeated=0.5)
    # Legs are dear enough that small tables are replicated.
    free = replace(Constants.of("cpu"), copies_s=0.0, leg_s=2e-4, width_s=0.0)

    def copied(constants):
        found = plan(work, 4, constants=constants, gap=0.2)
        return [name for name, entry in found.plan.entries.items() if entry == "data_parallel"]

    assert len(copied(free)) > 1
    assert copied(replace(free, copies_s=0.01)) == []


def test_a_result_is_shown_in_a_line():
    found = plan(TABLES, 4, **FIGURES)
    assert repr(found).startswith("PlanResult(4 tables, 4 ranks, cost_s=")
    assert len(repr(found)) < 100
