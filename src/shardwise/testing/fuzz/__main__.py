"""Random programs, sharded and on one device: many of them, their results, the command line.

    python -m shardwise.testing.fuzz --programs 1000 --seed 0 --workers 8
    python -m shardwise.testing.fuzz --replay 17

The package's docstring says what a program is, and which file does what.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.simulation.world import simulate
from shardwise.testing.fuzz.generate import MESHES, generate, mesh_of
from shardwise.testing.fuzz.play import (
    FAILURES,
    OUTCOMES,
    ProgramOutcome,
    play,
    play_alone,
    play_forked,
    shrink,
)
from shardwise.testing.fuzz.program import Program, Sharded
from shardwise.testing.workers import Lost, answer, ask, part_of_several, serve_all


@dataclass
class Result:
    """How the program with this seed ended, and its script where it was shrunk."""

    seed: int
    mesh: tuple[int, ...]
    num_items: int
    kind: str
    aspect: str = ""
    note: str = ""
    script: str = ""


_HEAD = """\
import copy

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import Partial, Replicate, Shard
from shardwise.testing.fuzz.program import OneDevice, Sharded
"""


def script(program: Program, outcome: ProgramOutcome) -> str:
    """A script that prints what both worlds hold; it runs with the repository on its path."""
    lines = [f"    {line}" for line in program.text.splitlines()]
    shown = f"w.read({outcome.slot})" if outcome.slot else '"no error"'
    return f"""\
# {outcome.kind}: {outcome.note}
{_HEAD}

def program(w):
    torch.manual_seed({program.seed})
{chr(10).join(lines)}
    return {shown}


print("one device:", program(OneDevice()))
with shardwise.simulate({math.prod(program.mesh)}):
    print("sharded:   ", program(Sharded({program.mesh})))
