"""Memory that kernels of one launch share, kept from launch to launch: asking for it costs time.

There is one of each per stream, so that launches on two streams do not meet in it. While a graph is
captured it is asked for anew: the graph keeps its own, and outlives what is kept here.
"""

from __future__ import annotations

import torch
import triton


class Scratch:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[tuple[str, int], torch.Tensor] = {}

    def counters(self, num: int) -> torch.Tensor:
        """Zeros, which kernels count in and set back to zero."""
        return self._take("counters", num, torch.int32)

    def floats(self, num: int) -> torch.Tensor:
        return self._take("floats", num, torch.float32)

    def ints(self, num: int) -> torch.Tensor:
        return self._take("ints", num, torch.int32)

    def _take(self, name: str, num: int, dtype: torch.dtype) -> torch.Tensor:
        stream = 0
        if self._device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return torch.zeros(num, dtype=dtype, device=self._device)
            stream = triton.runtime.driver.active.get_current_stream(self._device.index)
        kept = self._kept.get((name, stream))
        if kept is None or kept.shape[0] < num:
            kept = torch.zeros(num, dtype=dtype, device=self._device)
            self._kept[name, stream] = kept
        return kept
