"""Hub: what the groups of one outermost module share: their order, and what is in flight.

Note [In flight]
While a group computes, the next `prefetch` groups are being gathered: in forward in the order of
the last step, in backward in the reverse order of this one. As many reductions may be running: the
next one waits for the oldest, which frees its row.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise._torch.autograd import after_backward, in_backward
from shardwise.comm import collectives
from shardwise.core.untraced import untraced
from shardwise.training.flat_buffer import FlatBuffer, check_ties

if TYPE_CHECKING:
    from shardwise.training.shard_group import ParameterGroup

SHARDED, STARTED, WHOLE = "sharded", "started", "whole"
#: The attribute of a module with its group.
GROUP = "_shard_group"


def group_of(module: nn.Module) -> ParameterGroup | None:
    return module.__dict__.get(GROUP)


@dataclass(slots=True, eq=False, weakref_slot=True)
class ModuleCall:
    """One forward of a group: its place in the order of the step, and what it read."""

    group: ParameterGroup
    index: int
    version: int
    takes_gradients: bool = False
    #: What its modules saw as their parameters: they see it again where checkpoints inside of them
    #: compute forward again. Dropped after backward, since its history refers to this.
    tensors: list[torch.Tensor] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Reducing:
    """A row of gradients on its way: what it holds, and the axes that are still to come."""

    buffer: FlatBuffer
    #: For each member, by number, the axes of its mesh along which its gradient stays Partial.
    partial: dict[int, tuple[int, ...]]
    row: Any
    #: Whether each member has a gradient on this rank: then no flag has to be read.
    all_here: bool
    #: Axes of replicas, to be reduced after the reduce-scatter.
    left: list[int] = field(default_factory=list)
    #: The gradients themselves, where nothing is sent.
    grads: dict[int, torch.Tensor | None] | None = None
    finished: bool = False
    #: The collective that runs: waits for it, and returns the next row.
    wait: Callable[[], torch.Tensor] | None = None

    def advance(self) -> None:
        """Wait for the collective that runs, and start the next one."""
        row = self.row if self.wait is None else self.wait()
        if self.left:
            started = collectives.start_all_reduce(row, "sum", self.buffer.grid, self.left.pop(0))
            self.row, self.wait = None, functools.partial(collectives.awaited, started)
        else:
            self.row, self.wait, self.finished = row, None, True


class Hub:
    """What the groups of one outermost module share: their order, and what is in flight."""

    def __init__(self) -> None:
        self.groups: list[ParameterGroup] = []
        self.last_order: list[ParameterGroup] = []
        self.calls: list[ModuleCall] = []
        self.reducing: deque[Reducing] = deque()
        #: Rows that were sent in this pass. New memory costs a page fault for every 4 KiB of it.
        self.unused_rows: list[torch.Tensor] = []
        self.ends_backward = False
        #: Whether the backward pass makes a graph, in which tensors are saved again.
        self.keeps_whole = False

    def __getstate__(self) -> dict[str, Any]:
        return {"groups": self.groups}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.groups = state["groups"]

    def begin(self, root: ParameterGroup) -> None:
        """A new forward of the outermost module."""
        if self.ends_backward and not in_backward():
            self.forget()  # that backward raised
        found = [inner for inner in map(group_of, root.module.modules()) if inner is not None]
        if found != self.groups:
            check_ties(root.module)
            self.groups = found
            for group in found:
                group.hub = self
        for call in self.calls:
            call.tensors.clear()
        self.last_order = [call.group for call in self.calls] or self.last_order
        self.calls = []
        for group in found:
            group.drop_old()
        if torch.is_grad_enabled():
            for group in found:
                group.make_token()

    def end(self, root: ParameterGroup) -> None:
        """The outermost module returned: what was prefetched and not used is freed."""
        for group in self.groups:
            if group.state == STARTED and group.depth == 0:
                group.reshard()

    def is_last(self, group: ParameterGroup) -> bool:
        """Whether the call that runs was the last one of the step before, and of this group."""
        order = self.last_order
        return len(self.calls) == len(order) and order[-1] is self.calls[-1].group is group

    def prefetch(self, groups: Iterator[ParameterGroup], most: int) -> None:
        for group in groups:
            if most <= 0:
                return
            if group.state == SHARDED:
                group.start()
            most -= 1

    def started(self, reducing: Reducing, most: int) -> None:
        """Note a reduction that was started; wait for older ones so that few are in flight."""
        self.reducing.append(reducing)
        while sum(not each.finished for each in self.reducing) > max(1, most):
            next(each for each in self.reducing if not each.finished).advance()

    def new_row(
        self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for gradients: that of a row that was sent, if one fits."""
        for number, row in enumerate(self.unused_rows):
            if (row.shape, row.dtype, row.device) == (shape, dtype, device):
                return self.unused_rows.pop(number)
        return torch.empty(shape, dtype=dtype, device=device)

    def attend_end(self) -> None:
        """Have `finish` run when the backward pass that runs now ends."""
        self.keeps_whole |= torch.is_grad_enabled()
        if not self.ends_backward:
            self.ends_backward = True
            after_backward(self.finish)

    @untraced
    def finish(self) -> None:
        self.ends_backward = False
        self.unused_rows.clear()
        keeps, self.keeps_whole = self.keeps_whole, False
        for group in self.groups:
            if group.sync and group.unsynced:
                group.reduce_late()
            group.running.clear()
            if not keeps:
                group.reshard()

    def forget(self) -> None:
        """Drop the state of a step that raised."""
        self.ends_backward = self.keeps_whole = False
        for reducing in self.reducing:
            if reducing.wait is not None:
                reducing.wait()
        self.reducing.clear()
        self.unused_rows.clear()
        for group in self.groups:
            group.running.clear()
            group.reshard()
