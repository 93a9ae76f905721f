"""Routing: which ids go to which rank, computed when a collection is sharded.

Note [Blocks]
A *leg* is one feature, and one shard of its table that gets its ids. Legs are handled in blocks:
neighbouring legs to one stack, whose tables are either not split by rows, or split by rows over the
same ranks. A *piece* of the output is what the rows of a block make, or those of the blocks of all
owners of split tables (a row group). What a plan decides is computed once, per block and piece; a
batch adds arrays of counts. So the Python of a step grows with blocks, of which a rank has about as
many as widths of tables, and not with tables.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from shardwise.core.sizes import chunk_length
from shardwise.lookup.ids import divided, spread
from shardwise.lookup.tiling import Features, TableShard, TableTiling, row_groups

#: A feature and a shard of its table; see Note [Blocks].
Leg = tuple[int, TableShard]


class OutputPiece:
    """Some columns of some features: the rows of a block, or of the blocks of several owners."""

    def __init__(self, legs: Sequence[Leg], blocks: Sequence[int], group: int) -> None:
        """`legs` are those to one owner; `blocks` the numbers of all owners' blocks."""
        self.blocks, self.group, self.width = blocks, group, legs[0][1].width
        self.features = np.array([feature for feature, _ in legs])
        self.of_features = picker(self.features.tolist())
        #: The columns of each feature, and their numbers as parts; see `Columns`.
        self.columns = [shard.columns for _, shard in legs]
        self.parts = slice(0)
        #: Where its features begin in the joined output, and their width, if it is a strip there.
        self.strip: tuple[int, int] | None = None

    def strip_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Its columns in the joined output, as a view: feature × bag × column."""
        assert self.strip is not None, "every piece is a strip"
        (start, dim), num = self.strip, len(self.features)
        part = whole[:, start : start + num * dim].unflatten(1, (num, dim))
        return part[:, :, slice(*self.columns[0])].transpose(0, 1)


class LegBlock(OutputPiece):
    """Neighbouring legs to one stack of a rank; see Note [Blocks]."""

    def __init__(self, legs: Sequence[Leg], number: int, group: int) -> None:
        super().__init__(legs, [number], group)
        self.legs, shards = legs, [shard for _, shard in legs]
        self.stack, self.rank = shards[0].stack, shards[0].rank
        #: The place of its rank among the owners of the group.
        self.owner = 0
        #: What is added to an id of the table, to count from the first row of the stack.
        self.shifts = np.array([shard.base - shard.rows[0] for shard in shards])
        self.first_row = np.array([shard.base for shard in shards])
        self.num_rows = np.array([shard.num_rows for shard in shards])


def picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Any]:
    """A function that picks the items at `places` of a list."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    # Of one place, `itemgetter` gives the item.
    return operator.itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


class RowGroup(OutputPiece):
    """The features whose tables are split by rows over the same ranks, and have one width."""

    def __init__(self, blocks: Sequence[LegBlock], features: Features, tiling: TableTiling) -> None:
        legs, group = blocks[0].legs, blocks[0].group
        super().__init__(legs, [block.blocks[0] for block in blocks], group)
        self.owners = [block.rank for block in blocks]
        for place, block in enumerate(blocks):
            block.owner = place
        #: As `LegBlock.shifts`, for each owner and feature.
        self.shifts = np.array([block.shifts for block in blocks])
        self._place_dtype = torch.uint8 if len(blocks) <= 256 else torch.int16
        place_of = {rank: place for place, rank in enumerate(self.owners)}
        tables = [features.tables_of[feature] for feature, _ in legs]
        heights = [tiling.tables[table].num_embeddings for table in tables]
        #: How many rows each owner has, the last ones perhaps fewer.
        self._rows_per_owner = chunk_length(max(heights), len(blocks))
        shards = [shard for table in tables for shard in tiling.shards[table]]
        #: Whether tables differ, or their rows are split otherwise.
        self._uneven = len(set(heights)) > 1 or any(
            shard.rows[0] != place_of[shard.rank] * self._rows_per_owner for shard in shards
        )
        if not self._uneven:
            return
        edges = np.cumsum([0, *heights])
        dtype = torch.int32 if edges[-1] < 2**31 else torch.int64
        #: What is added to the ids of each feature. Then, for each shard in the order of rows: one
        #: past its last row, and the place of its owner.
        self._first = torch.tensor(edges[:-1], dtype=dtype)
        mine = np.repeat(edges[:-1], len(blocks))
        ends = mine + [shard.rows[1] for shard in shards]
        order = np.argsort(ends)
        self._ends = torch.tensor(ends[order], dtype=dtype)
        places = np.array([place_of[shard.rank] for shard in shards])
        self._owner = torch.tensor(places[order], dtype=self._place_dtype)

    def owners_of(self, ids: torch.Tensor, num_ids: np.ndarray) -> torch.Tensor:
        """The place of the owner of each id; the features have `num_ids` each."""
        if not self._uneven:
            return divided(ids, self._rows_per_owner).to(self._place_dtype)
        if self._ends.device != ids.device:
            self._ends, self._owner = self._ends.to(ids.device), self._owner.to(ids.device)
        first = spread(self._first, num_ids, ids.shape[0], ids.device)
        at = torch.bucketize(ids + first, self._ends, right=True, out_int32=True)
        return self._owner.index_select(0, at)


