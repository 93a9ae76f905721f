"""Member: a parameter of a group; policies of groups, and tensors in nested containers."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


# -- policies ------------------------------------------------------------------------------------
# What a group may do besides sharding: compute in another dtype, and keep shards on the host.


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """Dtypes of a group: of gathered parameters, of their reduction, and of outputs.

    Parameters, gradients and optimizer state keep the dtype that they have. Gradients are reduced
    in `reduce_dtype`, or else in the dtype in which backward computes them. With
    `cast_forward_inputs`, floating inputs of the module get `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True, slots=True)
class CPUOffloadPolicy:
    """Sharded parameters, their gradients and so optimizer state are in the host's memory."""

    pin_memory: bool = True


# -- nested --------------------------------------------------------------------------------------
# Tensors in nested containers: what modules take and return.


def cast(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """`x` in a floating dtype, if it has one."""
    return x.to(dtype) if x.is_floating_point() else x


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested containers."""
    found: list[torch.Tensor] = []
    mapped(value, lambda x: found.append(x) or x)  # type: ignore[func-returns-value]
    return found


def mapped(value: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with `fn` applied to its tensors; the same object where none changes."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, dict):
        items = {key: mapped(item, fn) for key, item in value.items()}
        if all(items[key] is value[key] for key in items):
            return value
        made = copy.copy(value)
        for key, item in items.items():
            made[key] = item
        return made
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        fields = {name: mapped(item, fn) for name, item in held.items()}
        same = all(fields[name] is held[name] for name in held)
        return value if same else dataclasses.replace(value, **fields)
    if isinstance(value, (list, tuple)):
        parts = [mapped(item, fn) for item in value]
        if all(a is b for a, b in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
