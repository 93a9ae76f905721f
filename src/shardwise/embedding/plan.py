"""Plans: how each table of a collection is sharded, and what that costs in bytes.

    format = "shardwise embedding plan 1"
    exchange_dtype = "bfloat16"         # optional: rows and gradients are rounded to be sent

    [tables]
    "user_*" = "row_wise"
    country = "data_parallel"
    movie = { kind = "grid", ranks = [0, 1] }

| kind | a table's shards |
|---|---|
| `row_wise` | rows, over all ranks |
| `column_wise` | columns, over all ranks or the `ranks` given |
| `table_wise` | whole on one `rank`; by default the one with the fewest bytes |
| `grid` | rows, over the `ranks` given |
| `data_parallel` | whole on every rank |

A key is a table's name or a pattern with `*` and `?`. A name takes precedence over patterns; among
patterns, the first that matches counts.
"""

from __future__ import annotations

import fnmatch
import heapq
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.core.sizes import lengths
from shardwise.errors import ArgumentError, LayoutError, some_of
from shardwise.lookup.routing import Route, rows_are_fewer
from shardwise.lookup.tiling import Table, TableSplit, TableTiling, make_tiling
from shardwise.plans import read_plan_with, write_plan_file

FORMAT = "shardwise embedding plan 1"

#: Per kind, the options that its entry may have.
KINDS: dict[str, tuple[str, ...]] = {
    "row_wise": (),
    "column_wise": ("ranks",),
    "table_wise": ("rank",),
    "grid": ("ranks",),
    "data_parallel": (),
}

#: Dtypes that rows and gradients can be rounded to, by their names in files.
EXCHANGE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

Entry = str | Mapping[str, Any]


