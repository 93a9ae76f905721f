"""What a sweep found, as a table, as JSON and in one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardwise._torch.compat import VERSION
from shardwise.testing.children import Lost, ask, serve_all
from shardwise.testing.op_sweep.compare import KINDS, OUTCOMES, OpResult, tally
from shardwise.testing.op_sweep.table import full_name, operators


def summary(results: Sequence[OpResult]) -> str:
    """One line a kind: how many operators are right, wrong, refused."""
    lines = []
    for kind in KINDS:
        count = tally(results, kind)
        if not count:
            continue
        parts = [f"{count[o]} {o}" for o in reversed(OUTCOMES) if count[o] or o in ("ok", "wrong")]
        lines.append(f"{kind:9}{sum(count.values()):4} ops: {', '.join(parts)}")
    cases = sum(n for r in results for n in r.counts.get("forward", {}).values())
    lines.append(f"{cases} cases; {sum(r.random for r in results)} ops draw random numbers")
    return "\n".join(lines)


def table(results: Sequence[OpResult], *, notes: bool = True) -> str:
    """A line per operator, and below it what did not go well."""
    width = max((len(r.name) for r in results), default=4)
    lines = [" ".join([f"{'op':{width}}", *(f"{k:9}" for k in KINDS)]).rstrip()]
    for result in results:
        cells = [f"{result.worst(kind) or '-':9}" for kind in KINDS]
        lines.append(" ".join([f"{result.name:{width}}", *cells]).rstrip())
        if notes:
            for kind, texts in result.notes.items():
                lines += [f"    {kind} {text}" for text in texts]
    return "\n".join(lines)


def as_json(results: Sequence[OpResult], settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "torch": VERSION,
        "settings": settings,
        "summary": {kind: dict(tally(results, kind)) for kind in KINDS},
        "ops": [result.as_json() for result in results],
    }


# Processes that play operators: a crash or an endless loop costs one operator, not the sweep.

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
