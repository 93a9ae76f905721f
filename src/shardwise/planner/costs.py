"""The cost of each way to shard a table, by the constants of a machine, which a file holds.

Note [Who pays]
All ranks request rows of all tables, so which ranks hold a shard does not change what others pay.
The holder receives ids, looks rows up, sends them, receives gradients and updates; every rank sends
ids, assembles rows and sends gradients. An exchange takes as long as the rank that sends or
receives most; those are holders, so the network time is theirs.

Where the rows of a table are split and a sample says which are frequent, parts differ. The problem
then has every holder pay for the ids of the busiest part, so that ranks stay interchangeable; a
plan is priced with each rank's own part, and the bound is that of even parts.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.errors import ArgumentError, LayoutError
from shardwise.lookup.messages import SHORT_BAGS
from shardwise.lookup.optimizers import SGD, Adagrad, Adam, FusedOptimizer, RowWiseAdagrad
from shardwise.planner.problem import ANY, Array, FlatOptions, Mask, Option
from shardwise.planner.workload import TableUse, Workload, is_number
from shardwise.plans import LARGEST, read_content, write_text

OPTIMIZERS: dict[str, type[FusedOptimizer]] = {
    "sgd": SGD,
    "adagrad": Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
    "adam": Adam,
}
ID_BYTES = 4
#: Narrower columns than these are not offered.
LEAST_COLUMNS = 4
#: Splits into fewer rows per rank are not offered: they send as much and save nothing.
LEAST_ROWS = 100
#: Rows of fewer bytes than these are updated by torch's kernels where wider ones have their own.
NARROW_BYTES = 64


@dataclass(frozen=True, slots=True)
class Setting:
    """What is the same for all tables: ranks, hosts, dtype, optimizer, machine."""

    num_ranks: int
    ranks_per_host: int
    constants: Constants
    optimizer: str = "rowwise_adagrad"
    number_bytes: int = 4
    pooled: bool = True
    #: The dtype in which rows and gradients are sent; None: that of the tables.
    exchange_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ArgumentError(
                f"The optimizer is one of {', '.join(OPTIMIZERS)}; found {self.optimizer!r}."
            )

    @property
    def within(self) -> float:
        """The fraction of what a rank sends that goes to other ranks of its host."""
        return (self.ranks_per_host - 1) / self.num_ranks

    @property
    def between(self) -> float:
        return (self.num_ranks - self.ranks_per_host) / self.num_ranks

    @property
    def sent_bytes(self) -> int:
        """Bytes of a number that is sent."""
        return self.number_bytes if self.exchange_dtype is None else self.exchange_dtype.itemsize

    @property
    def rounded_bytes(self) -> int:
        """Further bytes of each number in buffers, if numbers are rounded to be sent."""
        return 0 if self.exchange_dtype is None else self.sent_bytes

    @property
    def round_number_s(self) -> float:
        """Seconds to round a number to be sent, or to widen one that came."""
        rounds = self.exchange_dtype is not None
        return self.number_bytes * self.constants.round_byte_s if rounds else 0.0

    @property
    def owner_byte_s(self) -> float:
        c = self.constants
        return self.within * c.owner_byte_s + self.between * c.owner_byte_between_s

    @property
    def base_s(self) -> float:
        """Seconds of a step of any plan: kernel calls, and the latency of four exchanges."""
        c = self.constants
        latency = 0.0
        if self.num_ranks > 1:
            several = self.num_ranks > self.ranks_per_host
            latency = 4 * (c.latency_between_s if several else c.latency_s)
        return c.step_s + c.lookup.call_s + c.update.call_s + latency

    def state_bytes(self, rows: Array, width: Array) -> Array:
        """Bytes of optimizer state of so many rows."""
        states = OPTIMIZERS[self.optimizer].states.values()
        numbers = sum((rows if per_row else rows * width for per_row in states), 0.0 * rows)
        return np.asarray(numbers * self.number_bytes)


class Loads:
    """The loads of many tables at once: a row for each table, seconds and bytes in columns."""

    def __init__(
        self, setting: Setting, work: Workload, tables: Sequence[int] | None = None
    ) -> None:
        places = range(len(work.uses)) if tables is None else tables
        uses = [work.uses[place] for place in places]
        self.setting, self.uses = setting, uses
        self.rows = np.array([use.table.num_embeddings for use in uses], float)
        self.dim = np.array([use.table.embedding_dim for use in uses], float)
        #: Ids that outputs have rows or sums for.
        self.all_ids = np.array([use.ids for use in uses])
        different = np.array(work.different(setting.num_ranks))[list(places)]
        once = work.leaves_out_repeats(setting.num_ranks)
        #: Ids of the lookups; see Note [Repeated ids] in `lookup.messages`.
        self.ids = different if once else self.all_ids
        #: Ids of a rank's batch, each once, where rows come back instead of sums.
        self.different = different if setting.pooled else self.ids
        self.unique = np.array([use.unique for use in uses])
        self.bags = np.array([use.bags for use in uses])
        self.features = np.array([len(use.table.features) for use in uses], float)

    def only(self, place: int) -> Loads:
        found = copy.copy(self)
        found.uses = [self.uses[place]]
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                setattr(found, name, value[place : place + 1])
        return found

    def rows_are_fewer(self, holders: float) -> Mask:
        """Per table, whether it exchanges rows if it decides alone."""
        found = rows_pay(self.different, self.ids, self.bags * holders)
        return np.asarray(found & (self.setting.pooled and holders > 1))

    def busiest(self, holders: int) -> Array:
        """Per table, the fraction of ids of the busiest of so many parts of its rows."""
        even = 1.0 / holders
        return np.array([use.shares(holders).max() if use.below else even for use in self.uses])

    def held(
        self, share: Array | float, width: Array, by_id: Mask, busy: Array | None = None
    ) -> Array:
        """The load on a rank that holds `share` of the rows, `width` columns wide.

        It gets the fraction `busy` of the ids, `share` by default; with `by_id` it returns rows.
        """
        s, c = self.setting, self.setting.constants
        row_bytes = width * s.number_bytes
        busy = np.asarray(share) if busy is None else busy
        rows = np.ceil(self.rows * share - 1e-6)
        ids = np.where(by_id, self.different, self.ids) * busy
        unique = np.minimum(self.unique * busy, rows)
        rows_come = by_id | (not s.pooled)
        answers, lengths = np.where(rows_come, ids, self.bags), np.where(rows_come, 0.0, self.bags)
        touched = unique * row_bytes
        seconds = c.lookup.seconds(ids, answers, row_bytes, touched)
        seconds += c.update.seconds(ids, answers, row_bytes, touched)
        message = (ids + lengths) * ID_BYTES
        numbers = 2 * answers * width
        seconds += (message + numbers * s.sent_bytes) * s.owner_byte_s + numbers * s.round_number_s
        held = rows * row_bytes + s.state_bytes(rows, width)
        buffers = message + numbers * (s.number_bytes + s.rounded_bytes)
        return np.stack([seconds, held + buffers], 1)

    def requested(
        self, holders: Array | float, width: Array, by_id: Mask, by_rows: Mask | bool
    ) -> Array:
        """The load on every rank to request rows of a table with so many holders."""
        s, c = self.setting, self.setting.constants
        ids, bags = self.ids / s.num_ranks, self.bags / s.num_ranks
        sent = np.where(by_id, self.different / s.num_ranks, ids * np.where(by_rows, 1, holders))
        rows_come = by_id | (not s.pooled)
        lengths = np.where(rows_come, 0.0, bags * holders)
        numbers = np.where(rows_come, sent, bags * holders) * width
        message = (sent + lengths) * ID_BYTES
        number_s = s.number_bytes * c.asker_byte_s + s.round_number_s
        seconds = sent * c.send_id_s + 2 * numbers * number_s
        split = np.asarray(holders) > 1
        split_leg_s = c.leg_s if c.split_leg_s is None else c.split_leg_s
        leg_s = np.where(by_rows & split, split_leg_s, c.leg_s)
        seconds = seconds + self.features * holders * leg_s
        seconds = seconds + np.where(by_rows & split, ids * c.split_id_s, 0.0)
        seconds = seconds + np.where(by_id, ids * c.sum_id_s, 0.0)
        answers = bags if s.pooled else self.all_ids / s.num_ranks
        # The ids, the received rows, and the output with its gradient.
        held = message + (numbers + 2 * answers * self.dim) * s.number_bytes
        held = held + numbers * s.rounded_bytes
        squares = self.squares(holders) * np.where(by_rows | ~split, 0, s.number_bytes)
        seconds, held = seconds + squares * self._all_reduce_byte_s(), held + squares
        return np.stack([seconds, held], 1)

    def squares(self, holders: Array | float) -> Array:
        """How many sums of squares are all-reduced of a table that is split by columns."""
        if OPTIMIZERS[self.setting.optimizer] is not RowWiseAdagrad:
            return np.zeros_like(self.rows)
        # Those of every row if some rank holds nothing.
        return np.where(np.asarray(holders) < self.setting.num_ranks, self.rows, self.unique)

    def copied(self) -> Array:
        """The load on every rank of a replicated table."""
        s, c = self.setting, self.setting.constants
        row_bytes = self.dim * s.number_bytes
        ids, bags = self.ids / s.num_ranks, self.bags / s.num_ranks
        answers = bags if s.pooled else ids
        unique = np.minimum(self.unique, ids)
        seconds = c.lookup.seconds(ids, answers, row_bytes, unique * row_bytes)
        # Rows that any rank looked up are updated on each.
        seconds += c.update.seconds(self.unique, answers, row_bytes, self.unique * row_bytes)
        dense = self.rows * (self.dim + 1) * s.number_bytes
        seconds += self.features * c.leg_s
        seconds += dense * self._all_reduce_byte_s()
        held = self.rows * row_bytes + s.state_bytes(self.rows, self.dim)
        outputs = bags if s.pooled else self.all_ids / s.num_ranks
        held = held + 2 * dense + 2 * outputs * row_bytes + (ids + bags) * ID_BYTES
        return np.stack([seconds, held], 1)

    def _all_reduce_byte_s(self) -> float:
        s, c = self.setting, self.setting.constants
        if s.num_ranks == 1:
            return 0.0
        several = s.num_ranks > s.ranks_per_host
        per_byte = c.copy_byte_between_s if several else c.copy_byte_s
        return 2 * (s.num_ranks - 1) / s.num_ranks * per_byte


def rows_pay(different: Array, ids: Array, sums: Array) -> Mask:
    """Whether rows of different ids are sent, where so many sums would be.

    See Note [Rows instead of sums] in `lookup.messages`.
    """
    return np.asarray((different < sums) & (ids < SHORT_BAGS * sums))


@dataclass(frozen=True, slots=True)
class SplitKind:
    """A kind of sharding, and how many ranks hold a shard."""

    kind: str
    holders: int


def split_kinds(setting: Setting, use: TableUse) -> list[SplitKind]:
    """The kinds that a table may be sharded by."""
    num, table = setting.num_ranks, use.table
    found = [SplitKind("table_wise", 1)]
    if num > 1:
        found += [SplitKind("data_parallel", num)]
        if table.num_embeddings >= LEAST_ROWS * num:
            found.append(SplitKind("row_wise", num))
        counts = _counts(num, setting.ranks_per_host)
        found += [
            SplitKind("grid", k)
            for k in counts
            if k < num and table.num_embeddings >= LEAST_ROWS * k
        ]
        most = min(use.max_column_cuts or num, num, table.embedding_dim // LEAST_COLUMNS)
        if use.kinds is not None and "column_wise" in use.kinds:
            most = max(most, min(num, table.embedding_dim, use.max_column_cuts or num))
        found += [
            SplitKind("column_wise", k)
            for k in sorted({*counts, num})
            if 1 < k <= most and table.embedding_dim % k == 0
        ]
    if use.kinds is not None:
        found = [way for way in found if way.kind in use.kinds] or _forced(setting, use)
    return found


@cache
def _counts(num_ranks: int, ranks_per_host: int) -> list[int]:
    """Powers of two, the ranks of a host, and three times those where there are few ranks."""
    found = {ranks_per_host} if ranks_per_host < num_ranks else set()
    size = 2
    while size < num_ranks:
        found |= {size} if size > 8 and num_ranks > 256 else {size, 3 * size // 2}
        size *= 2
    return sorted(k for k in found if 1 < k < num_ranks)


def _forced(setting: Setting, use: TableUse) -> list[SplitKind]:
    """Options of the kinds that the user asks for, where none would be offered."""
    num, found = setting.num_ranks, []
    for kind in use.kinds or ():
        if kind == "column_wise":
            most = min(num, use.table.embedding_dim)
            found += [
                SplitKind(kind, k) for k in range(most, 0, -1) if use.table.embedding_dim % k == 0
            ][:1]
        elif kind == "grid":
            found.append(SplitKind(kind, max(1, num // 2)))
        else:
            found.append(SplitKind(kind, 1 if kind == "table_wise" else num))
    return found


@dataclass(frozen=True, slots=True, eq=False)
class TableOptions:
    """The options of each table, their loads in arrays, and the load common to all options."""

    options: list[list[Option]]
    flat: FlatOptions
    common: Array


def table_options(setting: Setting, work: Workload) -> TableOptions:
    """All options of all tables; computed kind by kind, as there may be many tables."""
    loads, uses = Loads(setting, work), work.uses
    per_table = [split_kinds(setting, use) for use in uses]
    counts = [len(each) for each in per_table]
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    owner = np.repeat(np.arange(len(uses)), counts)
    wanted: dict[SplitKind, list[int]] = {}
    for start, each in zip(first.tolist(), per_table, strict=False):
        for number, way in enumerate(each):
            wanted.setdefault(way, []).append(start + number)
    everywhere, shard = np.zeros((len(owner), 2)), np.zeros((len(owner), 2))
    holders, kept = np.zeros(len(owner)), [way for each in per_table for way in each]
    for way, places in wanted.items():
        on_all, on_holder = kind_loads(loads, way)
        everywhere[places] = on_all[owner[places]]
        if on_holder is not None:
            shard[places] = on_holder[owner[places]]
            holders[places] = way.holders
    # What every option of a table loads is common to all plans.
    least = np.minimum.reduceat(everywhere, first[:-1])
    everywhere -= least[owner]
    mean = everywhere + shard * (holders / setting.num_ranks)[:, None]
    flat = FlatOptions(first, owner, mean, everywhere + shard)
    loaded = (everywhere.max(1) > 0).tolist()
    made = [
        _option(
            way, everywhere[i] if loaded[i] or not holders[i] else None, shard[i], int(holders[i])
        )
        for i, way in enumerate(kept)
    ]
    edges = first.tolist()
    options = [made[a:b] for a, b in itertools.pairwise(edges)]
    return TableOptions(options, flat, least.sum(0))


def kind_loads(loads: Loads, way: SplitKind) -> tuple[Array, Array | None]:
    """Per table: the load on every rank, and on each holder (None if all ranks hold a shard)."""
    num = loads.setting.num_ranks
    if way.kind == "data_parallel":
        return loads.copied(), None
    by_rows = way.kind != "column_wise"
    share = 1.0 / way.holders if by_rows else 1.0
    width = loads.dim if by_rows else loads.dim / way.holders
    busy = loads.busiest(way.holders) if by_rows else None
    by_id = loads.rows_are_fewer(way.holders if by_rows else 1)
    shard = loads.held(share, width, by_id, busy)
    everywhere = loads.requested(way.holders, width, by_id, by_rows)
    if way.holders == num and num > 1:
        return everywhere + shard, None
    return everywhere, shard


def _option(way: SplitKind, everywhere: Array | None, shard: Array, holders: int) -> Option:
    shards = shard[None].repeat(holders, 0) if holders else None
    named = way.kind in ("table_wise", "row_wise", "data_parallel")
    label = way.kind if named else f"{way.kind} on {way.holders}"
    return Option(label, everywhere, shards, ANY, True, way)


# Note [Seconds per byte]
# The seconds per byte of a lookup depend on how many different bytes a step touches: what fits into
# a cache is read faster. So a kernel has seconds per byte at some sizes, interpolated over the
# logarithm of the size. It also has seconds per call, per shard of a table, per id and per bag.
#
# Note [Rows of an update]
# An update reads and writes each different row once, however often it was looked up. Narrow rows
# may use another kernel; see `lookup.backends.registry`.


FORMAT = "shardwise constants 1"
#: Files that come with the package, by name.
SHIPPED = ("cpu", "h200")


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel over all shards of a rank: a lookup, or an update."""

    #: Seconds per call, per shard of a table, per id, and per bag.
    call_s: float
    tile_s: float
    id_s: float
    bag_s: float
    #: Bytes that a step touches, ascending, and seconds per byte of the rows of its ids there.
    touched: tuple[float, ...]
    byte_s: tuple[float, ...]
    #: Seconds per byte of a bag's row: what is written, or read as a gradient.
    bag_byte_s: float = 0.0
    #: Seconds per different row, and per byte of those. See Note [Rows of an update].
    row_s: float = 0.0
    row_byte_s: float = 0.0
    #: Further seconds per different row of fewer than `NARROW_BYTES`.
    narrow_row_s: float = 0.0

    def seconds(self, ids: Any, bags: Any, row_bytes: Any, touched: Any) -> Array:
        """The seconds of shards that touch so many different bytes, without `call_s`."""
        sizes = np.log(np.maximum(np.asarray(touched, float), 1.0))
        per_byte = np.interp(sizes, np.log(np.asarray(self.touched)), np.asarray(self.byte_s))
        found = self.tile_s + ids * (self.id_s + row_bytes * per_byte)
        found = found + bags * (self.bag_s + row_bytes * self.bag_byte_s)
        rows = touched / np.maximum(row_bytes, 1.0)
        row_s = self.row_s + np.where(np.asarray(row_bytes) < NARROW_BYTES, self.narrow_row_s, 0.0)
        return np.asarray(found + rows * row_s + touched * self.row_byte_s, float)


