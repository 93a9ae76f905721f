"""Keeping torch.autocast away from local tensors.

Autocast has done its work when a call arrives at a DTensor: what dtypes the results have is decided
there, and planning relies on it. Torch ops that run on local tensors after that, in local functions
and around collectives, must not be cast a second time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Fn = TypeVar("_Fn", bound=Callable[..., Any])
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU).add(
    torch._C.DispatchKey.AutocastCUDA
)


def _any_enabled() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


#: Whether autocast is on for any device.
is_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", _any_enabled)


def casts_nothing() -> Any:
    """A context in which autocast is off; dear, so ask `is_autocast` first."""
    return torch._C._ExcludeDispatchKeyGuard(_KEYS)


def is_cast_before(op: torch._ops.OpOverload) -> bool:
    """Whether autocast has an opinion about this op on every device.

    Then it has been asked when the op arrives at a DTensor, and is off for what the op runs.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return all(has_kernel(op.name(), key) for key in ("AutocastCPU", "AutocastCUDA"))


def without_autocast(fn: _Fn) -> _Fn:
    """`fn`, whose torch ops are not cast."""

    @functools.wraps(fn, assigned=("__name__", "__qualname__", "__doc__"), updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        if is_autocast():
            with casts_nothing():
                return fn(*args, **kwargs)
        # Most calls are by position, and no keywords are cheaper than an empty dictionary of them.
        return fn(*args, **kwargs) if kwargs else fn(*args)

    return run  # type: ignore[return-value]