class Route:
    """What is the same for every batch: the legs to each rank, and those to replicated tables."""

    def __init__(
        self, tiling: TableTiling, *, pooled: bool, dtype: torch.dtype = torch.float32
    ) -> None:
        """`dtype` is that of the tables."""
        self.tiling, self.pooled, self.dtype = tiling, pooled, dtype
        #: The dtype of weights of ids in messages, and how many int32 one of them takes there.
        self.weight_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.weight_ints = self.weight_dtype.itemsize // 4
        self.num_ranks = tiling.num_ranks
        self.features = Features(tiling.tables)
        of_features = list(self.features.owners.values())
        self.num_features, self.dims = len(of_features), [t.embedding_dim for t in of_features]
        means = [feature for feature, table in enumerate(of_features) if table.pooling == "mean"]
        #: The features whose bags are averaged.
        self.means = means if pooled else []
        #: Per rank, the blocks of legs that lead there from every rank, and those of legs to
        #: replicated tables, which need no exchange, and are the same on every rank.
        self.blocks, self.local_blocks = _blocks(tiling, self.features)
        #: The former in one list, as their rows come.
        self.all_blocks = list(itertools.chain(*self.blocks))
        #: Per rank, the first rank that gets the same message: it has other columns of the tables.
        self.like = _alike(self.blocks)
        by_group: dict[int, list[LegBlock]] = {-1: []}
        for block in self.all_blocks:
            by_group.setdefault(block.group, []).append(block)
        _, *split = sorted(by_group)
        self.groups = [RowGroup(by_group[g], self.features, tiling) for g in split]
        whole = by_group[-1]
        #: What the output consists of, but for replicated tables.
        self.pieces: list[OutputPiece] = [*whole, *self.groups]
        #: Per feature, what most owners of its table add to an id.
        self.shifts = np.zeros(self.num_features, dtype=np.int64)
        for block in [*whole, *self.local_blocks[0]]:
            self.shifts[block.features] = block.shifts
        self.has_whole = bool(whole or self.local_blocks[0])
        self.columns = Columns(self)
        #: Whether each piece is a strip of the joined output.
        self.has_strips = self._find_strips()
        longest = max((s.num_rows for each in tiling.stacks for s in each), default=0)
        self.id_dtype = torch.int32 if longest < 2**31 else torch.int64
        rows = self.features.num_rows.max()
        #: The dtype of ids that count the rows of whole tables.
        self.row_dtype = torch.int32 if rows < 2**31 else torch.int64
        self.max_blocks = max(map(len, [*self.blocks, *self.local_blocks]))
        #: Whether batches decide between rows and sums; see Note [Rows instead of sums].
        self.chooses = pooled and bool(self.groups)
        #: Columns of the note that a rank gives each other rank; see `messages`.
        self.note_width = self.num_features + self.max_blocks * (2 if self.chooses else 1) + 1
        #: Whether any id or row ever leaves a rank.
        self.travels = bool(self.all_blocks) and self.num_ranks > 1

    def sums_by_rank(self, of_blocks: Sequence[int]) -> list[int]:
        """Sums of numbers that there are for all blocks."""
        numbers = iter(of_blocks)
        return [sum(itertools.islice(numbers, len(blocks))) for blocks in self.blocks]

    def _find_strips(self) -> bool:
        """Describe the pieces as strips: the same columns of neighbouring features of one width."""
        starts = np.cumsum([0, *self.dims])
        for piece in self.pieces:
            features, dims = piece.features, {self.dims[feature] for feature in piece.features}
            if len(set(piece.columns)) > 1 or len(dims) > 1 or (np.diff(features) != 1).any():
                return False
            piece.strip = int(starts[features[0]]), dims.pop()
        return not self.local_blocks[0]


