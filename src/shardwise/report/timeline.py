"""Timeline: when the modules of a step ran in this process, and when it communicated."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from shardwise.comm.cost import collective_s
from shardwise.debug import CommDebugMode
from shardwise.debug.events import CommEvent
from shardwise.debug.places import Place


@dataclass(frozen=True)
class Span:
    """A stretch of time in which one module ran."""

    module: str
    phase: str
    start_s: float
    stop_s: float


class Timeline(CommDebugMode):
    """Notes when each collective began, and which module each op ran for.

    Times are those of this process. One that plays all ranks computes for all of them, one after
    another, and sends nothing; `expected_s` says what a collective would take by the cost that
    planning uses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []
        self.spans: list[Span] = []
        self._begin = 0.0
        self._open: Place | None = None

    def __enter__(self) -> CommDebugMode:
        super().__enter__()
        self.times, self.spans = [], []
        self._begin, self._open = time.perf_counter(), None
        return self

    def _now(self) -> float:
        return time.perf_counter() - self._begin

    def _note(self, event: CommEvent) -> None:
        super()._note(event)
        self.times.append(self._now())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        start = self._now()
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._ran(self._places.now(), start, self._now())

    def _ran(self, place: Place, start: float, stop: float) -> None:
        """Ops that follow each other in one module are one span."""
        before = self._open
        if before is not None and (before.module, before.phase) == (place.module, place.phase):
            self.spans[-1] = replace(self.spans[-1], stop_s=stop)
        else:
            self.spans.append(Span(place.module, place.phase, start, stop))
        self._open = place


_COSTS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}


def expected_s(event: CommEvent, num_ranks: int) -> float:
    """Seconds that a collective is expected to take; `num_bytes` is what a rank puts in."""
    kind = _COSTS.get(event.kind, "all_reduce")
    larger = event.num_bytes * (num_ranks if kind == "all_gather" else 1)
    return collective_s(kind, num_ranks, larger)
