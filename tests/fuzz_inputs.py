"""Drawn plan files and command lines: each is read, or refused by an error of ours in a second.

    PYTHONPATH=src python tests/fuzz_inputs.py plans --num 10000
    PYTHONPATH=src python tests/fuzz_inputs.py commands --num 10000 [--first 0]

Prints the inputs that are not; the number of one gives it again: `--first NUMBER --num 1`.
"""

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
from pathlib import Path

import torch
from click.testing import CliRunner
from time_limit import cpu_limit

from shardwise.checkpoint import save
from shardwise.cli.main import main as shardwise_command
from shardwise.embedding import Plan, Table
from shardwise.errors import ShardwiseError
from shardwise.parallel import load_plan as load_module_plan
from shardwise.planner.costs import Constants
from shardwise.planner.workload import read_tables
from shardwise.shard import load_plan as load_sharding_plan

#: The most that one input may take; a machine with other work gets some more.
MOST_S = 1.0

TABLES = [Table("user", 10, 4), Table("item", 6, 4)]


def load_table_plan(path):
    return Plan.load(path).cuts(TABLES, 4)


def load_constants(path):
    return Constants.load(path)


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
    read_tables: {
        "format": "shardwise tables 1",
        "batch": 4096,
        "pooled": True,
        "tables": {
            "user": {"rows": 2000, "dim": 64, "ids_per_bag": 4.0, "features": ["u", "v"]},
            "day": {"rows": 7, "dim": 16, "repeated": 0.9, "kinds": ["row_wise"], "batch": 9},
        },
    },
    load_constants: json.loads(
        (Path(sys.modules[Constants.__module__].__file__).parent / "constants_cpu.json").read_text()
    ),
}  # fmt: skip

WORDS = [
    "", "*", "?", "[", "colwise", "rowwise", "row_wise", "grid", "kind", "ranks", "style", "dim",
    "format", "modules", "tables", "shards", "offsets", "rows", "None", "Replicate()", "Shard(0)",
    "Shard(-1, sizes=(1, 2))", "Shard(0, sizes=(" + "1" * 40, f"Shard({'9' * 5000})",
    "Partial(sum)", "rank:0/cpu", "rank:-1/x", "rank:0/nowhere", f"rank:{'9' * 5000}/cpu",
    "SequenceParallel", "ChunkShardingSpec", "Output", "\0", "\x1b]0;title\x07", "é", "\ud800",
    "a" * 300, "[" * 5000, "a." * 500,
]  # fmt: skip
NUMBERS = [-1, 0, 1, 3, 4096, 2**31, 2**63, 10**30, -(10**400), 0.5, 1e308, float("nan")]
NUMBERS += [True, None]


