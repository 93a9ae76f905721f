"""Strict mode: errors for implicit communication, with the call to write instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.core.layout import Layout
from shardwise.core.placements import REPLICATE, Partial, short
from shardwise.dispatch.rule import CollectiveCost
from shardwise.errors import RedistributionError
from shardwise.redistribute.search import find_steps
from shardwise.redistribute.steps import Step, local_bytes


def forbid_move(op: Any, position: int, steps: Sequence[Step], target: Layout) -> None:
    """Raise if bringing an argument of `op` to `target` sends anything."""
    if any(step.communicates for step in steps):
        source = steps[0].source
        raise RedistributionError(
            f"{op} needs argument {position}, {source!r}, in {short(target.placements)}: "
            f"{_sent(steps)}, and communication must be explicit here. Write "
            f"x.redistribute({_placed(target)}) before the call."
        )


def forbid_leaf_move(found: Layout, wanted: Layout) -> None:
    """Raise if bringing a gradient to the layout of its leaf sends anything."""
    steps = find_steps(found, wanted)
    if any(step.communicates for step in steps):
        placements = tuple(REPLICATE if isinstance(p, Partial) else p for p in found.placements)
        used = found.with_placements(placements)
        raise RedistributionError(
            f"The gradient of a leaf arrives as {found!r}, but the leaf is in "
            f"{short(wanted.placements)}: {_sent(steps)}, and communication must be explicit "
            f"here. Use leaf.redistribute({_placed(used)}) in the forward pass, whose gradient is "
            "brought back to the leaf."
        )


def forbid_sent(
    op: Any, inputs: Sequence[Layout], sent: Sequence[tuple[int, CollectiveCost]]
) -> None:
    """Raise for a local function that communicates: a lookup of sharded ids in sharded rows."""
    grid = inputs[0].grid
    talking = "; ".join(
        f"{each.kind} over axis {grid.axis_name(axis)!r} of about {int(each.num_bytes):,} bytes"
        for axis, each in sent
    )
    found = "; ".join(map(repr, inputs))
    raise RedistributionError(
        f"{op.__name__} of {found} exchanges data between ranks: {talking} per rank, and "
        "communication must be explicit here. Write ids.redistribute(placements="
        f"{[REPLICATE] * grid.num_axes!r}) before the call: the table then stays where it is."
    )


def _sent(steps: Sequence[Step]) -> str:
    source = steps[0].source
    sizes = source.grid.shape
    num_bytes = int(local_bytes(source.shape, source.dtype.itemsize, source.placements, sizes))
    talking = "; ".join(str(step) for step in steps if step.communicates)
    return f"{talking} of about {num_bytes:,} bytes per rank"


def _placed(layout: Layout) -> str:
    """The arguments of the redistribute call that leads to `layout`."""
    return f"placements={list(layout.placements)!r}{layout.other_order()}"
