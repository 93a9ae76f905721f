"""Whatever a plan, a click log or an option holds: it is read, or refused by one of our errors."""

import contextlib
import json
import os
import tracemalloc

import fuzz_inputs
import hypothesis
import pytest
from fuzz_inputs import PLANS, load_table_plan
from hypothesis import strategies as st
from time_limit import cpu_limit

from shardwise import Shard
from shardwise.core.encode import decode_placement
from shardwise.demo import tasks
from shardwise.demo.tasks import read_clicks
from shardwise.errors import ArgumentError, LayoutError, ShardwiseError
from shardwise.report import Mesh
from shardwise.report.case import load_target

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize("read", PLANS, ids=lambda read: read.__name__)
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
        with pytest.raises(LayoutError, match=r"cannot be read as (TOML|JSON)"):
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
    assert len(found.bad) == tasks.MOST_NAMED
    assert found.bad[1] == "it has 16384 characters or more"
    assert peak < 2_000_000


@hypothesis.given(st.text(max_size=20) | WORDS | st.from_regex(r"(\w{1,3}=-?\d{1,30},?)+"))
def test_meshes_and_placements_as_text(text):
    for read in (Mesh.parse, decode_placement):
        with contextlib.suppress(ShardwiseError):
            read(text)


@pytest.mark.parametrize(
    "text",
    [
        f"Shard(0, sizes=({'1' * 40}",
        f"Shard(0, sizes=({'1' * 40}))",
        f"Shard(0, sizes=({'1, ' * 50_000}x))",
        f"Shard(0, sizes=({', ' * 50_000}))",
        "Shard(0, sizes=(1 2))",
        f"Shard({'0' * 300_000})",
        "Shard(٣)",
        "Shard(0, sizes=(1,,2))",
        "Partial(sum",
    ],
)
def test_placements_are_parsed_in_linear_time(text):
    with cpu_limit(1), pytest.raises(LayoutError, match="is not a placement"):
        decode_placement(text)


def test_sizes_of_many_ranks_are_read_back():
    sizes = tuple(range(4096))
    for text in (repr(Shard(-1, sizes)), f"Shard(-1, sizes=({','.join(map(str, sizes))},))"):
        assert decode_placement(text) == Shard(-1, sizes)
    assert decode_placement("Shard(0, sizes=())") == Shard(0, ())


def test_names_in_plans_are_bounded(folder):
    content = {"format": "shardwise embedding plan 1", "tables": {"[" * 100_000: "row_wise"}}
    (folder / "plan.json").write_text(json.dumps(content))
    words = "has 100,000 characters, more than 1,000"
    with cpu_limit(1), pytest.raises(LayoutError, match=words):
        load_table_plan(folder / "plan.json")


def test_a_plan_is_a_regular_file(folder):
    os.mkfifo(folder / "pipe.json")
    (folder / "folder.toml").mkdir()
    for name in ("pipe.json", "folder.toml"):
        with pytest.raises(LayoutError, match="not a regular file"):
            load_table_plan(folder / name)


@pytest.mark.parametrize("kind", fuzz_inputs.KINDS)
def test_drawn_inputs(tmp_path, kind):
    """A few of what `python tests/fuzz_inputs.py` runs by the thousand."""
    fuzz_inputs.run(kind, range(150), tmp_path)


def test_numbers_and_targets_that_python_does_not_take(tmp_path):
    """What drawn inputs have found."""
    constants = {**PLANS[fuzz_inputs.load_constants], "step_s": 10**400}
    (tmp_path / "constants.json").write_text(json.dumps(constants))
    with pytest.raises(LayoutError, match="step_s is a number from 0 on"):
        fuzz_inputs.load_constants(tmp_path / "constants.json")
    tables = {"a": {"rows": 2, "dim": 2, "kinds": [{}]}}
    (tmp_path / "tables.json").write_text(
        json.dumps({"format": "shardwise tables 1", "tables": tables})
    )
    with pytest.raises(ArgumentError, match="kinds are some of"):
        fuzz_inputs.read_tables(tmp_path / "tables.json")
    with pytest.raises(ArgumentError, match="json:loads takes s, "):
        load_target("json:loads")
