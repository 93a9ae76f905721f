"""shardwise plan and explain --ranks, as a person meets them."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from shardwise.cli.main import main
from shardwise.embedding import Plan
from shardwise.planner import Constants

TABLES = """format = "shardwise tables 1"
batch = 4096

[tables.user]
rows = 200_000
dim = 64
ids_per_bag = 4.0

[tables.day]
rows = 7
dim = 16
ids_per_bag = 1.0
repeated = 0.9
"""
SAMPLE = """
import torch
from shardwise.embedding import EmbeddingBagCollection, Jagged, Table

def batches():
    yield Jagged.from_lists({"user": [[1, 1], [2]], "day": [[3], [4]]})

def model():
    return EmbeddingBagCollection([Table("user", 1000, 16), Table("day", 7, 4)])

def plain():
    return torch.nn.Linear(2, 2), torch.zeros(1, 2)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("tables.toml").write_text(TABLES)
    Path("planner_sample.py").write_text(SAMPLE)
    return lambda *words: CliRunner().invoke(main, [*map(str, words)])


def test_a_plan_is_written_with_its_proof(run):
    Path("rows.toml").write_text(
        'format = "shardwise embedding plan 1"\n[tables]\n"*" = "data_parallel"\n'
    )
    asked = ("plan", "tables.toml", "--ranks", 4, "--memory", "1GB", "-o", "plan.toml")
    found = run(*asked, "--html", "page.html", "--compare", "rows.toml")
    assert found.exit_code == 0, found.output
    for word in ("lower bound", "gap", "limited by", "repeated of 1 tables", "rows.toml", "rank"):
        assert word in found.output
    assert set(Plan.load("plan.toml").entries) == {"user", "day"}
    assert 'data-kind="memory"' in Path("page.html").read_text()
    content = json.loads(run(*asked, "--json", "--no-solver").output)
    assert content["gap"] >= 0
    assert len(content["ranks"]["memory"]) == 4


@pytest.mark.parametrize(
    "optimizer", [(), ("--optimizer", "rowwise_adagrad"), ("--optimizer", "adam")]
)
def test_explain_counts_the_memory_that_plan_counts(run, optimizer):
    planned = run("plan", "tables.toml", "--ranks", 4, "-o", "plan.toml", "--json", *optimizer)
    asked = ("explain", "tables.toml", "--plan", "plan.toml", "--ranks", 4, "--json")
    priced = json.loads(run(*asked, *optimizer).stdout)
    assert priced["memory"] == json.loads(planned.stdout)["ranks"]["memory"]


def test_explain_refuses_what_a_price_does_not_have(run):
    run("plan", "tables.toml", "--ranks", 2, "-o", "plan.toml")
    asked = ("explain", "tables.toml", "--plan", "plan.toml", "--ranks", 2)
    for option in (("--html", "page.html"), ("--mesh", "dp=2"), ("--fully-shard", "*")):
        found = run(*asked, *option)
        assert found.exit_code == 2
        assert f"{option[0]} is for a step of a model" in found.output


@pytest.mark.parametrize("folder", ["", "./", "../elsewhere/"])
def test_a_sample_is_named_by_its_file(run, folder):
    elsewhere = Path("../elsewhere")
    elsewhere.mkdir(exist_ok=True)
    name = f"sample_in_{len(folder)}.py"
    Path(folder, name).write_text(SAMPLE)
    asked = ("plan", "tables.toml", "--ranks", 2, "--no-solver", "--seconds", 1)
    found = run(*asked, "--sample", f"{folder}{name}:batches")
    assert found.exit_code == 0, found.output


def test_json_is_all_that_is_printed_after_a_calibration(run, monkeypatch):
    monkeypatch.setattr("shardwise.cli.plan.calibrate", lambda: Constants.of("cpu"))
    asked = ("plan", "tables.toml", "--ranks", 2, "--calibrate", "mine.json", "--no-solver")
    assert json.loads(run(*asked, "--json").output)["gap"] >= 0
    assert "constants of this machine are in mine.json" in run(*asked).output


def test_explain_refuses_an_optimizer_that_no_step_of_a_model_takes(run):
    asked = ("explain", "planner_sample:model", "--mesh", "dp=2")
    found = run(*asked, "--optimizer", "rowwise_adagrad")
    assert found.exit_code == 2
    assert "a step of a model takes adamw, adam, sgd, adagrad" in found.output


