"""Routing: which ids go to which rank, computed when a collection is sharded.

Note [Blocks]
Legs are handled in blocks: neighbouring legs to one stack, whose tables are either not split by
rows, or split by rows over the same ranks. A *piece* of the output is what the rows of a block
make, or those of the blocks of all owners of split tables (a row group). What a plan decides is
computed once, per block and piece; a batch adds arrays of counts. So the Python of a step grows
with blocks, of which a rank has about as many as widths of tables, and not with tables.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from shardwise.core.sizes import chunk_length
from shardwise.lookup.ids import spread
from shardwise.lookup.tiling import Features, TableShard, TableTiling, row_groups


@dataclass(frozen=True, slots=True)
class FeatureRoute:
    """A leg: one feature, and one shard of its table that gets its ids."""

    feature: int
    table: int
    shard: TableShard
    #: The group of tables split over the same ranks that its table belongs to; -1: not split.
    group: int

    @property
    def split(self) -> bool:
        """Whether other shards have other rows of the table."""
        return self.group >= 0


class Strip(NamedTuple):
    """The same columns of neighbouring features of one width, with all features side by side."""

    start: int
    num_features: int
    dim: int
    columns: tuple[int, int]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """A view: feature × bag × column."""
        part = whole[:, self.start : self.start + self.num_features * self.dim]
        part = part.unflatten(1, (self.num_features, self.dim))
        return part[:, :, self.columns[0] : self.columns[1]].transpose(0, 1)


class OutputPiece:
    """Some columns of some features: the rows of a block, or of the blocks of several owners."""

    def __init__(
        self, legs: Sequence[FeatureRoute], blocks: Sequence[int], first_part: int
    ) -> None:
        """`legs` are those to one owner; `blocks` the numbers of all owners' blocks."""
        self.blocks, self.group, self.width = blocks, legs[0].group, legs[0].shard.width
        self.features = np.array([leg.feature for leg in legs])
        self.of_features = picker(self.features.tolist())
        #: The numbers of its features as parts, and the columns of each; see `Columns`.
        self.parts = slice(first_part, first_part + len(legs))
        self.columns = [leg.shard.columns for leg in legs]
        self.strip: Strip | None = None


class LegBlock(OutputPiece):
    """Neighbouring legs to one stack of a rank; see Note [Blocks]."""

    def __init__(self, legs: Sequence[FeatureRoute], first_part: int, number: int) -> None:
        super().__init__(legs, [number], first_part)
        self.legs, shards = legs, [leg.shard for leg in legs]
        self.stack, self.rank = shards[0].stack, shards[0].rank
        #: The place of its rank among the owners of the group.
        self.owner = 0
        #: What is added to an id of the table, to count from the first row of the stack.
        self.shifts = np.array([shard.base - shard.rows[0] for shard in shards])
        self.first_row = np.array([shard.base for shard in shards])
        self.num_rows = np.array([shard.num_rows for shard in shards])


@dataclass(frozen=True, slots=True)
class _FewPicked:
    """At most one place: `itemgetter` would not give a tuple."""

    places: tuple[int, ...]

    def __call__(self, items: Sequence[Any]) -> tuple[Any, ...]:
        return tuple([items[place] for place in self.places])


def picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that picks the items at `places` of a list."""
    return operator.itemgetter(*places) if len(places) > 1 else _FewPicked(tuple(places))


class RowIntervals:
    """The rows of each owner of a group's tables, one table after another."""

    def __init__(self, group: RowGroup, tables: Sequence[int], tiling: TableTiling) -> None:
        shards = [sorted(tiling.shards[table], key=lambda each: each.rows) for table in tables]
        rows = np.cumsum([tiling.tables[table].num_embeddings for table in tables])
        dtype = torch.int32 if rows[-1] < 2**31 else torch.int64
        #: What is added to the ids of each feature.
        self._first = torch.tensor([0, *rows[:-1]], dtype=dtype)
        ends = np.array([[shard.rows[1] for shard in each] for each in shards])
        #: One past the last row of each shard, and its owner's place in the group.
        self._ends = torch.from_numpy(ends.reshape(-1)).to(dtype)
        self._ends += torch.repeat_interleave(self._first, ends.shape[1])
        places = [group.owner_at[shard.rank] for each in shards for shard in each]
        self._owner = torch.tensor(places, dtype=group.place_dtype)

    def owners(self, ids: torch.Tensor, num_ids: np.ndarray) -> torch.Tensor:
        """The place of the owner of each id, of features that have `num_ids` each."""
        if self._ends.device != ids.device:
            self._ends, self._owner = self._ends.to(ids.device), self._owner.to(ids.device)
        first = spread(self._first, num_ids, ids.shape[0], ids.device)
        at = torch.bucketize(ids + first, self._ends, right=True, out_int32=True)
        return self._owner.index_select(0, at)


