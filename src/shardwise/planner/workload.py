"""Workload: tables, and how a step uses each.

    format = "shardwise tables 1"
    batch = 65536                       # bags of each feature in a step, over all ranks

    [tables.user]
    rows = 1_000_000
    dim = 64
    ids_per_bag = 3.5
    repeated = 0.4                      # the share of a step's ids that occurred in it before
    features = ["seen", "bought"]       # optional, as pooling = "sum"
    kinds = ["table_wise", "row_wise"]  # optional: the only kinds that may be chosen
    max_column_cuts = 4                 # optional

Missing figures have defaults; the report says which were used.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.embedding.jagged import Jagged
from shardwise.embedding.plan import KINDS
from shardwise.errors import ArgumentError, LayoutError
from shardwise.lookup.bags import MOST_DIFFERENT
from shardwise.lookup.tiling import Table, checked_tables
from shardwise.plans import LARGEST, read_content

FORMAT = "shardwise tables 1"
#: Of Meta's public set of 2021: 887,017,990 ids in 65,536 bags of 856 tables, 6.9 uses of each.
DEFAULTS = {"ids_per_bag": 15.8, "repeated": 0.855, "batch": 65536}
#: Parts of the rows of which a sample's ids are counted.
_PARTS = 64
_KEYS = {
    "rows", "dim", "ids_per_bag", "repeated", "batch", "features", "pooling", "kinds",
    "max_column_cuts",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TableUse:
    """One table, and how a step of all ranks together uses it."""

    table: Table
    #: Mean over the bags of all features of the table.
    ids_per_bag: float
    #: The share of a step's ids that occurred in it before.
    repeated: float
    #: Bags of all features of the table in a step, over all ranks.
    bags: float
    #: The kinds that may be chosen; None for all.
    kinds: tuple[str, ...] | None = None
    max_column_cuts: int | None = None
    #: Figures that are defaults.
    assumed: tuple[str, ...] = ()
    #: The fraction of ids below each of equally spaced rows, the last being 1; () if ids are
    #: spread evenly over the rows.
    below: tuple[float, ...] = ()
    #: The number of parts that a sample's batches were split into, and the share of ids that do not
    #: repeat an earlier one of their part; see `different`.
    sampled: tuple[int, float] | None = None

    def __post_init__(self) -> None:
        name = self.table.name
        for what, number, least in (
            ("ids_per_bag", self.ids_per_bag, 0.0),
            ("repeated", self.repeated, 0.0),
            ("batch", self.bags, 1.0),
        ):
            if not is_number(number) or not least <= number <= LARGEST:
                raise ArgumentError(
                    f"Table {name!r}: {what} is a number from {least:g} on, found {number!r}."
                )
        if self.repeated >= 1:
            raise ArgumentError(
                f"Table {name!r}: repeated is the share of ids that occurred before, below 1; "
                f"found {self.repeated!r}."
            )
        unknown = [k for k in self.kinds or () if not isinstance(k, str) or k not in KINDS]
        if unknown or self.kinds == ():
            raise ArgumentError(
                f"Table {name!r}: kinds are some of {', '.join(KINDS)}; found "
                f"{', '.join(map(repr, unknown)) or 'none'}."
            )
        cuts = self.max_column_cuts
        if cuts is not None and (not isinstance(cuts, int) or isinstance(cuts, bool) or cuts < 1):
            raise ArgumentError(f"Table {name!r}: max_column_cuts is an int from 1 on: {cuts!r}.")
        if cuts is not None and cuts > self.table.embedding_dim:
            raise LayoutError(
                f"Table {name!r}: its {self.table.embedding_dim} columns cannot be cut into "
                f"{cuts}. Ask for max_column_cuts of {self.table.embedding_dim} at most."
            )

    @property
    def ids(self) -> float:
        """Ids of a step, over all ranks."""
        return self.bags * self.ids_per_bag

    def shares(self, parts: int) -> npt.NDArray[np.float64]:
        """The fraction of ids that each of so many equal parts of the rows gets.

        >>> use = TableUse(Table("a", 100, 4), 1.0, 0.0, 8, below=(0.5, 0.75, 1.0, 1.0))
        >>> use.shares(2).tolist(), use.shares(4).tolist()
        ([0.75, 0.25], [0.5, 0.25, 0.25, 0.0])
        """
        rows = self.table.num_embeddings
        edges = np.minimum(np.arange(parts + 1) * -(-rows // parts), rows) / rows
        known = np.linspace(0.0, 1.0, len(self.below) + 1)
        return np.diff(np.interp(edges, known, (0.0, *self.below)) if self.below else edges)

    @property
    def unique(self) -> float:
        """Different ids of a step."""
        return min(float(self.table.num_embeddings), self.ids * (1 - self.repeated))

    def different(self, parts: int) -> float:
        """Different ids of each part of a step, summed over so many parts.

        Without a sample: as if ids were drawn at random from as many rows as make this share of
        repeats.

        >>> use = TableUse(Table("a", 100, 4), 1.0, 0.5, 8)
        >>> use.different(1), round(use.different(2), 2), round(use.different(1000), 2)
        (4.0, 5.51, 7.99)
        """
        if self.sampled is not None and self.sampled[0] == parts:
            return self.ids * self.sampled[1]
        if parts == 1 or not self.unique:
            return self.unique
        times = _draws_per_row(self.ids / self.unique)
        return self.ids * -math.expm1(-times / parts) * parts / times if times else self.ids


@cache
def _draws_per_row(uses: float) -> float:
    """The mean number of draws per row, if rows with any draw have `uses` on average.

    That is the x with x / (1 - exp(-x)) = uses, by Newton's method.
    """
    if uses <= 1 + 1e-9:
        return 0.0
    x = uses if uses > 1.5 else 2 * (uses - 1)
    for _ in range(8):
        hit = -math.expm1(-x)
        x -= (x / hit - uses) * hit * hit / (hit - x * math.exp(-x))
    return x


@dataclass(frozen=True, slots=True)
class Workload:
    """All tables of a plan."""

    uses: tuple[TableUse, ...]
    #: Whether bags are pooled; otherwise each id gets a row.
    pooled: bool = True

    def different(self, num_ranks: int) -> list[float]:
        """Per table, ids of a step without those that repeat where the engine looks for repeats.

        That is in the ids of a rank, of one feature if lookups are not pooled.
        """
        return [use.different(self.num_parts(use.table, num_ranks)) for use in self.uses]

    def num_parts(self, table: Table, num_ranks: int) -> int:
        return num_ranks if self.pooled else num_ranks * len(table.features)

    def leaves_out_repeats(self, num_ranks: int) -> bool:
        """Whether unpooled lookups send each id of a feature once; see `without_repeats`."""
        most = MOST_DIFFERENT * sum(use.ids for use in self.uses)
        return not self.pooled and num_ranks > 1 and sum(self.different(num_ranks)) <= most

    @property
    def tables(self) -> tuple[Table, ...]:
        return tuple(use.table for use in self.uses)

    def assumed(self) -> dict[str, int]:
        """For each figure that was not given, for how many tables."""
        found: dict[str, int] = {}
        for use in self.uses:
            for name in use.assumed:
                found[name] = found.get(name, 0) + 1
        return found


def workload(
    tables: Sequence[Table],
    *,
    batch: int | float | Mapping[str, float] | None = None,
    ids_per_bag: float | Mapping[str, float] | None = None,
    repeated: float | Mapping[str, float] | None = None,
    pooled: bool = True,
) -> Workload:
    """A workload from figures for all tables, or by name of table.

    >>> found = workload([Table("user", 1000, 16)], batch=64, ids_per_bag={"user": 2.0})
    >>> found.uses[0].ids, found.assumed()
    (128.0, {'repeated': 1})
    """
    checked = checked_tables(tables)
    known = {table.name for table in checked}
    given = {"batch": batch, "ids_per_bag": ids_per_bag, "repeated": repeated}
    for what, figures in given.items():
        if isinstance(figures, Mapping):
            _no_others(what, figures, known)

    def use(table: Table) -> TableUse:
        own = {k: v.get(table.name) if isinstance(v, Mapping) else v for k, v in given.items()}
        return _use(table, own)

    return Workload(tuple(map(use, checked)), pooled)


def _use(
    table: Table,
    given: Mapping[str, Any],
    kinds: tuple[str, ...] | None = None,
    max_column_cuts: int | None = None,
) -> TableUse:
    """The use of a table by the `given` figures; those that are None are assumed."""
    found = {k: DEFAULTS[k] if value is None else value for k, value in given.items()}
    batch = found["batch"]
    return TableUse(
        table,
        found["ids_per_bag"],
        found["repeated"],
        batch * len(table.features) if is_number(batch) else batch,
        kinds,
        max_column_cuts,
        tuple(k for k, value in given.items() if value is None),
    )


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _no_others(what: str, given: Mapping[str, Any], known: set[str]) -> None:
    others = sorted(set(given) - known)
    if others:
        raise LayoutError(
            f"{what} names no table of these: {', '.join(others[:5])}. There are "
            f"{', '.join(sorted(known)[:8])}."
        )


def read_tables(path: str | os.PathLike[str], *, batch: int | None = None) -> Workload:
    """A workload from a TOML or JSON file; `batch` overrides the file's."""
    file = Path(path)
    content = read_content(file)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise LayoutError(f'{file} holds no tables: it does not say format = "{FORMAT}".')
    sections = content.get("tables")
    others = sorted(set(content) - {"format", "batch", "tables", "pooled"})
    if not isinstance(sections, dict) or not sections or others:
        raise LayoutError(
            f"{file} should hold format, batch, pooled and tables, a section for each table; found "
            f"{', '.join(others) or 'no table'}."
        )
    pooled = content.get("pooled", True)
    if not isinstance(pooled, bool):
        raise LayoutError(f"{file}: pooled is true or false, found {pooled!r}.")
    whole = content.get("batch") if batch is None else batch
    uses = [_read_use(file, name, entry, whole, batch) for name, entry in sections.items()]
    checked_tables([use.table for use in uses])
    return Workload(tuple(uses), pooled)


