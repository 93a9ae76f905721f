"""The switches around a call: strictness, and who watches communication.

Process-wide, since backward may run on other threads. Only a call that moves something looks at
them, so a call that communicates nothing pays nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shardwise.simulation.events import listeners


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a collective runs: the op that needed it, and whether anybody wrote it down."""

    op: str
    implicit: bool


class Watch:
    """`on` is the one flag to look at; the rest says what it is on for."""

    __slots__ = (
        "announced",
        "cause",
        "gather_unknown",
        "kernels",
        "listeners",
        "notes",
        "on",
        "replicate_plain",
        "strict",
        "watchers",
    )

    def __init__(self) -> None:
        self.on = False
        self.strict = 0
        self.watchers = 0
        #: The cause of the collectives that run now.
        self.cause: Cause | None = None
        self.listeners = listeners
        #: Whether the collective ops that run now belong to one that listeners were told of.
        self.announced = False
        #: Ops whose kernels communicate: a mode that looks at ops has to run those itself.
        self.kernels: dict[Any, Callable[..., Any]] = {}
        #: Where planned calls are noted down for `explain`.
        self.notes: list[Any] | None = None
        #: Whether a plain tensor in a call counts as replicated; not part of `on`.
        self.replicate_plain = 0
        #: Whether an op without a rule gathers its operands; not part of `on`.
        self.gather_unknown = 0

    def tell(self, kind: str, sent: Any, group_name: str) -> None:
        """A collective runs that no op stands for."""
        for listener in self.listeners:
            listener(kind, sent, group_name)

    @contextlib.contextmanager
    def told(self, kind: str, sent: Any, group_name: str) -> Iterator[None]:
        """`tell`, once: the ops that run inside are no collectives of their own."""
        self.tell(kind, sent, group_name)
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
    """Collectives inside are caused by `op`, unless something around it caused them already.

    With `always` they are in any case.
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
    """Inside, communication that nobody wrote down raises, in forward and in backward.

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
