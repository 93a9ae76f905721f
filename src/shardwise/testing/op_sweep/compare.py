"""Whether a result is the one that one device gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch

from shardwise._torch.pytree import tree_leaves
from shardwise.dtensor.tensor import DTensor
from shardwise.simulation.parts import on_rank, parts_of

#: Closer than this is the same in float32; else float64 decides, with a tighter bound.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
CLOSE_DOUBLE = {"rtol": 1e-7, "atol": 1e-8}


class Different(Exception):
    """A number, a shape or a type that one device does not give."""


def gathered(result: Any) -> list[Any]:
    """The leaves of a result as one device would hold them."""
    return [_gathered(leaf) for leaf in tree_leaves(result, is_leaf=lambda x: x is None)]


def _gathered(leaf: Any) -> Any:
    if isinstance(leaf, DTensor):
        _check_parts(leaf)
        leaf = cast(DTensor, leaf.detach()).full_tensor()
    first, *others = parts_of(leaf)
    if any(_difference(other, first, CLOSE) for other in others):
        raise Different("ranks hold different values after a gather")
    return first


def _check_parts(x: DTensor) -> None:
    layout, local = x._layout, x._local
    if tuple(x.shape) != tuple(layout.shape):
        raise Different(f"a tensor of shape {tuple(x.shape)} has {layout!r}")
    for rank in layout.grid.ranks:
        part = on_rank(local, rank)
        wanted = layout.local_shape(layout.grid.coordinates[rank])
        if tuple(part.shape) != wanted or part.dtype != layout.dtype:
            raise Different(f"rank {rank} holds {part.dtype}{list(part.shape)} of {layout!r}")


def compare(
    found: list[Any],
    expected: list[Any],
    in_double: Callable[[], tuple[list[Any], list[Any]]] | None,
    what: str = "result",
) -> None:
    """Raise `Different`, with `what` was compared, where the two differ by more than rounding."""
    if len(found) != len(expected):
        raise Different(f"{len(found)} {what}s instead of {len(expected)}")
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        why = _difference(ours, theirs, CLOSE)
        if not why:
            continue
        # Rounding in another order may be all that it is: in double precision it would vanish.
        if in_double is not None and "differs by" in why:
            wide_found, wide_expected = in_double()
            if not _difference(wide_found[number], wide_expected[number], CLOSE_DOUBLE):
                continue
        raise Different(f"{what} {number} {why}")


def _difference(ours: Any, theirs: Any, close: dict[str, float]) -> str:
    if isinstance(ours, torch.Tensor) and theirs is None:
        theirs = torch.zeros_like(ours)
    if isinstance(theirs, torch.Tensor) and ours is None:
        ours = torch.zeros_like(theirs)
    if not isinstance(theirs, torch.Tensor) or not isinstance(ours, torch.Tensor):
        return "" if _equal(ours, theirs) else f"is {ours!r} instead of {theirs!r}"
    if ours.dtype != theirs.dtype:
        return f"is {ours.dtype} instead of {theirs.dtype}"
    if ours.shape != theirs.shape:
        return f"has shape {list(ours.shape)} instead of {list(theirs.shape)}"
    if ours.dtype is torch.complex32:  # which torch does not compare
        ours, theirs = ours.to(torch.complex64), theirs.to(torch.complex64)
    if torch.allclose(ours, theirs, equal_nan=True, **close):
        return ""
    return f"differs by {(ours - theirs).abs().max().item():.3g}"


def _equal(ours: Any, theirs: Any) -> bool:
    return ours == theirs or (ours != ours and theirs != theirs)


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and not any(
        _difference(a, b, CLOSE) for a, b in zip(one, other, strict=True)
    )


# What the sweep found out about an operator.

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
