"""Symbolic sizes, and fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise._torch.compat import Names, Probe

_names = Names()

#: The fake mode of the given tensors, or of what runs now; None if there is none.
detect_fake_mode: Callable[..., Any] = _names.find(
    "torch._guards.detect_fake_mode", "DTensors with symbolic sizes cannot be traced"
)
#: Asserts a fact about a symbol that the compiler may rely on.
check_size: Callable[[Any], None] = _names.find(
    "torch._check", "rows of a table cannot be picked in compiled code"
)
_NO_FORMULAS = "sizes computed from symbols cannot be written into a graph"
_sympy_interp: Callable[[], Any] = _names.later(
    "torch.utils._sympy.interp.sympy_interp", _NO_FORMULAS
)
_reference: Callable[[], Any] = _names.later(
    "torch.utils._sympy.reference.PythonReferenceAnalysis", _NO_FORMULAS
)


def compute(expression: Any, symbols: dict[Any, Any]) -> Any:
    """A sympy expression of a size, evaluated with `symbols`."""
    return _sympy_interp()(_reference(), symbols, expression)


def probe() -> Probe:
    return _names.probe(_computes, "symbolic sizes are computed wrongly")


def _computes() -> bool:
    import sympy  # type: ignore[import-untyped]

    check_size(torch.empty(2).numel() == 2)
    n = sympy.Symbol("n", integer=True)
    return detect_fake_mode() is None and compute(2 * n + 1, {n: 3}) == 7
