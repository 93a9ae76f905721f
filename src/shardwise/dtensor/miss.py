"""The call that no entry knows: planned, remembered, and run for the first time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.comm.watch import watch
from shardwise.core.layout import Layout
from shardwise.core.world import world_caches
from shardwise.dtensor.fallback import parts_of
from shardwise.dtensor.foreach import foreach_entry, is_foreach
from shardwise.dtensor.gathered import may_fall_back, run_gathered, unknown_shape_entry
from shardwise.dtensor.numbers import numbers_as_plain
from shardwise.dtensor.partial_writes import entry_of_call
from shardwise.dtensor.planning import Entry
from shardwise.dtensor.wrapped import Wrapped, as_layouts
from shardwise.errors import UnsupportedError
from shardwise.rules.catalog import (
    changes_shape,
    find_rule,
    functional_twin,
    rule_caches,
    written_twin,
)
from shardwise.rules.positional import Positional, plain_op
from shardwise.rules.propagate import unsupported

aten = torch.ops.aten

#: (op, layouts and static arguments) -> Entry. Emptied when full, and when a world comes or goes.
entries: dict[Any, Entry] = {}
_MAX_ENTRIES = 8192
#: Keys of calls in place that no choice leaves in place; see _write_back.
_written_back: set[Any] = set()
#: Hits of entries that are gone, and all misses; see cache_counts.
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


def _is_by_value(op: Any) -> bool:
    """Whether plans depend on floats among the arguments: the key of a hit has none."""
    rule = find_rule(plain_op(op))
    return rule is not None and rule.by_value


def plan_and_run(
    kind: Any,
    op: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    key: list[Any],
    operands: list[Any],
    wish: Layout | None,
) -> Any:
    """Plan the call, remember the plan, and run it for the first time; `kind` is DTensor."""
    try:
        return _planned(kind, op, args, kwargs, key, operands, wish)
    except UnsupportedError:
        if not may_fall_back(op):
            raise
    layouts = [as_layouts(a) for a in args]
    return run_gathered(op, args, kwargs, layouts, operands, kind.wrap)


def _planned(
    kind: Any,
    op: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    key: list[Any],
    operands: list[Any],
    wish: Layout | None,
) -> Any:
    global _misses
    if _is_by_value(op):
        key += [a for a in (*args, *kwargs.values()) if type(a) is float]
        if (known := entries.get(tuple(key))) is not None:
            known.hits += 1
            if watch.notes is not None:
                watch.notes.append(known)
            return _run_entry(kind, known, operands, args, kwargs)
    if changes_shape(op):
        return _view_in_place(op, args, kwargs)
    if not is_foreach(op) and (on_one := numbers_as_plain(args)) is not None:
        return kind.__torch_dispatch__(op, None, tuple(on_one), kwargs, wish)
    twin = written_twin(op)
    if twin is not None and (find_rule(op) is None or _known_write(key)):
        return _write_back(twin, args, kwargs)
    layouts = [as_layouts(a) for a in args]
    entry = foreach_entry(op, layouts) or unknown_shape_entry(op, layouts)
    if entry is None:
        parts = parts_of(plain_op(op)) if find_rule(plain_op(op)) is None else None
        if parts is not None:
            if isinstance(op, Positional):
                parts = functools.partial(op.spell, parts)
            return _in_parts(op, parts, args, kwargs)
        try:
            entry = entry_of_call(op, layouts, kwargs, wish)
        except UnsupportedError:
            if twin is None or not isinstance(args[0], Wrapped) or args[0]._layout.snapshot:
                raise
            with contextlib.suppress(TypeError):
                if len(_written_back) < _MAX_ENTRIES:
                    _written_back.add(tuple(key))
            return _write_back(twin, args, kwargs)
    plan = entry.plan
    _misses += 1
    if watch.notes is not None:
        watch.notes.append(entry)
    if not any(layout.symbolic for layout in (*plan.inputs, *plan.outputs)):
        if len(entries) >= _MAX_ENTRIES:
            _forget_entries()
        with contextlib.suppress(TypeError):
            entries[tuple(key)] = entry
    return _run_entry(kind, entry, operands, args, kwargs)


def _run_entry(
    kind: Any,
    entry: Entry,
    operands: list[Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    if entry.move is not None:
        entry.move(operands, args)
    local = entry.call(*operands, **kwargs)
    if entry.out is not None:
        return kind.wrap(local, entry.out)
    assert entry.finish is not None, "an entry either has one output or knows how to finish"
    return entry.finish(local, args, kind.wrap)


def _view_in_place(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An op that turns a tensor into a view of itself, such as `t_`."""
    x, twin = args[0], functional_twin(op)
    if twin is None:
        raise UnsupportedError(unsupported(op, [x._layout], [0]))
    view = twin(*args, **kwargs)
    if view._layout.snapshot and not x._layout.snapshot:
        raise UnsupportedError(unsupported(op, [x._layout], [0]))
    with torch._C._DisableTorchDispatch():
        op(*args, **kwargs)  # the wrapper's own shape
    x._local, x._layout = view._local, view._layout
    return x


def _known_write(key: list[Any]) -> bool:
    try:
        return tuple(key) in _written_back
    except TypeError:  # a symbolic int has no hash
        return False


def _write_back(twin: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An op in place that cannot run where its tensor lies: as a new tensor, copied back."""
    aten.copy_.default(args[0], twin(*args, **kwargs))
    return args[0]


def _in_parts(op: Any, parts: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an op that has no rule through others; where one of those has none, `op` fails."""
    cause: Exception | None = None
    try:
        result = parts(*args, **kwargs)
        if result is not NotImplemented:
            return result
    except NotImplementedError as error:
        cause = error
    layouts = [x._layout for a in args for x in _listed(a) if isinstance(x, Wrapped)]
    raise UnsupportedError(unsupported(op, layouts)) from cause


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)
