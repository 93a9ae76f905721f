"""Indices out of lists and numbers, such as `x[[0, 2]]`: torch makes plain tensors of them."""

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
    """The index of a write of one number: `x[rows, 3] = 0` with a tensor in place of the 3.

    Torch would select column 3 first, and write to what may be a copy.
    """
    if not isinstance(index, tuple) or not any(isinstance(i, torch.Tensor) for i in index):
        return index
    return tuple(_tensor(x, [item]) if type(item) is int else item for item in index)


def _is_numbers(item: Any) -> bool:
    return isinstance(item, list) and all(type(i) in (int, bool) or _is_numbers(i) for i in item)


def _tensor(x: Any, numbers: list[Any]) -> Any:
    plain = torch.tensor(numbers)
    return x.new_tensor(numbers, dtype=plain.dtype if plain.numel() else torch.long)
