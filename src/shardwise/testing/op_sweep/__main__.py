"""The command line of the sweep."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from shardwise.testing.op_sweep import report
from shardwise.testing.op_sweep.play import play_operator
from shardwise.testing.op_sweep.result import KINDS, OpResult
from shardwise.testing.op_sweep.table import full_name, operators
from shardwise.testing.op_sweep.workers import names_of, sweep


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.worker:
        return _work(options)
    names = names_of(options.patterns)
    if not names:
        print(f"No operator of torch's table matches {options.patterns}.", file=sys.stderr)
        return 2
    passed_on = [f"--samples={options.samples}", f"--ways={options.ways}"]
    passed_on.append(f"--kinds={','.join(options.kinds)}")

    def done(result: OpResult) -> None:
        if options.verbose:
            print(report.table([result]).partition("\n")[2], flush=True)

    results = sweep(names, passed_on, options.processes, options.timeout, done)
    # An entry without tensor arguments has nothing to lay out.
    results = [r for r in results if r.counts.get("forward")]
    settings = {"samples": options.samples, "ways": options.ways, "ranks": 4}
    if options.json:
        options.json.write_text(json.dumps(report.as_json(results, settings), indent=1) + "\n")
    if options.table:
        options.table.write_text(report.table(results) + "\n\n" + report.summary(results) + "\n")
    print(report.summary(results))
    return int(any(r.worst(kind) == "wrong" for r in results for kind in r.counts))


def _work(options: argparse.Namespace) -> int:
    """Play operators one after another, a line of JSON each."""
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what torch prints is no answer
    by_name = {full_name(entry): entry for entry in operators()}
    for name in options.patterns:
        result = play_operator(by_name[name], options.samples, options.ways, options.kinds)
        print(json.dumps(asdict(result)), file=answers, flush=True)
    return 0


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(text.split(","))
    unknown = set(kinds) - set(KINDS)
    if unknown or "forward" not in kinds:
        raise argparse.ArgumentTypeError(f"forward and any of {', '.join(KINDS[1:])}; got {text!r}")
    return kinds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m shardwise.testing.op_sweep",
        description="Plays torch's table of operators on 4 simulated ranks and on one device. "
        "Exits with 1 where a number differs.",
    )
    parser.add_argument("patterns", nargs="*", help="names of operators, with * and ?; else all")
    parser.add_argument("--samples", type=int, default=4, help="samples of each operator")
    parser.add_argument("--ways", type=int, default=16, help="layouts of each sample")
    parser.add_argument(
        "--kinds", type=_kinds, default=KINDS, help=f"what to compare, of {','.join(KINDS)}"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one operator")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--table", type=Path, help="write a table here")
    parser.add_argument("-v", "--verbose", action="store_true", help="a line per operator")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
