"""A program run in one world, statement by statement."""

from __future__ import annotations

import contextlib
import copy
import math
import re
import traceback
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardwise.core.placements import Partial, Replicate, Shard
from shardwise.testing.fuzz.program import Item, Program, compiled
from shardwise.testing.fuzz.worlds import OneDevice

_NAMES = {
    "torch": torch,
    "F": F,
    "math": math,
    "copy": copy,
    "checkpoint": checkpoint,
    "Shard": Shard,
    "Replicate": Replicate,
    "Partial": Partial,
}
_CAST = re.compile(r'autocast\("cpu", torch\.(\w+)\)')


def execute(code: str, scope: dict[str, Any]) -> None:
    """WorldState a statement. An error keeps no frame alive.

    A context that waits in a frame for its end goes on until the frame is gone: `checkpoint` of a
    function that raises would, in torch 2.11, recompute it in the backward of later programs.
    """
    try:
        exec(compiled(code), scope)
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        raise


@dataclass
class WorldState:
    """What a world holds after some items: the slots, and the generator of its own."""

    world: OneDevice
    seed: int
    scope: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None
    #: How many items ran; with an error, the number of the one that raised.
    done: int = 0
    #: What ops have run under autocast to.
    casts: set[torch.dtype] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.scope = dict(_NAMES) | {"w": self.world}
        self.rng = torch.Generator().manual_seed(self.seed).get_state()

    def execute(self, item: Item) -> None:
        """WorldState one item; what it raises is what one would see."""
        torch.set_rng_state(self.rng)
        try:
            execute(item.code, self.scope)
        finally:
            self.rng = torch.get_rng_state()
        self._look()
        self.casts.update(getattr(torch, name) for name in _CAST.findall(item.code))
        self.done += 1

    def _look(self) -> None:
        """Ask each value whether it is a leaf, so that no later step depends on who has asked.

        Until somebody asks, torch takes a view whose base was written to for a leaf, and refuses
        to write to it.
        """
        for value in self.slots().values():
            if isinstance(value, torch.Tensor):
                with contextlib.suppress(Exception):  # one of several views is not to be read
                    _ = value.is_leaf

    def slots(self) -> dict[str, Any]:
        """The values by name, in the order in which they were made."""
        return {name: v for name, v in self.scope.items() if name[0] == "v" and name[1:].isdigit()}


def run(program: Program, world: OneDevice) -> WorldState:
    """WorldState until the end or an error."""
    state = WorldState(world, program.seed)
    for item in program.items:
        try:
            state.execute(item)
        except Exception as error:
            state.error = error
            break
    return state
