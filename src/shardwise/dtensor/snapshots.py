"""Snapshots: copies in place of views, which follow writes to their base.

Note [Snapshots follow]
A view whose input had to be redistributed is a copy. On one device it would be a view, and later
writes to the base would show in it. So a snapshot keeps a `Source`: the memory that was copied, and
the view. An op that reads a snapshot first checks whether the memory has been written to since, and
if so replays the view. Replaying communicates as the view did; strict mode and `CommDebugMode`
treat it alike.

All ranks must decide alike, or some would wait for the others. So local tensors are not compared:
torch has a version counter for a tensor and all its views, which a snapshot shares. If torch shares
none (`x.data`, deep copies, inference mode), every write to any tensor of the mesh counts. Writes
to the result of `to_local` are not seen.

Calls without snapshots pay nothing: the mark is in the layout, so calls with snapshots have
separate plans, which check first (`follow`).
"""

from __future__ import annotations

import copy
import functools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise._torch.autograd import current_node
from shardwise.core.layout import Layout
from shardwise.dispatch.catalog import Path, at_path, tensor_paths
from shardwise.dispatch.plan import Entry
from shardwise.dispatch.variants import start_alike
from shardwise.dispatch.wrapped import SOURCE
from shardwise.errors import UnsupportedError
from shardwise.simulation.ranks import parts_of, per_rank

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class View:
    """A view op with its arguments, without the base."""

    kind: Any
    op: Any
    kwargs: dict[str, Any]
    rest: Sequence[Any]

    def __call__(self, base: Any) -> Any:
        return self.kind.__torch_dispatch__(self.op, None, (base, *self.rest), self.kwargs)

    @property
    def undoable(self) -> bool:
        """Whether a value of the view can be written back to the base."""
        if self.op is aten.unfold.default:
            return bool(self.rest[2] >= self.rest[1])  # windows do not overlap
        return any(self.op in kind for kind in (_OVERWRITES, _REGROUPS, _TURNS, _INVERSES))

    def undo(self, base: Any, value: Any) -> Any:
        """`base` with `value` in place of the view."""
        if self.op in _OVERWRITES:
            return _OVERWRITES[self.op](base, value, *self.rest)
        if self.op in _REGROUPS:
            return value.reshape(base.shape)
        if self.op in _INVERSES:
            return _INVERSES[self.op](value)
        if self.op is aten.permute.default:
            order = [dim % base.dim() for dim in self.rest[0]]
            return value.permute([order.index(dim) for dim in range(base.dim())])
        if self.op in (aten.t.default, aten.transpose.int):
            return self.op(value, *self.rest)
        if self.op is aten.unfold.default:
            spread, ones = aten.unfold_backward.default, torch.ones_like(value)
            there = spread(ones, base.shape, *self.rest) > 0
            return torch.where(there, spread(value, base.shape, *self.rest), base)
        return value


