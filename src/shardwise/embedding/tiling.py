"""Tiling: which rank owns which part of each table, and how the parts of a rank are stacked.

Note [Stacks]
All parts of one width that a rank owns lie in one weight, one below the other: a *stack*. A lookup
of many tables is then one lookup in a stack, with ids that count from its first row. The sender
adds the difference, so that what arrives can be looked up as it is. The table's parameter is a view
of its rows in the stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.core.placements import REPLICATE, Placement, Shard
from shardwise.core.sizes import lengths
from shardwise.embedding.table import Table


@dataclass(frozen=True, slots=True)
class Tile:
    """One rank's part of a table: rows and columns from, up to, at a place in its stack."""

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
    """Tables of one width that a rank holds below each other; `replicated` on every rank or not."""

    width: int
    num_rows: int
    #: (table, its tile), in the order of rows.
    tiles: tuple[tuple[int, Tile], ...]
    replicated: bool


@dataclass(frozen=True, slots=True)
class TableSplit:
    """How one table is split: the kind, and how many rows or columns each rank gets."""

    kind: str
    #: Per rank; for `column_wise` columns, else rows. All of them for `data_parallel`.
    sizes: tuple[int, ...]

    @property
    def by_columns(self) -> bool:
        return self.kind == "column_wise"

    @property
    def replicated(self) -> bool:
        return self.kind == "data_parallel"

    def placement(self, table: Table) -> Placement:
        """How the table's DTensor lies along the axis."""
        if self.replicated:
            return REPLICATE
        dim = 1 if self.by_columns else 0
        size = (table.num_embeddings, table.embedding_dim)[dim]
        even = lengths(size, len(self.sizes), None) == self.sizes
        return Shard(dim) if even else Shard(dim, self.sizes)


@dataclass(frozen=True, slots=True)
class TableTiling:
    """`tiles[t]` are the parts of table t in the order of ranks; `stacks[r]` what rank r holds."""

    tables: tuple[Table, ...]
    cuts: tuple[TableSplit, ...]
    tiles: tuple[tuple[Tile, ...], ...]
    stacks: tuple[tuple[Stack, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.stacks)

    def splits_columns(self, table: int) -> bool:
        """Whether several ranks hold some columns of a table each."""
        return self.cuts[table].by_columns and len(self.tiles[table]) > 1

    def tile_on(self, table: int, rank: int) -> Tile | None:
        return next((tile for tile in self.tiles[table] if tile.rank == rank), None)


def make_tiling(tables: Sequence[Table], cuts: Sequence[TableSplit], num_ranks: int) -> TableTiling:
    """Lay the parts of the tables out over ranks, equal widths of a rank in one stack."""
    tiles: list[list[Tile]] = [[] for _ in tables]
    stacks = []
    for rank in range(num_ranks):
        found: dict[tuple[bool, int], list[tuple[int, Tile]]] = {}
        heights: dict[tuple[bool, int], int] = {}
        for number, (table, cut) in enumerate(zip(tables, cuts, strict=True)):
            rows, columns = _extent(table, cut, rank)
            if rows[0] == rows[1] or columns[0] == columns[1]:
                continue
            key = (cut.replicated, columns[1] - columns[0])
            place = list(found).index(key) if key in found else len(found)
            tile = Tile(rank, rows, columns, place, heights.get(key, 0))
            found.setdefault(key, []).append((number, tile))
            heights[key] = tile.base + tile.num_rows
            tiles[number].append(tile)
        stacks.append(
            tuple(
                Stack(key[1], heights[key], tuple(members), key[0])
                for key, members in found.items()
            )
        )
    return TableTiling(tuple(tables), tuple(cuts), tuple(map(tuple, tiles)), tuple(stacks))


def _extent(table: Table, cut: TableSplit, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    rows, columns = (0, table.num_embeddings), (0, table.embedding_dim)
    if cut.replicated:
        return rows, columns
    start = sum(cut.sizes[:rank])
    piece = (start, start + cut.sizes[rank])
    return (rows, piece) if cut.by_columns else (piece, columns)