@dataclass(frozen=True, slots=True)
class Constants:
    """The seconds that a machine takes for each part of a step."""

    name: str
    lookup: Kernel
    update: Kernel
    #: Seconds of one exchange of any size: within a host, and between hosts.
    latency_s: float
    latency_between_s: float
    #: Seconds per byte for the rank that holds a table, to ranks of its host and of others.
    owner_byte_s: float
    owner_byte_between_s: float
    #: Seconds per byte of rows assembled and gradients sent, for the requesting ranks.
    asker_byte_s: float
    #: Seconds of a feature per shard of its table, for the requesting ranks.
    leg_s: float
    #: Seconds per id that a rank sends, and per id of a table whose rows are split.
    send_id_s: float
    split_id_s: float
    #: Seconds per byte of gradients of replicated tables.
    copy_byte_s: float
    copy_byte_between_s: float
    #: Further seconds of a step.
    step_s: float = 0.0
    #: How many ranks of a host compute at the same time; None for all.
    at_once: float | None = None
    #: Seconds of each further width of a rank's tables; None: those of both kernel calls.
    width_s: float | None = None
    #: Seconds per id whose row comes back instead of a sum, and of each group of tables of one
    #: width whose rows are split over the same ranks; for the requesting ranks.
    sum_id_s: float = 0.0
    group_s: float = 0.0
    #: Seconds of a step in which any table is replicated.
    copies_s: float = 0.0
    #: As `leg_s`, where rows are split; None: the same. A group's legs are handled together.
    split_leg_s: float | None = None
    #: Where each figure comes from.
    sources: Mapping[str, str] = field(default_factory=dict)
    #: Seconds per byte of rows that are rounded to a narrower dtype, or widened.
    round_byte_s: float = 0.0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the constants to a JSON file, whole or not at all."""
        check_constants_path(path)
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"
        write_text(Path(path), text)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Constants:
        file = Path(path)
        content = read_content(file)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise LayoutError(f'{file} holds no constants: it does not say format = "{FORMAT}".')
        return _constants(file, {k: v for k, v in content.items() if k != "format"})

    @staticmethod
    def of(given: Constants | str | os.PathLike[str]) -> Constants:
        """Constants, the name of a file that ships with the package, or a path."""
        if isinstance(given, Constants):
            return given
        if isinstance(given, str) and given in SHIPPED:
            return Constants.load(Path(__file__).parent / f"constants_{given}.json")
        if not isinstance(given, str | os.PathLike):
            raise ArgumentError(
                f"constants are Constants, the path of a file, or one of {', '.join(SHIPPED)}; "
                f"found {given!r}."
            )
        if not Path(given).is_file():
            raise ArgumentError(
                f"There is no file of constants {os.fspath(given)!r}; those that ship are "
                f"{', '.join(SHIPPED)}, and `shardwise plan --calibrate FILE` measures others."
            )
        return Constants.load(given)


def check_constants_path(path: str | os.PathLike[str]) -> None:
    if Path(path).suffix != ".json":
        raise ArgumentError(f"Constants are written as .json, found {os.fspath(path)!r}.")


def _constants(file: Path, content: dict[str, Any]) -> Constants:
    others = sorted(set(content) - {each.name for each in fields(Constants)})
    missing = sorted(_required(Constants) - set(content))
    if others or missing:
        said = f"unknown: {', '.join(others)}" if others else f"missing: {', '.join(missing)}"
        raise LayoutError(f"{file}: {said}.")
    for name, value in content.items():
        if name in ("lookup", "update"):
            content[name] = _kernel(file, name, value)
        elif name not in ("name", "sources") and not (
            name in ("at_once", "width_s", "split_leg_s") and value is None
        ):
            _check(file, name, value)
    return Constants(**content)


def _kernel(file: Path, name: str, value: Any) -> Kernel:
    known = {each.name for each in fields(Kernel)}
    if not isinstance(value, dict) or set(value) - known or _required(Kernel) - set(value):
        raise LayoutError(f"{file}: {name} should have {', '.join(sorted(known))}.")
    for key, number in value.items():
        for each in number if isinstance(number, list) else [number]:
            _check(file, f"{name}.{key}", each)
    touched, byte_s = tuple(value["touched"]), tuple(value["byte_s"])
    if not touched or len(touched) != len(byte_s) or list(touched) != sorted(touched):
        raise LayoutError(
            f"{file}: {name} needs as many byte_s as touched, and touched ascending; found "
            f"{len(byte_s)} and {list(touched)}."
        )
    return Kernel(**{**value, "touched": touched, "byte_s": byte_s})


def _required(kind: type[Constants] | type[Kernel]) -> set[str]:
    return {e.name for e in fields(kind) if e.default is MISSING and e.default_factory is MISSING}


def _check(file: Path, name: str, value: Any) -> None:
    if not is_number(value) or not 0 <= value <= LARGEST:
        raise LayoutError(f"{file}: {name} is a number from 0 on, found {value!r}.")
