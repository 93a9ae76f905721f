"""Communication by module as nested boxes: a module's box lies below that of the one around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.debug.comm_report import ancestry, is_inside
from shardwise.report.step import Collective


@dataclass(frozen=True)
class Flame:
    """One box; `left` and `width` are shares of the whole."""

    path: str
    depth: int
    number: int
    left: float
    width: float
    num_bytes: int
    num_calls: int


def flame(collectives: Sequence[Collective]) -> tuple[list[Flame], int]:
    """The boxes, and how many rows they take. A parent's bytes include its children's."""
    total = sum(each.num_bytes for each in collectives)
    if not total:
        return [], 0
    boxes: list[Flame] = []
    paths = list(dict.fromkeys(p for each in collectives for p in ancestry(each.module)))

    def add(path: str, depth: int, left: float) -> float:
        inside = [each for each in collectives if is_inside(each.module, path)]
        size = sum(each.num_bytes for each in inside)
        width = size / total
        boxes.append(Flame(path, depth, len(boxes), left, width, size, len(inside)))
        for child in paths:
            if child.rpartition(".")[0] == path and child:
                left += add(child, depth + 1, left)
        return width

    add("", 0, 0.0)
    return boxes, 1 + max(box.depth for box in boxes)
