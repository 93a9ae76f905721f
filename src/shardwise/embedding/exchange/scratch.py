"""Memory that is kept from step to step: for what a rank sends, and for gradients.

The C library takes large pieces of memory from the system and gives them back as soon as they are
free. A step that asks for new ones pays for every page of them again: on the CPU that costs more
than writing the numbers.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch


class Scratch:
    """One piece of memory, as large as was ever asked for; with `keep=False` a new one each time.

    >>> scratch = Scratch(keep=True)
    >>> first = scratch.numbers(6, torch.float32)
    >>> scratch.numbers(4, torch.float32).data_ptr() == first.data_ptr()
    True
    """

    __slots__ = ("_bytes", "keep")

    def __init__(self, *, keep: bool) -> None:
        self.keep = keep
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def numbers(
        self, num: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> torch.Tensor:
        """Room for so many numbers; what an earlier call gave is to be forgotten."""
        if not self.keep:
            return torch.empty(num, dtype=dtype, device=device)
        num_bytes = num * dtype.itemsize
        if self._bytes.shape[0] < num_bytes:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # the old one is free before
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
        return self._bytes[:num_bytes].view(dtype)

    def __reduce__(self) -> Any:
        """A copy has memory of its own."""
        return _scratch, (self.keep,)


def _scratch(keep: bool) -> Scratch:
    return Scratch(keep=keep)


class Lent:
    """Memory that others may hold on to: it is lent again only when nobody holds it any more.

    >>> lent = Lent()
    >>> gradient = lent.numbers(6, torch.float32)
    >>> lent.numbers(6, torch.float32).data_ptr() == gradient.data_ptr()  # which is still there
    False
    """

    __slots__ = ("_bytes", "_num_when_free")

    def __init__(self) -> None:
        self._bytes = np.empty(0, dtype=np.uint8)
        # This object's and the counter's own, which is not the same in every Python.
        self._num_when_free = sys.getrefcount(self._bytes)

    def numbers(self, num: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for so many numbers, on the CPU."""
        num_bytes = num * dtype.itemsize
        is_held = sys.getrefcount(self._bytes) > self._num_when_free
        if is_held or self._bytes.shape[0] < num_bytes:
            self._bytes = np.empty(num_bytes, dtype=np.uint8)
        # Whatever shares memory with the tensor keeps this view of the array alive.
        return torch.from_numpy(self._bytes[:num_bytes]).view(dtype)

    def __reduce__(self) -> Any:
        """A copy has memory of its own."""
        return Lent, ()
