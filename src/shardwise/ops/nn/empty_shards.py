"""A local call for kernels that fail on empty shards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class UnlessEmpty:
    """The op on a rank's shards; zeros where the input or the output is empty.

    `shapes` has the positions of arguments that hold the shape of an output, and its number.
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
