"""Indices out of lists and numbers, such as `x[[0, 2]]`: torch makes plain tensors of them.

Where one number is written, `x[2, 5] = 0`, a position is a slice of length 1: torch would select
it, and write to what may be a copy.
"""

from __future__ import annotations

from typing import Any

import torch


def holds_list(index: Any) -> bool:
    """Whether a list of numbers stands in an index."""
    return list in map(type, index) if type(index) is tuple else type(index) is list


def with_tensors(x: Any, index: Any) -> Any:
    """The index with a replicated tensor in place of each list of numbers.

    Every rank runs the same program, so a list is the same on all of them. A list of lists that
    is the whole index is left alone: torch is about to change what it means.
    """
    if isinstance(index, tuple):
        return tuple(_tensor(x, item) if _is_numbers(item) else item for item in index)
    return _tensor(x, index) if all(type(i) in (int, bool) for i in index) else index


def for_number(x: Any, index: Any) -> Any:
    """The index of a write of one number, with its positions as slices or as tensors."""
    items = index if type(index) is tuple else (index,)
    if not any(type(item) is int for item in items):
        return index
    if any(isinstance(item, torch.Tensor) for item in items):
        return tuple(_tensor(x, [item]) if type(item) is int else item for item in items)
    if all(type(item) in (int, slice, type(...)) for item in items):
        items = _each_dim(x.dim(), items)
    if len(items) != x.dim() or not all(map(_fits, items, x.shape)):
        return index  # torch knows what it means, or what is wrong
    return tuple(_span(x, dim, item) for dim, item in enumerate(items))


def _each_dim(num_dims: int, items: tuple[Any, ...]) -> tuple[Any, ...]:
    """One item per dim: what `...` stands for, or what is left out at the end, in full."""
    at = items.index(...) if ... in items else len(items)
    rest = items[at + 1 :]
    return (*items[:at], *(slice(None),) * (num_dims - at - len(rest)), *rest)


def _fits(item: Any, size: int) -> bool:
    return type(item) is slice or (type(item) is int and -size <= item < size)


def _span(x: Any, dim: int, item: Any) -> Any:
    """One position as a slice; where several axes split the dim, a slice is not a view."""
    if type(item) is slice:
        return item
    split_by = sum(p.is_shard(dim) for p in x.placements)
    return slice(item, item + 1 or None) if split_by < 2 else _tensor(x, [item])


def _is_numbers(item: Any) -> bool:
    return isinstance(item, list) and all(type(i) in (int, bool) or _is_numbers(i) for i in item)


def _tensor(x: Any, numbers: list[Any]) -> Any:
    plain = torch.tensor(numbers)
    return x.new_tensor(numbers, dtype=plain.dtype if plain.numel() else torch.long)
