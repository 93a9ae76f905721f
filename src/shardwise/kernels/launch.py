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
from typing import Any, NamedTuple

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


# Memory that kernels of one launch share, kept from launch to launch: asking for it costs time.
#
# There is one of each per stream, so that launches on two streams do not meet in it. While a
# graph is captured it is asked for anew: the graph keeps its own, and outlives what is kept here.


def is_captured(device: torch.device) -> bool:
    """Whether what is launched now becomes part of a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Parts(NamedTuple):
    """Room for the parts of results that several programs make."""

    #: Zeros, which kernels count in and set back to zero.
    counters: torch.Tensor
    values: torch.Tensor
    #: Where the values stand; without, for results that need it not.
    positions: torch.Tensor | None

    def hold(self, num_counters: int, num_values: int, with_positions: bool) -> bool:
        return (
            self.counters.shape[0] >= num_counters
            and self.values.shape[0] >= num_values
            and (not with_positions or self.positions is not None)
        )


class KernelScratch:
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
