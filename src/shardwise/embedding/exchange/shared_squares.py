"""Row-wise Adagrad on tables that are split by columns.

Its state is the mean square of a row's whole gradient, of which each rank has some columns. So
before any row changes, one all-reduce sums what the columns of each rank contribute. All ranks that
hold columns of a table looked up the same ids, so they have the same rows in the same order and
exchange one number per row that was looked up. Only where some ranks hold nothing of a table, and
cannot know those rows, do all send a number for each row of the table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.comm.watch import because
from shardwise.embedding.backends.backend import Backend
from shardwise.embedding.exchange.gradients import Lookups
from shardwise.embedding.optimizers import FusedOptimizer, State, scale_and_add_rows
from shardwise.embedding.stacks import Stacks
from shardwise.embedding.tiling import TableShard
from shardwise.lookup.exchange import summed

#: Per rank present, per stack: rows, their gradients, and the sums of squares of those.
Found = list[dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]


def stacks_of_columns(stacks: Stacks, place: int) -> list[int]:
    """The stacks of a rank that hold some but not all columns of a table."""
    tiling = stacks.tiling
    return [
        k
        for k, stack in enumerate(tiling.stacks[stacks.ranks[place]])
        if any(stacks.tiling.splits_columns(table) for table, _ in stack.shards)
    ]


def has_split_columns(stacks: Stacks) -> bool:
    """Whether some table's columns are on several ranks."""
    return any(stacks.tiling.splits_columns(table) for table in range(len(stacks.tiling.tables)))


def update_together(
    stacks: Stacks,
    backend: Backend,
    optimizer: FusedOptimizer,
    states: Sequence[Sequence[State]],
    lookups: Sequence[Lookups],
) -> None:
    """Update the stacks that hold columns, with the squares of whole rows."""
    found: Found = []
    for place, queries in enumerate(lookups):
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
    """Turn the squares of shards into mean squares of whole rows, in place."""
    assert stacks.grid is not None, "columns are split over a mesh"
    tables = [t for t in range(len(stacks.tiling.tables)) if stacks.tiling.splits_columns(t)]
    by_row = {t: len(stacks.tiling.shards[t]) == stacks.tiling.num_ranks for t in tables}
    sent = []
    for place in range(len(stacks.ranks)):
        sums = [_contribution(stacks, place, found[place], t, by_row[t]) for t in tables]
        sent.append(torch.cat(sums))
    with because("squares of rows split by columns", implicit=False):
        totals = summed(stacks.grid, sent)
    for place, total in enumerate(totals):
        at = 0
        for table in tables:
            range_ = _row_range(stacks, place, found[place], table)
            num = stacks.tiling.tables[table].num_embeddings
            if by_row[table]:
                assert range_ is not None, "every rank holds some of its columns"
                num = range_[1] - range_[0]
            part = total[at : at + num]
            at += num
            if range_ is None:
                continue
            shard, (rows, _, squares) = _shard_and_rows(stacks, place, found[place], table)
            start, end = range_
            whole = part if by_row[table] else part.index_select(0, rows[start:end] - shard.base)
            squares[start:end] = whole
        _to_means(stacks, place, found[place])


def _contribution(
    stacks: Stacks,
    place: int,
    found: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    table: int,
    by_row: bool,
) -> torch.Tensor:
    range_ = _row_range(stacks, place, found, table)
    num = stacks.tiling.tables[table].num_embeddings
    if range_ is None:
        return torch.zeros(num, dtype=stacks.dtype, device=stacks.device)
    shard, (rows, _, squares) = _shard_and_rows(stacks, place, found, table)
    start, end = range_
    if by_row:
        return squares[start:end]
    dense = squares.new_zeros(num)
    return dense.index_copy_(0, rows[start:end] - shard.base, squares[start:end])


def _row_range(
    stacks: Stacks,
    place: int,
    found: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    table: int,
) -> tuple[int, int] | None:
    """Where, among the rows of its stack, those of a table are; None where a rank has none."""
    shard = stacks.tiling.shard_on(table, stacks.ranks[place])
    if shard is None:
        return None
    rows = found[shard.stack][0]
    edges = torch.tensor([shard.base, shard.base + shard.num_rows], device=rows.device)
    start, end = torch.searchsorted(rows, edges).tolist()
    return start, end


def _shard_and_rows(
    stacks: Stacks,
    place: int,
    found: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    table: int,
) -> tuple[TableShard, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    shard = stacks.tiling.shard_on(table, stacks.ranks[place])
    assert shard is not None, "the rank holds some of the table"
    return shard, found[shard.stack]


def _to_means(
    stacks: Stacks,
    place: int,
    found: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
) -> None:
    """Divide the sums of squares by the width of the whole table."""
    for k, stack in enumerate(stacks.tiling.stacks[stacks.ranks[place]]):
        if k not in found:
            continue
        for table, _ in stack.shards:
            range_ = _row_range(stacks, place, found, table)
            assert range_ is not None, "the stack holds columns of the table"
            found[k][2][range_[0] : range_[1]] /= stacks.tiling.tables[table].embedding_dim
