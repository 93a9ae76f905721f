"""Entry: a planned call; and the cache of entries."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from shardwise.core.layout import Layout
from shardwise.core.world import world_caches
from shardwise.dispatch.catalog import rule_caches
from shardwise.dispatch.propagate import CallPlan


class Entry:
    """A planned call. `out` is the layout of a single output; otherwise `finish` wraps."""

    __slots__ = ("call", "finish", "hits", "move", "out", "plan")

    def __init__(self, plan: CallPlan) -> None:
        self.plan = plan
        self.hits = 0
        #: Redistributes the local operands as planned; None when nothing moves.
        self.move: Callable[[list[Any], Sequence[Any]], None] | None = None
        #: Runs on local operands.
        self.call: Callable[..., Any] = plan.op
        self.out: Layout | None = None
        #: From the local result and the call's arguments to the result of the call.
        self.finish: Callable[[Any, Sequence[Any], Callable[..., Any]], Any] | None = None


#: (op, layouts and static arguments) -> Entry. Emptied when full, and when a world comes or goes.
entries: dict[Any, Entry] = {}
_MAX_ENTRIES = 8192
#: Keys of in-place calls whose result has another layout: they make a new tensor, and copy it back.
_written_back: set[Any] = set()
#: Hits of dropped entries, and all misses; see cache_counts.
_past_hits, _misses = 0, 0


def _forget_entries() -> None:
    global _past_hits
    _past_hits += sum(entry.hits for entry in entries.values())
    entries.clear()
    _written_back.clear()


world_caches.append(_forget_entries)
rule_caches.append(_forget_entries)


def cache_counts() -> tuple[int, int, int, int]:
    """Hits and misses of this process so far, entries now, and how many there may be."""
    hits = _past_hits + sum(entry.hits for entry in entries.values())
    return hits, _misses, len(entries), _MAX_ENTRIES


def add_entry(key: list[Any], entry: Entry) -> None:
    """Count a miss, and keep its entry unless it has symbolic sizes."""
    global _misses
    _misses += 1
    plan = entry.plan
    if any(layout.symbolic for layout in (*plan.inputs, *plan.outputs)):
        return
    if len(entries) >= _MAX_ENTRIES:
        _forget_entries()
    with contextlib.suppress(TypeError):  # a symbolic int has no hash
        entries[tuple(key)] = entry


def known_entry(key: list[Any]) -> Entry | None:
    """What `add_entry` kept under this key."""
    try:
        return entries.get(tuple(key))
    except TypeError:
        return None


def add_write_back(key: list[Any]) -> None:
    """Record that the in-place call of this key makes a new tensor and copies it back."""
    if len(_written_back) < _MAX_ENTRIES:
        with contextlib.suppress(TypeError):
            _written_back.add(tuple(key))


def is_write_back(key: list[Any]) -> bool:
    """Whether `add_write_back` was called for this key."""
    try:
        return tuple(key) in _written_back
    except TypeError:
        return False
