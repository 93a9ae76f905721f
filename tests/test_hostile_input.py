"""Whatever a plan, a click log or an option holds: it is read, or refused by one of our errors."""

import contextlib
import json
import tracemalloc

import hypothesis
import pytest
from hypothesis import strategies as st

from shardwise.core.encode import decode_placement
from shardwise.demo import data
from shardwise.demo.data import read_clicks
from shardwise.embedding import Plan, Table
from shardwise.errors import ArgumentError, LayoutError, ShardwiseError
from shardwise.parallel import load_plan as load_module_plan
from shardwise.report import Mesh
from shardwise.shard import load_plan as load_sharding_plan

TABLES = [Table("user", 10, 4), Table("item", 6, 4)]


def load_table_plan(path):
    return Plan.load(path).cuts(TABLES, 4)


PLANS = {
    load_module_plan: {
        "format": "shardwise plan 1",
        "modules": {
            "a.*": "colwise",
            "b": {"style": "SequenceParallel", "sequence_dim": 1},
            "c": {"style": "PrepareModuleInput", "input_layouts": ["Shard(0)", "None"],
                  "desired_input_layouts": ["Replicate()", "None"]},
        },
    },
    load_table_plan: {
        "format": "shardwise embedding plan 1",
        "tables": {"user": {"kind": "grid", "ranks": [0, 1]}, "*": "row_wise"},
    },
    load_sharding_plan: {
        "format": "shardwise plan 1",
        "modules": {
            "t.weight": {"style": "ChunkShardingSpec", "dim": 0,
                         "placements": ["rank:0/cpu", "rank:1/cpu"]},
            "u.weight": {"style": "EnumerableShardingSpec", "shards": [
                {"offsets": [0, 0], "sizes": [2, 4], "placement": "rank:0/cpu"},
                {"offsets": [2, 0], "sizes": [2, 4], "placement": "rank:1/cpu"}]},
            "tower": {"style": "Output", "local": True},
        },
    },
}  # fmt: skip

WORDS = st.sampled_from(
    ["", "*", "colwise", "row_wise", "kind", "ranks", "style", "Shard(0)", "Shard(99999999999)",
     "Shard(0, sizes=(1, 2))", f"Shard({'9' * 5000})", "Partial(sum)", "rank:0/cpu", "rank:-1/x",
     "rank:0/nowhere", "ChunkShardingSpec", "dim", "shards", "\0", "a" * 300]
)  # fmt: skip
NUMBERS = st.sampled_from([-1, 0, 1, 3, 2**31, 2**63, 10**30, 0.5])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def mutated(draw, content):
    """The content, with something else in one place of it."""
    if isinstance(content, dict) and content and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(content)))
        if draw(st.integers(0, 4)) == 0:
            return {draw(WORDS) if k == key else k: v for k, v in content.items()}
        return {**content, key: draw(mutated(content[key]))}
    if isinstance(content, list) and content and draw(st.integers(0, 4)):
        place = draw(st.integers(0, len(content) - 1))
        return [*content[:place], draw(mutated(content[place])), *content[place + 1 :]]
    return draw(VALUES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile")


@pytest.mark.parametrize("read", PLANS, ids=["modules", "tables", "parameters"])
def test_plans(folder, read):
    (folder / "whole.json").write_text(json.dumps(PLANS[read]))
    read(folder / "whole.json")

    @hypothesis.settings(max_examples=250)
    @hypothesis.given(mutated(PLANS[read]))
    def changed(content):
        (folder / "plan.json").write_text(json.dumps(content))
        with contextlib.suppress(ShardwiseError):
            read(folder / "plan.json")

    changed()


@hypothesis.given(st.binary(max_size=80) | st.text(max_size=80).map(str.encode))
def test_plans_of_noise(folder, noise):
    for name in ("plan.toml", "plan.json"):
        (folder / name).write_bytes(noise)
        with pytest.raises(ShardwiseError):
            load_table_plan(folder / name)


@pytest.mark.parametrize("deep", ["[" * 200_000, '{"a":' * 100_000, "a." * 100_000 + "b = 1"])
def test_plans_that_are_deep_or_long(folder, deep):
    for name in ("plan.toml", "plan.json"):
        (folder / name).write_text(deep)
        with pytest.raises(LayoutError, match="cannot be read as a plan"):
            load_table_plan(folder / name)
    (folder / "long.toml").write_bytes(b"#" * (3 << 20))
    with pytest.raises(LayoutError, match="more than 2097152 bytes"):
        load_table_plan(folder / "long.toml")


FIELD = st.sampled_from(["", "0", "7", "-3", "ff", "9" * 30, "1_0", "0x1", "é", "\0", " 1", "1e5"])


@hypothesis.settings(max_examples=200)
@hypothesis.given(
    st.lists(
        st.lists(FIELD, min_size=38, max_size=41).map("\t".join)
        | st.integers(0, 255).map(lambda n: f"{n % 2}" + 13 * f"\t{n}" + 26 * f"\t{n:x}")
        | st.text(max_size=20),
        max_size=8,
    ),
    st.binary(max_size=30),
)
def test_click_logs(folder, lines, noise):
    path = folder / "clicks.tsv"
    raw = "\n".join(lines).encode() + b"\n" + noise
    path.write_bytes(raw)
    try:
        found = read_clicks(str(path))
    except ArgumentError:
        return
    assert found.ids.shape == (len(found), 26)
    assert found.dense.isfinite().all()
    assert found.num_bad == len(found.bad)
    assert len(found) + found.num_bad == raw.count(b"\n") + (not raw.endswith(b"\n"))


def test_a_click_log_costs_what_is_used_of_it(folder):
    good = b"1" + 13 * b"\t2" + 26 * b"\t0a" + b"\n"
    path = folder / "long.tsv"
    with path.open("wb") as file:
        file.write(b"x" * 5_000_000 + b"\n" + 3 * good + 20_000 * b"bad\n" + 50_000 * good)
    read_clicks(str(path), 1)  # what Python makes at a first call is not counted
    tracemalloc.start()
    found = read_clicks(str(path), 5)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) == 5
    assert found.num_bad == 20_001
    assert len(found.bad) == data.MOST_NAMED
    assert found.bad[1] == "it has 16384 characters or more"
    assert peak < 2_000_000


@hypothesis.given(st.text(max_size=20) | WORDS | st.from_regex(r"(\w{1,3}=-?\d{1,30},?)+"))
def test_meshes_and_placements_as_text(text):
    for read in (Mesh.parse, decode_placement):
        with contextlib.suppress(ShardwiseError):
            read(text)
