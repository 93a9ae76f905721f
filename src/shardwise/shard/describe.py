"""What a plan will cost: bytes on each rank, and what a forward communicates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.planfile.paths import find_tensor
from shardwise.shard.row_owners import wire_dtype
from shardwise.shard.spec import ShardingSpec, ShardMetadata

ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class Traffic:
    """One collective of a forward: so many bytes for each of something that ranks bring."""

    kind: str
    num_bytes: int
    per: str

    def __str__(self) -> str:
        return f"{self.kind} {self.num_bytes:,} B per {self.per}"


@dataclass(frozen=True, slots=True)
class ShardingPlanReport:
    """What a plan would do to a module. Printed, it is a table."""

    #: For each parameter of the plan: its shape, how it is cut, and its bytes on each rank.
    sharded: Mapping[str, tuple[tuple[int, ...], str, tuple[int, ...]]]
    #: Paths that the plan leaves to sharders, and the sharders' names.
    sharders: Mapping[str, str]
    #: Parameters that every rank keeps whole.
    whole: tuple[str, ...]
    #: Bytes of parameters on each rank, without what sharders shard.
    bytes_per_rank: tuple[int, ...]
    #: What a forward of each module sends, besides a few numbers.
    forwards: Mapping[str, tuple[str, tuple[Traffic, ...]]]

    @property
    def balance(self) -> float:
        """What the fullest rank holds, over the average."""
        average = sum(self.bytes_per_rank) / len(self.bytes_per_rank)
        return max(self.bytes_per_rank) / average if average else 1.0

    def __str__(self) -> str:
        lines = [
            f"{path} {shape} {how}: {_listed(sizes)}"
            for path, (shape, how, sizes) in self.sharded.items()
        ]
        lines += [f"{path} is left to {name}" for path, name in self.sharders.items()]
        if self.whole:
            lines.append(f"whole on every rank: {', '.join(self.whole)}")
        lines.append(
            f"parameters per rank: {_listed(self.bytes_per_rank)}; the largest holds "
            f"{self.balance:.2f} times the average"
        )
        for path, (kind, traffic) in self.forwards.items():
            lines.append(f"forward of {path} ({kind}):")
            lines += [f"  {each}" for each in traffic]
        return "\n".join(lines)


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(f"{size:,} B" for size in sizes)


def report(
    module: nn.Module, plan: Mapping[str, Any], world_size: int | None
) -> ShardingPlanReport:
    specs = {path: entry for path, entry in plan.items() if isinstance(entry, ShardingSpec)}
    owners = {path: find_tensor(module, path) for path in specs}
    boxes = {path: spec.boxes(tuple(owners[path][2].shape)) for path, spec in specs.items()}
    named = [box.rank for each in boxes.values() for box in each]
    num_ranks = world_size or max(named, default=0) + 1
    sharders = {path: type(e).__name__ for path, e in plan.items() if path not in specs}
    sharded, forwards, totals = {}, {}, [0] * num_ranks
    for path, (owner, name, tensor) in owners.items():
        sizes = _bytes(tensor, boxes[path], num_ranks)
        sharded[path] = (tuple(tensor.shape), _how(boxes[path], tuple(tensor.shape)), sizes)
        totals = [a + b for a, b in zip(totals, sizes, strict=True)]
        traffic = _traffic(owner, name, tensor, boxes[path])
        if traffic:
            forwards[path.rpartition(".")[0]] = (type(owner).__name__, traffic)
    ids = {id(tensor) for _, _, tensor in owners.values()}
    whole = []
    for path, tensor in module.named_parameters():
        if id(tensor) not in ids and not any(path.startswith(f"{s}.") for s in sharders):
            whole.append(path)
            totals = [size + tensor.numel() * tensor.element_size() for size in totals]
    return ShardingPlanReport(sharded, sharders, tuple(whole), tuple(totals), forwards)


def _bytes(
    tensor: torch.Tensor, boxes: tuple[ShardMetadata, ...], num_ranks: int
) -> tuple[int, ...]:
    sizes = [0] * num_ranks
    for box in boxes:
        sizes[box.rank] += box.numel * tensor.element_size()
    return tuple(sizes)


def _how(boxes: tuple[ShardMetadata, ...], shape: tuple[int, ...]) -> str:
    dims = {d for box in boxes for d, size in enumerate(box.shard_sizes) if size != shape[d]}
    if not dims:
        return "whole on one rank"
    return f"cut along dim {', '.join(map(str, sorted(dims)))}"


def _traffic(
    owner: nn.Module, name: str, tensor: torch.Tensor, boxes: tuple[ShardMetadata, ...]
) -> tuple[Traffic, ...]:
    dims = {d for box in boxes for d, s in enumerate(box.shard_sizes) if s != tensor.shape[d]}
    if name != "weight" or tensor.dim() != 2 or len(dims) > 1:
        return ()
    by_columns = dims == {1}
    if isinstance(owner, nn.Linear):
        return _linear(tensor, boxes, by_columns)
    if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
        width = max(box.shard_sizes[1] for box in boxes) * tensor.element_size()
        return _columns(owner, tensor, width) if by_columns else _rows(owner, tensor, width)
    return ()


def _linear(
    weight: torch.Tensor, boxes: tuple[ShardMetadata, ...], by_columns: bool
) -> tuple[Traffic, ...]:
    (num_outputs, num_inputs), item = weight.shape, weight.element_size()
    there = Traffic("all_gather", num_inputs * item, "row of this rank")
    if by_columns:
        return there, Traffic("reduce_scatter", num_outputs * item, "row of all ranks")
    outputs = max(box.shard_sizes[0] for box in boxes)
    return there, Traffic("all_to_all", outputs * item, "row of all ranks")


def _columns(
    owner: nn.Embedding | nn.EmbeddingBag, weight: torch.Tensor, width: int
) -> tuple[Traffic, ...]:
    found, unit = [Traffic("all_gather", ID_BYTES, "id of this rank")], "id"
    if owner.max_norm is not None:
        found.append(Traffic("all_reduce", weight.element_size(), "different id of all ranks"))
    if isinstance(owner, nn.EmbeddingBag) and not owner.scale_grad_by_freq:
        unit = "bag"
        found.append(Traffic("all_gather", ID_BYTES, "bag of this rank"))
    return *found, Traffic("all_to_all", width, f"{unit} of all ranks")


def _rows(
    owner: nn.Embedding | nn.EmbeddingBag, weight: torch.Tensor, width: int
) -> tuple[Traffic, ...]:
    id_bytes = wire_dtype(weight.shape[0]).itemsize
    if not isinstance(owner, nn.EmbeddingBag) or owner.scale_grad_by_freq:
        return (
            Traffic("all_to_all", id_bytes, "different id of this rank"),
            Traffic("all_to_all", width, "different id that this rank is asked for"),
        )
    piece = "bag that this rank is asked for"
    found = [
        Traffic("all_to_all", id_bytes, "id of this rank"),
        Traffic("all_to_all", width, piece),
    ]
    if owner.mode == "max":
        found.append(Traffic("all_to_all", weight.shape[1], f"{piece}, in training"))
    return tuple(found)
