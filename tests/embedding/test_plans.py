"""Plans as data: what they say, what does not fit, what they print."""

import embedding_cases as cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.debug import CommDebugMode
from shardwise.embedding import SGD, Plan, RowWiseAdagrad, Table
from shardwise.embedding.plan import traffic
from shardwise.errors import ArgumentError, LayoutError
from shardwise.lookup.routing import Route

TABLES = [Table("user", 10, 8), Table("item", 6, 4)]


def test_files(tmp_path):
    plan = Plan({"user": "row_wise", "it*": {"kind": "grid", "ranks": [0, 1]}})
    for name in ("plan.toml", "plan.json"):
        plan.save(tmp_path / name)
        assert Plan.load(tmp_path / name).entries == plan.entries


def test_a_file_by_hand(tmp_path):
    (tmp_path / "plan.toml").write_text(
        'format = "shardwise embedding plan 1"\n[tables]\n"*" = "table_wise"\n'
        'user = { kind = "column_wise", ranks = [1, 0] }\n'
    )
    cuts = Plan.load(tmp_path / "plan.toml").cuts(TABLES, 2)
    assert [(cut.kind, cut.sizes) for cut in cuts] == [
        ("column_wise", (4, 4)),
        ("table_wise", (6, 0)),
    ]


def test_a_plan_for_modules_is_no_plan_for_tables(tmp_path):
    (tmp_path / "plan.toml").write_text('format = "shardwise plan 1"\n[modules]\n')
    with pytest.raises(LayoutError, match="does not say format"):
        Plan.load(tmp_path / "plan.toml")


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"user": "row_wise"}, "leaves out: item"),
        ({"*": "row_wise", "users": "row_wise"}, "entries for no table: users"),
        ({"user": "row_wise", "x": "grid_wise"}, "'grid_wise' is not a kind of sharding"),
        ({"*": {"rows": 3}}, "neither a kind nor a table"),
        ({"*": {"kind": "row_wise", "ranks": [0]}}, "row_wise takes no options, found ranks"),
        ({"*": "grid"}, "grid needs ranks"),
        (
            {"*": {"kind": "grid", "ranks": [0, 4]}},
            r"on ranks \[0, 4\], but there are ranks 0 to 3",
        ),
        ({"*": {"kind": "grid", "ranks": [1, 1]}}, "each to be named once"),
        ({"*": {"kind": "table_wise", "rank": -1}}, "ranks 0 to 3"),
        ({"*": {"kind": "column_wise", "ranks": 2}}, "a list of ranks"),
    ],
)
def test_what_does_not_fit(entries, says):
    with pytest.raises(LayoutError, match=says):
        Plan(entries).cuts(TABLES, 4)


def test_columns_that_cannot_be_split():
    with pytest.raises(LayoutError, match=r"'item': its 4 columns cannot be split over 8 ranks"):
        Plan.of("column_wise").cuts(TABLES, 8)


def test_a_plan_of_another_type():
    with pytest.raises(
        ArgumentError, match="A plan is a Plan, a dict, a kind or a Path; found int"
    ):
        Plan.of(3)


@given(
    rows=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    dim=st.integers(4, 9),
    kind=st.sampled_from(["row_wise", "column_wise", "table_wise", "data_parallel"]),
    num_ranks=st.integers(1, 4),
)
def test_tiles_cover_each_table_once(rows, dim, kind, num_ranks):
    tables = [Table(f"t{i}", num, dim) for i, num in enumerate(rows)]
    tiling = Plan.of(kind).tiling(tables, num_ranks)
    for table, shards in zip(tables, tiling.shards, strict=True):
        cells = [
            (row, column)
            for shard in shards
            for row in range(*shard.rows)
            for column in range(*shard.columns)
        ]
        copies = num_ranks if kind == "data_parallel" else 1
        assert len(cells) == copies * len(set(cells))
        assert len(set(cells)) == table.num_embeddings * table.embedding_dim
    for stacks in tiling.stacks:
        for stack in stacks:
            ends = [shard.base + shard.num_rows for _, shard in stack.shards]
            assert [0, *ends[:-1]] == [shard.base for _, shard in stack.shards]
            assert ends[-1] == stack.num_rows


