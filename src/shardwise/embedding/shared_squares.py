"""Row-wise Adagrad on tables that are split by columns.

Its state is the mean square of a row's whole gradient, of which each rank has some columns. So
before any row changes, one all-reduce sums what the columns of each rank contribute. All ranks that
hold columns of a table looked up the same ids, so they have the same rows in the same order and
exchange one number per row that was looked up. Only where some ranks hold nothing of a table, and
cannot know those rows, do all send a number for each row of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from shardwise.comm.watch import because
from shardwise.embedding.stacks import Stacks
from shardwise.lookup.backends.backend import Backend, Lookups, Query
from shardwise.lookup.exchange import combined
from shardwise.lookup.optimizers import FusedOptimizer, State, add_distinct_rows


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
        add_distinct_rows(weight, self.rows, self._values, factors)


class SharedColumns:
    """Which tables have their columns on several ranks; computed once."""

    def __init__(self, stacks: Stacks) -> None:
        tiling, self._stacks = stacks.tiling, stacks
        numbers = range(len(tiling.tables))
        split = np.array([tiling.splits_columns(table) for table in numbers])
        everywhere = np.array([len(shards) == tiling.num_ranks for shards in tiling.shards])
        mine = [tiling.stacks[rank] for rank in stacks.ranks]
        #: Per rank present, the stacks that hold some but not all columns of a table.
        self.stacks = [
            [k for k, stack in enumerate(each) if any(split[t] for t, _ in stack.shards)]
            for each in mine
        ]
        #: Whether there are any. The tiling decides: all ranks have to take part.
        self.are_there = bool(split.any())
        self._tables = [[np.array([t for t, _ in s.shards]) for s in each] for each in mine]
        self._bases = [[np.array([s.base for _, s in one.shards]) for one in each] for each in mine]
        self._dims = np.array([table.embedding_dim for table in tiling.tables])
        heights = np.array([table.num_embeddings for table in tiling.tables])
        #: Tables of which a number is sent for each row that was looked up, or for each row; and
        #: where those of the latter begin.
        self._known, self._dense = split & everywhere, split & ~everywhere
        self._first = np.cumsum([0, *(heights * self._dense)])

    def mean_squares(self, found: Sequence[dict[int, Scaled]]) -> list[dict[int, torch.Tensor]]:
        """Per rank present and stack, the mean squares of whole rows."""
        assert self._stacks.grid is not None, "columns are split over a mesh"
        parts = [self._in_tables(place, each) for place, each in enumerate(found)]
        with because("squares of rows split by columns", implicit=False):
            totals = combined(self._stacks.grid, [part.sent for part in parts])
        means = []
        for part, total, each in zip(parts, totals, found, strict=True):
            part.squares[part.known] = total[: part.known.shape[0]]
            part.squares[part.dense] = total[part.known.shape[0] :].index_select(0, part.at)
            sizes = [scaled.rows.shape[0] for scaled in each.values()]
            squares = part.squares.div_(part.dims).split(sizes)
            means.append(dict(zip(each, squares, strict=True)))
        return means

    def _in_tables(self, place: int, found: dict[int, Scaled]) -> _RankSquares:
        """What a rank sends: in the order of tables, which all ranks have."""
        stacks, device = self._stacks, self._stacks.device
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        tables, rows = [nothing], [nothing]
        for k, scaled in found.items():
            bases = torch.from_numpy(self._bases[place][k]).to(device)
            at = torch.searchsorted(bases, scaled.rows, right=True) - 1
            tables.append(torch.from_numpy(self._tables[place][k]).to(device)[at])
            rows.append(scaled.rows - bases[at])
        table, row = torch.cat(tables), torch.cat(rows)
        squares = [torch.empty(0, dtype=stacks.dtype, device=device)]
        given = torch.cat([*squares, *(scaled.squares for scaled in found.values())])
        order = torch.sort(table, stable=True).indices
        is_known, is_dense, first, dims = (
            torch.from_numpy(numbers).to(device)
            for numbers in (self._known, self._dense, self._first, self._dims)
        )
        known = order[is_known[table[order]]]
        dense = is_dense[table].nonzero().view(-1)
        at = first[table[dense]] + row[dense]
        whole = given.new_zeros(int(self._first[-1])).index_copy_(0, at, given[dense])
        return _RankSquares(given, torch.cat([given[known], whole]), known, dense, at, dims[table])


class _RankSquares(NamedTuple):
    """The squares of a rank's rows, what it sends of them, and where that is among them."""

    squares: torch.Tensor
    sent: torch.Tensor
    #: Rows that all ranks know, in the order in which they are sent.
    known: torch.Tensor
    #: Rows of tables that are sent whole, and their places there.
    dense: torch.Tensor
    at: torch.Tensor
    dims: torch.Tensor


def update_together(
    stacks: Stacks,
    columns: SharedColumns,
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
    for place, squares in enumerate(columns.mean_squares(found)):
        for k, scaled in found[place].items():
            weight, state = stacks.weights[place][k], states[place][k]
            scaled.add(weight, optimizer.row_factors(scaled.rows, squares[k], state))


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
