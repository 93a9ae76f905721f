"""Keeping torch.autocast away from local tensors.

Autocast has done its work when a call arrives at a DTensor: what dtypes the results have is decided
there, and planning relies on it. Torch ops that run on local tensors after that, in local functions
and around collectives, must not be cast a second time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from shardwise._torch.dispatch import autocast_off, has_kernel_for_key, is_autocast
from shardwise._torch.schema import OpOverload

_Fn = TypeVar("_Fn", bound=Callable[..., Any])


def is_cast_before(op: OpOverload) -> bool:
    """Whether autocast has an opinion about this op on every device.

    Then it has been asked when the op arrives at a DTensor, and is off for what the op runs.
    """
    return all(has_kernel_for_key(op.name(), key) for key in ("AutocastCPU", "AutocastCUDA"))


def without_autocast(fn: _Fn) -> _Fn:
    """`fn`, whose torch ops are not cast."""

    @functools.wraps(fn, assigned=("__name__", "__qualname__", "__doc__"), updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        if is_autocast():
            with autocast_off():
                return fn(*args, **kwargs)
        # Most calls are by position, and no keywords are cheaper than an empty dictionary of them.
        return fn(*args, **kwargs) if kwargs else fn(*args)

    return run  # type: ignore[return-value]
