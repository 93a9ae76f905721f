"""CPU memory: of tables, and of messages and gradients, which is reused from step to step.

The C library returns large allocations to the system as soon as they are free. A step that
allocates them anew pays for every page fault again, which costs more than writing the values.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

#: The C library returns larger allocations to the system as soon as they are free.
LARGE_BYTES = 8 << 20

_HUGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
#: From how many bytes on a table lies in huge pages.
_HUGE_BYTES = 8 << 20


def table_memory(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, zeros: bool = False
) -> torch.Tensor:
    """Uninitialised memory for a table, or zeros.

    Rows are read and written in random order. So on the CPU large tables lie in huge pages, where
    the system has any: a lookup then waits less for addresses to be translated.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    # In a fake mode torch makes another kind of tensor.
    plain = device.type == "cpu" and type(torch.empty(0, device=device)) is torch.Tensor
    if num_bytes < _HUGE_BYTES or not plain or _HUGE is None:
        return (torch.zeros if zeros else torch.empty)(tuple(shape), dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without huge pages
        memory.madvise(_HUGE)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


class Lent:
    """A buffer that callers may keep: it is lent again only when no tensor refers to it.

    >>> lent = Lent()
    >>> gradient = lent.numbers(6, torch.float32)
    >>> lent.numbers(6, torch.float32).data_ptr() == gradient.data_ptr()  # which is still there
    False
    """

    __slots__ = ("_bytes", "_num_when_free")

    def __init__(self) -> None:
        self._bytes = np.empty(0, dtype=np.uint8)
        # The references of this object and of getrefcount, which differ between Python versions.
        self._num_when_free = sys.getrefcount(self._bytes)

    def numbers(
        self, num: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> torch.Tensor:
        """An uninitialised tensor; new memory on other devices, whose allocators cache it."""
        if not num or (device is not None and device.type != "cpu"):
            return torch.empty(num, dtype=dtype, device=device)
        num_bytes = num * dtype.itemsize
        is_held = sys.getrefcount(self._bytes) > self._num_when_free
        if is_held or self._bytes.shape[0] < num_bytes:
            self._bytes = np.empty(0, dtype=np.uint8)  # free the old one first
            self._bytes = np.empty(num_bytes, dtype=np.uint8)
        # Whatever shares memory with the tensor keeps this view of the array alive.
        return torch.from_numpy(self._bytes[:num_bytes]).view(dtype)

    def __reduce__(self) -> Any:
        """A copy has its own memory."""
        return Lent, ()