def test_the_dtype_of_exchanges_is_written(run):
    asked = ("plan", "tables.toml", "--ranks", 4, "-o", "plan.toml", "--exchange-dtype", "bfloat16")
    found = run(*asked, "--constants", "h200")
    assert found.exit_code == 0, found.output
    assert "sent as bfloat16" in found.output
    assert Plan.load("plan.toml").exchange_dtype == torch.bfloat16
    priced = ("explain", "tables.toml", "--plan", "plan.toml", "--ranks", 4, "--json")
    narrow = json.loads(run(*priced).output)
    Plan(Plan.load("plan.toml").entries).save("plan.toml")
    assert max(narrow["sent"]) < max(json.loads(run(*priced).output)["sent"])


def test_a_plan_of_a_model_and_of_a_sample(run):
    found = run("plan", "planner_sample:model", "--ranks", 2, "--batch", 128, "-o", "plan.json")
    assert found.exit_code == 0, found.output
    assert set(Plan.load("plan.json").entries) == {"user", "day"}
    found = run("plan", "tables.toml", "--ranks", 2, "--sample", "planner_sample.py:batches")
    assert found.exit_code == 0, found.output
    assert "assumed" not in found.output


def test_explain_prices_ten_thousand_ranks(run):
    Path("plan.toml").write_text(
        'format = "shardwise embedding plan 1"\n[tables]\nuser = "row_wise"\nday = "table_wise"\n'
    )
    asked = ("explain", "tables.toml", "--plan", "plan.toml", "--optimizer", "sgd")
    found = run(*asked, "--ranks", 10_000)
    assert found.exit_code == 0, found.output
    assert "10000 ranks" in found.output
    assert len(json.loads(run(*asked, "--ranks", 16, "--json").output)["sent"]) == 16


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        (("dim = 64", "dim = 0"), (), "embedding_dim must be a positive int"),
        (("rows = 7", "rows = 0"), (), "num_embeddings must be a positive int"),
        (("4.0", "nan"), (), "ids_per_bag is a number"),
        (("dim = 16", "dim = 16\nmax_column_cuts = 17"), (), "cannot be cut into 17"),
        (("dim = 16", "dim = 16\nwidth = 3"), (), "unknown: width"),
        (("dim = 16", 'dim = 16\nkinds = ["diagonal"]'), (), "kinds are some of"),
        (("tables 1", "chairs 1"), (), "holds no tables"),
        (("", ""), ("--memory", "1kB"), "No plan fits into 1 kB"),
        (("", ""), ("--memory", "9MB"), "would do"),
        (("", ""), ("--memory", "much"), "80GB"),
        (("", ""), ("--hosts", "3"), "hosts"),
        (("", ""), ("--seconds", "nan"), "seconds is a number from 0 on"),
        (("", ""), ("--gap", "-1"), "gap is a number from 0 on"),
        (("", ""), ("--html", "nowhere/page.html"), "no folder for 'nowhere/page.html'"),
        (("", ""), ("--html", "."), "'.' is a folder"),
        (("", ""), ("--exchange-dtype", "int8"), "bfloat16"),
        (("", ""), ("--compare", "other.toml"), "does not fit the tables"),
        (("", ""), ("--compare", "nowhere.toml"), "nowhere.toml cannot be read"),
        (("", ""), ("--calibrate", "nowhere/mine.json"), "no folder for 'nowhere/mine.json'"),
        (("", ""), ("--calibrate", "mine.toml"), "written as .json"),
        (("", ""), ("--constants", "tables.toml"), "holds no constants"),
        (("", ""), ("--sample", "planner_sample.py:nothing"), "no callable"),
    ],
)
def test_bad_input_is_a_clear_error_and_writes_nothing(run, change, words, message):
    Path("tables.toml").write_text(TABLES.replace(*change) if change[0] else TABLES)
    Path("other.toml").write_text(
        'format = "shardwise embedding plan 1"\n[tables]\nsomebody = "row_wise"\n'
    )
    found = run("plan", "tables.toml", "--ranks", 4, "-o", "plan.toml", *words)
    assert found.exit_code == 2, found.output
    assert message in found.output.replace("\n", " ")
    assert not Path("plan.toml").exists()


def test_it_says_why_the_plan_is_not_table_wise(run):
    found = run("plan", "tables.toml", "--ranks", 4, "--memory", "20MB")
    assert "which does not fit into memory; this plan takes" in " ".join(found.output.split())
    forced = TABLES.replace("dim = 64", 'dim = 64\nkinds = ["data_parallel"]')
    Path("tables.toml").write_text(forced)
    found = run("plan", "tables.toml", "--ranks", 4)
    assert "which was ruled out for 'user'; this plan takes" in " ".join(found.output.split())


def test_targets_that_hold_no_tables(run):
    for source, message in (
        ("nowhere.toml", "no file of tables"),
        ("planner_sample:plain", "without a collection"),
        ("planner_sample:batches", "should return a module"),
        ("nowhere:make", "no module"),
    ):
        found = run("plan", source, "--ranks", 2)
        assert found.exit_code == 2
        assert message in found.output
