"""Arithmetic of symbolic sizes that a compiler's graph need not hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

_Result = TypeVar("_Result")


def unrecorded(fn: Callable[..., _Result], *args: Any) -> _Result:
    """`fn(*args)`; what it computes with sizes does not enter a graph that is being traced.

    When it makes a tensor, torch notes how it got a size, such as `s = 1 + (s - 1)` for the memory
    of `s` entries, and the last note about `s` answers for every `s` that has none of its own: that
    one would answer for itself. Sizes without notes are built from a graph's inputs when needed.
    """
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    with disable_proxy_modes_tracing():
        return fn(*args)


def noted(numbers: Sequence[Any]) -> Sequence[Any]:
    """`numbers`, which a graph that is being traced can hold: the same object where it does.

    torch builds sums and products of sizes when it needs them, but a stride such as `s * s` is a
    power to it, which it must have seen.
    """
    if not any(map(_is_power, numbers)):
        return numbers
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    if get_proxy_mode() is None:
        return numbers
    return tuple(_noted(n) if _is_power(n) else n for n in numbers)


def _noted(number: torch.SymInt) -> Any:
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    expr, env = number.node.expr, number.node.shape_env
    symbols = {symbol: env.create_symintnode(symbol, hint=None) for symbol in expr.free_symbols}
    return sympy_interp(PythonReferenceAnalysis, symbols, expr)


def _is_power(number: Any) -> bool:
    if type(number) is not torch.SymInt:
        return False
    expr = number.node.expr
    return expr.is_Pow or any(factor.is_Pow for factor in expr.args)