def value(draw, depth=0):
    kind = draw.randrange(5 if depth < 3 else 3)
    if kind < 2:
        return draw.choice(WORDS)
    if kind == 2:
        return draw.choice(NUMBERS)
    if kind == 3:
        return [value(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {draw.choice(WORDS): value(draw, depth + 1) for _ in range(draw.randrange(4))}


def changed(draw, content):
    """The content, with something else in one place of it."""
    if isinstance(content, dict) and content and draw.random() < 0.8:
        key = draw.choice(sorted(content))
        what = draw.randrange(8)
        if what == 0:
            return {draw.choice(WORDS) if k == key else k: v for k, v in content.items()}
        if what == 1:
            return {k: v for k, v in content.items() if k != key}
        return {**content, key: changed(draw, content[key])}
    if isinstance(content, list) and content and draw.random() < 0.8:
        place = draw.randrange(len(content))
        return [*content[:place], changed(draw, content[place]), *content[place + 1 :]]
    return value(draw)


TOKENS = [b"[", b"{", b'"', b"\x27" * 3, b"a.", b"=", b"\n[x]\n", b"9", b"-", b"\0"]


def damaged(draw, data):
    """Bytes that were changed, cut, repeated or put in somewhere."""
    data = bytearray(data)
    for _ in range(draw.randrange(1, 4)):
        at = draw.randrange(len(data) + 1)
        what = draw.randrange(4)
        if what == 0 and at < len(data):
            data[at] = draw.randrange(256)
        elif what == 1:
            del data[at : at + draw.randrange(1, 30)]
        elif what == 2:
            data[at:at] = data[at : at + 40] * draw.choice([1, 3, 500])
        else:
            token = draw.choice(
                [b"[", b"{", b'"', b"\x27" * 3, b"a.", b"=", b"\n[x]\n", b"9", b"-", b"\0"]
            )
            data[at:at] = token * draw.choice([1, 20, 20_000])
    return bytes(data)


def as_toml(content):
    lines = [
        f"{json.dumps(k)} = {json.dumps(v)}" for k, v in content.items() if not isinstance(v, dict)
    ]
    for name, table in content.items():
        if isinstance(table, dict):
            lines.append(f"[{json.dumps(name)}]")
            lines += [f"{json.dumps(k)} = {_inline(v)}" for k, v in table.items()]
    return "\n".join(lines)


def _inline(each):
    if isinstance(each, dict):
        return "{ " + ", ".join(f"{json.dumps(k)} = {_inline(v)}" for k, v in each.items()) + " }"
    if isinstance(each, list):
        return "[" + ", ".join(map(_inline, each)) + "]"
    return json.dumps(each)


def plan_file(draw, folder):
    """A file of a plan, of tables or of constants, and the function that reads it."""
    read = draw.choice(list(PLANS))
    content = PLANS[read]
    for _ in range(draw.randrange(3)):
        content = changed(draw, content)
    is_toml = draw.random() < 0.5 and isinstance(content, dict)
    with contextlib.suppress(ValueError):
        text = as_toml(content) if is_toml else json.dumps(content)
        data = text.encode(errors="surrogatepass")
        data = damaged(draw, data) if draw.random() < 0.4 else data
        path = folder / f"drawn.{'toml' if is_toml else 'json'}"
        path.write_bytes(data)
        return read, path
    return plan_file(draw, folder)


def run_plan(draw, folder):
    read, path = plan_file(draw, folder)
    with contextlib.suppress(ShardwiseError):
        read(path)
    return f"{read.__name__}: {path.read_bytes()[:300]!r}"


# -- command lines ---------------------------------------------------------------------------


def prepared(folder):
    """Files for commands to meet."""
    if not (folder / "saved").exists():
        save({"x": torch.ones(4, 3), "step": 3}, folder / "saved")
        for name, content in (("plan", load_table_plan), ("tables", read_tables)):
            (folder / f"{name}.json").write_text(json.dumps(PLANS[content]))
        (folder / "noise.safetensors").write_bytes(bytes(range(256)) * 4)
        (folder / "noise.toml").write_bytes(b"\xff\xfe = [")
        (folder / "folder.json").mkdir()
    return ["saved", "plan.json", "tables.json", "noise.safetensors", "noise.toml", "folder.json"]


#: Options that make a command fail before it trains anything, or that keep it short.
SHORT = {
    "demo": ["--data", "nowhere.tsv"],
    "explain": ["--ranks", "4"],
    "check": ["--plan", "nowhere.toml"],
    "plan": ["--no-solver", "--seconds", "0.05"],
}
COMMANDS = [["demo"], ["explain"], ["check"], ["plan"], ["rules"], ["completion"], ["checkpoint"],
            ["checkpoint", "inspect"], ["checkpoint", "verify"], ["checkpoint", "convert"], [],
            ["nonsense"]]  # fmt: skip
OPTIONS = [
    "--ranks",
    "--plan",
    "--mesh",
    "--memory",
    "--hosts",
    "--batch",
    "--optimizer",
    "--gap",
    "--constants",
    "--compare",
    "--json",
    "--html",
    "--data",
    "--options",
    "--tolerance",
    "--seed",
    "--prefix",
    "--max-file-bytes",
    "--model",
    "--steps",
    "--keep",
    "-o",
    "--output",
    "--sample",
    "--help",
    "--",
    "-",
    "--no-such-option",
    "-h",
    "--version",
    "--debug",
]
VALUES = [
    "0",
    "-1",
    "1",
    "4",
    "2,2",
    "1,2;dp=2",
    "dp=2,tp=2",
    "tp=0",
    "tp=99999999999999999999",
    "tp=4,tp=4",
    "=",
    ",",
    "80GB",
    "1e400",
    "nan",
    "-5MB",
    "cpu",
    "h200",
    "sgd",
    "adam",
    "nowhere:make",
    "json:loads",
    "json",
    "a:b:c",
    ":",
    "json:",
    "aten.mm",
    "aten.nothing",
    "mm",
    "\x1b[2J",
    "é",
    "../../etc/passwd",
    "/dev/null",
    "/",
    "new.toml",
    "new.json",
    "new.html",
    "bash",
    "clip,late",
    "gpt",
    "0.5",
    "1e-9",
]
VALUES += ["", "a b", "9" * 400 + "GB", "." * 300, "a" * 5000]


def command_line(draw, files):
    command = draw.choice(COMMANDS)
    words = [*command]
    for _ in range(draw.randrange(4)):
        words.append(draw.choice([*files, *VALUES]))
        if draw.random() < 0.6:
            words += [draw.choice(OPTIONS), draw.choice([*files, *VALUES])]
    return words + SHORT.get(command[0] if command else "", [])


def run_command(draw, folder):
    files = prepared(folder)
    words = command_line(draw, files)
    with contextlib.chdir(folder):
        found = CliRunner().invoke(shardwise_command, words)
    text = f"shardwise {words}"
    if found.exit_code not in (0, 1, 2, 3) or not isinstance(found.exception, SystemExit | None):
        raise AssertionError(f"{text} ends with {found.exit_code}: {found.exception!r}")
    if "shows the traceback" in found.output:
        raise AssertionError(f"{text} says: {found.output[-400:]}")


KINDS = {"plans": run_plan, "commands": run_command}


def run(kind, seeds, folder):
    """Raise for the first input that is not read or refused, or takes too long."""
    KINDS[kind](random.Random("warm"), folder)  # what Python imports at a first call
    for seed in seeds:
        draw = random.Random(f"{kind} {seed}")
        try:
            with cpu_limit(MOST_S):
                KINDS[kind](draw, folder)
        except Exception as error:
            raise AssertionError(f"{kind} {seed}: {type(error).__name__}: {error}") from error


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--num", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    num_failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.first, options.first + options.num):
            try:
                run(options.kind, [seed], Path(folder))
            except AssertionError as error:
                num_failed += 1
                print(error, flush=True)
    print(f"{options.num:,} {options.kind}, {num_failed} not read or refused within {MOST_S:g} s")
    return min(num_failed, 1)


if __name__ == "__main__":
    os.environ.setdefault("COLUMNS", "200")
    sys.exit(main())
