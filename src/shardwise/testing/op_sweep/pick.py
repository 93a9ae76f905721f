"""Some of a list, spread over all of it."""

from __future__ import annotations

import random
import zlib
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


def by_lot(every: Sequence[T], limit: int, key: str) -> list[T]:
    """At most `limit`, drawn by lot; the same key draws the same, in every process."""
    return list(every) if limit >= len(every) else lots_of(key).sample(every, limit)


def lots_of(key: str) -> random.Random:
    return random.Random(zlib.crc32(key.encode()))
