"""Table, and Tiling: which rank owns which shard of each table, and how shards are stacked.

Note [Stacks]
All shards of one width that a rank owns are rows of one weight: a *stack*. A lookup in many tables
is then one lookup in a stack, with ids that count from its first row. The sender shifts them,
so the receiver looks ids up as they arrive. The table's parameter is a view of its rows in the
stack.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.core.placements import REPLICATE, Placement, Shard
from shardwise.core.sizes import lengths
from shardwise.errors import ArgumentError, LayoutError, some_of


@dataclass(frozen=True, slots=True)
class TableShard:
    """One rank's shard of a table: rows and columns (start, end), from row `base` of a stack."""

    rank: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    stack: int
    base: int

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def width(self) -> int:
        return self.columns[1] - self.columns[0]


@dataclass(frozen=True, slots=True)
class Stack:
    """Shards of one width on one rank, concatenated; `replicated` ones are whole on every rank."""

    replicated: bool
    width: int
    #: (table, its shard), in the order of rows.
    shards: tuple[tuple[int, TableShard], ...]

    @property
    def num_rows(self) -> int:
        last = self.shards[-1][1]
        return last.base + last.num_rows


@dataclass(frozen=True, slots=True)
class TableSplit:
    """How one table is split: the kind, and how many rows or columns each rank gets."""

    kind: str
    #: Per rank; for `column_wise` columns, else rows. All of them for `data_parallel`.
    sizes: tuple[int, ...]
    #: Where those of each rank begin; None if they are in the order of ranks.
    starts: tuple[int, ...] | None = None

    @property
    def by_columns(self) -> bool:
        return self.kind == "column_wise"

    @property
    def replicated(self) -> bool:
        return self.kind == "data_parallel"

    def placement(self, table: Table) -> Placement:
        """The placement of the table's DTensor."""
        if self.replicated:
            return REPLICATE
        dim = 1 if self.by_columns else 0
        size = (table.num_embeddings, table.embedding_dim)[dim]
        even = lengths(size, len(self.sizes), None) == self.sizes
        return Shard(dim) if even else Shard(dim, self.sizes)


