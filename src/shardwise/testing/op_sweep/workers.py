"""Processes that play operators: a crash or an endless loop costs one operator, not the sweep."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence

from shardwise.testing.children import Lost, ask, serve_all
from shardwise.testing.op_sweep.result import OpResult
from shardwise.testing.op_sweep.table import full_name, operators

#: Operators of one process. A fresh one now and then keeps torch's caches from growing.
CHUNK = 40


def sweep(
    names: Sequence[str],
    options: Sequence[str],
    num_processes: int,
    timeout_s: float,
    done: Callable[[OpResult], None],
) -> list[OpResult]:
    """Play the operators of these names, several at a time; results in the order of `names`."""
    # Several chunks for each process, so that none ends long after the others.
    size = max(1, min(CHUNK, -(-len(names) // (4 * num_processes))))
    command = [sys.executable, "-m", "shardwise.testing.op_sweep", "--worker", *options]
    found: dict[str, OpResult] = {}

    def answers(chunk: list[str]) -> Iterator[tuple[str, str | Lost]]:
        return ask(command, chunk, timeout_s)

    def note(name: str, answer: str | Lost) -> None:
        found[name] = _result(name, answer)
        done(found[name])

    serve_all(names, size, num_processes, answers, note)
    return [found[name] for name in names]


def _result(name: str, answer: str | Lost) -> OpResult:
    if isinstance(answer, str):
        return OpResult(**json.loads(answer))
    failed = OpResult(name)
    failed.add("forward", "timeout" if answer.late else "crash", answer.why)
    return failed


def names_of(patterns: Sequence[str]) -> list[str]:
    return [full_name(entry) for entry in operators(patterns)]
