"""Some of a list, spread over all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
Pick = Callable[[Sequence[T], int], list[T]]


def evenly(every: Sequence[T], limit: int) -> list[T]:
    """At most `limit`, the first among them."""
    if len(every) <= limit:
        return list(every)
    return [every[i * len(every) // limit] for i in range(limit)]


def middles(every: Sequence[T], limit: int) -> list[T]:
    """At most `limit`, from the middle of each stretch: what comes first is often trivial."""
    if len(every) <= limit:
        return list(every)
    return [every[(2 * i + 1) * len(every) // (2 * limit)] for i in range(limit)]
