"""`x[[0, 2]]`: torch makes a tensor out of the list, and here that has to be a DTensor."""

from __future__ import annotations

from typing import Any

import torch


def holds_list(index: Any) -> bool:
    """Whether a list of numbers stands in an index."""
    if type(index) is tuple:
        return any(type(item) is list for item in index)
    return type(index) is list


def with_tensors(x: Any, index: Any) -> Any:
    """The index with a replicated tensor in place of each list of numbers.

    Every rank runs the same program, so a list is the same on all of them. A list of lists that
    is the whole index is left alone: torch is about to change what it means.
    """
    if type(index) is tuple:
        return tuple(_tensor(x, item) if _is_numbers(item) else item for item in index)
    return _tensor(x, index) if all(type(i) in (int, bool) for i in index) else index


def _is_numbers(item: Any) -> bool:
    return type(item) is list and all(type(i) in (int, bool) or _is_numbers(i) for i in item)


def _tensor(x: Any, numbers: list[Any]) -> Any:
    plain = torch.tensor(numbers)
    return x.new_tensor(numbers, dtype=plain.dtype if plain.numel() else torch.long)
