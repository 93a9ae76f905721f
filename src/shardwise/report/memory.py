"""Memory of each rank: parameters, gradients, optimizer state and activations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.dtensor.tensor import DTensor
from shardwise.simulation.parts import on_rank, parts_of


@dataclass
class RankMemory:
    """Bytes on one rank. `activations` are what forward saves for backward."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


def bytes_on(tensor: torch.Tensor, rank: int) -> int:
    """The bytes of a tensor on a rank; a plain one is whole on each."""
    if isinstance(tensor, DTensor):
        layout = tensor._layout
        coordinate = layout.grid.coordinates.get(rank)
        if coordinate is None:
            return 0
        return layout.box(coordinate).volume * layout.dtype.itemsize
    part = on_rank(tensor, rank)
    if part.layout is not torch.strided:
        return sum(bytes_on(inner, rank) for inner in _inside(part))
    return part.numel() * part.element_size()


def _inside(tensor: Any) -> list[torch.Tensor]:
    """The plain tensors of a sparse or jagged one."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout is torch.jagged:
        return [tensor.values(), tensor.offsets()]
    return []


def sum_on(tensors: Iterable[torch.Tensor], rank: int) -> int:
    return sum(bytes_on(tensor, rank) for tensor in tensors)


class SavedTensors:
    """Adds up the bytes that autograd saves, each tensor once, without parameters."""

    def __init__(self, parameters: Iterable[torch.Tensor], num_ranks: int) -> None:
        self.bytes = [0] * num_ranks
        self._known = {place for p in parameters for place in _places(p)}

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._saved, lambda x: x):
            yield

    def _saved(self, tensor: Any) -> Any:
        places = _places(tensor)
        if places and not self._known.issuperset(places):
            self._known.update(places)
            for rank in range(len(self.bytes)):
                self.bytes[rank] += bytes_on(tensor, rank)
        return tensor


def _places(tensor: torch.Tensor) -> list[int]:
    """The addresses of a tensor, on each rank that this process plays.

    A tensor on the meta device has none: it counts by its storage.
    """
    local = tensor._local if isinstance(tensor, DTensor) else tensor
    return [
        part.untyped_storage()._cdata if part.is_meta else part.untyped_storage().data_ptr()
        for part in parts_of(local)
        if part.layout is torch.strided and part.numel()
    ]


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The state that an optimizer keeps."""
    return [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    ]
