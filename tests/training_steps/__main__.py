"""Whether ranks train a model as one device does: random cases, played; faults are printed."""

from __future__ import annotations

import argparse
import collections
import itertools
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache

import torch

from shardwise.errors import ArgumentError
from shardwise.testing.layouts import Mesh
from shardwise.testing.loop import OPTIONS, agree
from shardwise.testing.workers import part_of_several
from tests.training_steps.case import Door, StepCase, StepVerdict, prove
from tests.training_steps.models import KINDS, Kind

TABLE_PLANS = ("row_wise", "column_wise", "table_wise", "data_parallel")

#: By the names of a mesh's axes: sets of front doors, to be called in any order.
DOORS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("tp",): ("tp",),
    ("dp",): (
        "dp(dp)",
        "fs(dp)",
        "fs(dp); dp(dp)",
        "replicate; fs(dp)",
        "replicate; dp(dp)",
        "dp(dp)@body; dp(dp)",
        "fs(dp)@body; dp(dp)",
        "fs(dp)@*; fs(dp)",
        "fs(dp)@*; dp(dp)",
        "dm",
        "dm; dp(dp)",
        "dm; fs(dp)",
        "sm(0); dp(dp)",
        "sm(1); dp(dp)",
        "tables(dp,?); dp(dp)",
        "tables(dp,?); fs(dp)",
    ),
    ("dp", "tp"): (
        "tp; dp(dp)",
        "tp; fs(dp)",
        "tp; fs(dp); dp(dp)",
        "tp; fs(dp)@body; dp(dp)",
        "tp; fs(dp)@*; fs(dp)",
        "tp",
        "tp(tp); dp(dp)",
        "tp(tp); fs(dp)",
        "tp(tp); fs(dp); dp(dp)",
        "dp(dp)",
        "dp(dp+tp)",
        "dp(dp*tp)",
        "dm",
        "dm; dp(dp)",
        "dm; fs(dp)",
        "sm(0); dp(dp*tp)",
        "sm(0); dp(dp+tp)",
        "tables(dp,?); tp; dp(dp)",
        "tables(dp*tp,?); dp(dp*tp)",
    ),
    ("rep", "shard"): (
        "fs(shard); dp(rep)",
        "fs(shard); dp(rep*shard)",
        "fs(shard); dp(rep+shard)",
        "dp(rep)@body; dp(shard)",
        "dp(rep)@*; dp(shard)",
        "dp(rep); dp(shard)",
        "dp(rep+shard)",
        "dp(rep*shard)",
        "fs(rep*shard)",
        "fs(rep+shard)",
        "fs(rep+shard)@*; fs(rep+shard)",
        "fs(shard)",
        "dm",
        "dm; fs(shard); dp(rep)",
        "sm(0); dp(rep*shard)",
    ),
    ("rep", "shard", "tp"): (
        "tp; fs(shard); dp(rep)",
        "tp; fs(shard); dp(rep*shard)",
        "tp; fs(shard); dp(rep+shard)",
        "tp; fs(shard)",
        "tp; fs(rep+shard)@*; fs(rep+shard)",
        "tp; dp(rep+shard)",
        "tp; dp(rep*shard)",
        "tp; dp(rep); dp(shard)",
        "tp; dp(rep)@*; dp(shard)",
        "tp(tp); dp(rep+shard)",
        "tp(tp); fs(shard); dp(rep)",
        "tp(shard+tp); fs(shard); dp(rep)",
        "tp(shard+tp); dp(rep+shard)",
        "dm; fs(shard); dp(rep)",
    ),
    ("host", "dev"): (
        "tables(dev,?); dp(host)@tables; dp(host*dev)",
        "tables(dev,?); dp(host*dev)",
        "tables(dev,?); dp(host+dev)",
        "tables(host*dev,?); dp(host*dev)",
        "tables(host*dev,?); dp(host+dev)",
        "tables(dev,?); fs(dev)@body; dp(host*dev)",
        "tables(host,?); dp(host*dev)",
        "tables(host,?); dp(dev)@tables; dp(host+dev)",
    ),
    ("pod", "host", "dev"): (
        "tables(dev,?); dp(pod*host*dev)",
        "tables(host,?); dp(pod+host+dev)",
        "tables(host*dev,?); dp(pod*host*dev)",
        "tables(pod*dev,?); dp(host)@tables; dp(pod+host+dev)",
    ),
    ("cp",): ("cp(cp)", "cp(cp); fs(cp)", "cp(cp); dp(cp)", "cp(cp); fs(cp)@*"),
    ("dp", "cp"): (
        "cp(cp); dp(dp)",
        "cp(cp); fs(dp)",
        "cp(cp); dp(dp+cp)",
        "cp(cp); fs(dp*cp)",
        "cp(cp); fs(cp); dp(dp)",
    ),
    ("dp", "cp", "tp"): (
        "tp; cp(cp); dp(dp)",
        "tp; cp(cp); fs(dp)",
        "tp; cp(cp); fs(dp*cp)",
        "tp; cp(cp); fs(cp); dp(dp)",
    ),
    ("ep",): ("ep(ep)", "ep(ep); fs(ep)", "ep(ep); dp(ep)"),
    ("dp", "ep"): (
        "ep(ep); dp(dp)",
        "ep(ep); fs(dp)",
        "ep(ep); dp(dp+ep)",
        "ep(ep); fs(dp*ep)",
        "ep(ep); fs(dp); dp(dp)",
    ),
    ("cp", "ep"): ("cp(cp); ep(ep)", "cp(cp); ep(ep); fs(cp)", "cp(cp); ep(ep); fs(ep)"),
    ("dp", "ep", "tp"): ("tp; ep(ep); dp(dp)", "tp; ep(ep); fs(dp)", "tp; ep(ep); fs(dp*ep)"),
}
#: The same doors for axes in another order: torch wants them named in mesh order.
DOORS["tp", "dp"] = tuple(
    text.replace("dp+tp", "tp+dp").replace("dp*tp", "tp*dp") for text in DOORS["dp", "tp"]
)

