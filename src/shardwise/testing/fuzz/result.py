"""What is known about a program that was played."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.testing.fuzz.play import FAILURES, OUTCOMES


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


def counts(results: Sequence[Result]) -> dict[str, int]:
    """Programs by outcome, the worst first."""
    found = Counter(result.kind for result in results)
    return {kind: found[kind] for kind in OUTCOMES}


def summary(results: Sequence[Result]) -> str:
    """A line of counts, what was refused and what is undefined, the most frequent first."""
    steps = sum(result.num_items for result in results)
    told = ", ".join(f"{num} {kind}" for kind, num in counts(results).items())
    lines = [f"{len(results)} programs, {steps} leaves and steps: {told}"]
    for kind in ("refused", "undefined"):
        texts = Counter(result.aspect for result in results if result.kind == kind)
        lines += [f"  {kind} {num:5} times: {text}" for text, num in texts.most_common(20)]
    return "\n".join(lines)


def failures(results: Sequence[Result]) -> list[Result]:
    """What failed, scripts first, alike ones together."""
    found = [result for result in results if result.kind in FAILURES]
    order = {kind: place for place, kind in enumerate(OUTCOMES)}
    return sorted(found, key=lambda r: (not r.script, order[r.kind], r.aspect, r.seed))


def told(result: Result) -> str:
    """A failure in words, with its script or the way to get it."""
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
