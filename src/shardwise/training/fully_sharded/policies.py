"""What a group may do besides sharding: compute in another dtype, and keep shards on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
