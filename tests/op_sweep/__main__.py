"""Every operator of torch's own table, in many layouts, against one device.

    python -m tests.op_sweep                    # all of them
    python -m tests.op_sweep 'fft.*' sort       # some, by name or pattern
    python -m tests.op_sweep --compiled         # as compiled code, against eager code

`table` reads torch's table, `play` runs one operator's samples, eager or compiled, in layouts of
`ways`, and `report` plays many operators and writes the table and the JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from shardwise.testing.compare import full_name
from shardwise.testing.workers import answer, part_of_several
from tests.op_sweep import report
from tests.op_sweep.play import Compiler, play_compiled, play_operator
from tests.op_sweep.report import KINDS, OpResult, names_of, sweep
from tests.op_sweep.table import operators


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.worker:
        return answer(_play_all(options))
    names = names_of(options.patterns)
    if not names:
        print(f"No operator of torch's table matches {options.patterns}.", file=sys.stderr)
        return 2
    part, num_parts = options.part
    names = names[part - 1 :: num_parts]
    _fill_in(options)
    passed_on = [f"--samples={options.samples}", f"--ways={options.ways}"]
    passed_on += [f"--doors={options.doors}", f"--kinds={','.join(options.kinds)}"]
    if options.compiled:
        passed_on += ["--compiled", f"--backend={options.backend}"]
        passed_on += ["--dynamic"] * options.dynamic

    def done(result: OpResult) -> None:
        if options.verbose:
            print(report.table([result]).partition("\n")[2], flush=True)

    results = sweep(names, passed_on, options.processes, options.timeout, done)
    # An entry without tensor arguments has nothing to lay out.
    results = [r for r in results if r.counts.get("forward")]
    settings = {"samples": options.samples, "ways": options.ways, "ranks": 4}
    settings["doors"] = options.doors
    if options.compiled:
        settings |= {"backend": options.backend, "dynamic": options.dynamic}
    if options.json:
        options.json.write_text(json.dumps(report.as_json(results, settings), indent=1) + "\n")
    if options.table:
        options.table.write_text(report.table(results) + "\n\n" + report.summary(results) + "\n")
    print(report.summary(results))
    return int(any(r.worst(kind) == "wrong" for r in results for kind in r.counts))


def _play_all(options: argparse.Namespace) -> Iterator[OpResult]:
    """Play operators one after another."""
    torch.set_num_threads(1)
    by_name = {full_name(entry): entry for entry in operators()}
    for name in options.patterns:
        given = (by_name[name], options.samples, options.ways, options.kinds)
        if options.compiled:
            yield play_compiled(*given, Compiler(options.backend, options.dynamic))
        else:
            yield play_operator(*given, options.doors)


def _fill_in(options: argparse.Namespace) -> None:
    """A compilation takes seconds, so compiled code is played with fewer samples and ways."""
    if options.samples is None:
        options.samples = 1 if options.compiled else 4
    if options.ways is None:
        options.ways = 2 if options.compiled else 16
    if options.kinds is None:
        options.kinds = ("forward", "backward") if options.compiled else KINDS


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(text.split(","))
    unknown = set(kinds) - set(KINDS)
    if unknown or "forward" not in kinds:
        raise argparse.ArgumentTypeError(f"forward and any of {', '.join(KINDS[1:])}; got {text!r}")
    return kinds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.op_sweep",
        description="Plays torch's table of operators on 4 simulated ranks and on one device. "
        "Exits with 1 where a number differs.",
    )
    parser.add_argument("patterns", nargs="*", help="names of operators, with * and ?; else all")
    parser.add_argument("--samples", type=int, help="of each operator; else 4, compiled 1")
    parser.add_argument("--ways", type=int, help="layouts of each sample; else 16, compiled 2")
    parser.add_argument(
        "--doors",
        type=int,
        default=1,
        help="further meshes of each sample, reads and writes of each case, drawn at random",
    )
    parser.add_argument(
        "--kinds",
        type=_kinds,
        help=f"what to compare, of {','.join(KINDS)}; else all, compiled forward and backward",
    )
    parser.add_argument("--compiled", action="store_true", help="compile each call, as one graph")
    parser.add_argument("--dynamic", action="store_true", help="compile with sizes as symbols")
    parser.add_argument("--backend", default="aot_eager", help="of the compiler")
    parser.add_argument(
        "--part", type=part_of_several, default=(1, 1), help="such as 3/16: some operators"
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
