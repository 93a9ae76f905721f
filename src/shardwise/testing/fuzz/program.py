"""A program: leaves and statements over named slots, its text as Python, and a run of it."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import re
import traceback
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardwise.core.placements import Partial, Placement, Replicate, Shard
from shardwise.testing.fuzz.worlds import OneDevice

_DOUBLE = {
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
_SLOT = re.compile(r"\bv\d+\b")


@dataclass(frozen=True)
class Leaf:
    """A tensor that the program starts with. Its number in `name` is the seed of its values.

    Integers are below `high`; `placements` has one entry per mesh axis.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[Placement, ...]
    order: tuple[int, ...] | None = None
    grad: bool = False
    high: int = 5

    @property
    def code(self) -> str:
        parts = [repr(self.shape), repr(self.dtype), placed(self.placements), self.name[1:]]
        parts += [f"order={self.order}"] if self.order is not None else []
        parts += ["grad=True"] if self.grad else []
        parts += [f"high={self.high}"] if self.high != 5 else []
        return f"{self.name} = w.leaf({', '.join(parts)})"

    @property
    def makes(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def reads(self) -> frozenset[str]:
        return frozenset()


@dataclass(frozen=True)
class Statement:
    """A statement. `makes` are the slots that it assigns; the others in its text it reads."""

    code: str
    makes: tuple[str, ...] = ()

    @property
    def reads(self) -> frozenset[str]:
        return frozenset(_SLOT.findall(self.code)) - set(self.makes)


Item = Leaf | Statement


@dataclass(frozen=True)
class Program:
    """Items in order, on a mesh of this shape; `seed` seeds the random ops."""

    seed: int
    mesh: tuple[int, ...]
    items: tuple[Item, ...]

    @property
    def leaves(self) -> list[Leaf]:
        return [item for item in self.items if isinstance(item, Leaf)]

    def upto(self, num: int) -> Program:
        """The first `num` items."""
        return replace(self, items=self.items[:num])

    def without(self, index: int) -> Program:
        """Without item `index` and all items that need a slot of it."""
        gone = set(self.items[index].makes)
        kept = list(self.items[:index])
        for item in self.items[index + 1 :]:
            if item.reads & gone:
                gone.update(item.makes)
            else:
                kept.append(item)
        return replace(self, items=tuple(kept))

    def with_item(self, index: int, item: Item) -> Program:
        items = (*self.items[:index], item, *self.items[index + 1 :])
        return replace(self, items=items)

    def in_double(self) -> Program:
        """The same with leaves in double precision."""
        items = tuple(
            replace(item, dtype=_DOUBLE.get(item.dtype, item.dtype))
            if isinstance(item, Leaf)
            else item
            for item in self.items
        )
        return replace(self, items=items)

    @property
    def text(self) -> str:
        return "\n".join(item.code for item in self.items)


@functools.lru_cache(maxsize=10_000)
def compiled(code: str) -> CodeType:
    """The compiled statement; shrinking runs each many times."""
    return compile(code, "<program>", "exec")


def placed(placements: tuple[Placement, ...]) -> str:
    """Placements as Python."""
    words = [f'Partial("{p.reduce_op}")' if isinstance(p, Partial) else repr(p) for p in placements]
    return f"[{', '.join(words)}]"


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
    """Run a statement. An error keeps no frame alive.

    A context manager in a frame stays entered as long as the frame lives: in torch 2.11, a
    `checkpoint` whose function raises would recompute it in the backward of later programs.
    """
    try:
        exec(compiled(code), scope)
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        raise


@dataclass
class WorldState:
    """What a world holds after some items: the slots, and its own generator state."""

    world: OneDevice
    seed: int
    scope: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None
    #: How many items ran; with an error, the number of the one that raised.
    done: int = 0
    #: The dtypes of autocast blocks that ran.
    casts: set[torch.dtype] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.scope = dict(_NAMES) | {"w": self.world}
        self.rng = torch.Generator().manual_seed(self.seed).get_state()

    def execute(self, item: Item) -> None:
        """Run one item; its errors are raised."""
        torch.set_rng_state(self.rng)
        try:
            execute(item.code, self.scope)
        finally:
            self.rng = torch.get_rng_state()
        self._look()
        self.casts.update(getattr(torch, name) for name in _CAST.findall(item.code))
        self.done += 1

    def _look(self) -> None:
        """Ask each value whether it is a leaf, so that no later step depends on the first question.

        Until then torch takes a view whose base was written to for a leaf, and refuses a write.
        """
        for value in self.slots().values():
            if isinstance(value, torch.Tensor):
                with contextlib.suppress(Exception):  # torch may forbid reading a view
                    _ = value.is_leaf

    def slots(self) -> dict[str, Any]:
        """The values by name, in the order in which they were made."""
        return {name: v for name, v in self.scope.items() if name[0] == "v" and name[1:].isdigit()}


def run(program: Program, world: OneDevice) -> WorldState:
    """Run until the end or an error."""
    state = WorldState(world, program.seed)
    for item in program.items:
        try:
            state.execute(item)
        except Exception as error:
            state.error = error
            break
    return state