@dataclass(frozen=True)
class Plan:
    """Entries by table name or pattern.

    >>> plan = Plan({"user": "row_wise", "*": "table_wise"})
    >>> tables = [Table("user", 10, 4), Table("item", 6, 4), Table("place", 4, 4)]
    >>> [(split.kind, split.sizes) for split in plan.cuts(tables, num_ranks=2)]
    [('row_wise', (5, 5)), ('table_wise', (6, 0)), ('table_wise', (0, 4))]
    """

    entries: Mapping[str, Entry] = field(default_factory=dict)
    #: The dtype in which rows and gradients are sent; None: that of the tables.
    exchange_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.exchange_dtype is not None:
            check_exchange_dtype(self.exchange_dtype, torch.float32)
        for name, entry in self.entries.items():
            _checked_entry(name, entry)

    @staticmethod
    def of(plan: Plan | str | Mapping[str, Entry] | os.PathLike[str]) -> Plan:
        """A plan, a dict of entries, one kind for every table, or the `Path` of a file."""
        if isinstance(plan, Plan):
            return plan
        if isinstance(plan, os.PathLike):
            try:
                return Plan.load(plan)
            except OSError as error:
                raise LayoutError(f"The plan {os.fspath(plan)} cannot be read: {error}.") from error
        if isinstance(plan, str):
            return Plan({"*": plan})
        if isinstance(plan, Mapping):
            return Plan(dict(plan))
        raise ArgumentError(
            f"A plan is a Plan, a dict, a kind or a Path; found {type(plan).__name__}."
        )

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan from a TOML or JSON file."""
        key = "exchange_dtype"
        entries, found = read_plan_with(path, [key], form=FORMAT, section="tables")
        name = found.get(key)
        if name is not None and (not isinstance(name, str) or name not in EXCHANGE_DTYPES):
            raise LayoutError(
                f"{os.fspath(path)}: {key} is one of {', '.join(EXCHANGE_DTYPES)}; found {name!r}."
            )
        return Plan(entries, None if name is None else EXCHANGE_DTYPES[name])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a TOML or JSON file, whole or not at all."""
        entries = {k: v if isinstance(v, str) else dict(v) for k, v in self.entries.items()}
        settings = {}
        if self.exchange_dtype is not None:
            settings["exchange_dtype"] = str(self.exchange_dtype).removeprefix("torch.")
        write_plan_file(path, entries, form=FORMAT, section="tables", settings=settings)

    def cuts(self, tables: Sequence[Table], num_ranks: int) -> list[TableSplit]:
        """How each table is split over `num_ranks` ranks; an error names what does not fit."""
        found = zip(tables, self.holders(tables, num_ranks), strict=True)
        return [_split_table(table, *holders, num_ranks) for table, holders in found]

    def holders(
        self, tables: Sequence[Table], num_ranks: int
    ) -> list[tuple[str, Sequence[int] | None]]:
        """The kind of each table and its ranks, ascending; None means all ranks.

        Like `cuts`, but without a size per rank.

        >>> Plan({"a": "row_wise", "b": {"kind": "grid", "ranks": [3, 1]}}).holders(
        ...     [Table("a", 10, 4), Table("b", 6, 4)], num_ranks=4
        ... )
        [('row_wise', None), ('grid', [1, 3])]
        """
        chosen = self._chosen(tables)
        found: dict[str, Sequence[int] | None] = {}
        unassigned: list[Table] = []
        #: Elements on each rank, without replicated tables.
        load = [0] * num_ranks
        for table in tables:
            kind, options = chosen[table.name]
            if options:
                ranks = [options["rank"]] if kind == "table_wise" else options["ranks"]
                found[table.name] = holders = _checked_ranks(table, kind, ranks, num_ranks)
                for rank, numbers in zip(holders, _numbers(table, kind, len(holders)), strict=True):
                    load[rank] += numbers
            elif kind == "table_wise":
                unassigned.append(table)
            else:
                found[table.name] = None
                if kind != "data_parallel":
                    for rank, numbers in enumerate(_numbers(table, kind, num_ranks)):
                        load[rank] += numbers
        # Largest first, to the lowest of the emptiest ranks: the same on every rank.
        heap = [(numbers, rank) for rank, numbers in enumerate(load)]
        heapq.heapify(heap)
        for table in sorted(unassigned, key=lambda t: -t.num_embeddings * t.embedding_dim):
            numbers, rank = heap[0]
            found[table.name] = [rank]
            size = table.num_embeddings * table.embedding_dim
            heapq.heapreplace(heap, (numbers + size, rank))
        return [(chosen[table.name][0], found[table.name]) for table in tables]

    def tiling(self, tables: Sequence[Table], num_ranks: int) -> TableTiling:
        """The shards of all tables on `num_ranks` ranks."""
        return make_tiling(tables, self.cuts(tables, num_ranks), num_ranks)

    def describe(
        self,
        tables: Sequence[Table],
        num_ranks: int,
        *,
        batch_size: int = 2048,
        ids_per_bag: float = 1,
        pooled: bool = True,
        dtype: torch.dtype = torch.float32,
        exchange_dtype: torch.dtype | None = None,
    ) -> str:
        """Bytes per rank, their balance, and what a step of such batches communicates.

        >>> tables = [Table("user", 1_000_000, 64), Table("day", 7, 16)]
        >>> plan = Plan({"user": "row_wise", "day": "data_parallel"})
        >>> print(plan.describe(tables, 2, batch_size=1000))
        2 tables on 2 ranks; 1000 bags of 1 ids per feature and rank
        rank  parts  MB of tables  of mean  MB sent per step: ids   rows  gradients  copies
           0      2         128.0     1.00                    0.0    0.1        0.1     0.0
           1      2         128.0     1.00                    0.0    0.1        0.1     0.0
        row_wise: user
        data_parallel: day
        exchanges per step: counts, ids, rows, gradients, an all-reduce of copied tables' gradients
        """
        return describe(
            self.tiling(tables, num_ranks),
            pooled=pooled,
            batch_size=batch_size,
            ids_per_bag=ids_per_bag,
            dtype=dtype,
            exchange_dtype=exchange_dtype or self.exchange_dtype,
        )

    def _chosen(self, tables: Sequence[Table]) -> dict[str, tuple[str, Mapping[str, Any]]]:
        names = [table.name for table in tables]
        used: set[str] = set()
        chosen: dict[str, tuple[str, Mapping[str, Any]]] = {}
        # Most plans name thousands of tables and few patterns.
        patterns = [key for key in self.entries if set(key) & set("*?[")]
        for name in names:
            keys = [name] if name in self.entries else []
            keys += [k for k in patterns if fnmatch.fnmatchcase(name, k)]
            used.update(keys)
            if keys:
                entry = self.entries[keys[0]]
                options = {} if isinstance(entry, str) else dict(entry)
                kind = entry if isinstance(entry, str) else options.pop("kind")
                chosen[name] = (kind, options)
        unknown = [key for key in self.entries if key not in used]
        left_out = [name for name in names if name not in chosen]
        if unknown or left_out:
            said = []
            if unknown:
                said.append(f"it has entries for no table: {some_of(unknown)}")
            if left_out:
                said.append(f"it leaves out: {some_of(left_out)}")
            raise LayoutError(f"The plan does not fit the tables: {'; '.join(said)}.")
        return chosen


