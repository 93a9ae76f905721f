"""Ways between a rank's own batch and the ranks that hold the weight, there and back.

`send` takes what a rank brings to those that compute with it, and `home` takes their results to the
rank that asked. `send_back` and `back` are what becomes of gradients on the same ways.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shardwise.comm import collectives
from shardwise.comm.id_exchange import Counts
from shardwise.core.mesh import Grid
from shardwise.shard.moves import exchanged
from shardwise.shard.tiling import Blocks
from shardwise.simulation.ranks import each_rank, localize

# Collectives of batches of different size: padded to the largest on the wire only.


def all_gather_uneven(x: torch.Tensor, counts: tuple[int, ...], grid: Grid) -> torch.Tensor:
    """The ranks' rows, joined in their order; rank i of the group has `counts[i]` of them."""
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
    """The sum of the ranks' rows, of which rank i of the group gets its `counts[i]`."""
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

    def send_back(self, grad: torch.Tensor) -> torch.Tensor: ...

    def home(self, results: torch.Tensor) -> torch.Tensor: ...

    def back(self, grad: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class ToEveryone:
    """Everybody's batch goes to every rank, as all of them have something to compute for it.

    Ranks compute columns of the result, which are `joined`, or terms, which are added.
    """

    grid: Grid
    blocks: Blocks
    joined: bool
    num_columns: int
    #: By rank: how much it brings, and how many rows of the result it gets.
    num_brought: tuple[int, ...]
    num_rows: tuple[int, ...]

    def send(self, x: torch.Tensor) -> torch.Tensor:
        return all_gather_uneven(localize(self.grid, x), self.num_brought, self.grid)

    def send_back(self, grad: torch.Tensor) -> torch.Tensor:
        return reduce_scatter_uneven(localize(self.grid, grad), self.num_brought, self.grid)

    def _columns(self, rank: int) -> int:
        """How many columns of the result a rank computes."""
        return self.blocks.stretches[rank][1] if self.joined else self.num_columns

    def home(self, results: torch.Tensor) -> torch.Tensor:
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
                start, length = self.blocks.stretches[sender]
                out[:, start : start + length] = part.view(mine, length)
            return out

        return each_rank(grid, join, arrived)

    def back(self, grad: torch.Tensor) -> torch.Tensor:
        if not self.joined:
            return all_gather_uneven(localize(self.grid, grad), self.num_rows, self.grid)
        grid = self.grid
        ranks, total = grid.ranks, sum(self.num_rows)
        counts = [[n * self._columns(owner) for owner in ranks] for n in self.num_rows]

        def part(_: Any, mine: torch.Tensor) -> torch.Tensor:
            pieces = []
            for owner in ranks:
                start, length = self.blocks.stretches[owner]
                pieces.append(mine[:, start : start + length].reshape(-1))
            return torch.cat(pieces)

        arrived = exchanged(each_rank(grid, part, grad), counts, grid)

        def stack(place: Any, flat: torch.Tensor) -> torch.Tensor:
            return flat.view(total, self._columns(ranks[place[0]]))

        return each_rank(grid, stack, arrived)


@dataclass(frozen=True, slots=True)
class ToOwners:
    """Each entry of a batch goes to the one rank that it concerns, and one row comes back for each
    piece that was asked of a rank."""

    grid: Grid
    #: Which of this rank's entries are sent, in the order in which they are, by owner.
    order: torch.Tensor
    #: One number for each entry of this rank; only its length is looked at.
    entries: torch.Tensor
    #: Entries that this rank sends to each rank, and gets from each.
    num_sent: Counts
    num_got: Counts
    #: Pieces that this rank asks each rank for, and that each asks it for.
    num_asked: Counts
    num_given: Counts

    def send(self, x: torch.Tensor) -> torch.Tensor:
        def pick(_: Any, mine: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
            return mine.index_select(0, order)

        picked = each_rank(self.grid, pick, localize(self.grid, x), self.order, axes=())
        return self._moved(picked, self.num_sent, self.num_got)

    def send_back(self, grad: torch.Tensor) -> torch.Tensor:
        def put(
            _: Any, arrived: torch.Tensor, order: torch.Tensor, entries: torch.Tensor
        ) -> torch.Tensor:
            out = arrived.new_zeros((entries.shape[0], *arrived.shape[1:]))
            return out.index_copy_(0, order, arrived)

        arrived = self._moved(localize(self.grid, grad), self.num_got, self.num_sent)
        return each_rank(self.grid, put, arrived, self.order, self.entries, axes=())

    def home(self, results: torch.Tensor) -> torch.Tensor:
        return self._moved(results, self.num_given, self.num_asked)

    def back(self, grad: torch.Tensor) -> torch.Tensor:
        return self._moved(localize(self.grid, grad), self.num_asked, self.num_given)

    def _moved(self, x: torch.Tensor, num_sent: Counts, num_got: Counts) -> torch.Tensor:
        return collectives.all_to_all_uneven(x, num_sent, num_got, self.grid, 0)
