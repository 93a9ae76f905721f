"""Whether ranks train a model as one device does: draws cases, plays them, prints what is wrong."""

from __future__ import annotations

import argparse
import collections
import re
import subprocess
import sys
import time

import torch

from shardwise.errors import ArgumentError
from shardwise.testing.steps.case import StepCase, StepVerdict, prove
from shardwise.testing.steps.draw import draw_cases
from shardwise.testing.workers import part_of_several


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
        command = [sys.executable, "-m", "shardwise.testing.steps", *words]
        running.append(subprocess.Popen(command))
    return max(each.wait() for each in running)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m shardwise.testing.steps",
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
