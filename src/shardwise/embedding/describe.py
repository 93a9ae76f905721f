"""What a plan means, as text: bytes per rank, their balance, and what a step communicates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.embedding.routing import Route
from shardwise.embedding.tiling import TableTiling


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """Bytes that one rank sends in a step."""

    ids: float
    rows: float
    gradients: float
    copies: float

    @property
    def total(self) -> float:
        return self.ids + self.rows + self.gradients + self.copies


def held_bytes(tiling: TableTiling, number_bytes: int = 4) -> list[int]:
    """The bytes of tables on each rank."""
    return [
        sum(stack.num_rows * stack.width for stack in stacks) * number_bytes
        for stacks in tiling.stacks
    ]


def traffic(
    route: Route, batch_size: int, ids_per_bag: float, number_bytes: int = 4
) -> list[StepTraffic]:
    """What each rank sends in a step with bags of that many ids, drawn evenly from all rows."""
    num = route.num_ranks
    ids = [0.0] * num
    rows = [0.0] * num
    gradients = [0.0] * num
    id_bytes = route.id_dtype.itemsize
    for owner, legs in enumerate(route.legs):
        for leg in legs:
            whole = route.tiling.tables[leg.table].num_embeddings
            num_ids = batch_size * ids_per_bag * leg.tile.num_rows / whole
            num_rows = batch_size if route.pooled else num_ids
            sent = (num_ids + (batch_size if route.pooled else 0)) * id_bytes
            back = num_rows * leg.tile.width * number_bytes
            for asker in range(num):
                if asker != owner:
                    ids[asker] += sent
                    rows[owner] += back
                    gradients[asker] += back
    copied = sum(s.num_rows * (s.width + 1) for s in route.tiling.stacks[0] if s.replicated)
    reduced = 2 * (num - 1) / num * copied * number_bytes
    return [StepTraffic(*each, reduced) for each in zip(ids, rows, gradients, strict=True)]


def describe(
    tiling: TableTiling,
    *,
    pooled: bool,
    batch_size: int,
    ids_per_bag: float,
    dtype: torch.dtype,
    sums_squares: bool = False,
) -> str:
    """A table with a line per rank, then one per sharding kind, then the exchanges of a step.

    With `sums_squares` the optimizer wants to know the squares of whole rows.
    """
    route = Route(tiling, pooled=pooled)
    held = held_bytes(tiling, dtype.itemsize)
    sent = traffic(route, batch_size, ids_per_bag, dtype.itemsize)
    mean = sum(held) / len(held)
    lines = [
        f"{len(tiling.tables)} tables on {tiling.num_ranks} ranks; {batch_size} bags of "
        f"{ids_per_bag:g} ids per feature and rank",
        "rank  parts  MB of tables  of mean  MB sent per step: ids   rows  gradients  copies",
    ]
    for rank, (num_bytes, one) in enumerate(zip(held, sent, strict=True)):
        parts = sum(len(stack.tiles) for stack in tiling.stacks[rank])
        share = num_bytes / mean if mean else 1
        lines.append(
            f"{rank:4}  {parts:5}  {num_bytes / 1e6:12.1f}  {share:7.2f}  "
            f"{one.ids / 1e6:21.1f}  {one.rows / 1e6:5.1f}  {one.gradients / 1e6:9.1f}  "
            f"{one.copies / 1e6:6.1f}"
        )
    lines += _kind_lines(tiling)
    lines.append(f"exchanges per step: {', '.join(_exchanges(route, sums_squares)) or 'none'}")
    return "\n".join(lines)


def _kind_lines(tiling: TableTiling) -> Sequence[str]:
    kinds: dict[str, list[str]] = {}
    for table, cut in zip(tiling.tables, tiling.cuts, strict=True):
        kinds.setdefault(cut.kind, []).append(table.name)
    return [f"{kind}: {', '.join(names)}" for kind, names in kinds.items()]


def _exchanges(route: Route, sums_squares: bool) -> list[str]:
    if route.num_ranks == 1:
        return []
    found = ["counts"]
    if route.travels:
        found += ["ids", "rows", "gradients"]
    if any(stack.replicated for stack in route.tiling.stacks[0]):
        found.append("an all-reduce of copied tables' gradients")
    if sums_squares and any(
        route.tiling.splits_columns(t) for t in range(len(route.tiling.tables))
    ):
        found.append("an all-reduce of squares of rows that are split by columns")
    return found
