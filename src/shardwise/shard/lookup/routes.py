"""Routes between the ranks' local batches and the ranks that hold the weight.

`send` takes batches to the ranks that compute with them, `reply` takes their results to the
requesters. `send_grad` and `reply_grad` are the transposes, for gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shardwise.comm import collectives
from shardwise.comm.id_exchange import Counts
from shardwise.core.mesh import Grid
from shardwise.shard.moves import exchanged
from shardwise.shard.tiling import DimSplit
from shardwise.simulation.ranks import each_rank, localize


def all_gather_uneven(x: torch.Tensor, counts: tuple[int, ...], grid: Grid) -> torch.Tensor:
    """The ranks' rows, concatenated; rank i of the group has `counts[i]` of them.

    They are padded to the largest count while they are sent.
    """
    longest = max(counts)
    if longest == 0:
        return x
    if min(counts) == longest:
        return collectives.all_gather(x, grid, 0)
    padded = each_rank(grid, lambda _, mine: _padded(mine, longest), x)
    gathered = collectives.all_gather(padded, grid, 0)

    def compact(_: Any, rows: torch.Tensor) -> torch.Tensor:
        parts = rows.split(longest)
        return torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])

    return each_rank(grid, compact, gathered, axes=())


def reduce_scatter_uneven(x: torch.Tensor, counts: tuple[int, ...], grid: Grid) -> torch.Tensor:
    """The sum of the ranks' rows, of which rank i of the group gets `counts[i]`."""
    longest = max(counts)
    if longest == 0:
        return x
    if min(counts) == longest:
        return collectives.reduce_scatter(x, "sum", grid, 0)

    def spread(_: Any, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([_padded(part, longest) for part in rows.split(list(counts))])

    reduced = collectives.reduce_scatter(each_rank(grid, spread, x), "sum", grid, 0)
    return each_rank(grid, lambda place, rows: rows[: counts[place[0]]], reduced)


def _padded(x: torch.Tensor, length: int) -> torch.Tensor:
    if x.shape[0] == length:
        return x.contiguous()
    out = x.new_zeros((length, *x.shape[1:]))
    out[: x.shape[0]] = x
    return out


class BatchRoute(Protocol):
    @property
    def grid(self) -> Grid: ...

    def send(self, x: torch.Tensor) -> torch.Tensor: ...

    def send_grad(self, grad: torch.Tensor) -> torch.Tensor: ...

    def reply(self, results: torch.Tensor) -> torch.Tensor: ...

    def reply_grad(self, grad: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class ToEveryone:
    """Every rank gets all batches.

    Ranks compute columns of the result, which are concatenated (`joined`), or terms of a sum.
    """

    grid: Grid
    split: DimSplit
    joined: bool
    num_columns: int
    #: By rank: the size of its batch, and the number of result rows that it gets.
    num_brought: tuple[int, ...]
    num_rows: tuple[int, ...]

    def send(self, x: torch.Tensor) -> torch.Tensor:
        return all_gather_uneven(localize(self.grid, x), self.num_brought, self.grid)

    def send_grad(self, grad: torch.Tensor) -> torch.Tensor:
        return reduce_scatter_uneven(localize(self.grid, grad), self.num_brought, self.grid)

    def _columns(self, rank: int) -> int:
        """How many columns of the result a rank computes."""
        return self.split.intervals[rank][1] if self.joined else self.num_columns

    def reply(self, results: torch.Tensor) -> torch.Tensor:
        if not self.joined:
            return reduce_scatter_uneven(results, self.num_rows, self.grid)
        grid = self.grid
        ranks = grid.ranks
        counts = [[n * self._columns(sender) for n in self.num_rows] for sender in ranks]
        arrived = exchanged(each_rank(grid, lambda _, r: r.reshape(-1), results), counts, grid)

        def join(place: Any, flat: torch.Tensor) -> torch.Tensor:
            mine = self.num_rows[place[0]]
            parts = flat.split([mine * self._columns(sender) for sender in ranks])
            out = flat.new_empty(mine, self.num_columns)
            for sender, part in zip(ranks, parts, strict=True):
                start, length = self.split.intervals[sender]
                out[:, start : start + length] = part.view(mine, length)
            return out

        return each_rank(grid, join, arrived)

    def reply_grad(self, grad: torch.Tensor) -> torch.Tensor:
        if not self.joined:
            return all_gather_uneven(localize(self.grid, grad), self.num_rows, self.grid)
        grid = self.grid
        ranks, total = grid.ranks, sum(self.num_rows)
        counts = [[n * self._columns(owner) for owner in ranks] for n in self.num_rows]

        def part(_: Any, mine: torch.Tensor) -> torch.Tensor:
            columns = []
            for owner in ranks:
                start, length = self.split.intervals[owner]
                columns.append(mine[:, start : start + length].reshape(-1))
            return torch.cat(columns)

        arrived = exchanged(each_rank(grid, part, grad), counts, grid)

        def stack(place: Any, flat: torch.Tensor) -> torch.Tensor:
            return flat.view(total, self._columns(ranks[place[0]]))

        return each_rank(grid, stack, arrived)


@dataclass(frozen=True, slots=True)
class ToOwners:
    """Each entry of a batch goes to one owner, and one row comes back for each segment."""

    grid: Grid
    #: The entries of this rank that are sent, ordered by owner.
    order: torch.Tensor
    #: One number for each entry of this rank; only its length is used.
    entries: torch.Tensor
    #: Entries that this rank sends to each rank, and gets from each.
    num_sent: Counts
    num_got: Counts
    #: Segments that this rank asks each rank for, and that each asks it for.
    num_asked: Counts
    num_given: Counts

    def send(self, x: torch.Tensor) -> torch.Tensor:
        def pick(_: Any, mine: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
            return mine.index_select(0, order)

        picked = each_rank(self.grid, pick, localize(self.grid, x), self.order, axes=())
        return self._moved(picked, self.num_sent, self.num_got)

    def send_grad(self, grad: torch.Tensor) -> torch.Tensor:
        def put(
            _: Any, arrived: torch.Tensor, order: torch.Tensor, entries: torch.Tensor
        ) -> torch.Tensor:
            out = arrived.new_zeros((entries.shape[0], *arrived.shape[1:]))
            return out.index_copy_(0, order, arrived)

        arrived = self._moved(localize(self.grid, grad), self.num_got, self.num_sent)
        return each_rank(self.grid, put, arrived, self.order, self.entries, axes=())

    def reply(self, results: torch.Tensor) -> torch.Tensor:
        return self._moved(results, self.num_given, self.num_asked)

    def reply_grad(self, grad: torch.Tensor) -> torch.Tensor:
        return self._moved(localize(self.grid, grad), self.num_asked, self.num_given)

    def _moved(self, x: torch.Tensor, num_sent: Counts, num_got: Counts) -> torch.Tensor:
        return collectives.all_to_all_uneven(x, num_sent, num_got, self.grid, 0)
