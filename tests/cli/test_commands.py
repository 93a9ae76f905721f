"""The command line, as a person meets it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import report_models
import torch
from click.testing import CliRunner
from rich.table import Table
from rich.text import Text

import shardwise
from shardwise.checkpoint import save
from shardwise.cli.console import console
from shardwise.cli.main import main


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("plan.toml").write_text(report_models.TENSOR_PLAN)
    return lambda *words: CliRunner().invoke(main, [*map(str, words)])


def test_help_has_examples_and_needs_no_torch():
    program = (
        "import sys; from shardwise.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: assert 'torch' not in sys.modules and 'rich' not in sys.modules"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert "shardwise check my_model:make" in ran.stdout


def test_version(run):
    assert run("--version").output.startswith("shardwise, version 0.")


def test_explain_as_text_and_json(run):
    asked = ("explain", "report_models:mlp", "--plan", "plan.toml", "--mesh", "dp=2,tp=2")
    text = run(*asked, "--html", "page.html")
    assert text.exit_code == 0, text.output
    assert "[R, S(0)]" in text.output
    assert Path("page.html").read_text().startswith("<!doctype html>")
    content = json.loads(run(*asked, "--json").output)
    assert content["axes"] == [["dp", 2], ["tp", 2]]


def test_fully_sharded_modules(run):
    asked = ("report_models:layers", "--mesh", "dp=2,fsdp=2", "--fully-shard", "layers.*")
    text = run("explain", *asked, "--recompute", "layers.*")
    assert text.exit_code == 0, text.output
    assert "fully sharded: layers.*" in text.output
    text = run("check", *asked, "--options", "clip")
    assert text.exit_code == 0, text.output


def test_check_with_split_sequences(run):
    asked = ("report_models:layers", "--mesh", "fsdp=2,cp=2", "--context", "layers.*")
    text = run("check", *asked, "--recompute", "layers.0", "--options", "clip")
    assert text.exit_code == 0, text.output
    assert "agrees with one device; compared 4 outputs" in text.output


def test_check_compares_on_ranks_and_trains_on_a_mesh(run):
    asked = ("check", "report_models:mlp", "--plan", "plan.toml", "--ranks", "1,2", "--json")
    found = json.loads(run(*asked, "--mesh", "dp=2", "--options", "clip").output)
    assert [(each["mesh"], "training" in each) for each in found] == [
        ("tp=1", False),
        ("tp=2", False),
        ("dp=2", True),
    ]


def test_check_prints_json_without_nan(run):
    found = run("check", "report_models:badly_masked", "--mesh", "dp=2", "--json")
    assert found.exit_code == 1
    (parity,) = json.loads(found.output, parse_constant=pytest.fail)
    assert None in [each["largest"] for each in parity["differences"]]


def test_check_says_what_differs_by_its_exit_status(run):
    good = run("check", "report_models:mlp", "--plan", "plan.toml", "--ranks", "1,2")
    assert good.exit_code == 0, good.output
    assert good.output.count("agrees with one device") == 2
    bad = run("check", "report_models:careless", "--plan", "plan.toml", "--ranks", "2")
    assert bad.exit_code == 1
    assert "differs" in bad.output
    assert "on rank 0" in bad.output


def test_check_trains_on_a_mesh(run):
    asked = ("check", "report_models:mlp", "--plan", "plan.toml", "--mesh", "dp=2,tp=2")
    good = run(*asked)
    assert good.exit_code == 0, good.output
    for words in ("plain", "no_sync", "clip", "late", "save", "4 parameters, 5 loaded"):
        assert words in good.output
    (found,) = json.loads(run(*asked, "--options", "clip,copy", "--json").output)
    assert found["training"] == [{"options": ["clip", "copy"], "verdict": "ok", "text": ""}]
    sharded = run(*asked, "--data", "fully_shard", "--options", "late")
    assert sharded.exit_code == 0, sharded.output


def test_check_says_what_trains_otherwise(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")  # no text in the table is broken in two
    asked = ("--plan", "plan.toml", "--mesh", "tp=2", "--options", "copy")
    bad = run("check", "report_models:forgetful", *asked)
    assert bad.exit_code == 1, bad.output
    assert "differs" in bad.output
    refused = run("check", "report_models:strict", *asked)
    assert refused.exit_code == 2
    assert "not in double precision" in refused.output
    unknown = run("check", "report_models:mlp", "--mesh", "2", "--options", "late,freeze")
    assert unknown.exit_code == 2
    assert "exclude each other" in unknown.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("check", "nowhere:make"), "There is no module 'nowhere'"),
        (("check", "report_models"), "pkg.module:factory"),
        (("check", "report_models:nothing"), "has no callable 'nothing'; it has"),
        (("check", "report_models:no_module"), "a module and a sample batch"),
        (("check", "report_models:classes"), "tensors of floats to make one of; found torch.int64"),
        (("check", "report_models:frozen"), "no parameter that requires a gradient"),
        (("check", "report_models:mlp_on_meta"), "is on the meta device"),
        (("check", "report_models:failing"), "the weights are elsewhere"),
        (("check", "report_models:mlp", "--plan", "gone.toml"), "no plan file 'gone.toml'"),
        (("explain", "report_models:mlp", "--mesh", "dp=x"), "A mesh is written dp=2,tp=4"),
        (("check", "report_models:mlp", "--options", "clip"), "which --mesh asks for"),
        (("explain", "report_models:mlp", "--batch", "4"), "--batch goes with --ranks"),
        (("explain", "report_models:mlp", "--ranks", "2", "--hosts", "2"), "for plans of tables"),
        (("explain", "report_models:sparse_rows", "--ranks", "4"), "make the tables with sparse"),
        (("explain", "tables.toml", "--plan", "plan.toml"), "a number of --ranks"),
        (("rules", "mn"), "Did you mean"),
        (("demo", "--plan", "gone.toml"), "no plan file 'gone.toml'"),
        (("demo", "--data", "gone.tsv"), "no file 'gone.tsv'"),
        (("demo", "--ranks", "3"), "do not divide among 3 ranks"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_one_message(run, words, said):
    result = run(*words)
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output
    assert run("--debug", *words).exception is not None


def test_rules(run):
    assert "m k, k n -> m n" in run("rules", "aten.mm.default").output
    for name in ("mm", "torch.mm", "torch.ops.aten.mm"):
        assert "[S(1), S(0)]" in run("rules", name).output
    added = run("rules", "aten.add").output
    assert "aten.add.Tensor" in added
    assert "aten.add.Scalar" in added
    for number_or_text in ("add.t:", "add.str:", "add.int:", "add.default:"):
        assert number_or_text not in added
    assert "aten.zeros.default" in run("rules", "zeros").output
    listed = run("rules").output
    assert "a rule of its own" in listed
    assert "embedding" in listed


def test_completion_scripts(run):
    for shell in ("bash", "zsh", "fish"):
        assert "_SHARDWISE_COMPLETE" in run("completion", shell).output


def test_checkpoints(run):
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        weight = shardwise.ones(4, 6, device_mesh=mesh, placements=[shardwise.Shard(0)])
        save({"model": {"weight": weight}, "step": 7, "losses": [0.5] * 9}, "saved")
    shown = run("checkpoint", "inspect", "saved").output
    for words in ("96 bytes of tensors, saved by 2 ranks", "model.weight", "4x6", "9 in all"):
        assert words in shown
    content = json.loads(run("checkpoint", "inspect", "saved", "--json").output)
    assert content["state"]["step"] == 7
    assert run("checkpoint", "verify", "saved").exit_code == 0
    made = run("checkpoint", "convert", "saved", "whole.safetensors", "--prefix", "model.")
    assert "1 tensors, 96 bytes" in made.output
    assert "weight" in run("checkpoint", "inspect", "whole.safetensors").output
    again = run("checkpoint", "convert", "saved", "whole.safetensors")
    assert again.exit_code == 3
    assert "exists already" in again.stderr
    file = Path("saved/model-00002-of-00002.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    damaged = run("checkpoint", "verify", "saved")
    assert damaged.exit_code == 1
    assert "model-00002-of-00002.safetensors is damaged" in damaged.output
    gone = run("checkpoint", "inspect", "nowhere")
    assert gone.exit_code == 3
    assert "There is no checkpoint at nowhere" in gone.stderr


def test_a_shell_completes_commands_and_options():
    def completed(words, place):
        asked = {"COMP_WORDS": words, "COMP_CWORD": str(place)}
        environment = {"_SHARDWISE_COMPLETE": "bash_complete", **asked}
        result = CliRunner().invoke(main, [], prog_name="shardwise", env=environment)
        return [line.split(",")[1] for line in result.output.split()]

    assert completed("shardwise che", 1) == ["check", "checkpoint"]
    assert "--resume" in completed("shardwise demo --r", 2)


def test_colours_where_they_are_wanted(run, monkeypatch):
    asked = ("check", "report_models:careless", "--plan", "plan.toml", "--ranks", "2")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[31m" in run(*asked).output
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[31m" not in run(*asked).output


@pytest.mark.parametrize("columns", ["40", "80"])
def test_narrow_terminals_get_no_longer_lines(run, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    output = run("explain", "report_models:mlp", "--plan", "plan.toml").output
    assert max(map(len, output.splitlines())) <= int(columns)
    if columns == "80":
        assert "forward" in output
        assert "all_reduce" in output  # words are not broken in two


def test_an_error_names_the_line_of_the_model(run):
    Path("plan.toml").write_text('format = "shardwise plan 1"\n[modules]\nup = "colwise"\n')
    found = run("explain", "report_models:mlp", "--plan", "plan.toml")
    assert found.exit_code == 2
    assert "report_models.py:" in found.output


def test_pipes_get_no_colours(run, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert "\x1b[" not in run("explain", "report_models:mlp", "--plan", "plan.toml").output


@pytest.mark.processes
def test_doctor():
    program = "from shardwise.cli.main import main; main(['doctor'])"
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "2 processes added a number over loopback" in ran.stdout
    assert " works  dispatch  " in ran.stdout


def test_the_package_is_run_as_a_program():
    told = subprocess.run(
        [sys.executable, "-m", "shardwise", "--version"], capture_output=True, text=True, check=True
    )
    assert told.stdout.startswith("shardwise, version")


def test_the_parameters_of_an_optimizer_are_one_row(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    net = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(4)])
    save({"net": net, "optimizer": torch.optim.SGD(net.parameters())}, "saved")
    shown = run("checkpoint", "inspect", "saved").output
    assert "'net.0.weight', 'net.0.bias', 'net.1.weight', 'net.1.bias', … 8 in all" in shown


HOSTILE = "\x1b]0;pwned\x07\x1b[2Jlayer\u202e[red]x"


def test_names_in_a_checkpoint_do_not_reach_the_terminal_raw(run, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    tensors = {HOSTILE: torch.ones(2), "tied": None, "value": {HOSTILE: HOSTILE}}
    tensors["tied"] = tensors[HOSTILE]
    save(tensors, tmp_path / "saved")
    shown = run("checkpoint", "inspect", "saved")
    assert shown.exit_code == 0, shown.output
    assert r"\x1b]0;pwned\x07\x1b[2Jlayer\u202e[red]x" in shown.output
    (file,) = (tmp_path / "saved").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    damaged = run("checkpoint", "verify", "saved")
    assert damaged.exit_code == 1
    missing = run("checkpoint", "verify", HOSTILE)
    broken = run("checkpoint", "convert", "saved", "whole")
    for ran in (shown, damaged, missing, broken, run("checkpoint", "inspect", "saved", "--json")):
        assert "pwned" in ran.output
        assert not set(ran.output) & set("\x1b\x07\u202e"), ran.output


def test_what_any_command_prints_is_escaped(capsys):
    out = console()
    out.print(f"{HOSTILE}\nsecond line", markup=False)
    table = Table("name")
    table.add_row(Text(HOSTILE))
    out.print(table)
    printed = capsys.readouterr().out
    assert printed.count("pwned") == 2
    assert "\nsecond line" in printed
    assert not set(printed) & set("\x1b\x07\u202e")
