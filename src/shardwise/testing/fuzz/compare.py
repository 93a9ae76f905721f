"""Whether what a sharded run holds is what one device holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from shardwise.dtensor.tensor import DTensor
from shardwise.testing.op_sweep.compare import Different, gathered

#: How far a value may be off, in multiples of the largest one, or of 1 where that is smaller. A
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


def whole(value: Any) -> Any:
    """A value as one device would hold it; raises `Different` where the ranks disagree."""
    with torch.no_grad():
        return gathered([value])[0]


def difference(found: Any, expected: Any, allowed: float) -> str:
    """How `found` is not `expected`; empty where it is."""
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        return _scalar_difference(found, expected, allowed)
    if found.dtype != expected.dtype:
        return f"is {found.dtype} instead of {expected.dtype}"
    if found.shape != expected.shape:
        return f"has shape {list(found.shape)} instead of {list(expected.shape)}"
    if not (expected.is_floating_point() or expected.is_complex()):
        return "" if torch.equal(found, expected) else f"is {_short(found)}, not {_short(expected)}"
    ours, theirs = _wide(found), _wide(expected)
    if not torch.equal(ours.isnan(), theirs.isnan()):
        return f"is {_short(found)}, not {_short(expected)}"
    ours, theirs = (
        ours.nan_to_num(posinf=1e30, neginf=-1e30),
        theirs.nan_to_num(posinf=1e30, neginf=-1e30),
    )
    if not ours.numel():
        return ""
    off = (ours - theirs).abs().max().item()
    if off <= allowed * max(1.0, theirs.abs().max().item()):
        return ""
    return f"differs by {off:.3g}: {_short(found)}, not {_short(expected)}"


def _wide(value: torch.Tensor) -> torch.Tensor:
    value = value.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(value.to(torch.complex128)) if value.is_complex() else value.double()


def _scalar_difference(found: Any, expected: Any, allowed: float) -> str:
    if type(found) is type(expected):
        if found == expected or (found != found and expected != expected):
            return ""
        if isinstance(found, float) and abs(found - expected) <= allowed * max(1.0, abs(expected)):
            return ""
    return f"is {found!r}, not {expected!r}"


def _short(value: torch.Tensor) -> str:
    text = str(value.detach().flatten()[:6].tolist())
    return text if value.numel() <= 6 else text[:-1] + ", ...]"


def grad_of(value: Any) -> Any:
    """The gradient that a slot has gathered, if it has any."""
    if not isinstance(value, torch.Tensor) or not (value.is_leaf or value.retains_grad):
        return None
    return value.grad


def misplaced(leaf: Any, grad: Any) -> str:
    """How the gradient of a leaf breaks the contract about where it lies."""
    if not isinstance(leaf, DTensor) or not isinstance(grad, DTensor) or not leaf.is_leaf:
        return ""
    for axis, (here, there) in enumerate(zip(leaf.placements, grad.placements, strict=True)):
        if here.is_shard() != there.is_shard() or (here.is_shard() and here != there):
            return f"lies as {there!r} along axis {axis} of a leaf that is {here!r}"
    return ""


__all__ = ["TOLERANCES", "Different", "difference", "grad_of", "misplaced", "tolerance", "whole"]