def _checked_entry(name: str, entry: Any) -> None:
    options = {"kind": entry} if isinstance(entry, str) else entry
    if not isinstance(options, Mapping) or "kind" not in options:
        raise LayoutError(
            f'Plan entry {name!r}: {entry!r} is neither a kind nor a table like {{ kind = "grid", '
            "ranks = [0, 1] }."
        )
    kind = options["kind"]
    if not isinstance(kind, str) or kind not in KINDS:
        raise LayoutError(
            f"Plan entry {name!r}: {kind!r} is not a kind of sharding; use one of "
            f"{', '.join(KINDS)}."
        )
    others = sorted(set(options) - {"kind", *KINDS[kind]})
    if others:
        raise LayoutError(
            f"Plan entry {name!r}: {kind} takes {' and '.join(KINDS[kind]) or 'no options'}, found "
            f"{', '.join(others)}."
        )
    if kind == "grid" and "ranks" not in options:
        raise LayoutError(f"Plan entry {name!r}: grid needs ranks, those that share the rows.")


def _split_table(
    table: Table, kind: str, ranks: Sequence[int] | None, num_ranks: int
) -> TableSplit:
    if kind == "data_parallel":
        return TableSplit(kind, (table.num_embeddings,) * num_ranks)
    holders = range(num_ranks) if ranks is None else ranks
    size = table.embedding_dim if kind == "column_wise" else table.num_embeddings
    sizes = [0] * num_ranks
    for rank, length in zip(holders, lengths(size, len(holders), None), strict=True):
        sizes[rank] = length
    return TableSplit(kind, tuple(sizes))


def _numbers(table: Table, kind: str, num_parts: int) -> list[int]:
    """How many elements each shard of a table has."""
    size, other = table.num_embeddings, table.embedding_dim
    if kind == "column_wise":
        size, other = other, size
        if size < num_parts:
            raise LayoutError(
                f"Table {table.name!r}: its {size} columns cannot be split over {num_parts} ranks. "
                "Name fewer ranks, or use another kind."
            )
    return [length * other for length in lengths(size, num_parts, None)]


def _checked_ranks(table: Table, kind: str, given: Any, num_ranks: int) -> list[int]:
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise LayoutError(f"Table {table.name!r}: {kind} takes a list of ranks, found {given!r}.")
    wrong = [r for r in given if not isinstance(r, int) or not 0 <= r < num_ranks]
    if wrong or len(set(given)) != len(given):
        raise LayoutError(
            f"Table {table.name!r}: {kind} on ranks {list(given)}, but there are ranks 0 to "
            f"{num_ranks - 1}, each to be named once."
        )
    return sorted(given)


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """Bytes that one rank sends in a step."""

    ids: float
    rows: float
    gradients: float
    copies: float

    @property
    def total(self) -> float:
        return self.ids + self.rows + self.gradients + self.copies


def table_bytes(tiling: TableTiling, number_bytes: int = 4) -> list[int]:
    """The bytes of tables on each rank."""
    return [
        sum(stack.num_rows * stack.width for stack in stacks) * number_bytes
        for stacks in tiling.stacks
    ]


