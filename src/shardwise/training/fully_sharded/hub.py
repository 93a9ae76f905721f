"""Hub: what the groups of one outermost module share: their order, and what is in flight.

Note [In flight]
While a group computes, the next `prefetch` groups are being gathered: in forward in the order of
the last step, in backward in the reverse order of this one. As many reductions may be running: the
next one waits for the oldest, which frees its row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise._torch.autograd import after_backward, in_backward
from shardwise.core.untraced import untraced
from shardwise.training.fully_sharded.gathered import STARTED
from shardwise.training.fully_sharded.gradients import RowsInFlight
from shardwise.training.fully_sharded.members import check_ties

if TYPE_CHECKING:
    from shardwise.training.fully_sharded.group import ParameterGroup

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
    grad_enabled: bool = field(default_factory=torch.is_grad_enabled)
    #: What its modules saw as their parameters: they see it again where checkpoints inside of them
    #: compute forward again. Dropped after backward, since its history refers to this.
    tensors: list[torch.Tensor] = field(default_factory=list)


class Hub:
    """What the groups of one outermost module share: their order, and what is in flight."""

    def __init__(self) -> None:
        self.groups: list[ParameterGroup] = []
        self.last_order: list[ParameterGroup] = []
        self.calls: list[ModuleCall] = []
        self.rows = RowsInFlight()
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
        inside = (group for group in map(group_of, root.module.modules()) if group is not None)
        found = list({id(group): group for group in inside}.values())
        for group in found:
            group.parameters.check()
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

    def end(self) -> None:
        """The outermost module returned: what was prefetched and not used is freed."""
        for group in self.groups:
            if group.parameters.state == STARTED and group.depth == 0:
                group.reshard()

    def is_last(self, group: ParameterGroup) -> bool:
        """Whether the call that runs was the last one of the step before, and of this group."""
        order = self.last_order
        return len(self.calls) == len(order) and order[-1] is self.calls[-1].group is group

    def prefetch(self, groups: Iterator[ParameterGroup], most: int) -> None:
        for _, group in zip(range(most), groups, strict=False):
            group.parameters.start()

    def attend_end(self) -> None:
        """Have `finish` run when the backward pass that runs now ends."""
        self.keeps_whole |= torch.is_grad_enabled()
        if not self.ends_backward:
            self.ends_backward = True
            after_backward(self.finish)

    @untraced
    def finish(self) -> None:
        self.ends_backward = False
        self.rows.unused.clear()
        keeps, self.keeps_whole = self.keeps_whole, False
        for group in self.groups:
            group.gradients.reduce_late(self.rows)
            group.running.clear()
            if not keeps:
                group.reshard()

    def forget(self) -> None:
        """Drop the state of a step that raised."""
        self.ends_backward = self.keeps_whole = False
        self.rows.forget()
        for group in self.groups:
            group.running.clear()
            group.reshard()
