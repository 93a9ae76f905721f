"""Row-wise Adagrad on tables that are split by columns.

Its state is the mean square of a row's whole gradient, of which each rank has some columns. So the
ranks add up what their columns contribute, in one all-reduce, before any row changes. Ranks that
hold columns of a table were asked for the same ids, and so have the same rows in the same order:
one number per row that was looked up is exchanged. Only where some ranks hold nothing of a table,
and cannot know its rows, does a number for each row of the table travel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.comm.watch import because
from shardwise.embedding.backends.backend import Backend, Query
from shardwise.embedding.optimizers import FusedOptimizer, State, scale_and_add_rows
from shardwise.embedding.stacks import Stacks
from shardwise.embedding.tiling import Tile
from shardwise.lookup.exchange import summed

#: Per rank present, per stack.
Found = list[dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]


def stacks_of_columns(stacks: Stacks, place: int) -> list[int]:
    """The stacks of a rank that hold some columns of a table, and not all."""
    tiling = stacks.tiling
    return [
        k
        for k, stack in enumerate(tiling.stacks[stacks.ranks[place]])
        if any(stacks.tiling.splits_columns(table) for table, _ in stack.tiles)
    ]


def has_split_columns(stacks: Stacks) -> bool:
    """Whether some table's columns are on several ranks."""
    return any(stacks.tiling.splits_columns(table) for table in range(len(stacks.tiling.tables)))


def update_together(
    stacks: Stacks,
    backend: Backend,
    optimizer: FusedOptimizer,
    states: Sequence[Sequence[State]],
    asked: Sequence[dict[int, tuple[Query, torch.Tensor]]],
) -> None:
    """Update the stacks that hold columns, with the squares of whole rows."""
    found: Found = []
    for place, queries in enumerate(asked):
        here = {}
        for k, (query, grad) in queries.items():
            weight = stacks.weights[place][k]
            rows, values = backend.row_gradient(weight, query, grad)
            optimizer.decay(weight, rows, values)
            here[k] = (rows, values, torch.linalg.vector_norm(values, dim=1).square_())
        found.append(here)
    _add_up(stacks, found)
    for place, here in enumerate(found):
        for k, (rows, values, squares) in here.items():
            weight, state = stacks.weights[place][k], states[place][k]
            scale_and_add_rows(optimizer, weight, rows, values, squares, state)


def _add_up(stacks: Stacks, found: Found) -> None:
    """Turn the squares of tiles into mean squares of whole rows, in place."""
    assert stacks.grid is not None, "columns are split over a mesh"
    tables = [t for t in range(len(stacks.tiling.tables)) if stacks.tiling.splits_columns(t)]
    by_row = {t: len(stacks.tiling.tiles[t]) == stacks.tiling.num_ranks for t in tables}
    sent = []
    for place in range(len(stacks.ranks)):
        pieces = [_contribution(stacks, place, found[place], t, by_row[t]) for t in tables]
        sent.append(torch.cat(pieces))
    with because("squares of rows split by columns", implicit=False):
        totals = summed(stacks.grid, sent)
    for place, total in enumerate(totals):
        at = 0
        for table in tables:
            span = _span(stacks, place, found[place], table)
            num = stacks.tiling.tables[table].num_embeddings
            if by_row[table]:
                assert span is not None, "every rank holds some of its columns"
                num = span[1] - span[0]
            part = total[at : at + num]
            at += num
            if span is None:
                continue
            tile, (rows, _, squares) = _tile_and_rows(stacks, place, found[place], table)
            start, end = span
            whole = part if by_row[table] else part.index_select(0, rows[start:end] - tile.base)
            squares[start:end] = whole
        _to_means(stacks, place, found[place])


def _contribution(
    stacks: Stacks,
    place: int,
    found: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    table: int,
    by_row: bool,
) -> torch.Tensor:
    span = _span(stacks, place, found, table)
    num = stacks.tiling.tables[table].num_embeddings
    if span is None:
        return torch.zeros(num, dtype=stacks.dtype, device=stacks.device)
    tile, (rows, _, squares) = _tile_and_rows(stacks, place, found, table)
    start, end = span
    if by_row:
        return squares[start:end]
    dense = squares.new_zeros(num)
    return dense.index_copy_(0, rows[start:end] - tile.base, squares[start:end])


def _span(
    stacks: Stacks,
    place: int,
    found: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    table: int,
) -> tuple[int, int] | None:
    """Where, among the rows of its stack, those of a table are; None where a rank has none."""
    tile = stacks.tiling.tile_on(table, stacks.ranks[place])
    if tile is None:
        return None
    rows = found[tile.stack][0]
    edges = torch.tensor([tile.base, tile.base + tile.num_rows], device=rows.device)
    start, end = torch.searchsorted(rows, edges).tolist()
    return start, end


def _tile_and_rows(
    stacks: Stacks,
    place: int,
    found: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    table: int,
) -> tuple[Tile, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    tile = stacks.tiling.tile_on(table, stacks.ranks[place])
    assert tile is not None, "asked for a rank that holds some of the table"
    return tile, found[tile.stack]


def _to_means(
    stacks: Stacks,
    place: int,
    found: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
) -> None:
    """Divide the sums of squares by the width of the whole table."""
    for k, stack in enumerate(stacks.tiling.stacks[stacks.ranks[place]]):
        if k not in found:
            continue
        for table, _ in stack.tiles:
            span = _span(stacks, place, found, table)
            assert span is not None, "the stack holds a part of the table"
            found[k][2][span[0] : span[1]] /= stacks.tiling.tables[table].embedding_dim
