"""A program: leaves and statements, its text as Python, and the two worlds that it runs in."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any, cast

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardwise.core.layout import canonical_order, contiguous_stride, make_layout, normalize
from shardwise.core.mesh import grid_of
from shardwise.core.placements import REPLICATE, Partial, Placement, Replicate, Shard
from shardwise.dtensor.create import distribute_tensor
from shardwise.dtensor.tensor import DTensor
from shardwise.testing.compare import gathered
from shardwise.testing.layouts import scatter

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


# On one device a conversion is a copy. Writes after a conversion are therefore undefined: the
# generator writes to neither side of one.


def values(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, high: int = 5
) -> torch.Tensor:
    """The values of a leaf: bounded, and the same for the same seed.

    Floats are distinct odd multiples of 1/32: exact in every dtype, without ties, none of them 0.
    Integers are below `high`.

    >>> values((4,), torch.float32)
    tensor([ 0.7812,  0.9062, -0.9062, -1.7812])
    """
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        real = torch.float64
        parts = [values(shape, real, seed + offset) for offset in (0, 1000)]
        return torch.complex(*parts).to(dtype)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not dtype.is_floating_point:
        return torch.randint(0, high, shape, generator=generator).to(dtype)
    num = math.prod(shape)
    # An odd multiple within ±2 as long as there are enough of them.
    places = torch.randperm(max(num, 64), generator=generator)[:num]
    return ((2 * places + 1 - max(num, 64)).double() / 32).reshape(shape).to(dtype)


Placements = Sequence[Placement]


class OneDevice:
    """Plain torch."""

    def leaf(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        placements: Placements,
        seed: int = 0,
        *,
        order: tuple[int, ...] | None = None,
        grad: bool = False,
        high: int = 5,
    ) -> Any:
        """A new leaf, Partial ones included."""
        return self._lay(values(shape, dtype, seed, high), placements, order).requires_grad_(grad)

    def _lay(self, value: torch.Tensor, placements: Placements, order: Any) -> torch.Tensor:
        return value.clone()  # `value` may be a view, which would not be an ordinary leaf

    def redistribute(self, x: Any, placements: Placements, order: Any = None) -> Any:
        return x.clone()

    def full_tensor(self, x: Any) -> Any:
        return x.clone()

    def round_trip(self, x: Any) -> Any:
        return x.clone()

    def from_whole(self, x: Any) -> Any:
        return x.clone()

    def distribute(self, x: Any, placements: Placements) -> Any:
        return x.detach().clone()

    def weighted(self, x: Any) -> Any:
        """A weighted sum, so that entries have different gradients."""
        return (x * _weights(x)).sum()

    def read(self, x: Any) -> Any:
        """What one device would hold."""
        return x


class Sharded(OneDevice):
    """DTensors on a mesh of the given shape, in the current simulated world."""

    def __init__(self, mesh: tuple[int, ...]) -> None:
        self.mesh = init_device_mesh("cpu", mesh)
        self.grid = grid_of(self.mesh)

    def _lay(self, value: torch.Tensor, placements: Placements, order: Any) -> DTensor:
        """Shards without a redistribution."""
        shape = tuple(value.shape)
        normal = normalize(placements, shape, self.grid, order)
        layout = make_layout(self.grid, normal, shape, contiguous_stride(shape), value.dtype, order)
        return DTensor._wrap(scatter(value, layout), layout)

    def redistribute(self, x: DTensor, placements: Placements, order: Any = None) -> DTensor:
        """In other placements; never the tensor itself, and dense as a copy on one device is."""
        moved = x.redistribute(placements=placements, order=order)
        return cast(DTensor, moved.clone()) if moved is x or _has_gaps(moved) else moved

    def full_tensor(self, x: DTensor) -> torch.Tensor:
        """The whole on every rank."""
        return x.full_tensor()

    def round_trip(self, x: DTensor) -> DTensor:
        """`to_local` and `from_local`, where that is the same tensor again."""
        layout = x._layout
        terms = {p.reduce_op for p in layout.placements if isinstance(p, Partial)}
        if terms - {"sum"} or layout.order != canonical_order(layout.placements, None):
            x = x.redistribute(placements=[REPLICATE] * len(layout.placements))
        x = cast(DTensor, x.clone())  # strides with gaps are lost, as on one device
        local = x.to_local()
        return DTensor.from_local(
            local, self.mesh, x.placements, shape=tuple(x.shape), stride=x.stride()
        )

    def from_whole(self, x: torch.Tensor) -> DTensor:
        """What `full_tensor` gave, or was computed from it, as a replicated DTensor."""
        return DTensor.from_local(x, self.mesh, [REPLICATE] * self.mesh.ndim)

    def distribute(self, x: torch.Tensor, placements: Placements) -> DTensor:
        """A new DTensor of a plain tensor that every rank has."""
        return distribute_tensor(x.detach(), self.mesh, placements)

    def weighted(self, x: torch.Tensor) -> Any:
        """The same weighted sum of what one device would hold."""
        weights = _weights(x)
        return (x * (self.from_whole(weights) if isinstance(x, DTensor) else weights)).sum()

    def read(self, x: Any) -> Any:
        """What one device would hold."""
        return gathered([x])[0]


def _has_gaps(x: torch.Tensor) -> bool:
    """Whether a clone has other strides: some dims are expanded, or entries left out."""
    like = torch.empty_strided(x.shape, x.stride(), device="meta")
    return torch.empty_like(like).stride() != x.stride()


def _weights(x: torch.Tensor) -> torch.Tensor:
    """Multiples of 1/8, which every dtype holds exactly."""
    return ((torch.arange(x.numel()) % 7 + 1) / 8).to(x.dtype).reshape(x.shape)