class RowGroup(OutputPiece):
    """The features whose tables are split by rows over the same ranks, and have one width."""

    def __init__(self, blocks: Sequence[LegBlock], tiling: TableTiling, first_part: int) -> None:
        super().__init__(blocks[0].legs, [block.blocks[0] for block in blocks], first_part)
        tables = [leg.table for leg in blocks[0].legs]
        self.owners = [block.rank for block in blocks]
        self.owner_at = {rank: place for place, rank in enumerate(self.owners)}
        for place, block in enumerate(blocks):
            block.owner = place
        #: The dtype of owners' places.
        self.place_dtype = torch.uint8 if len(self.owners) <= 256 else torch.int16
        heights = {tiling.tables[table].num_embeddings for table in tables}
        #: How many rows each owner has, the last ones perhaps fewer.
        self.rows_per_owner = chunk_length(max(heights), len(self.owners))
        #: Where tables differ, or rows are split otherwise: who has which rows. None elsewhere.
        self.intervals: RowIntervals | None = None
        if len(heights) > 1 or not self._is_even(tables, tiling):
            self.intervals = RowIntervals(self, tables, tiling)
        #: As `LegBlock.shifts`, for each owner and feature.
        self.shifts = np.array([block.shifts for block in blocks])

    def _is_even(self, tables: Sequence[int], tiling: TableTiling) -> bool:
        shards = (shard for table in tables for shard in tiling.shards[table])
        return all(s.rows[0] == self.owner_at[s.rank] * self.rows_per_owner for s in shards)


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
        feature_tables = [t for t, table in enumerate(tiling.tables) for _ in table.features]
        self.num_features = len(feature_tables)
        self.features = Features(tiling.tables)
        groups = row_groups(tiling.tables, tiling.splits)
        legs: list[list[FeatureRoute]] = [[] for _ in range(self.num_ranks)]
        local: list[list[FeatureRoute]] = [[] for _ in range(self.num_ranks)]
        for feature, table in enumerate(feature_tables):
            for shard in tiling.shards[table]:
                target = local if tiling.splits[table].replicated else legs
                target[shard.rank].append(FeatureRoute(feature, table, shard, groups[table]))
        #: Per rank, the legs that lead there from every rank, in the order of rows of its stacks.
        self.legs: tuple[tuple[FeatureRoute, ...], ...] = _in_order(legs)
        #: Per rank, the legs to replicated tables, which need no exchange.
        self.local: tuple[tuple[FeatureRoute, ...], ...] = _in_order(local)
        self.blocks, num = _blocks(self.legs, 0)
        #: The same blocks in one list, as their rows come.
        self.all_blocks = [block for each in self.blocks for block in each]
        #: Per rank, the first rank that gets the same message: it has other columns of the tables.
        self.like = _alike(self.legs)
        self.groups: list[RowGroup] = []
        for number in range(max(groups) + 1):
            owners = [block for block in self.all_blocks if block.group == number]
            self.groups.append(RowGroup(owners, tiling, num))
            num = self.groups[-1].parts.stop
        # Replicated tables are the same on every rank, and so are the legs to them.
        self.local_blocks = tuple(_blocks([each], num)[0][0] for each in self.local)
        whole = [block for block in self.all_blocks if block.group < 0]
        #: What the output consists of, but for replicated tables.
        self.pieces: list[OutputPiece] = [*whole, *self.groups]
        #: Per feature, what most owners of its table add to an id.
        self.shifts = np.zeros(self.num_features, dtype=np.int64)
        for block in [*whole, *self.local_blocks[0]]:
            self.shifts[block.features] = block.shifts
        self.has_whole = bool(whole or self.local_blocks[0])
        self.feature_tables = feature_tables
        self.dims = [tiling.tables[table].embedding_dim for table in feature_tables]
        means = [f for f, t in enumerate(feature_tables) if tiling.tables[t].pooling == "mean"]
        #: The features whose bags are averaged.
        self.means = means if pooled else []
        self.columns = Columns(self)
        #: Whether each piece is a strip of the joined output.
        self.has_strips = self._find_strips()
        longest = max((s.num_rows for each in tiling.stacks for s in each), default=0)
        self.id_dtype = torch.int32 if longest < 2**31 else torch.int64
        rows = max((table.num_embeddings for table in tiling.tables), default=0)
        #: The dtype of ids that count the rows of whole tables.
        self.row_dtype = torch.int32 if rows < 2**31 else torch.int64
        self.max_blocks = max(map(len, self.blocks + self.local_blocks))
        #: Columns of the note that a rank gives each other rank; see `messages`.
        self.note_width = self.num_features + self.max_blocks * (2 if self.chooses else 1) + 1
        #: Whether any id or row ever leaves a rank.
        self.travels = any(self.legs) and self.num_ranks > 1

    def sums_by_rank(self, of_blocks: Sequence[int]) -> list[int]:
        """Sums of numbers that there are for all blocks."""
        numbers = iter(of_blocks)
        return [sum(itertools.islice(numbers, len(blocks))) for blocks in self.blocks]

    @property
    def chooses(self) -> bool:
        """Whether batches decide between rows and sums; see Note [Rows instead of sums]."""
        return self.pooled and bool(self.groups)

    def _find_strips(self) -> bool:
        starts = np.cumsum([0, *self.dims])
        for piece in self.pieces:
            features, columns = piece.features, set(piece.columns)
            dims = {self.dims[feature] for feature in features.tolist()}
            if len(columns) > 1 or len(dims) > 1 or (np.diff(features) != 1).any():
                return False
            start = int(starts[features[0]])
            piece.strip = Strip(start, len(features), dims.pop(), piece.columns[0])
        return not self.local[0]