MESHES = (
    "tp=2",
    "dp=2",
    "dp=4",
    "dp=3",
    "dp=2,tp=2",
    "dp=2,tp=1",
    "dp=4,tp=2",
    "tp=2,dp=2",
    "rep=2,shard=2",
    "rep=1,shard=2",
    "rep=2,shard=2,tp=2",
    "rep=2,shard=2,tp=1",
    "host=2,dev=2",
    "pod=2,host=2,dev=2",
    "cp=2",
    "cp=4",
    "dp=2,cp=2",
    "dp=2,cp=2,tp=2",
    "ep=2",
    "dp=2,ep=2",
    "cp=2,ep=2",
    "dp=2,ep=2,tp=2",
)
#: How many drawn cases compete to be the next one.
NUM_CANDIDATES = 12


def draw_cases(num_cases: int, seed: int, *, in_processes: bool = False) -> list[StepCase]:
    """Draw cases; of a few candidates, the one with the most new pairs of choices is taken."""
    chance = random.Random(seed)
    meshes = [Mesh.parse(text) for text in MESHES]
    if in_processes:
        # A process for each rank: more than four are slow on a small machine.
        meshes = [mesh for mesh in meshes if mesh.num_ranks <= 4]
    tried: set[frozenset[str]] = set()
    cases: list[StepCase] = []
    while len(cases) < num_cases:
        drawn = [_draw(chance, meshes) for _ in range(NUM_CANDIDATES)]
        best = max(drawn, key=lambda c: len(set(_pairs(c)) - tried))
        tried.update(_pairs(best))
        cases.append(best)
    return cases


def _draw(chance: random.Random, meshes: list[Mesh]) -> StepCase:
    while True:
        name, mesh = chance.choice(list(KINDS)), chance.choice(meshes)
        kind = KINDS[name]
        fitting = [text for text in DOORS[mesh.names] if _fits(kind, text)]
        if not fitting:
            continue
        text = chance.choice(fitting).replace("?", chance.choice(TABLE_PLANS))
        doors = [Door.parse(door) for door in text.split(";")]
        if chance.random() < 0.5:
            chance.shuffle(doors)
        case = StepCase(name, mesh, tuple(doors))
        options = _draw_options(chance, kind, case)
        # Adam and Adagrad divide by small numbers, which amplifies rounding.
        steady = [o for o in kind.optimizers if o in ("sgd", "momentum")]
        optimizer = chance.choice(steady if "autocast" in options else kind.optimizers)
        if optimizer == "adagrad" and options & {"added", "groups"} and not _adagrad_takes_groups():
            optimizer = "sgd"
        return StepCase(name, mesh, tuple(doors), options, optimizer, chance.randrange(1000))


