"""What the sweep found out about an operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

#: How a case can end, the worst first; an op has the worst of its cases. In compiled code, `torch`
#: is what torch does not compile on one device, and `eager` what eager code does not run.
OUTCOMES = ("wrong", "crash", "timeout", "error", "raises", "eager", "torch", "ok")
#: What is compared: the result, the gradients, the result read through doors, what shares memory,
#: the variants that write, and what must be refused.
KINDS = ("forward", "backward", "doors", "writes", "inplace", "out", "refused")
_NOTES_KEPT = 3


@dataclass
class OpResult:
    """What the sweep found out about one operator."""

    name: str
    random: bool = False
    seconds: float = 0.0
    #: kind -> outcome -> number of cases
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    #: kind -> the first cases that did not end well, in words
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


def brief(error: BaseException) -> str:
    """What an error says, and what it was raised from, on one line."""
    cause = error.__cause__
    text = " ".join(str(error).split())[:300]
    text += "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"{text} <- {brief(cause)}" if cause is not None else text
