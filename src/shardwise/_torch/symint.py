"""Sizes that are symbols, and the fake tensors that carry them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise._torch.compat import Names, Probe

_names = Names()

#: The mode under which the given tensors, or what runs now, are fake; None where nothing is.
detect_fake_mode: Callable[..., Any] = _names.find(
    "torch._guards.detect_fake_mode", "DTensors with symbolic sizes cannot be traced"
)
#: States what a symbol can be, for the compiler to rely on.
check_size: Callable[[Any], None] = _names.find(
    "torch._check", "rows of a table cannot be picked in compiled code"
)
_constrain_range: Callable[[], Any] = _names.later(
    "torch.fx.experimental.symbolic_shapes._constrain_range_for_size",
    "sharded modules with outputs of unknown size cannot be compiled",
)
_NO_FORMULAS = "sizes computed from symbols cannot be written into a graph"
_sympy_interp: Callable[[], Any] = _names.later(
    "torch.utils._sympy.interp.sympy_interp", _NO_FORMULAS
)
_reference: Callable[[], Any] = _names.later(
    "torch.utils._sympy.reference.PythonReferenceAnalysis", _NO_FORMULAS
)


def constrain_size(size: Any) -> None:
    """`size`, which only values tell, is one: 0 or more."""
    _constrain_range()(size, min=0)


def compute(expression: Any, symbols: dict[Any, Any]) -> Any:
    """A sympy expression of a size, of numbers in place of its symbols."""
    return _sympy_interp()(_reference(), symbols, expression)


def probe() -> Probe:
    return _names.probe(_computes, "sizes that are symbols are computed otherwise")


def _computes() -> bool:
    import sympy  # type: ignore[import-untyped]

    check_size(torch.empty(2).numel() == 2)
    n = sympy.Symbol("n", integer=True)
    return detect_fake_mode() is None and compute(2 * n + 1, {n: 3}) == 7
