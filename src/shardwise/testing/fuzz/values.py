"""The values of leaves: bounded, distinct where the dtype allows it, the same for the same seed."""

from __future__ import annotations

import math

import torch


def values(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, high: int = 5
) -> torch.Tensor:
    """A tensor of the given shape.

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
