"""What all kernels share: loads and stores of rows, and cheap launches.

Triton inspects every argument of every launch to find the compiled kernel: its type, whether it is
divisible by 16, whether it is 1. For a kernel of many arguments that takes longer than the launch.
Here only what can differ between two launches is inspected, and the compiled kernel is launched
with addresses, which skips the check that a tensor is on the device. The kernels tell Triton not to
specialize on the values of numbers; 64-bit numbers and unaligned tensors are left to Triton.

Scratch memory is kept per stream, so that launches on two streams do not share it. During graph
capture it is allocated anew: the graph keeps its own, and outlives what is kept here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

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


#: Those of a device.
launches_on = functools.lru_cache(None)(Launches)


def _watched() -> bool:
    """Whether Triton has launch hooks, such as those of its profiler."""
    runtime = triton.knobs.runtime
    hooks = (runtime.launch_enter_hook, runtime.launch_exit_hook)
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def current_stream(device: torch.device) -> int:
    """A number of the device's current stream; 0 where there are none."""
    if device.type != "cuda":
        return 0
    return triton.runtime.driver.active.get_current_stream(device.index)


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
        stream = current_stream(self._device)
        kept = self._kept.get(stream)
        if kept is None or not kept.hold(num_counters, num_values, with_positions):
            kept = self._kept[stream] = self._make(num_counters, num_values, with_positions)
        return kept

    def _make(self, num_counters: int, num_values: int, with_positions: bool) -> Parts:
        counters = torch.zeros(num_counters, dtype=torch.int32, device=self._device)
        values = torch.empty(num_values, device=self._device)
        positions = torch.empty_like(values, dtype=torch.int32) if with_positions else None
        return Parts(counters, values, positions)


@triton.jit
def load_rows(address, at, mask, dtype, DTYPES: tl.constexpr):
    """Elements `at` of a table at an address, as float32."""
    if DTYPES == 1:
        return tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask=mask, other=0.0)
    elif DTYPES == 2:
        found = tl.load(address.to(tl.pointer_type(tl.bfloat16)) + at, mask=mask, other=0.0)
        return found.to(tl.float32)
    elif DTYPES == 4:
        found = tl.load(address.to(tl.pointer_type(tl.float16)) + at, mask=mask, other=0.0)
        return found.to(tl.float32)
    else:
        # Tables of several dtypes: one branch for all of a table's rows.
        if dtype == 0:
            found = tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask=mask, other=0.0)
        elif dtype == 1:
            brain = tl.load(address.to(tl.pointer_type(tl.bfloat16)) + at, mask=mask, other=0.0)
            found = brain.to(tl.float32)
        else:
            half = tl.load(address.to(tl.pointer_type(tl.float16)) + at, mask=mask, other=0.0)
            found = half.to(tl.float32)
        return found


@triton.jit
def store_rows(address, at, values, mask, dtype, DTYPES: tl.constexpr):
    """Write float32 values to elements `at` of a table at an address."""
    if DTYPES == 1:
        tl.store(address.to(tl.pointer_type(tl.float32)) + at, values, mask=mask)
    elif DTYPES == 2:
        tl.store(address.to(tl.pointer_type(tl.bfloat16)) + at, values.to(tl.bfloat16), mask=mask)
    elif DTYPES == 4:
        tl.store(address.to(tl.pointer_type(tl.float16)) + at, values.to(tl.float16), mask=mask)
    else:
        if dtype == 0:
            tl.store(address.to(tl.pointer_type(tl.float32)) + at, values, mask=mask)
        elif dtype == 1:
            brain = values.to(tl.bfloat16)
            tl.store(address.to(tl.pointer_type(tl.bfloat16)) + at, brain, mask=mask)
        else:
            half = values.to(tl.float16)
            tl.store(address.to(tl.pointer_type(tl.float16)) + at, half, mask=mask)


@triton.jit
def last_at_most(values, count, wanted):
    """The position of the last of `count` ascending values that is at most `wanted`."""
    low, high = 0 * count, count
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(values + middle) <= wanted:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def assert_owned(owned, here, flags):
    """A wrong id loads nothing; it fails a device assertion, or sets a flag."""
    tl.device_assert(owned | (here == 0), "an embedding id is out of the range of its table")
    if flags is not None:
        wrong = (here & (owned == 0)).to(tl.int32)
        tl.store(flags + wrong * 0, wrong, mask=wrong > 0)


def padded_dim(dim: int) -> int:
    """The width of a kernel's blocks for tables of up to `dim` columns: a power of two."""
    return max(4, 1 << (dim - 1).bit_length())


def num_pieces(count: int, size: int) -> int:
    """`count / size`, rounded up. Triton's cdiv takes ten times as long on the host."""
    return -(-count // size)


def rows_in_flight(dim: int) -> int:
    """How many rows of `dim` columns a warp reads at a time."""
    return max(1, min(16, 512 // dim))