def _read_use(file: Path, name: str, entry: Any, whole: Any, forced: int | None) -> TableUse:
    if not isinstance(entry, dict):
        raise LayoutError(f"{file}: table {name!r} should have rows and dim; found {entry!r}.")
    others, missing = sorted(set(entry) - _KEYS), sorted({"rows", "dim"} - set(entry))
    if others or missing:
        said = f"unknown: {', '.join(others)}" if others else f"missing: {', '.join(missing)}"
        raise LayoutError(f"{file}: table {name!r}: {said}. It takes {', '.join(sorted(_KEYS))}.")
    features = entry.get("features", ())
    if not isinstance(features, list | tuple) or not all(isinstance(f, str) for f in features):
        raise LayoutError(f"{file}: table {name!r}: features is a list of names.")
    kinds = entry.get("kinds")
    if kinds is not None and not isinstance(kinds, list):
        raise LayoutError(f"{file}: table {name!r}: kinds is a list of kinds, found {kinds!r}.")
    table = Table(name, entry["rows"], entry["dim"], tuple(features), entry.get("pooling", "sum"))
    own = entry.get("batch") if forced is None else None
    given = {
        "ids_per_bag": entry.get("ids_per_bag"),
        "repeated": entry.get("repeated"),
        "batch": whole if own is None else own,
    }
    kinds = None if kinds is None else tuple(kinds)
    return _use(table, given, kinds, entry.get("max_column_cuts"))


