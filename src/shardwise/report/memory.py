"""Memory of each rank: parameters, gradients, optimizer state, activations, and the peak."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise._torch.dispatch import TorchDispatchMode
from shardwise._torch.pytree import tree_leaves
from shardwise.dtensor.tensor import DTensor
from shardwise.simulation.parts import is_per_rank, on_rank, parts_of


@dataclass
class RankMemory:
    """Bytes on one rank. `activations` are what forward saves for backward.

    `peak` is the most that lives at once in a step, after the first one has made optimizer state.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    peak: int = 0

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
    """Adds up the bytes that autograd saves and holds, each tensor once, without parameters.

    Parameters that `fully_shard` gathers are saved too, but freed after forward.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], ranks: Sequence[int]) -> None:
        self.bytes = [0] * len(ranks)
        self._ranks = ranks
        self._known = {place for p in parameters for place in _places(p)}
        self._saved: list[tuple[weakref.ref[Any], list[int]]] = []

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._note, lambda x: x):
            yield
        for ref, sizes in self._saved:
            storage = ref()
            if storage is not None and storage.nbytes():
                self.bytes = [total + size for total, size in zip(self.bytes, sizes, strict=True)]

    def _note(self, tensor: Any) -> Any:
        places = _places(tensor)
        if places and not self._known.issuperset(places):
            self._known.update(places)
            storage = next(part for part in _local_parts(tensor) if part.numel()).untyped_storage()
            sizes = [bytes_on(tensor, rank) for rank in self._ranks]
            self._saved.append((weakref.ref(storage), sizes))
        return tensor


def _local_parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    return parts_of(tensor._local if isinstance(tensor, DTensor) else tensor)


def _places(tensor: torch.Tensor) -> list[int]:
    """The storages of a tensor, on each rank that this process plays."""
    return [
        part.untyped_storage()._cdata
        for part in _local_parts(tensor)
        if part.layout is torch.strided and part.numel()
    ]


class LiveMemory(TorchDispatchMode):
    """The most bytes that live at once on each rank: what ops take and return, while it is held.

    What an op needs inside of it is not counted. Ops on one rank's part of a tensor make tensors of
    that rank; what nothing of a rank ever meets is not counted either.
    """

    def __init__(
        self, ranks: Sequence[int], tensors: Iterable[torch.Tensor], *, alone: bool
    ) -> None:
        """`tensors` exist already; `alone` where this process is one rank, which holds all."""
        super().__init__()
        self.peak = dict.fromkeys(ranks, 0)
        self._ranks = frozenset(ranks)
        self._orphans = self._ranks if alone else frozenset[int]()
        #: By id, each storage and the share of it that each rank holds.
        self._live: dict[int, tuple[weakref.ref[Any], dict[int, float]]] = {}
        self._hold([*tensors], self._ranks)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        taken = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        returned = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        storages = [id(x.untyped_storage()) for x in taken if _is_one(x)]
        known = [frozenset(self._live[key][1]) for key in storages if key in self._live]
        by = frozenset.intersection(*known) if known else self._orphans
        self._hold([*taken, *returned], by)
        held = dict.fromkeys(self._ranks, 0.0)
        for ref, shares in self._live.values():
            storage = ref()
            num_bytes = storage.nbytes() if storage is not None else 0
            for rank, share in shares.items():
                held[rank] += num_bytes * share
        self.peak = {rank: max(most, round(held[rank])) for rank, most in self.peak.items()}
        return result

    def _hold(self, tensors: list[torch.Tensor], ranks: frozenset[int]) -> None:
        """Note tensors; `ranks` hold those that do not say themselves who holds them."""
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                tensor, holders = tensor._local, self._ranks
            else:
                holders = self._ranks if is_per_rank(tensor) else ranks
            held: dict[int, dict[int, torch.Tensor]] = {}
            for rank in holders:
                part = on_rank(tensor, rank)
                if _is_dense(part):
                    held.setdefault(id(part.untyped_storage()), {})[rank] = part
            for key, parts in held.items():
                if key not in self._live:
                    self._live[key] = self._shares(key, parts)

    def _shares(
        self, key: int, parts: dict[int, torch.Tensor]
    ) -> tuple[weakref.ref[Any], dict[int, float]]:
        """Parts of several ranks may be views of one storage: then each has its part of it."""
        storage = next(iter(parts.values())).untyped_storage()
        split = len({id(part) for part in parts.values()}) > 1
        shares = {
            rank: part.numel() * part.element_size() / max(1, storage.nbytes()) if split else 1.0
            for rank, part in parts.items()
        }
        return weakref.ref(storage, lambda _: self._live.pop(key, None)), shares


def _is_one(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and _is_dense(tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and bool(tensor.numel())


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The state that an optimizer keeps."""
    return [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    ]
