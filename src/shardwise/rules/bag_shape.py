"""The shape of bags: where they start and end, and how their ids may be cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.core.placements import REPLICATE, Placement
from shardwise.rules.rule import Call

Optional = torch.Tensor | None


def bounds(ids: torch.Tensor, offsets: Optional) -> torch.Tensor:
    """Where each bag starts among the flat ids, and where the last one ends."""
    if offsets is not None:
        return offsets
    num_bags, length = ids.shape
    return torch.arange(num_bags + 1, device=ids.device) * length


def bag_of(ids: torch.Tensor, offsets: Optional, places: torch.Tensor) -> torch.Tensor:
    """The bag of each place among the flat ids."""
    if offsets is None:
        return places // ids.shape[1]
    return torch.searchsorted(offsets, places, right=True) - 1


def num_in_bags(ids: torch.Tensor, offsets: Optional, padding_idx: int) -> torch.Tensor:
    """How many ids of each bag count."""
    edges = bounds(ids, offsets)
    if padding_idx < 0:
        return edges.diff()
    counted = torch.nn.functional.pad((ids.reshape(-1) != padding_idx).cumsum(0), (1, 0))
    return counted[edges].diff()


def packed(*tensors: Optional) -> list[torch.Tensor]:
    return [t for t in tensors if t is not None]


def unpacked(parts: Sequence[torch.Tensor], offsets: Any, weights: Any) -> Any:
    """`(ids, offsets, weights)` out of those that there are."""
    rest = iter(parts)
    ids = next(rest)
    return ids, None if offsets is None else next(rest), None if weights is None else next(rest)


def batch_placements(
    call: Call, first: Sequence[Placement], placement: Placement
) -> tuple[Placement, ...]:
    """Placements of an op's inputs: `first`, then `placement` for ids and their weights."""
    rest = len(call.inputs) - len(first)
    if rest == 3:
        return (*first, placement, REPLICATE, placement)
    has_offsets = call.args[len(first) + 1] is not None
    return (*first, placement, *((REPLICATE if has_offsets else placement,) * (rest - 1)))


def bag_splits(call: Call, number: int) -> list[tuple[int, ...] | None]:
    """How the bags may be cut: not at all where offsets say where they end."""
    return call.splits([(number, 0)]) if call.inputs[number].ndim == 2 else []


def inside_splits(call: Call, number: int) -> list[tuple[int, ...] | None]:
    """How the ids may be cut inside of bags, for sums."""
    return call.splits([(number, 1)]) if call.inputs[number].ndim == 2 else []


def linear_inputs(call: Call) -> tuple[tuple[int, ...], ...]:
    """Groups of inputs in which the op is linear: the first, and the weights of the samples."""
    has_weights = call.args[3] is not None
    return ((0,), (len(call.inputs) - 1,)) if has_weights else ((0,),)