@cache
def _adagrad_takes_groups() -> bool:
    """Whether torch's Adagrad steps parameters of a group that was added later; 2.11 does not."""
    first, later = (torch.ones(1, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.Adagrad([first])
    optimizer.add_param_group({"params": [later]})
    later.grad = torch.ones(1)
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


def _draw_options(chance: random.Random, kind: Kind, case: StepCase) -> frozenset[str]:
    allowed = [option for option in OPTIONS if option not in kind.without]
    if not any(door.name == "dp" for door in case.doors):
        allowed = [option for option in allowed if option != "no_sync"]
    if case.has_global_batch:
        # A plain layer does not take DTensors: a user would distribute it.
        allowed = [option for option in allowed if option != "added"]
    while True:
        options = frozenset(chance.sample(allowed, chance.choice((0, 1, 1, 2, 2, 3))))
        if agree(options):
            return options


def _fits(kind: Kind, text: str) -> bool:
    if ("cp(" in text and not kind.attention) or ("ep(" in text and not kind.experts):
        return False
    if "tables" in text:
        return kind.collection and ("tp;" not in text or bool(kind.plan))
    if kind.collection:
        return text in ("dp(dp)", "fs(dp)", "dp(rep*shard)", "tp; dp(dp)") and (
            "tp" not in text or bool(kind.plan)
        )
    if text.startswith("sm"):
        return bool(kind.sharded)
    if text.startswith("dm"):
        return kind.whole_module
    return not text.startswith("tp") or bool(kind.plan)


def _pairs(case: StepCase) -> Iterator[frozenset[str]]:
    """The pairs of choices of a case; its doors count together and each for itself."""
    choices = {
        case.kind,
        f"mesh {case.mesh}",
        "; ".join(map(str, case.doors)),
        f"with {case.optimizer}",
        *(f"{door.name} {'flat' if door.flattened else len(door.axes)}" for door in case.doors),
        *case.options,
    }
    yield from map(frozenset, itertools.combinations(sorted(choices), 2))


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    torch.set_num_threads(1)
    begin_s = time.monotonic()
    if options.workers > 1 and not options.replay:
        return _in_parts(options)
    try:
        cases = [StepCase.parse(text) for text in options.replay]
    except ArgumentError as error:
        print(error, file=sys.stderr)
        return 2
    if not cases:
        part, num_parts = options.part
        cases = draw_cases(options.cases, options.seed, in_processes=options.processes)
        cases = cases[part - 1 :: num_parts]

    def done(verdict: StepVerdict) -> None:
        if options.verbose or verdict.kind == "wrong":
            print(verdict, flush=True)

    verdicts = prove(cases, done, in_processes=options.processes)
    print(summary(verdicts, time.monotonic() - begin_s))
    return int(any(verdict.kind == "wrong" for verdict in verdicts))


def summary(verdicts: list[StepVerdict], seconds: float) -> str:
    """How many of each kind, and each refusal once, with a case."""
    count = collections.Counter(verdict.kind for verdict in verdicts)
    lines = [
        f"{len(verdicts)} cases in {seconds:.0f} s: {count['ok']} ok, {count['refused']} refused, "
        f"{count['wrong']} wrong"
    ]
    alike: dict[str, list[StepVerdict]] = {}
    for verdict in verdicts:
        if verdict.kind == "refused":
            alike.setdefault(re.sub(r"'[^']*'|\d+", "…", verdict.text), []).append(verdict)
    for refused in sorted(alike.values(), key=len, reverse=True):
        first = refused[0]
        lines.append(f'refused {len(refused)} times, first "{first.case}":\n    {first.text}')
    return "\n".join(lines)


def _in_parts(options: argparse.Namespace) -> int:
    """Several processes, each with a part of the cases."""
    part, num_parts = options.part
    running = []
    for worker in range(options.workers):
        own = f"{part + num_parts * worker}/{num_parts * options.workers}"
        words = [f"--cases={options.cases}", f"--seed={options.seed}", f"--part={own}"]
        words += ["--processes"] * options.processes + ["--verbose"] * options.verbose
        command = [sys.executable, "-m", "tests.training_steps", *words]
        running.append(subprocess.Popen(command))
    return max(each.wait() for each in running)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.training_steps",
        description="Draws training runs (model, mesh, front doors, options), takes three steps "
        "on many ranks and on one device, and compares all parameters. Exits with 1 where any "
        "differs.",
    )
    parser.add_argument("--cases", type=int, default=300, help="how many to draw")
    parser.add_argument("--seed", type=int, default=0, help="draws the same cases each time")
    parser.add_argument("--part", type=part_of_several, default=(1, 1), help="such as 3/16: some")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the cases")
    parser.add_argument(
        "--processes", action="store_true", help="a process for each rank, instead of simulation"
    )
    parser.add_argument(
        "--replay", action="append", default=[], metavar="CASE", help="this case, as it was printed"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="a line per case")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
