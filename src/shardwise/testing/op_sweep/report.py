"""What a sweep found, as a table, as JSON and in one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise._torch.compat import VERSION
from shardwise.testing.op_sweep.result import KINDS, OUTCOMES, OpResult, tally


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
