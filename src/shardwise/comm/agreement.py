"""Whether the generators of all ranks are in one state, so that all of them draw the same."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable

import torch

from shardwise.comm import collectives
from shardwise.comm.watch import because
from shardwise.core.grid import Grid
from shardwise.errors import RankMismatchError
from shardwise.simulation.parts import agreed
from shardwise.simulation.ranks import localize

#: Per mesh, the kinds of generators that were compared at a first draw.
_compared: weakref.WeakKeyDictionary[Grid, set[str]] = weakref.WeakKeyDictionary()


def agree_once(grid: Grid, kind: str, state: Callable[[], int]) -> None:
    """Compare at the first draw on a mesh from a `kind` of generator, and never again."""
    kinds = _compared.setdefault(grid, set())
    if kind not in kinds:
        check_agreement(grid, kind, state(), "the first random draw on a mesh")
        kinds.add(kind)


def check_agreement(grid: Grid, kind: str, state: int, cause: str) -> None:
    """Raise on every rank of the mesh when the ranks' numbers for `state` are not all the same."""
    with because(cause, implicit=False, always=True):
        row = localize(grid, torch.tensor([state], device=grid.device_type))
        for axis in reversed(range(grid.num_axes)):
            row = collectives.all_gather(row, grid, axis)
    found = agreed(row).tolist()
    if any(number != found[0] for number in found):
        raise RankMismatchError(_message(grid, kind, found))


def _message(grid: Grid, kind: str, found: list[int]) -> str:
    groups: dict[int, list[int]] = defaultdict(list)
    for rank, number in zip(grid.ranks, found, strict=True):
        groups[number].append(rank)
    states = "; ".join(f"one on ranks {ranks}" for ranks in groups.values())
    return (
        f"The {kind} are in {len(groups)} different states: {states}. Ranks that draw from "
        "different states would hold parts of different tensors. Call torch.manual_seed(seed) with "
        "the same seed on every rank, and draw what only one rank needs from a torch.Generator of "
        "its own."
    )
