"""Cheap launches: compiled kernels, and the scratch memory of launches, are kept.

Triton inspects every argument of every launch to find the compiled kernel: its type, whether it is
divisible by 16, whether it is 1. For a kernel of many arguments that takes longer than the launch.
Here only what can differ between two launches is inspected, and the compiled kernel is launched
with addresses, which skips the check that a tensor is on the device. The kernels tell Triton not to
specialize on the values of numbers; 64-bit numbers and unaligned tensors are left to Triton.

Scratch memory is kept per stream, so that launches on two streams do not share it. During graph
capture it is allocated anew: the graph keeps its own, and outlives what is kept here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton

_ALIGNED = 16
_WIDE = 2**31


class Launches:
    """Compiled kernels, by what they were compiled for."""

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
        max_registers: int | None = None,
        debug: bool = False,
    ) -> None:
        """Launch `kernel` on tensors, numbers and constants, in this order.

        `max_registers` of a thread: fewer let a multiprocessor hold more programs.
        """
        if self._device is None:  # interpreted
            kernel[grid](*tensors, *numbers, *constants)
            return
        if torch.cuda.current_device() != self._device:
            with torch.cuda.device(self._device):
                self.run(
                    kernel, grid, tensors, numbers, constants,
                    num_warps=num_warps, max_registers=max_registers, debug=debug,
                )  # fmt: skip
            return
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        bits = 0
        for address in addresses:
            bits |= address or 0
        # By identity: a kernel hashes its whole source.
        dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        known = (id(kernel), debug, *constants, *dtypes)
        compiled = self._compiled.get(known)
        ordinary = bits % _ALIGNED == 0 and (not numbers or max(numbers) < _WIDE)
        if compiled is None or not ordinary or _watched():
            compiled = kernel[grid](
                *tensors, *numbers, *constants, num_warps=num_warps, debug=debug,
                maxnreg=max_registers, sanitize_overflow=False,
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
    """Whether Triton has launch hooks, such as those of its profiler."""
    runtime = triton.knobs.runtime
    hooks = (runtime.launch_enter_hook, runtime.launch_exit_hook)
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Parts(NamedTuple):
    """Scratch memory for partial results of several programs."""

    #: Zeros, which kernels count in and reset.
    counters: torch.Tensor
    values: torch.Tensor
    #: The positions of the values, for results that need them.
    positions: torch.Tensor | None

    def hold(self, num_counters: int, num_values: int, with_positions: bool) -> bool:
        return (
            self.counters.shape[0] >= num_counters
            and self.values.shape[0] >= num_values
            and (not with_positions or self.positions is not None)
        )


class KernelScratch:
    """Scratch memory that is kept per stream, as large as the largest request."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[int, Parts] = {}

    def parts(self, num_counters: int, num_values: int, with_positions: bool) -> Parts:
        if is_captured(self._device):
            return self._make(num_counters, num_values, with_positions)
        stream = 0
        if self._device.type == "cuda":
            stream = triton.runtime.driver.active.get_current_stream(self._device.index)
        kept = self._kept.get(stream)
        if kept is None or not kept.hold(num_counters, num_values, with_positions):
            kept = self._kept[stream] = self._make(num_counters, num_values, with_positions)
        return kept

    def _make(self, num_counters: int, num_values: int, with_positions: bool) -> Parts:
        counters = torch.zeros(num_counters, dtype=torch.int32, device=self._device)
        values = torch.empty(num_values, device=self._device)
        positions = torch.empty_like(values, dtype=torch.int32) if with_positions else None
        return Parts(counters, values, positions)