def test_tables_without_a_rank_are_balanced():
    tables = [Table(f"t{i}", 10 * (i + 1), 4) for i in range(8)]
    tiling = Plan.of("table_wise").tiling(tables, 2)
    held = [sum(stack.num_rows for stack in stacks) for stacks in tiling.stacks]
    assert held == [180, 180]


@pytest.mark.parametrize("plan", ["row_wise", "column_wise", "data_parallel"])
@pytest.mark.parametrize(
    ("dtype", "sent"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.float16)],
)
def test_described_bytes_are_those_that_are_sent(mesh, plan, dtype, sent):
    """Batches of one id per bag: with ids spread evenly, the description is exact."""
    tables = [Table(f"t{i}", 8, 4) for i in range(5)]
    sharded = cases.make(tables=tables, optimizer=SGD(0.1), dtype=dtype)
    sharded.shard(mesh, plan, exchange_dtype=sent)
    batch = cases.Jagged.from_lists({f"t{i}": [[row] for row in range(8)] for i in range(5)})
    route = Route(Plan.of(plan).tiling(tables, 4), pooled=True)
    expected = traffic(route, 8, 1, dtype.itemsize, (sent or dtype).itemsize)[0]
    with CommDebugMode() as comm:
        loss = cases.loss_of(sharded(batch))
        loss.backward()
    found = {"ids": 0.0, "rows": 0.0, "gradients": 0.0, "copies": 0.0}
    names = {
        "ids of a batch": "ids",
        "rows of tables": "rows",
        "gradients of rows": "gradients",
        "gradients of copied tables": "copies",
    }
    for event in comm.events:
        if event.op in names:
            found[names[event.op]] += event.num_bytes
    # A collective counts what stays at home too; four ranks send three quarters.
    assert found["ids"] * 3 / 4 == expected.ids
    assert found["rows"] * 3 / 4 == expected.rows
    assert found["gradients"] * 3 / 4 == expected.gradients
    assert found["copies"] * 2 * 3 / 4 == expected.copies


def test_describe_of_a_collection(mesh):
    text = cases.make().shard(mesh, cases.PLANS["mixed"]).describe(batch_size=100, ids_per_bag=3)
    assert "5 tables on 4 ranks; 100 bags of 3 ids" in text
    assert "grid: word" in text
    assert text.count("\n") == 2 + 4 + 5
    assert "squares" not in text
    rounded = cases.make().shard(mesh, "row_wise", exchange_dtype=torch.float16).describe()
    assert rounded.endswith("rows and gradients are sent as float16")
    squares = cases.make(optimizer=RowWiseAdagrad(0.1)).shard(mesh, cases.PLANS["mixed"]).describe()
    assert squares.endswith(", an all-reduce of squares of rows that are split by columns")


@pytest.mark.parametrize("ending", ["toml", "json"])
def test_a_plan_file_names_the_dtype_of_exchanges(mesh, tmp_path, ending):
    file = tmp_path / f"plan.{ending}"
    Plan({"*": "row_wise"}, exchange_dtype=torch.bfloat16).save(file)
    plan = Plan.load(file)
    assert plan.exchange_dtype == torch.bfloat16
    sharded = cases.make().shard(mesh, file)
    assert sharded.describe().endswith("rows and gradients are sent as bfloat16")
    other = cases.make().shard(mesh, plan, exchange_dtype=torch.float16)
    assert other.describe().endswith("rows and gradients are sent as float16")
    with pytest.raises(ArgumentError, match="exchange_dtype is torch"):
        cases.make(dtype=torch.bfloat16).shard(mesh, plan)
    file.write_text(file.read_text().replace("bfloat16", "int8"))
    with pytest.raises(LayoutError, match="exchange_dtype is one of bfloat16, float16"):
        Plan.load(file)
