"""Leaky ReLU with drawn slopes, above autograd: see Note [Above autograd].

Not torch's own: that one writes the slopes to a second tensor besides its result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from shardwise.dtensor.tensor import run
from shardwise.rules.random import rrelu_slopes


def rrelu(
    x: Any,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Any:
    slopes = _slopes(x, lower, upper, training, generator)
    if slopes is None:
        return F.leaky_relu(x, (lower + upper) / 2)
    return x.contiguous() * slopes  # as one device leaves it


def rrelu_(
    x: Any,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Any:
    slopes = _slopes(x, lower, upper, training, generator)
    return F.leaky_relu_(x, (lower + upper) / 2) if slopes is None else x.mul_(slopes)


def _slopes(x: Any, lower: float, upper: float, training: bool, generator: Any) -> Any:
    if not lower <= upper:
        torch.rrelu(torch.empty(0), lower, upper, training)  # torch says what is wrong
    # One device goes through the entries in order, not through memory.
    return run(rrelu_slopes, x.detach().contiguous(), lower, upper, generator) if training else None


KERNELS = (("rrelu", rrelu), ("rrelu_", rrelu_))
