"""A program as data: leaves and statements that name slots, and its text as Python."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from types import CodeType

import torch

from shardwise.core.placements import Partial, Placement

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
    """Items in order, on a mesh of this shape; `seed` is that of the draws."""

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
        """Item `index` left out, with everything that needs a slot that it makes."""
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
    """The code of a statement, which shrinking runs many times."""
    return compile(code, "<program>", "exec")


def placed(placements: tuple[Placement, ...]) -> str:
    """Placements as Python."""
    words = [f'Partial("{p.reduce_op}")' if isinstance(p, Partial) else repr(p) for p in placements]
    return f"[{', '.join(words)}]"
