"""What one device has and what many have: differences, tensor by tensor.

A difference counts against the largest entry of the tensor on one device, or a thousandth of the
largest of its kind where that is more: a value that is zero in theory is rounding on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

SMALLEST = 1e-3

Values = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """One tensor: the largest difference, what it was measured against, or why it has none."""

    what: str
    name: str
    largest: float
    scale: float
    remark: str = ""

    def within(self, tolerance: float) -> bool:
        return not self.remark and self.largest <= tolerance * self.scale


def differences(what: str, one: Values, many: Values) -> Iterator[Difference]:
    largest = max((_largest(value) for value in one.values()), default=0.0)
    for name, expected in one.items():
        found = many.get(name)
        scale = max(_largest(expected), SMALLEST * largest)
        if found is None:
            yield Difference(what, name, 0.0, scale, "missing when sharded")
        elif found.shape != expected.shape:
            shapes = f"{tuple(found.shape)}, not {tuple(expected.shape)}"
            yield Difference(what, name, 0.0, scale, f"has shape {shapes}")
        else:
            gap = _largest(found.double() - expected.double())
            remark = "" if gap == gap else "not a number"
            yield Difference(what, name, gap, scale, remark)
    for name in many.keys() - one.keys():
        yield Difference(what, name, 0.0, 0.0, "missing on one device")


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0