def with_sample(
    work: Workload, batches: Iterable[Any], *, batch: int | None = None, num_ranks: int = 1
) -> Workload:
    """Figures measured from a sample of batches: ids per bag, repeated ids, bags per step, and
    how ids are spread over the rows.

    A batch is in the form that the collection takes: a `Jagged`, or what becomes one. Each counts
    as the batch of all ranks for one step, split evenly; with `batch`, its number of bags is
    ignored.
    """
    seen = [_Seen(use.table) for use in work.uses]
    num_batches = 0
    for each in batches:
        jagged = Jagged.of(each)
        num_batches += 1
        for one in seen:
            one.count(jagged, num_ranks, work.pooled)
    if not num_batches:
        raise ArgumentError("The sample holds no batch.")
    uses = []
    for use, one in zip(work.uses, seen, strict=True):
        if not one.bags:
            uses.append(use)
            continue
        per_step = one.bags / num_batches if batch is None else use.bags
        num = max(one.ids, 1)
        uses.append(
            replace(
                use,
                ids_per_bag=one.ids / one.bags,
                repeated=min(1 - one.different / num, 1 - 1e-9) if one.ids else 0.0,
                bags=float(max(1.0, per_step)),
                assumed=tuple(n for n in use.assumed if n == "batch" and batch is not None),
                below=tuple((np.cumsum(one.where) / num).tolist()) if one.ids else (),
                sampled=(work.num_parts(use.table, num_ranks), one.different_in_parts / num),
            )
        )
    return replace(work, uses=tuple(uses))


class _Seen:
    """What a sample says about one table."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.bags = self.ids = self.different = self.different_in_parts = 0
        self.where = np.zeros(_PARTS, np.int64)

    def count(self, jagged: Jagged, num_ranks: int, pooled: bool) -> None:
        table, found = self.table, []
        for feature in table.features:
            if feature not in jagged.features:
                raise LayoutError(
                    f"The sample has no feature {feature!r} of table {table.name!r}; it has "
                    f"{', '.join(jagged.features[:8])}."
                )
            values, lengths = (part.cpu().numpy() for part in jagged.of_feature(feature))
            self.bags += len(lengths)
            bags = np.arange(num_ranks + 1) * -(-len(lengths) // num_ranks)
            ends = np.concatenate([[0], np.cumsum(lengths)])
            edges = ends[np.minimum(bags, len(lengths))]
            found.append(np.split(values, edges[1:-1]))
        whole = np.concatenate([part for each in found for part in each] or [np.zeros(0, int)])
        wrong = whole[(whole < 0) | (whole >= table.num_embeddings)]
        if len(wrong):
            raise LayoutError(
                f"The sample has id {int(wrong[0])} for table {table.name!r}, which has rows 0 to "
                f"{table.num_embeddings - 1}."
            )
        # Pooled lookups look for repeats among all features of a table.
        parts = (
            [np.concatenate(each) for each in zip(*found, strict=True)]
            if pooled
            else [part for each in found for part in each]
        )
        self.ids += len(whole)
        self.different += _num_different(whole)
        self.different_in_parts += sum(map(_num_different, parts))
        self.where += np.bincount(whole * _PARTS // table.num_embeddings, minlength=_PARTS)


def _num_different(ids: Any) -> int:
    """How many ids differ; sorting is ten times faster than `np.unique`, which hashes."""
    return int(np.count_nonzero(np.diff(np.sort(ids)))) + bool(len(ids))
