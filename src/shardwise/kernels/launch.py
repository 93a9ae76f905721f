"""Launching a kernel again without asking again which one it is.

Triton looks at every argument of every launch to find the compiled kernel: its type, whether it is
divisible by 16, whether it is 1. For a kernel of many arguments that takes longer than launching.
Here only what can differ between two lookups of the same tables is looked at, and the compiled
kernel is launched as it is.
"""

from __future__ import annotations

from typing import Any

import torch

_ALIGNED = 16


class Launches:
    """The compiled kernels that were launched before, by what they were compiled for."""

    def __init__(self) -> None:
        self._compiled: dict[Any, Any] = {}

    def run(
        self,
        kernel: Any,
        grid: tuple[int, int],
        tensors: tuple[torch.Tensor | None, ...],
        numbers: tuple[int, ...],
        constants: tuple[Any, ...],
        *,
        debug: bool,
    ) -> None:
        """Launch programs of one warp on tensors, integers and constants, in this order."""
        key = (
            kernel,
            constants,
            debug,
            # A division and a comparison of what Triton specializes on, and nothing else.
            tuple([t if t is None else (t.dtype, t.data_ptr() % _ALIGNED == 0) for t in tensors]),
            tuple([(n % _ALIGNED == 0, n == 1, n >= 2**31) for n in numbers]),
            torch.cuda.current_device() if torch.cuda.is_initialized() else None,
        )
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[(*grid, 1)](*tensors, *numbers, *constants)
            return
        # Interpreted kernels give nothing back, and are found anew each time.
        self._compiled[key] = kernel[grid](
            *tensors, *numbers, *constants, num_warps=1, debug=debug, sanitize_overflow=False
        )