@dataclass(frozen=True, slots=True)
class TableTiling:
    """`shards[t]` are the shards of table t in the order of ranks; `stacks[r]` those of rank r."""

    tables: tuple[Table, ...]
    splits: tuple[TableSplit, ...]
    shards: tuple[tuple[TableShard, ...], ...]
    stacks: tuple[tuple[Stack, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.stacks)

    def splits_columns(self, table: int) -> bool:
        """Whether several ranks hold some columns of a table each."""
        return self.splits[table].by_columns and len(self.shards[table]) > 1

    def shard_on(self, table: int, rank: int) -> TableShard | None:
        shards = self.shards[table]
        at = bisect.bisect_left(shards, rank, key=lambda shard: shard.rank)
        return shards[at] if at < len(shards) and shards[at].rank == rank else None


def row_groups(tables: Sequence[Table], splits: Sequence[TableSplit]) -> list[int]:
    """Per table, the number of its group; -1 for tables that are not split by rows.

    Tables of one group are split over the same ranks and have the same width.
    """
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    found = []
    for table, split in zip(tables, splits, strict=True):
        holders = tuple(rank for rank, size in enumerate(split.sizes) if size)
        if split.by_columns or split.replicated or len(holders) < 2:
            found.append(-1)
        else:
            found.append(numbers.setdefault((table.embedding_dim, holders), len(numbers)))
    return found


def make_tiling(
    tables: Sequence[Table], splits: Sequence[TableSplit], num_ranks: int
) -> TableTiling:
    """Place the shards of all tables; those of one width on a rank form a stack."""
    shards: list[list[TableShard]] = [[] for _ in tables]
    stacks = []
    groups = row_groups(tables, splits)
    # Tables of one group are neighbours in a stack; see Note [Blocks].
    in_order = sorted(enumerate(zip(tables, splits, strict=True)), key=lambda each: groups[each[0]])
    for rank in range(num_ranks):
        found: dict[tuple[bool, int], list[tuple[int, TableShard]]] = {}
        for number, (table, split) in in_order:
            rows, columns = _extent(table, split, rank)
            if rows[0] == rows[1] or columns[0] == columns[1]:
                continue
            key = (split.replicated, columns[1] - columns[0])
            members = found.setdefault(key, [])
            base = members[-1][1].base + members[-1][1].num_rows if members else 0
            shard = TableShard(rank, rows, columns, list(found).index(key), base)
            members.append((number, shard))
            shards[number].append(shard)
        stacks.append(tuple(Stack(*key, tuple(members)) for key, members in found.items()))
    return TableTiling(tuple(tables), tuple(splits), tuple(map(tuple, shards)), tuple(stacks))


def _extent(table: Table, split: TableSplit, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    rows, columns = (0, table.num_embeddings), (0, table.embedding_dim)
    if split.replicated:
        return rows, columns
    start = sum(split.sizes[:rank]) if split.starts is None else split.starts[rank]
    mine = (start, start + split.sizes[rank])
    return (rows, mine) if split.by_columns else (mine, columns)


# -- table ---------------------------------------------------------------------------------------
# Table: the description of one table of a collection.


POOLINGS = ("sum", "mean")
#: Orders of features that are remembered.
_KNOWN = 32


@dataclass(frozen=True, slots=True)
class Table:
    """A table by name, its size, how bags are pooled, and the features that look it up.

    Without `features`, the table has one feature of its own name.

    >>> Table("movie", 1000, 16, features=("watched", "liked"))
    Table(name='movie', num_embeddings=1000, embedding_dim=16, features=('watched', 'liked'), \
pooling='sum')
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    features: tuple[str, ...] = ()
    pooling: str = "sum"

    def __post_init__(self) -> None:
        for what, number in (
            ("num_embeddings", self.num_embeddings),
            ("embedding_dim", self.embedding_dim),
        ):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ArgumentError(
                    f"Table {self.name!r}: {what} must be a positive int, found {number!r}."
                )
        if not isinstance(self.name, str) or not self.name or "." in self.name:
            raise ArgumentError(
                f"A table's name is a text without dots (it names a parameter); found "
                f"{self.name!r}."
            )
        if isinstance(self.features, str):
            raise ArgumentError(f"Table {self.name!r}: features is a sequence of names, not text.")
        features = tuple(self.features) or (self.name,)
        object.__setattr__(self, "features", features)
        if self.pooling not in POOLINGS:
            raise LayoutError(
                f"Table {self.name!r}: pooling is one of {', '.join(POOLINGS)}; found "
                f"{self.pooling!r}."
            )


def checked_tables(tables: Sequence[Table]) -> tuple[Table, ...]:
    """The tables of a collection: names and features must each be unique."""
    found = tuple(tables)
    if not found:
        raise ArgumentError("A collection needs at least one Table.")
    for table in found:
        if not isinstance(table, Table):
            raise ArgumentError(f"A collection takes Tables, found {type(table).__name__}.")
    for what, names in (
        ("table", [t.name for t in found]),
        ("feature", [f for t in found for f in t.features]),
    ):
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        if twice:
            raise LayoutError(
                f"Every {what} of a collection has a name of its own; twice there: "
                f"{', '.join(twice)}."
            )
    return found


class Features:
    """The features of tables, in the declared order."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = tables
        self.owners = {feature: table for table in tables for feature in table.features}
        #: The number of each feature's table, and its rows.
        self.tables_of = [number for number, table in enumerate(tables) for _ in table.features]
        self.num_rows = np.array([table.num_embeddings for table in self.owners.values()])
        self.fewest_rows = int(self.num_rows.min())
        self._places: dict[tuple[str, ...], np.ndarray | str] = {}

    def called(self, feature: str) -> str:
        """A feature, as errors name it."""
        return f"feature {feature!r} of table {self.owners[feature].name!r}"

    def places(self, given: tuple[str, ...]) -> np.ndarray | str:
        """Where each feature is among those of a batch; or what is wrong with those."""
        if given not in self._places:
            if len(self._places) > _KNOWN:
                self._places.clear()
            found: np.ndarray | str | None = self._wrong_names(given)
            if found is None:
                place_of = {feature: place for place, feature in enumerate(given)}
                found = np.array([place_of[feature] for feature in self.owners])
            self._places[given] = found
        return self._places[given]

    def _wrong_names(self, given: Sequence[str]) -> str | None:
        counts = Counter(given)
        unknown = [name for name in counts if name not in self.owners]
        if unknown:
            known = some_of([f"{t.name!r} has {some_of(t.features)}" for t in self.tables], "; ")
            return f"feature {unknown[0]!r} belongs to no table; of the tables, {known}"
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            return f"{self.called(twice[0])} is there more than once"
        missing = [name for name in self.owners if name not in counts]
        return f"{self.called(missing[0])} is missing" if missing else None
