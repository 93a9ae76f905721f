"""The outcomes of operators, and the sweep over them: as a table, as JSON and in one line."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shardwise._torch.compat import VERSION
from shardwise.testing.compare import full_name
from shardwise.testing.workers import Lost, serve_all
from tests.op_sweep.table import operators

#: How a case can end, the worst first; an op has the worst of its cases. In compiled code, `torch`
#: is what torch does not compile on one device, and `eager` what eager code does not run.
OUTCOMES = ("wrong", "crash", "timeout", "error", "raises", "eager", "torch", "ok")
#: What is compared: the result, the gradients, the result read through conversions, what shares
#: memory, the variants that write, and what must be refused.
KINDS = ("forward", "backward", "doors", "writes", "inplace", "out", "refused")
_NOTES_KEPT = 3


@dataclass
class OpResult:
    """The outcomes of one operator."""

    name: str
    random: bool = False
    seconds: float = 0.0
    #: kind -> outcome -> number of cases
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    #: kind -> the first cases that failed, as text
    notes: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, outcome: str, note: str = "") -> None:
        count = self.counts.setdefault(kind, {})
        count[outcome] = count.get(outcome, 0) + 1
        if outcome != "ok" and count[outcome] <= _NOTES_KEPT:
            self.notes.setdefault(kind, []).append(f"{outcome}: {note}")

    def worst(self, kind: str) -> str:
        """The worst outcome of a kind; empty when there was no case."""
        return next((o for o in OUTCOMES if self.counts.get(kind, {}).get(o)), "")

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {kind: self.worst(kind) for kind in KINDS}


def tally(results: Sequence[OpResult], kind: str) -> Counter[str]:
    """How many operators have each outcome, those without a case left out."""
    return Counter(filter(None, (r.worst(kind) for r in results)))


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
    """A line per operator, with its failures below it."""
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


#: Operators for one process at most; a new process now and then keeps torch's caches small.
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
    command = [sys.executable, "-m", "tests.op_sweep", "--worker", *options]
    found: dict[str, OpResult] = {}

    def note(name: str, line: str | Lost) -> None:
        found[name] = _result(name, line)
        done(found[name])

    serve_all(command, names, size, num_processes, timeout_s, note)
    return [found[name] for name in names]


def _result(name: str, line: str | Lost) -> OpResult:
    if isinstance(line, str):
        return OpResult(**json.loads(line))
    failed = OpResult(name)
    failed.add("forward", "timeout" if line.late else "crash", line.why)
    return failed


def names_of(patterns: Sequence[str]) -> list[str]:
    return [full_name(entry) for entry in operators(patterns)]
