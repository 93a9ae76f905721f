"""Arithmetic of symbolic sizes that a compiler's graph need not hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

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
