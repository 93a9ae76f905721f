"""Batches: split over data axes and given to ranks; calls of a module and their loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwise._torch.pytree import tree_leaves, tree_map
from shardwise.core.world import current_world
from shardwise.embedding import Jagged
from shardwise.errors import ArgumentError, LayoutError
from shardwise.simulation.ranks import on_every_rank


def split_batch(batch: Any, num_parts: int) -> list[Any]:
    """The batch in equal parts along dim 0 of each tensor; bags of ids are split alike.

    >>> split_batch({"x": torch.arange(4), "scale": 2}, 2)
    [{'x': tensor([0, 1]), 'scale': 2}, {'x': tensor([2, 3]), 'scale': 2}]
    """

    def part(index: int) -> Any:
        return _map(batch, lambda value: _part(value, index, num_parts))

    return [part(index) for index in range(num_parts)]


def part_of_batch(batch: Any, index: int, num_parts: int) -> Any:
    """One of the equal parts of a batch, in memory of its own."""

    def part(value: Any) -> Any:
        found = _part(value, index, num_parts)
        return found.clone() if isinstance(found, torch.Tensor) else found

    return _map(batch, part)


def per_rank(parts: list[Any], index_of: Callable[[int], int]) -> Any:
    """Each rank's part of a batch, with the number `index_of(rank)`.

    In a simulated world, tensors of all ranks; in a process, its own part.
    """
    first, *others = current_world().present
    return _gather(parts, index_of) if others and len(parts) > 1 else parts[index_of(first)]


def call(module: Callable[..., Any], batch: Any) -> Any:
    """The module called with a batch: a tuple is its arguments, a dict its keyword arguments."""
    if isinstance(batch, tuple):
        return module(*batch)
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(batch)


def loss_of(output: Any) -> torch.Tensor:
    """The output if it is a scalar, its `loss`, or else the mean square of its tensors."""
    loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and not loss.dim():
        return loss
    floating = [leaf for leaf in tensors_of(output) if leaf.is_floating_point()]
    if not floating:
        raise ArgumentError(
            f"The module should give a loss or tensors of numbers, found {type(output).__name__}."
        )
    return sum((leaf.pow(2).mean() for leaf in floating), torch.zeros(()))


def tensors_of(output: Any) -> list[torch.Tensor]:
    if not isinstance(output, (torch.Tensor, Mapping, tuple, list)) and hasattr(output, "__dict__"):
        output = vars(output)
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _map(batch: Any, fn: Callable[[Any], Any]) -> Any:
    return tree_map(fn, batch, is_leaf=lambda value: isinstance(value, Jagged))


def _part(value: Any, index: int, num_parts: int) -> Any:
    if isinstance(value, Jagged):
        return _bags(value, index, num_parts)
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or num_parts == 1:
        return value
    _even(value.shape[0], num_parts)
    size = value.shape[0] // num_parts
    return value[index * size : (index + 1) * size]


def _even(size: int, num_parts: int) -> None:
    if size % num_parts:
        raise LayoutError(
            f"A batch of {size} examples does not divide among {num_parts} data-parallel ranks. "
            f"Let the factory return a batch of a multiple of {num_parts}, or use fewer ranks."
        )


def _bags(batch: Jagged, index: int, num_parts: int) -> Jagged:
    """The bags of some examples, of all features."""
    num_features = len(batch.features)
    num_bags = len(batch.lengths) // num_features
    _even(num_bags, num_parts)
    size = num_bags // num_parts
    start = torch.zeros(len(batch.lengths) + 1, dtype=torch.int64)
    torch.cumsum(batch.lengths, 0, out=start[1:])
    values, lengths, weights = [], [], []
    for feature in range(num_features):
        first = feature * num_bags + index * size
        ids = slice(int(start[first]), int(start[first + size]))
        lengths.append(batch.lengths[first : first + size])
        values.append(batch.values[ids])
        if batch.weights is not None:
            weights.append(batch.weights[ids])
    return Jagged(
        batch.features,
        torch.cat(values),
        lengths=torch.cat(lengths),
        weights=torch.cat(weights) if weights else None,
    )


def _gather(parts: list[Any], index_of: Callable[[int], int]) -> Any:
    """One structure whose tensors have each rank's part."""
    first = parts[0]
    if isinstance(first, Jagged):
        fields = {
            name: _gather([getattr(part, name) for part in parts], index_of)
            for name in ("values", "lengths", "weights")
        }
        return Jagged(first.features, **fields)
    if isinstance(first, torch.Tensor):
        return on_every_rank(lambda rank: parts[index_of(rank)])
    if isinstance(first, Mapping):
        return {key: _gather([part[key] for part in parts], index_of) for key in first}
    if isinstance(first, (tuple, list)):
        return type(first)(_gather(list(each), index_of) for each in zip(*parts, strict=True))
    return first
