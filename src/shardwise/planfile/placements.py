"""Placements as text, as plan files hold them."""

from __future__ import annotations

import re

from shardwise.core.placements import REDUCE_OPS, Partial, Placement, Replicate, Shard
from shardwise.errors import ArgumentError, LayoutError

#: A dim has few digits, a size at most 18.
_SHARD = re.compile(r"Shard\((-?[0-9]{1,4})(?:, sizes=\(((?:[0-9]{1,18}[, ]*)*)\))?\)")


def placement_text(placement: Placement) -> str:
    """How a plan file writes a placement; `parse_placement` reads it.

    >>> placement_text(Shard(1)), placement_text(Replicate()), placement_text(Partial())
    ('Shard(1)', 'Replicate()', 'Partial(sum)')
    """
    if type(placement) not in (Shard, Replicate, Partial):
        raise ArgumentError(f"{placement!r} has no place in a plan: shard, replicate or sum.")
    return repr(placement)


def parse_placement(text: str) -> Placement:
    """The placement that a text names.

    >>> parse_placement("Shard(-1)")
    Shard(-1)
    """
    plain = text.strip()
    if plain in ("Replicate()", "Replicate"):
        return Replicate()
    if (found := _SHARD.fullmatch(plain)) is not None:
        dim, sizes = found.groups()
        return Shard(int(dim), _numbers(sizes))
    if plain in ("Partial()", "Partial"):
        return Partial()
    if plain.startswith("Partial(") and plain[8:-1] in REDUCE_OPS:
        return Partial(plain[8:-1])
    raise LayoutError(
        f"{text[:60]!r} is no placement: write Shard(1), Replicate() or Partial(sum)."
    )


def _numbers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    return tuple(int(number) for number in text.split(",") if number.strip())
