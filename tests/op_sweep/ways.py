"""The layouts in which the sweep runs a call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from shardwise.core.placements import REPLICATE, SUM, Placement, Shard
from shardwise.testing.layouts import OperandLayouts, random_of

T = TypeVar("T")
Pick = Callable[[Sequence[T], int], list[T]]


def evenly(every: Sequence[T], limit: int) -> list[T]:
    """At most `limit` entries, evenly spaced, the first among them."""
    if len(every) <= limit:
        return list(every)
    return [every[i * len(every) // limit] for i in range(limit)]


def middles(every: Sequence[T], limit: int) -> list[T]:
    """At most `limit`, from the middle of equal ranges: the first entries are often trivial."""
    if len(every) <= limit:
        return list(every)
    return [every[(2 * i + 1) * len(every) // (2 * limit)] for i in range(limit)]


def draw(every: Sequence[T], limit: int, key: str) -> list[T]:
    """At most `limit`, drawn at random; the same key draws the same, in every process."""
    return list(every) if limit >= len(every) else random_of(key).sample(every, limit)


RANKS = 4
ONE_AXIS, TWO_AXES, THREE_AXES = (4,), (2, 2), (2, 2, 2)


def ways(
    tensors: Sequence[torch.Tensor], limit: int, pick: Pick[OperandLayouts] = evenly
) -> list[OperandLayouts]:
    """At most `limit`: replicated, sharded alike, differently, unevenly, Partial, on two axes."""
    return pick(list(dict.fromkeys(w for w in _every(tensors) if _fits(w, tensors))), limit)


def further_ways(tensors: Sequence[torch.Tensor], num: int, key: str) -> list[OperandLayouts]:
    """`num` layouts on two and three axes in any order, drawn at random by `key`."""
    every = dict.fromkeys(w for w in _in_any_order(tensors) if _fits(w, tensors))
    return draw(list(every), num, key)


def _in_any_order(tensors: Sequence[torch.Tensor]) -> Iterator[OperandLayouts]:
    last = max(t.dim() for t in tensors) - 1
    for mesh in (TWO_AXES, THREE_AXES):
        num_axes = len(mesh)
        patterns = itertools.product(("first", "last", "sum", "whole"), repeat=num_axes)
        orders = list(itertools.permutations(range(num_axes)))
        for pattern, order, apart in itertools.product(patterns, orders, (False, True)):
            if pattern.count("whole") == num_axes:
                continue
            placements = []
            for number, tensor in enumerate(tensors):
                turn = number % num_axes if apart else 0
                turned = pattern[turn:] + pattern[:turn]
                placements.append(tuple(_placement(tensor, word, last) for word in turned))
            yield OperandLayouts(mesh, tuple(placements), None if order == orders[0] else order)


def _placement(tensor: torch.Tensor, word: str, last: int) -> Placement:
    match word:
        case "first":
            return _shard(tensor, 0)
        case "last":
            return _shard(tensor, last)
        case "sum":
            return _sum(tensor)
    return REPLICATE


def _fits(way: OperandLayouts, tensors: Sequence[torch.Tensor]) -> bool:
    return all(
        not p.is_partial() or t.is_floating_point() or t.is_complex()
        for placements, t in zip(way.placements, tensors, strict=True)
        for p in placements
    )


def _every(tensors: Sequence[torch.Tensor]) -> Iterator[OperandLayouts]:
    num, most_dims = len(tensors), max(t.dim() for t in tensors)
    yield _one(REPLICATE for _ in tensors)
    for dim in range(most_dims):
        yield _one(_shard(t, dim) for t in tensors)
    if num > 1:
        for dim in range(tensors[0].dim()):
            yield _one(_shard(t, dim) if i == 0 else REPLICATE for i, t in enumerate(tensors))
        for dim in range(max(t.dim() for t in tensors[1:])):
            yield _one(_shard(t, dim) if i else REPLICATE for i, t in enumerate(tensors))
        for shift in range(most_dims):
            yield _one(_shard(t, (i + shift) % max(t.dim(), 1)) for i, t in enumerate(tensors))
    yield _one(_sum(t) if i == 0 else REPLICATE for i, t in enumerate(tensors))
    if num > 1:
        yield _one(map(_sum, tensors))
        yield _one(_sum(t) if i else _shard(t, 0) for i, t in enumerate(tensors))
    for dim in {0, most_dims - 1} - {-1}:
        yield _one(_uneven(t, dim, first=True) for t in tensors)
        yield _one(_uneven(t, dim, first=False) for t in tensors)
    last = most_dims - 1
    yield _two((_shard(t, 0), _shard(t, last)) for t in tensors)
    yield _two((_shard(t, last), _shard(t, last)) for t in tensors)
    yield _two((_sum(t), _shard(t, 0)) for t in tensors)


def _one(placements: Iterable[Placement]) -> OperandLayouts:
    return OperandLayouts(ONE_AXIS, tuple((p,) for p in placements))


def _two(placements: Iterable[tuple[Placement, Placement]]) -> OperandLayouts:
    return OperandLayouts(TWO_AXES, tuple(placements))


def _shard(tensor: torch.Tensor, dim: int) -> Placement:
    return Shard(dim) if 0 <= dim < tensor.dim() else REPLICATE


def _sum(tensor: torch.Tensor) -> Placement:
    return SUM if tensor.is_floating_point() or tensor.is_complex() else REPLICATE


def _uneven(tensor: torch.Tensor, dim: int, *, first: bool) -> Placement:
    """Everything on the first rank, or a single entry there and the rest on the last."""
    if not 0 <= dim < tensor.dim():
        return REPLICATE
    size = tensor.shape[dim]
    if first or size < 2:
        return Shard(dim, (size, 0, 0, 0))
    return Shard(dim, (1, 0, 0, size - 1))