class Columns:
    """How the columns of all features are put together from parts.

    Parts are the features of pieces, and those of the legs to replicated tables.
    """

    def __init__(self, route: Route) -> None:
        found: list[tuple[int, tuple[int, int], int]] = []
        for piece in [*route.pieces, *route.local_blocks[0]]:
            start = len(found)
            numbers = range(start, start + len(piece.columns))
            found += zip(piece.features.tolist(), piece.columns, numbers, strict=True)
            piece.parts = slice(start, len(found))
        for blocks in route.local_blocks[1:]:
            for block, first in zip(blocks, route.local_blocks[0], strict=True):
                block.parts = first.parts
        features, columns, order = zip(*sorted(found), strict=True)
        #: The parts in the order of columns, and their widths; and in the order of their numbers.
        self.in_order, self.widths = picker(order), [end - start for start, end in columns]
        self.numbered = picker(np.argsort(order).tolist())
        #: Per feature, its parts among those in order.
        edges = np.searchsorted(features, np.arange(route.num_features + 1))
        self.of_feature = [slice(a, b) for a, b in itertools.pairwise(edges.tolist())]
        #: Pieces that have all columns of the same features, side by side, and what puts those of
        #: all lists in order; empty if some pieces have other features.
        self.by_features = _by_features([*route.pieces, *route.local_blocks[0]], route.dims)
        listed = [feature for pieces in self.by_features for feature in pieces[0].features]
        self.from_pieces = picker(np.argsort(listed).tolist())


def _by_features(pieces: Sequence[OutputPiece], dims: Sequence[int]) -> list[list[OutputPiece]]:
    """Lists of pieces with the same features, in the order of columns; see `Columns`."""
    found: dict[bytes, list[OutputPiece]] = {}
    for piece in sorted(pieces, key=lambda piece: piece.columns[0]):
        found.setdefault(piece.features.tobytes(), []).append(piece)
    for alike in found.values():
        parts = [columns for piece in alike for columns in set(piece.columns)]
        width = sum(piece.width for piece in alike)
        if len(parts) != len(alike) or {dims[f] for f in alike[0].features} != {width}:
            return []
    return list(found.values())


#: The blocks of each rank.
Blocks = tuple[tuple[LegBlock, ...], ...]


def _blocks(tiling: TableTiling, features: Features) -> tuple[Blocks, Blocks]:
    """The blocks of legs to tables that are not replicated, and to those that are."""
    groups = row_groups(tiling.tables, tiling.splits)
    of_table: list[list[int]] = [[] for _ in groups]
    for feature, table in enumerate(features.tables_of):
        of_table[table].append(feature)
    sharded, replicated, numbers = [], [], itertools.count()
    for stacks in tiling.stacks:
        here: tuple[list[LegBlock], list[LegBlock]] = [], []
        for stack in stacks:
            # In a stack, the tables of one group are neighbours.
            for group, members in itertools.groupby(stack.shards, lambda each: groups[each[0]]):
                legs = [(feature, shard) for t, shard in members for feature in of_table[t]]
                number = -1 if stack.replicated else next(numbers)
                here[stack.replicated].append(LegBlock(legs, number, group))
        sharded.append(tuple(here[0]))
        replicated.append(tuple(here[1]))
    return tuple(sharded), tuple(replicated)


def _alike(blocks: Blocks) -> list[int]:
    first: dict[Any, int] = {}
    found = []
    for rank, mine in enumerate(blocks):
        own = rank if any(block.group >= 0 for block in mine) else -1
        arrays = ((each.features, each.shifts, each.first_row, each.num_rows) for each in mine)
        key = (own, *(array.tobytes() for block in arrays for array in block))
        found.append(first.setdefault(key, rank))
    return found


def rows_are_fewer(num_ids: float, num_bags: float, num_owners: int) -> bool:
    """Whether the rows of all ids are fewer than a row for each bag from every owner."""
    return num_ids < num_bags * num_owners
