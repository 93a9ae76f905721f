"""The switches around a call: strictness, and who watches communication.

Process-wide, since backward may run on other threads. Only calls that move data look at them, so a
call without communication pays nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shardwise.simulation.collectives import listeners


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a collective runs: the op that needed it, and whether the program asked for it."""

    op: str
    implicit: bool


class Watch:
    """The switches. Calls that move data check `on`; `update` derives it from the other fields."""

    def __init__(self) -> None:
        self.on = False
        self.strict = 0
        self.watchers = 0
        #: The cause of the collectives that run now.
        self.cause: Cause | None = None
        self.listeners = listeners
        #: Whether the collective ops that run now belong to one already reported to listeners.
        self.announced = False
        #: Ops whose kernels communicate: a dispatch mode has to run those kernels itself.
        self.kernels: dict[Any, Callable[..., Any]] = {}
        #: Planned calls, recorded for `explain`.
        self.notes: list[Any] | None = None
        #: Called with what is not an op but should be the same on all ranks; see debug.agree.
        self.record: Callable[[str], None] | None = None
        #: Called with an optimizer before it steps.
        self.steps: list[Callable[[Any], None]] = []
        #: Whether a plain tensor in a call counts as replicated; not part of `on`.
        self.replicate_plain = 0
        #: Whether an op without a rule gathers its operands; not part of `on`.
        self.gather_unknown = 0

    @contextlib.contextmanager
    def reported(self, kind: str, sent: Any, group_name: str) -> Iterator[None]:
        """Report a collective that is not an op; the collective ops inside belong to it."""
        for listener in self.listeners:
            listener(kind, sent, group_name)
        before, self.announced = self.announced, True
        try:
            yield
        finally:
            self.announced = before

    def update(self) -> None:
        self.on = bool(self.strict or self.watchers or self.notes is not None)


watch = Watch()


@contextlib.contextmanager
def because(op: Any, *, implicit: bool, always: bool = False) -> Iterator[None]:
    """`op` is the cause of the collectives inside, unless an outer call already set one.

    With `always` it replaces an outer cause.
    """
    before = watch.cause
    if before is None or always:
        watch.cause = Cause(_name(op), implicit)
    try:
        yield
    finally:
        watch.cause = before


def _name(op: Any) -> str:
    if isinstance(op, str) or hasattr(op, "_schema"):
        return str(op)
    return getattr(op, "__name__", repr(op))


@contextlib.contextmanager
def explicit_redistribution() -> Iterator[None]:
    """Inside, communication that the program did not ask for raises, in forward and backward.

    The error names the op, the layouts, the bytes and the `redistribute` call to write.
    """
    watch.strict += 1
    watch.update()
    try:
        yield
    finally:
        watch.strict -= 1
        watch.update()


@contextlib.contextmanager
def implicit_replication() -> Iterator[None]:
    """Inside, a plain tensor that meets a DTensor counts as replicated over its mesh."""
    watch.replicate_plain += 1
    try:
        yield
    finally:
        watch.replicate_plain -= 1
