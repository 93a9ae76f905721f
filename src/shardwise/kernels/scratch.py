"""Memory that kernels of one launch share, kept from launch to launch: asking for it costs time.

There is one of each per stream, so that launches on two streams do not meet in it. While a graph is
captured it is asked for anew: the graph keeps its own, and outlives what is kept here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton


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