"""


#: Programs that share a simulated world; a new one now and then keeps caches small.
OF_ONE_WORLD = 100
#: Failures of one kind that are shrunk.
MOST_SHRUNK = 3

Meshes = tuple[tuple[int, ...], ...]


def by_mesh(seeds: Sequence[int], meshes: Meshes = MESHES) -> list[int]:
    """The seeds ordered by mesh, since programs of one mesh share a world."""
    return sorted(seeds, key=lambda seed: (mesh_of(seed, meshes), seed))


def play_seeds(
    seeds: Sequence[int], meshes: Meshes = MESHES, most_shrunk: int = MOST_SHRUNK
) -> Iterator[Result]:
    """Play in the given order."""
    shrunk: Counter[tuple[str, str]] = Counter()
    for mesh, same in itertools.groupby(seeds, key=lambda seed: mesh_of(seed, meshes)):
        for batch in _batches(list(same)):
            with simulate(math.prod(mesh)):
                world = Sharded(mesh)
                for seed in batch:
                    program = generate(seed, meshes)
                    outcome = play(program, world)
                    key = (outcome.kind, outcome.aspect)
                    shrunk[key] += outcome.failed
                    yield _result(program, outcome, shrunk[key] <= most_shrunk)


def replay(seed: int, meshes: Meshes = MESHES, forked: bool = False) -> Result:
    """Run one program in a new world; with `forked`, in a new process."""
    program = generate(seed, meshes)
    return _result(program, (play_forked if forked else play_alone)(program), True, forked)


def _batches(seeds: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(seeds), OF_ONE_WORLD):
        yield seeds[start : start + OF_ONE_WORLD]


def _result(
    program: Program, outcome: ProgramOutcome, smaller: bool, forked: bool = False
) -> Result:
    text = ""
    if outcome.failed and smaller:
        play_one = play_forked if forked else play_alone
        # Alone in a world it may not fail: then the whole program is shown.
        small = shrink(program, outcome, play_one) if play_one(program).failed else None
        text = script(*small) if small else script(program, outcome)
    return Result(
        program.seed,
        program.mesh,
        len(program.items),
        outcome.kind,
        outcome.aspect,
        outcome.note,
        text,
    )


def counts(results: Sequence[Result]) -> dict[str, int]:
    """Programs by outcome, the worst first."""
    found = Counter(result.kind for result in results)
    return {kind: found[kind] for kind in OUTCOMES}


def summary(results: Sequence[Result]) -> str:
    """Counts, and the most frequent reasons of what was refused or is undefined."""
    steps = sum(result.num_items for result in results)
    counted = ", ".join(f"{num} {kind}" for kind, num in counts(results).items())
    lines = [f"{len(results)} programs, {steps} leaves and steps: {counted}"]
    for kind in ("refused", "undefined"):
        texts = Counter(result.aspect for result in results if result.kind == kind)
        lines += [f"  {kind} {num:5} times: {text}" for text, num in texts.most_common(20)]
    return "\n".join(lines)


def failures(results: Sequence[Result]) -> list[Result]:
    """The failures, those with a script first, similar ones together."""
    found = [result for result in results if result.kind in FAILURES]
    order = {kind: place for place, kind in enumerate(OUTCOMES)}
    return sorted(found, key=lambda r: (not r.script, order[r.kind], r.aspect, r.seed))


def failure_text(result: Result) -> str:
    """A failure as text, with its script or the command that makes it."""
    head = f"=== seed {result.seed}, mesh {result.mesh}: {result.kind}: {result.note}"
    again = f"    python -m shardwise.testing.fuzz --replay {result.seed}"
    return f"{head}\n{result.script or again}"


def as_json(results: Sequence[Result], settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "settings": settings,
        "counts": counts(results),
        "failures": [asdict(result) for result in failures(results)],
        "refused": [asdict(result) for result in results if result.kind == "refused"],
        "undefined": [asdict(result) for result in results if result.kind == "undefined"],
    }


#: Seeds of `--seed S` start at S times this, so that two runs share none.
SEEDS = 1_000_000
#: The largest number of programs for one process.
CHUNK = 400


def main(argv: list[str] | None = None) -> int:
    """Play programs; returns 0 if none failed."""
    options = _parser().parse_args(argv)
    meshes: Meshes = tuple(options.mesh or MESHES)
    torch.set_num_threads(1)
    if options.worker:
        return _work(options, meshes)
    if options.replay is not None:
        return _replay(options, meshes)
    part, num_parts = options.part
    first = options.seed * SEEDS
    seeds = by_mesh(range(first, first + options.programs)[part - 1 :: num_parts], meshes)
    if options.workers > 1:
        results = _in_processes(seeds, options, meshes)
    else:
        results = list(play_seeds(seeds, meshes, options.shrink))
    for result in failures(results):
        print(failure_text(result), end="\n\n")
    print(summary(results))
    if options.out:
        settings = {"programs": options.programs, "seed": options.seed, "part": options.part}
        options.out.write_text(json.dumps(as_json(results, settings), indent=1) + "\n")
    return int(bool(failures(results)))


def _replay(options: argparse.Namespace, meshes: Meshes) -> int:
    print(generate(options.replay, meshes).text, end="\n\n")
    result = replay(options.replay, meshes, forked=options.forked)
    print(failure_text(result) if failures([result]) else f"{result.kind}: {result.note}")
    return len(failures([result]))


def _work(options: argparse.Namespace, meshes: Meshes) -> int:
    if options.forked:
        return answer(replay(seed, meshes, True) for seed in options.seeds)
    return answer(play_seeds(options.seeds, meshes, options.shrink))


def _in_processes(seeds: list[int], options: argparse.Namespace, meshes: Meshes) -> list[Result]:
    command = [sys.executable, "-m", "shardwise.testing.fuzz", "--worker"]
    command += [f"--shrink={options.shrink}"]
    command += [f"--mesh={'x'.join(map(str, mesh))}" for mesh in meshes if options.mesh]
    found: dict[str, Result] = {}

    def done(name: str, line: str | Lost) -> None:
        if isinstance(line, Lost) and not line.late:
            # Once more, with each trial in a new process.
            ((_, again),) = ask([*command, "--forked"], [name], 10 * options.timeout)
            line = again if isinstance(again, str) else line
        found[name] = _decode(int(name), line, meshes)
        if options.verbose:
            print(f"{len(found)} of {len(seeds)}", found[name].kind, file=sys.stderr, flush=True)

    size = max(1, min(CHUNK, -(-len(seeds) // options.workers)))
    serve_all(command, list(map(str, seeds)), size, options.workers, options.timeout, done)
    return [found[str(seed)] for seed in seeds]


def _decode(seed: int, line: str | Lost, meshes: Meshes) -> Result:
    mesh = mesh_of(seed, meshes)
    if isinstance(line, Lost):
        return Result(seed, mesh, 0, "crash", "process", f"the process ended: {line.why}")
    result = Result(**json.loads(line))
    result.mesh = mesh
    return result


def _mesh(text: str) -> tuple[int, ...]:
    sizes = text.split("x")
    if not all(size.isdigit() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"sizes of axes, such as 2x2; got {text!r}")
    return tuple(map(int, sizes))


def _file(text: str) -> Path:
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder for {text!r}")
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m shardwise.testing.fuzz",
        description="Plays random programs on simulated ranks and on one device. Exits with 1 "
        "where they differ, and prints a script for each difference.",
    )
    parser.add_argument("--programs", type=int, default=200, help="how many; else 200")
    parser.add_argument("--seed", type=int, default=0, help="other seeds, other programs")
    parser.add_argument("--replay", type=int, metavar="SEED", help="the one program with this seed")
    parser.add_argument("--workers", type=int, default=1, help="processes; else all in this one")
    parser.add_argument(
        "--part", type=part_of_several, default=(1, 1), help="such as 3/16: some programs"
    )
    parser.add_argument(
        "--mesh", type=_mesh, action="append", help="such as 2x2, several times; else 1 to 3 axes"
    )
    parser.add_argument(
        "--shrink", type=int, default=MOST_SHRUNK, help="failures of a kind to shrink"
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one program")
    parser.add_argument("--out", type=_file, help="write counts and failures here, as JSON")
    parser.add_argument("-v", "--verbose", action="store_true", help="a line per program")
    parser.add_argument(
        "--forked", action="store_true", help="a process for each trial, to survive a crash"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("seeds", nargs="*", type=int, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