#: Views of some entries, and the op that overwrites these.
_OVERWRITES = {
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
#: Views that change the shape, not the order of entries.
_REGROUPS = frozenset(
    {
        aten.view.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
    }
)
#: Views of each entry, and what undoes them.
_INVERSES: dict[Any, Callable[[Any], Any]] = {
    aten._conj.default: aten._conj_physical.default,
    aten._neg_view.default: aten.neg.default,
    aten.view_as_real.default: lambda value: torch.complex(*value.unbind(-1)),
    aten.view_as_complex.default: aten.view_as_real.default,
}
#: Other views that can be undone.
_TURNS = frozenset(
    {
        aten.permute.default,
        aten.t.default,
        aten.transpose.int,
        aten.detach.default,
        aten.alias.default,
    }
)


class Source:
    """The memory that snapshots were copied from, the view, and its latest results."""

    _layout: Layout
    _take: Callable[[Any], Any]
    #: The local tensor that was copied; None if the base is itself a snapshot.
    _base: torch.Tensor | None
    #: If the base is a snapshot: its source, and its number there.
    _above: tuple[Source, int] | None
    #: A tensor with the version counter of the memory, where a snapshot may not share it.
    _clock: torch.Tensor | None
    #: Whether `_clock`, or each snapshot, is known to share the version counter; a view does.
    _shares: bool
    #: Whether only the mesh's count of writes can be used.
    _counted: bool
    #: The base and its grad_fn at that time, where torch's autograd sees no view.
    _history: tuple[Callable[[], Any], Any] | None
    #: `_now` when the view was taken.
    _seen: tuple[int, int]
    #: The local tensors of the results.
    held: list[torch.Tensor]

    def __init__(
        self,
        base: Any,
        take: Callable[[Any], Any],
        held: Sequence[torch.Tensor],
        *,
        shares: bool = False,
        counted: bool = False,
    ) -> None:
        self._layout = base._layout
        # Not the base itself: its autograd graph would live as long as its snapshots.
        self._above = base.__dict__.get(SOURCE)
        self._base = base._local if self._above is None else None
        self._take, self.held = take, list(held)
        self._clock, self._shares = None, shares
        if self._above is not None and self._above[0]._clock is not None:
            # A view of a snapshot that does not share the counter does not share it either.
            self._clock, self._shares = self._above[0]._clock, True
        self._history = None if self._above is None else self._above[0]._history
        self._counted = counted or base.is_inference()
        self._seen = self._now(base)

    def _now(self, x: Any) -> tuple[int, int]:
        """The counts of writes to the memory, as seen by `x`, and to all tensors of the mesh."""
        x = self._clock if self._clock is not None else x
        return 0 if self._counted else x._version, self._layout.grid.num_writes

    def refresh(self, x: Any) -> None:
        """Replay the view if the memory was written to; `x` is one of the snapshots."""
        if self._history is not None and torch.is_grad_enabled():
            self._refuse_other_history()
        now = self._now(x)
        if now == self._seen:
            return
        # A view that was taken inside another op has a separate counter.
        shares = self._shares or x._is_view()
        hidden = not shares or self._counted or self._layout.grid.hides_writes
        if self._is_stale(now, shares, hidden):
            self._refresh(now, shares, hidden, type(x)._wrap)

    def _is_stale(self, now: tuple[int, int], shares: bool, hidden: bool) -> bool:
        return (shares and now[0] != self._seen[0]) or (hidden and now[1] != self._seen[1])

    def _refresh(
        self, now: tuple[int, int], shares: bool, hidden: bool, wrap: Callable[..., Any]
    ) -> None:
        base = self._base
        if self._above is not None:
            source, number = self._above
            if source._is_stale(now, shares, hidden):
                source._refresh(now, shares, hidden, wrap)
            base = source.held[number]
        taken = self._take(wrap(base, self._layout))
        results = taken if isinstance(taken, (list, tuple)) else [taken]
        self.held = [result._local for result in results]
        self._seen = now

    def send_gradient_to(self, x: Any) -> None:
        """The gradient goes to `x` with its current grad_fn: autograd does not replay the view."""
        self._history = weakref.ref(x), x.grad_fn

    def _refuse_other_history(self) -> None:
        assert self._history is not None
        x, grad_fn = self._history[0](), self._history[1]
        if x is not None and x.grad_fn is not grad_fn:
            raise UnsupportedError(
                "A view by as_strided() is used after a differentiable write to its base: "
                f"{self._layout!r}. The values of the view follow, but its gradient would miss the "
                "write. Call as_strided() again after the write, or use the view under "
                "torch.no_grad()."
            )

    @property
    def bits(self) -> tuple[bool, bool]:
        """Whether one device would be lazy about the conjugate, and about the sign, with a bit."""
        conjugate, negative = (False, False) if self._above is None else self._above[0].bits
        op = self._take.op if isinstance(self._take, View) else None
        if op is aten.select.int and conjugate and not self._layout.dtype.is_complex:
            # The real or the imaginary part, whose sign is lazy on one device.
            return False, negative != bool(self._take.rest[1])  # type: ignore[attr-defined]
        return conjugate != (op is aten._conj.default), negative != (op is aten._neg_view.default)

    @property
    def writable(self) -> bool:
        """Whether a value of the snapshot can be written to the memory."""
        if len(self.held) > 1 or not isinstance(self._take, View) or not self._take.undoable:
            return False
        return self._above is None or self._above[0].writable

    def write(self, value: Any) -> None:
        """Write a value of the snapshot to the memory."""
        assert isinstance(self._take, View), "only a view is undone"
        base = self._base if self._above is None else self._above[0].held[self._above[1]]
        there = type(value)._wrap(base, self._layout)
        whole = self._take.undo(there, value)
        if self._above is not None:
            self._above[0].write(whole)
        else:
            aten.copy_.default(there, whole)

    def is_part_of(self, x: Any) -> bool:
        """Whether `x` is all of the tensor that the snapshots were copied from."""
        source = self
        while source._above is not None:
            source = source._above[0]
        if source._base is None or math.prod(source._layout.shape) != x.numel():
            return False
        return any(map(start_alike, parts_of(source._base), parts_of(x._local)))

    def count_from(self, x: Any) -> None:
        """Count writes from now on, with the version counter of `x`, which has the memory."""
        self._seen = self._now(x)

    def use_counter_of(self, clock: torch.Tensor) -> None:
        """Use the version counter of `clock` instead of the snapshot's."""
        self._clock, self._shares = clock, True
        self._seen = self._now(clock)

    def __deepcopy__(self, memo: dict[int, Any]) -> Source:
        """The source of copied memory; copies of views do not share a version counter."""
        copied = object.__new__(Source)
        memo[id(self)] = copied
        copied._layout, copied._take = self._layout, self._take
        copied._base = None if self._base is None else copied_parts(self._base, memo)
        copied._above = copy.deepcopy(self._above, memo)
        copied._clock, copied._shares, copied._counted = None, False, True
        copied._history = None
        copied._seen = (0, self._layout.grid.num_writes)
        copied.held = [copied_parts(local, memo) for local in self.held]
        return copied


def current(x: Any) -> torch.Tensor:
    """The local tensor of `x`, brought up to date if `x` is a snapshot."""
    known = x.__dict__.get(SOURCE)
    if known is not None:
        source, number = known
        source.refresh(x)
        x._local = source.held[number]
    return x._local


def resolve_conj(x: Any) -> Any:
    """`x`; a copy if one device makes one here, to resolve a lazy conjugate."""
    known = x.__dict__.get(SOURCE)
    return x.clone() if known is not None and known[0].bits[0] else x


def resolve_neg(x: Any) -> Any:
    """`x`; a copy if one device makes one here, to resolve a lazy negative."""
    known = x.__dict__.get(SOURCE)
    return x.clone() if known is not None and known[0].bits[1] else x


def may_write(x: Any) -> bool:
    """Whether a write to the snapshot `x` can go to its base."""
    known = x.__dict__.get(SOURCE)
    if known is None or not known[0].writable or x._layout.expanded:
        return False
    # In a traced graph, later ops cannot tell that a snapshot is stale.
    traced = any(type(part) is not torch.Tensor for part in parts_of(x._local))
    return not traced or _in_gradient_of_write()


def _in_gradient_of_write() -> bool:
    """Whether autograd writes the gradient of a write to a view.

    It copies the base's gradient and overwrites the same view of the copy, which nothing else uses.
    """
    node = current_node()
    return node is not None and bool(node.name().endswith("CopySlices"))


def write_through(x: Any, value: Any) -> None:
    """`x.copy_(value)` of a snapshot, written to its base; see `may_write`."""
    current(x)
    x.__dict__[SOURCE][0].write(value.to(x.dtype).expand(x.shape))


def follow(kind: Any, op: Any, args: Sequence[Any], kwargs: dict[str, Any], entry: Entry) -> None:
    """Make a planned call update the snapshots that it reads, and give those it makes a source.

    `args` has layouts in place of tensors.
    """
    read_current(args, entry)
    if any(layout.snapshot for layout in entry.plan.outputs):
        finish = entry.finish or _wraps_one(entry.out)
        # To torch, the result of detach is not a view, but shares the version counter.
        shares = op is aten.detach.default
        entry.finish = _noting_source(functools.partial(View, kind, op, kwargs), finish, shares)
        entry.out = None


def read_current(args: Sequence[Any], entry: Entry) -> None:
    """Make a planned call update the snapshots that it reads."""
    paths = [p for p in tensor_paths(args) if getattr(at_path(args, p), "snapshot", False)]
    if paths:
        entry.move = _current_first(paths, entry.move)


def _current_first(
    paths: Sequence[Path], move: Callable[[list[Any], Sequence[Any]], None] | None
) -> Callable[[list[Any], Sequence[Any]], None]:
    def moved(operands: list[Any], args: Sequence[Any]) -> None:
        for path in paths:
            place = operands if len(path) == 1 else operands[path[0]]
            place[path[-1]] = current(at_path(args, path))
        if move is not None:
            move(operands, args)

    return moved


def _wraps_one(layout: Layout | None) -> Callable[..., Any]:
    return lambda local, args, wrap: wrap(local, layout)


def _noting_source(
    view: Callable[[Sequence[Any]], View], finish: Callable[..., Any], shares: bool
) -> Callable[..., Any]:
    def noted(local: Any, args: Sequence[Any], wrap: Callable[..., Any]) -> Any:
        result = finish(local, args, wrap)
        add_source(result, args[0], view(args[1:]), shares=shares)
        return result

    return noted


def add_source(
    result: Any,
    base: Any,
    take: Callable[[Any], Any],
    *,
    shares: bool = False,
    counted: bool = False,
) -> Source:
    """Record that `result`, one snapshot or several, is `take(base)`."""
    results = result if isinstance(result, (list, tuple)) else [result]
    source = Source(base, take, [each._local for each in results], shares=shares, counted=counted)
    for number, each in enumerate(results):
        each.__dict__[SOURCE] = source, number
    return source


def mark_view_of(result: Any, base: Any) -> None:
    """Record that `result`, a view of an alias of `base`, is a view of `base`."""
    known = getattr(result, "__dict__", {}).get(SOURCE)
    if known is not None:
        known[0].count_from(base)


def take_over(x: Any, other: Any) -> None:
    """Give `x` the local tensor, layout and source of `other`."""
    x._local, x._layout = other._local, other._layout
    known = other.__dict__.get(SOURCE)
    if known is not None:
        x.__dict__[SOURCE] = known
    else:
        x.__dict__.pop(SOURCE, None)


def share_memory(x: Any, value: Any) -> None:
    """Give `x` the memory of `value`; each keeps its own version counter."""
    if SOURCE in value.__dict__:
        held = value.detach()
        add_source(held, value, _itself, counted=True)
        value = held
    value._layout.grid.hides_writes = True
    take_over(x, value)


def count_separately(data: Any, x: Any) -> None:
    """Record that `data` has the memory of `x`, but its own version counter."""
    x._layout.grid.hides_writes = True
    data._local = per_rank(lambda part: part.data, data._local)
    known = data.__dict__.get(SOURCE)
    if known is not None:
        known[0].use_counter_of(x.detach())


def _itself(x: Any) -> Any:
    return x


def deep_copied(x: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of `x`, which shares memory with the copies of its views in `memo`."""
    local, known = current(x), x.__dict__.get(SOURCE)
    copied = type(x)._wrap(copied_parts(local, memo), x._layout)
    if known is not None:
        source, number = copied.__dict__[SOURCE] = copy.deepcopy(known, memo)
        copied._local = source.held[number]
    if x._is_view():
        x._layout.grid.hides_writes = True
    return copied


def copied_parts(local: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of a local tensor that keeps shared memory shared."""

    def copied(part: torch.Tensor) -> torch.Tensor:
        if type(part) is not torch.Tensor:
            return part.detach().clone()
        return copy.deepcopy(part.detach(), memo)

    return per_rank(copied, local)
