"""The ranks that save or load together: one process, all processes, or a simulated world."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from shardwise.comm.agreement import Fault, joint_error
from shardwise.core.world import World, current_world
from shardwise.errors import CheckpointError, ShardwiseError

T = TypeVar("T")

#: One group per world: a save in the background must not interleave with other collectives.
_groups: weakref.WeakKeyDictionary[World, Any] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Crew:
    """`present` are the ranks of this process; `group` is None if those are all ranks."""

    size: int
    present: tuple[int, ...]
    group: Any

    @property
    def leads(self) -> bool:
        """Whether this process does what only one may do."""
        return self.present[0] == 0

    def exchange(self, mine: Sequence[T]) -> list[T]:
        """All-gather: one value per rank present becomes one value per rank."""
        if self.group is None:
            return list(mine)
        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, mine[0], group=self.group)
        except RuntimeError as error:
            raise CheckpointError(
                f"Rank {self.present[0]} lost the others during a checkpoint: {error}"
            ) from error
        return found

    def together(self, step: Callable[[], Sequence[T]]) -> list[T]:
        """Run a step and all-gather its results; if it fails on any rank, raise on all."""
        cause: Exception | None = None
        mine: Sequence[Any]
        try:
            mine = step()
        except (ShardwiseError, OSError, RuntimeError, ValueError, TypeError) as error:
            cause = error
            mine = [Fault(_text(error), CheckpointError)] * len(self.present)
        found = self.exchange(mine)
        faults = {rank: each for rank, each in enumerate(found) if isinstance(each, Fault)}
        if faults:
            raise joint_error("", faults, self.size) from cause
        return found

    def once(self, step: Callable[[], Any]) -> None:
        """Run a step on rank 0; if it fails, raise on all ranks."""

        def run() -> list[Any]:
            if self.leads:
                step()
            return [None] * len(self.present)

        self.together(run)


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}"
    return str(error) or type(error).__name__


def current_crew() -> Crew:
    """The crew of the current world; without torch.distributed, this process alone."""
    if not dist.is_available() or not dist.is_initialized():
        return Crew(1, (0,), None)
    world = current_world()
    if len(world.present) == world.size:
        return Crew(world.size, world.present, None)
    if world not in _groups:
        _groups[world] = dist.new_group(backend="gloo")
    return Crew(world.size, (world.rank,), _groups[world])
