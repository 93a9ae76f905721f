"""Roster: which rank of a simulated world holds which part of a LocalTensor.

Ranks that hold one tensor share a part, so a replicated value is stored and written once. Rosters
are interned per world: tensors whose ranks share alike have the same roster.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from shardwise.core.world import World, simulated_world, world_caches
from shardwise.errors import RankMismatchError, WorldError


class Roster:
    """`index[i]` is the part that `ranks[i]` holds. Compared by identity."""

    __slots__ = ("__weakref__", "_parts", "index", "num_parts", "ranks", "world")

    def __init__(self, world: World, ranks: tuple[int, ...], index: tuple[int, ...]) -> None:
        self.world, self.ranks, self.index = world, ranks, index
        self.num_parts = max(index) + 1
        self._parts = dict(zip(ranks, index, strict=True))

    def __deepcopy__(self, memo: Any) -> Roster:
        return self  # one object per value

    def __reduce__(self) -> Any:
        return _make_here, (self.ranks, self.index)

    def ranks_of(self, part: int) -> list[int]:
        return [r for r, p in zip(self.ranks, self.index, strict=True) if p == part]

    def part_of(self, rank: int) -> int:
        return self._parts[rank]


_interned: weakref.WeakValueDictionary[Any, Roster] = weakref.WeakValueDictionary()


def make_roster(world: World, ranks: tuple[int, ...], index: tuple[int, ...]) -> Roster:
    key = (world, ranks, index)
    roster = _interned.get(key)
    if roster is None:
        roster = _interned[key] = Roster(world, ranks, index)
    return roster


def _make_here(ranks: tuple[int, ...], index: tuple[int, ...]) -> Roster:
    return make_roster(simulated_world("A LocalTensor"), ranks, index)


def grouped(
    world: World, ranks: tuple[int, ...], keys: Sequence[Hashable]
) -> tuple[Roster, list[int]]:
    """The roster in which ranks with equal keys share a part, and the first rank of each part.

    The first ranks are given as positions in `ranks`.
    """
    parts: dict[Hashable, int] = {}
    firsts: list[int] = []
    index = []
    for place, key in enumerate(keys):
        if key not in parts:
            parts[key] = len(parts)
            firsts.append(place)
        index.append(parts[key])
    return make_roster(world, ranks, tuple(index)), firsts


@functools.lru_cache(maxsize=256)
def join(rosters: tuple[Roster, ...]) -> tuple[Roster, tuple[tuple[int, ...], ...]]:
    """The coarsest roster that is at least as fine as each, and each one's part per joined part."""
    first = rosters[0]
    for other in rosters[1:]:
        if other.ranks != first.ranks or other.world is not first.world:
            raise WorldError(
                f"One call mixes tensors of ranks {first.ranks} ({first.world}) and of ranks "
                f"{other.ranks} ({other.world}); both must be on the same ranks."
            )
    rows = list(zip(*(r.index for r in rosters), strict=True))
    joined, firsts = grouped(first.world, first.ranks, rows)
    picks = tuple(tuple(r.index[place] for place in firsts) for r in rosters)
    return joined, picks


world_caches.append(join.cache_clear)


# -- one value of all ranks ------------------------------------------------------------------


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal; NaN equals NaN. Those without values are alike by shape."""
    if one.is_meta or other.is_meta:
        return one.shape == other.shape
    if torch.equal(one, other):
        return True
    if one.shape != other.shape or not (one.is_floating_point() or one.is_complex()):
        return False
    return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def agreed_value(values: Sequence[Any], roster: Roster, asked: str) -> Any:
    """The value that all parts have, or an error that names the ranks."""
    first = values[0]
    for value in values[1:]:
        if value != first and not (value != value and first != first):
            raise mismatch(asked, roster, values)
    return first


def mismatch(asked: str, roster: Roster, values: Sequence[Any]) -> RankMismatchError:
    found = "; ".join(
        f"rank {spans(roster.ranks_of(part))} has {_brief(value)}"
        for part, value in enumerate(values)
    )
    return RankMismatchError(
        f"One value was asked for ({asked}), but the ranks differ: {found}. Ask for one rank with "
        ".on_rank(r), or map over ranks with LocalTensor.per_rank(fn)."
    )


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return str(value)


def spans(ranks: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` as `0-2, 5`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    return ", ".join("-".join(map(str, span)) for span in spans)
