"""Floats as integers that compare like them, and back."""

from __future__ import annotations

import torch

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
_FLOATS = {integer: floating for floating, integer in _INTEGERS.items()}


def ordered_integers(x: torch.Tensor, *, nan_last: bool) -> torch.Tensor:
    """Integers in the order of the floats; NaN is after all of them, or else before.

    >>> ordered_integers(torch.tensor([-1.0, 0.0, 0.5, torch.inf]), nan_last=True).diff() > 0
    tensor([True, True, True])
    """
    wide = x if x.dtype in _INTEGERS else x.float()
    integer = _INTEGERS[wide.dtype]
    bounds = torch.iinfo(integer)
    ordered = _flipped(wide.contiguous().view(integer))
    return torch.where(wide.isnan(), bounds.max if nan_last else bounds.min, ordered)


def floats_of(ordered: torch.Tensor) -> torch.Tensor:
    """What `ordered_integers` was given, in float32 at least.

    >>> x = torch.tensor([-1.0, -0.0, 3.5, torch.inf, torch.nan])
    >>> floats_of(ordered_integers(x, nan_last=False))
    tensor([-1.0000, -0.0000,  3.5000,     inf,     nan])
    """
    return _flipped(ordered).view(_FLOATS[ordered.dtype])


def _flipped(bits: torch.Tensor) -> torch.Tensor:
    """Floats are a sign and a magnitude, integers are not: all other bits of a negative turn."""
    bounds = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (bounds.bits - 1)) & bounds.max)
