"""Member: a parameter of a group; and which parameters have been replaced by sharded ones."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.core.layout import Layout
from shardwise.core.mesh import Grid
from shardwise.errors import LayoutError

#: Parameters that fully_shard has replaced, and the names under which it found them.
_replaced: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}


@dataclass(frozen=True, slots=True)
class ShardAxes:
    """The mesh of sharded parameters, the axis that shards them, and those with replicas."""

    grid: Grid
    axis: int
    replicas: tuple[int, ...]

    @property
    def parts(self) -> int:
        return self.grid.shape[self.axis]


@dataclass(slots=True)
class Member:
    """A parameter of a group: who holds it, and how it is laid out while sharded and gathered."""

    name: str
    owners: list[tuple[nn.Module, str]]
    parameter: nn.Parameter
    #: The layout of the sharded parameter.
    layout: Layout
    #: The layout while it is gathered; None for a plain tensor.
    whole: Layout | None
    #: Whether its gradient is that of this rank's own loss; else it is global.
    own: bool
    #: The dim whose rows are shared out; in the buffer it is the outermost.
    dim: int = 0

    def whole_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of what `rank` holds while it is gathered."""
        if self.whole is None:
            return self.layout.shape
        return self.whole.local_shape(self.whole.grid.coordinates[rank])


def note_replaced(old: torch.Tensor, name: str) -> None:
    """Remember a parameter that a sharded one replaced, wherever else it may be held."""
    number = id(old)
    _replaced[number] = weakref.ref(old, lambda _: _replaced.pop(number, None)), name


def name_of_replaced(parameter: torch.Tensor) -> str | None:
    """The name under which fully_shard has replaced this parameter, if it has."""
    known = _replaced.get(id(parameter))
    return known[1] if known is not None and known[0]() is parameter else None


def check_ties(module: nn.Module) -> None:
    """Raise where a module still holds a parameter that was replaced elsewhere."""
    for path, parameter in module.named_parameters():
        name = name_of_replaced(parameter)
        if name is not None:
            raise LayoutError(
                f"Parameter {path!r} is shared with a module that is fully sharded without it "
                f"(there it is {name!r}), and would not be tied to it any more. A parameter "
                "belongs to one group: call fully_shard on a module that has all its users, and "
                "not on those."
            )
