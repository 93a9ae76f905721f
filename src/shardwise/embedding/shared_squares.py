"""Row-wise Adagrad on tables that are split by columns.

Its state is the mean square of a row's whole gradient, of which each rank has some columns. So
before any row changes, one all-reduce sums what the columns of each rank contribute. All ranks that
hold columns of a table looked up the same ids, so they have the same rows in the same order and
exchange one number per row that was looked up. Only where some ranks hold nothing of a table, and
cannot know those rows, do all send a number for each row of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from shardwise.comm.watch import because
from shardwise.embedding.stacks import Stacks
from shardwise.lookup.backends.backend import Backend, Lookups, Query
from shardwise.lookup.exchange import combined
from shardwise.lookup.optimizers import FusedOptimizer, State, add_distinct_rows, row_factors_of


class Scaled(Protocol):
    """The rows of a stack that have a gradient, and the squares of their gradients' norms."""

    rows: torch.Tensor
    squares: torch.Tensor

    def add(self, weight: torch.Tensor, factors: torch.Tensor) -> None:
        """Add to each row its factor times its gradient."""


class GradientRows:
    """As `Scaled`, with the gradients at hand."""

    def __init__(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        self.rows, self._values = rows, values
        self.squares = torch.linalg.vector_norm(values, dim=1).square_()

    def add(self, weight: torch.Tensor, factors: torch.Tensor) -> None:
        add_distinct_rows(weight, self.rows, self._values.mul_(factors.unsqueeze(1)), 1)


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
    found = [
        {k: _scaled(stacks.weights[n][k], backend, optimizer, *each) for k, each in queries.items()}
        for n, queries in enumerate(lookups)
    ]
    for place, squares in enumerate(_mean_squares(stacks, found)):
        for k, scaled in found[place].items():
            weight, state = stacks.weights[place][k], states[place][k]
            scaled.add(weight, row_factors_of(optimizer, scaled.rows, squares[k], state))


def _scaled(
    weight: torch.Tensor,
    backend: Backend,
    optimizer: FusedOptimizer,
    query: Query,
    grad: torch.Tensor,
) -> Scaled:
    own = getattr(backend, "scaled_rows", None)
    if own is not None and not optimizer.weight_decay:
        scaled = own(weight, query, grad)
        if scaled is not None:
            return scaled
    rows, values = backend.row_gradient(weight, query, grad)
    optimizer.decay(weight, rows, values)
    return GradientRows(rows, values)


def _mean_squares(
    stacks: Stacks, found: Sequence[dict[int, Scaled]]
) -> list[dict[int, torch.Tensor]]:
    """Per rank present and stack, the mean squares of whole rows, from those of their shards."""
    assert stacks.grid is not None, "columns are split over a mesh"
    tiling = stacks.tiling
    tables = [t for t in range(len(tiling.tables)) if tiling.splits_columns(t)]
    known = {t for t in tables if len(tiling.shards[t]) == tiling.num_ranks}
    parts = [_per_table(stacks, n, each) for n, each in enumerate(found)]
    sent, sizes = [], []
    for part in parts:
        pieces = [part[t][1] if t in known else _dense(stacks, t, part.get(t)) for t in tables]
        sizes.append([piece.shape[0] for piece in pieces])
        sent.append(torch.cat(pieces))
    with because("squares of rows split by columns", implicit=False):
        totals = combined(stacks.grid, sent)
    means = []
    for place, (part, total) in enumerate(zip(parts, totals, strict=True)):
        whole = dict(zip(tables, total.split(sizes[place]), strict=True))
        per_stack = {}
        for k in found[place]:
            shards = tiling.stacks[stacks.ranks[place]][k].shards
            squares = [
                (whole[t] if t in known else whole[t].index_select(0, part[t][0]))
                / tiling.tables[t].embedding_dim
                if t in whole
                else part[t][1] / tiling.tables[t].embedding_dim
                for t, _ in shards
            ]
            per_stack[k] = torch.cat(squares)
        means.append(per_stack)
    return means


def _per_table(
    stacks: Stacks, place: int, found: dict[int, Scaled]
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Per table of a rank: its rows that have a gradient, and their squares."""
    per_table = {}
    for k, scaled in found.items():
        stack = stacks.tiling.stacks[stacks.ranks[place]][k]
        bases = [shard.base for _, shard in stack.shards]
        edges = torch.tensor([*bases, stack.num_rows], device=scaled.rows.device)
        sizes = torch.searchsorted(scaled.rows, edges).diff().tolist()
        both = scaled.rows.split(sizes), scaled.squares.split(sizes)
        for (table, shard), rows, squares in zip(stack.shards, *both, strict=True):
            per_table[table] = (rows - shard.base, squares)
    return per_table


def _dense(
    stacks: Stacks, table: int, part: tuple[torch.Tensor, torch.Tensor] | None
) -> torch.Tensor:
    """A number for each row of a table, of which some ranks do not know which were looked up."""
    num = stacks.tiling.tables[table].num_embeddings
    dense = torch.zeros(num, dtype=stacks.dtype, device=stacks.device)
    return dense if part is None else dense.index_copy_(0, *part)
