"""Keeping torch.autocast away from local tensors.

Autocast has run when a call arrives at a DTensor, and planning relies on the dtypes that it chose.
Torch ops that run on local tensors after that, in local functions and around collectives, must not
be cast a second time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from shardwise._torch.dispatch import autocast_off, has_kernel_for_key, is_autocast
from shardwise._torch.schema import OpOverload

_Fn = TypeVar("_Fn", bound=Callable[..., Any])


def is_cast_before(op: OpOverload) -> bool:
    """Whether autocast has a kernel for this op on every device.

    Then that has run before the op arrives at a DTensor, and autocast is off inside the op.
    """
    return all(has_kernel_for_key(op.name(), key) for key in ("AutocastCPU", "AutocastCUDA"))


def without_autocast(fn: _Fn) -> _Fn:
    """`fn`, whose torch ops are not cast."""

    @functools.wraps(fn, assigned=("__name__", "__qualname__", "__doc__"), updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        if is_autocast():
            with autocast_off():
                return fn(*args, **kwargs)
        # Most calls are positional, and passing no keywords is cheaper than an empty dict.
        return fn(*args, **kwargs) if kwargs else fn(*args)

    return run  # type: ignore[return-value]
