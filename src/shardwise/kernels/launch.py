"""Launching a kernel again without asking again which one it is.

Triton looks at every argument of every launch to find the compiled kernel: its type, whether it is
divisible by 16, whether it is 1. For a kernel of many arguments that takes longer than launching.
Here only what can differ between two launches is looked at, and the compiled kernel is launched
with addresses, which need no check that a tensor is on the device. The kernels ask Triton not to
specialize on the values of numbers; numbers of 64 bits and tensors that are not aligned are left to
Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

_ALIGNED = 16
_WIDE = 2**31


class Launches:
    """The compiled kernels that were launched before, by what they were compiled for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device.index if device.type == "cuda" else None
        self._compiled: dict[Any, Any] = {}

    def run(
        self,
        kernel: Any,
        grid: tuple[int, int],
        tensors: Sequence[torch.Tensor | None],
        numbers: tuple[float, ...],
        constants: tuple[Any, ...],
        *,
        num_warps: int = 1,
        debug: bool = False,
    ) -> None:
        """Launch `kernel` on tensors, numbers and constants, in this order."""
        if self._device is None:  # interpreted
            kernel[grid](*tensors, *numbers, *constants)
            return
        if torch.cuda.current_device() != self._device:
            with torch.cuda.device(self._device):
                self.run(
                    kernel, grid, tensors, numbers, constants, num_warps=num_warps, debug=debug
                )
            return
        addresses: list[int | None] = []
        # By identity: a kernel hashes its whole source.
        key: list[Any] = [id(kernel), constants, debug]
        bits = 0
        for tensor in tensors:
            address = None if tensor is None else tensor.data_ptr()
            addresses.append(address)
            key.append(None if tensor is None else tensor.dtype)
            bits |= address or 0
        known = tuple(key)
        compiled = self._compiled.get(known)
        ordinary = bits % _ALIGNED == 0 and (not numbers or max(numbers) < _WIDE)
        if compiled is None or not ordinary or _watched():
            compiled = kernel[grid](
                *tensors, *numbers, *constants, num_warps=num_warps, debug=debug,
                sanitize_overflow=False,
            )  # fmt: skip
            if ordinary:
                self._compiled[known] = compiled
            return
        stream = triton.runtime.driver.active.get_current_stream(self._device)
        compiled.run(
            *grid, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *addresses, *numbers, *constants,
        )  # fmt: skip


def _watched() -> bool:
    """Whether somebody asked Triton to be told of launches, as its profiler does."""
    runtime = triton.knobs.runtime
    hooks = (runtime.launch_enter_hook, runtime.launch_exit_hook)
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)
