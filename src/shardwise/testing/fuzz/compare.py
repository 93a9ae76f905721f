"""Comparison of a program's values with one device's: relative to the largest entry."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from shardwise.testing.compare import equal, mismatch

#: How far a value may be off, relative to the largest one, or to 1 where that is smaller. A
#: program has the tolerance of the coarsest dtype in it. Other dtypes are exact.
TOLERANCES = {
    torch.float64: 1e-10,
    torch.complex128: 1e-10,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 1.2e-1,
}


def tolerance(values: Iterable[Any], casts: Iterable[torch.dtype] = ()) -> float:
    """The tolerance of a program that holds these values and has run ops under autocast to `casts`.

    Such an op may return float32 and round inside: `F.bilinear` adds products of bfloat16.
    """
    dtypes = {v.dtype for v in values if isinstance(v, torch.Tensor)} | set(casts)
    return max((TOLERANCES.get(dtype, 0.0) for dtype in dtypes), default=0.0)


def difference(found: Any, expected: Any, allowed: float) -> str:
    """How `found` differs from `expected`; empty where it does not."""
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        return _scalar_difference(found, expected, allowed)
    if why := mismatch(found, expected):
        return why
    if not (expected.is_floating_point() or expected.is_complex()):
        return "" if torch.equal(found, expected) else f"is {_short(found)}, not {_short(expected)}"
    ours, theirs = _wide(found), _wide(expected)
    if not torch.equal(ours.isnan(), theirs.isnan()):
        return f"is {_short(found)}, not {_short(expected)}"
    if not ours.numel():
        return ""
    ours, theirs = (x.nan_to_num(posinf=1e30, neginf=-1e30) for x in (ours, theirs))
    off = (ours - theirs).abs().max().item()
    if off <= allowed * max(1.0, theirs.abs().max().item()):
        return ""
    return f"differs by {off:.3g}: {_short(found)}, not {_short(expected)}"


def _wide(value: torch.Tensor) -> torch.Tensor:
    value = value.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(value.to(torch.complex128)) if value.is_complex() else value.double()


def _scalar_difference(found: Any, expected: Any, allowed: float) -> str:
    if type(found) is type(expected):
        if equal(found, expected):
            return ""
        if isinstance(found, float) and abs(found - expected) <= allowed * max(1.0, abs(expected)):
            return ""
    return f"is {found!r}, not {expected!r}"


def _short(value: torch.Tensor) -> str:
    text = str(value.detach().flatten()[:6].tolist())
    return text if value.numel() <= 6 else text[:-1] + ", ...]"