def traffic(
    route: Route,
    batch_size: int,
    ids_per_bag: float,
    number_bytes: int = 4,
    exchange_bytes: int | None = None,
) -> list[StepTraffic]:
    """The bytes that each rank sends in a step, with ids drawn evenly from all rows.

    A number of a row or gradient is sent in `exchange_bytes` (default: `number_bytes`).
    """
    exchange_bytes = exchange_bytes or number_bytes
    num = route.num_ranks
    ids = [0.0] * num
    rows = [0.0] * num
    gradients = [0.0] * num
    id_bytes = route.id_dtype.itemsize
    for block in route.all_blocks:
        shares = block.num_rows / route.features.num_rows[block.features]
        num_ids = batch_size * ids_per_bag * float(shares.sum())
        is_split = block.group >= 0
        by_id = not route.pooled or (
            is_split and rows_are_fewer(ids_per_bag, 1, len(route.groups[block.group].owners))
        )
        num_bags = 0 if by_id else batch_size * len(block.features)
        sent = (num_ids + num_bags) * id_bytes
        back = (num_ids if by_id else num_bags) * block.width * exchange_bytes
        for rank in range(num):
            if rank != block.rank:
                ids[rank] += sent
                rows[block.rank] += back
                gradients[rank] += back
    copied = sum(s.num_rows * (s.width + 1) for s in route.tiling.stacks[0] if s.replicated)
    reduced = 2 * (num - 1) / num * copied * number_bytes
    return [StepTraffic(*each, reduced) for each in zip(ids, rows, gradients, strict=True)]


def check_exchange_dtype(exchange_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
    """Raise unless rows of tables of `dtype` can be sent as `exchange_dtype`."""
    if exchange_dtype is None:
        return
    if exchange_dtype in EXCHANGE_DTYPES.values() and dtype.itemsize > 2:
        return
    raise ArgumentError(
        f"exchange_dtype is torch.bfloat16 or torch.float16, for tables of a wider dtype, or None; "
        f"found {exchange_dtype!r} for tables of {dtype}."
    )


def describe(
    tiling: TableTiling,
    *,
    pooled: bool,
    batch_size: int,
    ids_per_bag: float,
    dtype: torch.dtype,
    exchange_dtype: torch.dtype | None = None,
    sums_squares: bool = False,
) -> str:
    """A table with a line per rank, then one per sharding kind, then the exchanges of a step.

    With `sums_squares` the optimizer needs the squares of whole rows.
    """
    route = Route(tiling, pooled=pooled)
    held = table_bytes(tiling, dtype.itemsize)
    check_exchange_dtype(exchange_dtype, dtype)
    wire = exchange_dtype or dtype
    sent = traffic(route, batch_size, ids_per_bag, dtype.itemsize, wire.itemsize)
    mean = sum(held) / len(held)
    lines = [
        f"{len(tiling.tables)} tables on {tiling.num_ranks} ranks; {batch_size} bags of "
        f"{ids_per_bag:g} ids per feature and rank",
        "rank  parts  MB of tables  of mean  MB sent per step: ids   rows  gradients  copies",
    ]
    for rank, (num_bytes, one) in enumerate(zip(held, sent, strict=True)):
        parts = sum(len(stack.shards) for stack in tiling.stacks[rank])
        share = num_bytes / mean if mean else 1
        lines.append(
            f"{rank:4}  {parts:5}  {num_bytes / 1e6:12.1f}  {share:7.2f}  "
            f"{one.ids / 1e6:21.1f}  {one.rows / 1e6:5.1f}  {one.gradients / 1e6:9.1f}  "
            f"{one.copies / 1e6:6.1f}"
        )
    lines += _kind_lines(tiling)
    lines.append(f"exchanges per step: {', '.join(_exchanges(route, sums_squares)) or 'none'}")
    if exchange_dtype is not None and route.travels:
        name = str(exchange_dtype).removeprefix("torch.")
        lines.append(f"rows and gradients are sent as {name}")
    return "\n".join(lines)


def _kind_lines(tiling: TableTiling) -> Sequence[str]:
    kinds: dict[str, list[str]] = {}
    for table, split in zip(tiling.tables, tiling.splits, strict=True):
        kinds.setdefault(split.kind, []).append(table.name)
    return [f"{kind}: {', '.join(names)}" for kind, names in kinds.items()]


def _exchanges(route: Route, sums_squares: bool) -> list[str]:
    if route.num_ranks == 1:
        return []
    found = ["counts"]
    if route.travels:
        found += ["ids", "rows", "gradients"]
    if any(stack.replicated for stack in route.tiling.stacks[0]):
        found.append("an all-reduce of copied tables' gradients")
    if sums_squares and any(
        route.tiling.splits_columns(t) for t in range(len(route.tiling.tables))
    ):
        found.append("an all-reduce of squares of rows that are split by columns")
    return found