class Columns:
    """How the columns of all features are put together from parts.

    Parts are the features of pieces, and those of the legs to replicated tables.
    """

    def __init__(self, route: Route) -> None:
        pieces = [*route.pieces, *route.local_blocks[0]]
        parts = sorted(
            (feature, columns, number)
            for piece in pieces
            for feature, columns, number in zip(
                piece.features.tolist(),
                piece.columns,
                range(piece.parts.start, piece.parts.stop),
                strict=True,
            )
        )
        #: Numbers of parts in the order of columns, and their widths.
        self.numbers = [number for _, _, number in parts]
        self.widths = [end - start for _, (start, end), _ in parts]
        self.in_order = picker(self.numbers)
        self.num_parts = max(piece.parts.stop for piece in pieces)
        #: Per feature, its parts among those in order.
        edges = np.searchsorted([f for f, _, _ in parts], np.arange(route.num_features + 1))
        self.of_feature = [slice(a, b) for a, b in itertools.pairwise(edges.tolist())]

    def numbered(self, in_order: Sequence[torch.Tensor]) -> list[Any]:
        """Parts by number, from those in the order of columns."""
        found: list[Any] = [None] * self.num_parts
        for number, part in zip(self.numbers, in_order, strict=True):
            found[number] = part
        return found


def _in_order(legs: Sequence[Sequence[FeatureRoute]]) -> tuple[tuple[FeatureRoute, ...], ...]:
    def place(leg: FeatureRoute) -> tuple[int, int, int]:
        return leg.shard.stack, leg.group, leg.feature

    return tuple(tuple(sorted(each, key=place)) for each in legs)


def _blocks(
    legs: Sequence[Sequence[FeatureRoute]], first_part: int
) -> tuple[tuple[tuple[LegBlock, ...], ...], int]:
    """The blocks of each rank, and the number of the part after theirs."""
    found, num = [], 0
    for mine in legs:
        kinds: dict[tuple[int, int], list[FeatureRoute]] = {}
        for leg in mine:
            kinds.setdefault((leg.shard.stack, leg.group), []).append(leg)
        blocks = []
        for members in kinds.values():
            blocks.append(LegBlock(members, first_part, num))
            first_part += len(members)
            num += 1
        found.append(tuple(blocks))
    return tuple(found), first_part


def _alike(legs: Sequence[Sequence[FeatureRoute]]) -> tuple[int, ...]:
    first: dict[Any, int] = {}
    found = []
    for rank, mine in enumerate(legs):
        own = rank if any(leg.split for leg in mine) else -1
        key = (own, *((leg.feature, leg.shard.base, leg.shard.rows) for leg in mine))
        found.append(first.setdefault(key, rank))
    return tuple(found)


def rows_are_fewer(num_ids: float, num_bags: float, num_owners: int) -> bool:
    """Whether the rows of all ids are fewer than a row for each bag from every owner."""
    return num_ids < num_bags * num_owners
