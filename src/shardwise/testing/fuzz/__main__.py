"""Random programs, sharded and on one device: the command line.

    python -m shardwise.testing.fuzz --programs 1000 --seed 0 --workers 8
    python -m shardwise.testing.fuzz --replay 17

The package's docstring says what a program is, and which file does what.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from shardwise.testing.fuzz.generate import MESHES, generate, mesh_of
from shardwise.testing.fuzz.session import (
    MOST_SHRUNK,
    Meshes,
    Result,
    as_json,
    by_mesh,
    failures,
    play_seeds,
    replay,
    summary,
    told,
)
from shardwise.testing.workers import Lost, answer, ask, part_of_several, serve_all

#: Seeds of `--seed S` start at S times this, so that two runs share none.
SEEDS = 1_000_000
#: At most so many programs for one process.
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
        print(told(result), end="\n\n")
    print(summary(results))
    if options.out:
        settings = {"programs": options.programs, "seed": options.seed, "part": options.part}
        options.out.write_text(json.dumps(as_json(results, settings), indent=1) + "\n")
    return int(bool(failures(results)))


def _replay(options: argparse.Namespace, meshes: Meshes) -> int:
    print(generate(options.replay, meshes).text, end="\n\n")
    result = replay(options.replay, meshes, forked=options.forked)
    print(told(result) if failures([result]) else f"{result.kind}: {result.note}")
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
            # Once more, each trial in a process of its own.
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
    parser.add_argument("--out", type=Path, help="write counts and failures here, as JSON")
    parser.add_argument("-v", "--verbose", action="store_true", help="a line per program")
    parser.add_argument(
        "--forked", action="store_true", help="a process for each trial, to survive a crash"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("seeds", nargs="*", type=int, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
