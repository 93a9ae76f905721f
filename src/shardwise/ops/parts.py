"""Local functions for parts that torch's kernels do not survive, or that need their own shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.ops.shape.views import DimSlice


def functional(op: Any) -> Any:
    """The op that returns a new tensor; planning writes that back for an op in place."""
    if not op._schema.is_mutable:
        return op
    namespace, _, name = op._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"))
    return getattr(packet, op._schema.overload_name or "default")


@dataclass(frozen=True, slots=True)
class UnlessEmpty:
    """The op on a rank's planes; results without elements where it has none.

    `shapes` names arguments that hold the shape of an output, by their position.
    """

    op: Any
    shapes: tuple[tuple[int, int], ...] = ()

    def __call__(self, coordinate: Any, layouts: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        outputs = layouts[len(tensors) :]
        if math.prod(tensors[0].shape) and math.prod(outputs[0].local_shape(coordinate)):
            here = list(args)
            for position, number in self.shapes:
                here[position] = outputs[number].local_shape(coordinate)
            return self.op(*here, **kwargs)
        made = [
            torch.zeros(o.local_shape(coordinate), dtype=o.dtype, device=tensors[0].device)
            for o in outputs
        ]
        schema = getattr(self.op, "_schema", None)  # a function of ours has none
        if schema is not None and len(schema.returns) > len(made):
            names, remaining = [a.name for a in schema.arguments], iter(made)
            asked = args[names.index("output_mask")]
            return tuple(next(remaining) if wanted else None for wanted in asked)
        return made[0] if len(made) == 1 else tuple(made)


@dataclass(frozen=True, slots=True)
class OwnedSelectScatter:
    """Writes one row of a sharded dim where it lies."""

    dim: int

    def __call__(
        self,
        coordinate: Any,
        layouts: Sequence[Any],
        x: torch.Tensor,
        source: torch.Tensor,
        dim: int,
        index: int,
    ) -> torch.Tensor:
        offset = layouts[0].box(coordinate)[0][self.dim]
        row = index % layouts[0].shape[self.dim] - offset
        result = x.clone()
        if 0 <= row < x.shape[self.dim]:
            result.select(self.dim, row).copy_(source)
        return result


@dataclass(frozen=True, slots=True)
class OwnedSliceScatter:
    """Writes this rank's part of a slice."""

    cut: DimSlice

    def __call__(
        self,
        coordinate: Any,
        layouts: Sequence[Any],
        x: torch.Tensor,
        source: torch.Tensor,
        *_: Any,
    ) -> torch.Tensor:
        result = x.clone()
        self.cut.of(result, layouts[0].box(coordinate)[0][self.cut.dim]).copy_(source)
        return result
