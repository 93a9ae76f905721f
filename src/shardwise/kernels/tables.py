"""The tables as the kernels see them (addresses and sizes in device memory); checks of a batch.

Tables may differ in rows, dim and dtype, and several features may look up one table; one launch
serves all. A *key* is a row number over all tables, so sorting keys groups the ids of all features
by the row that they touch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.kernels import DTYPES
from shardwise.kernels.launch import (
    KernelScratch,
    assert_owned,
    current_stream,
    is_captured,
    launches_on,
    num_pieces,
    padded_dim,
)

#: Columns of `TableSet.features`.
FEATURE_COLUMNS = (
    "address",
    "rows",
    "dim",
    "dtype",
    "first_key",
    "first_row",
    "out_at",
    "stride",
    "num_keys",
    "mean",
)
#: Columns of `TableLines.rows`.
TABLE_COLUMNS = ("address", "first_key", "dim", "dtype", "state", "second_state")


class OutputRows(NamedTuple):
    """The output rows of each feature: the start of the first one, and the stride.

    Both count elements of one buffer of `num_elements`.
    """

    starts: tuple[int, ...]
    strides: tuple[int, ...]
    num_elements: int


class IdBags(NamedTuple):
    """Ids in bags, numbered over all features.

    Feature f has bags `first_bag[f]` to `first_bag[f + 1]`, at most `max_bags`, and bag b the ids
    `offsets[b]` to `offsets[b + 1]`; without offsets each id is one bag.
    """

    ids: torch.Tensor
    offsets: torch.Tensor | None
    first_bag: torch.Tensor
    max_bags: int
    #: Where the results of the bags go, and their gradients come from.
    rows: OutputRows


class TableLines(NamedTuple):
    """One row per table, with TABLE_COLUMNS, and a last one that ends the keys."""

    rows: torch.Tensor
    #: Whether tables, and each state, are adjacent in one buffer: a key is a row of it.
    in_one_buffer: bool


class Unread(NamedTuple):
    """In place of a table of which no kernel reads a row: that of a gradient."""

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    def dim(self) -> int:
        return len(self.shape)

    def is_contiguous(self) -> bool:
        return True

    def data_ptr(self) -> int:
        return 0


class TableSet:
    """Tables on one device, by their current addresses, and the features that look them up.

    For a row-wise shard `tables[t]`, `first_rows[t]` is the row of the whole table that it begins
    with: ids count in the whole table, and those of other shards are skipped.
    """

    def __init__(
        self,
        tables: Sequence[torch.Tensor | Unread],
        feature_tables: Sequence[int],
        first_rows: Sequence[int] | None = None,
        means: Sequence[bool] | None = None,
    ) -> None:
        for number, table in enumerate(tables):
            if table.dtype not in DTYPES or table.dim() != 2 or not table.is_contiguous():
                raise ValueError(
                    f"table {number} is {table.dtype} of shape {tuple(table.shape)}; the kernels "
                    "take contiguous matrices of float32, bfloat16 or float16."
                )
        self.tables: list[Any] = list(tables)
        self.feature_tables = tuple(feature_tables)
        self.first_rows = tuple(first_rows) if first_rows is not None else (0,) * len(tables)
        self.masked = first_rows is not None
        #: Which features a lookup of mode "mean" divides by the lengths of bags.
        self.means = tuple(means) if means is not None else (True,) * len(self.feature_tables)
        counts = [table.shape[0] for table in tables]
        #: The key of each table's first row, and the number of keys.
        self.first_keys = _starts(counts)
        self.num_keys = sum(counts)
        self.padded_dim = padded_dim(max(table.shape[1] for table in tables))
        #: Which dtypes occur, as bits: kernels for one dtype do not branch.
        self.dtypes = 0
        for table in tables:
            self.dtypes |= 1 << DTYPES.index(table.dtype)
        #: Read once: a table that moves in memory needs another set.
        self._addresses = tuple([table.data_ptr() for table in tables])
        self._features: tuple[OutputRows, torch.Tensor] | None = None
        self._lines: tuple[object, list[tuple[int, ...]], TableLines] | None = None
        #: Read by captured graphs: kept alive when the next batch has other sizes.
        self._in_graphs: list[torch.Tensor] = []
        self.device = tables[0].device
        self.scratch = KernelScratch(self.device)
        self.launches = launches_on(self.device)

    @cached_property
    def flags(self) -> torch.Tensor:
        """Set by the kernels and never reset: an id was out of range; a bag was long."""
        return torch.zeros(2, dtype=torch.int32, device=self.device)

    def features(self, out: OutputRows) -> torch.Tensor:
        """One row per feature, with FEATURE_COLUMNS."""
        if self._features is None or (self._features[0] is not out and self._features[0] != out):
            places = zip(self.feature_tables, out.starts, out.strides, self.means, strict=True)
            rows = [
                [
                    self._addresses[t],
                    self.tables[t].shape[0],
                    self.tables[t].shape[1],
                    DTYPES.index(self.tables[t].dtype),
                    self.first_keys[t],
                    self.first_rows[t],
                    start,
                    stride,
                    self.num_keys,
                    int(mean),
                ]
                for t, start, stride, mean in places
            ]
            self._features = (out, on_device(rows, self.device))
        if is_captured(self.device):
            self._in_graphs.append(self._features[1])
        return self._features[1]

    def lines(self, states: Sequence[Sequence[torch.Tensor]] = ()) -> TableLines:
        """The tables and the addresses of their states, which are contiguous float32.

        A tuple of states is kept, and its addresses are read once.
        """
        if self._lines is None or self._lines[0] is not states:
            beside = [tuple(map(torch.Tensor.data_ptr, state)) for state in states]
            known = None if self._lines is None or self._lines[1] != beside else self._lines[2]
            kept = states if isinstance(states, tuple) else None
            self._lines = (kept, beside, known or self._make_lines(states, beside))
        if is_captured(self.device):
            self._in_graphs.append(self._lines[2].rows)
        return self._lines[2]

    def _make_lines(
        self, states: Sequence[Sequence[torch.Tensor]], addresses: Sequence[Sequence[int]]
    ) -> TableLines:
        _check_states(states)
        rows = [
            [
                self._addresses[t],
                self.first_keys[t],
                table.shape[1],
                DTYPES.index(table.dtype),
                *(state[t] for state in addresses),
                *[0] * (2 - len(addresses)),
            ]
            for t, table in enumerate(self.tables)
        ]
        rows.append([0, self.num_keys, 0, 0, 0, 0])
        return TableLines(on_device(rows, self.device), _in_one_buffer(self.tables, states))


def on_device(rows: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Addresses and sizes in device memory. New tensors are often where older ones were."""
    known = tuple(map(tuple, rows))
    # What a graph's memory pool holds is the graph's; another stream would have to wait.
    make = _on_device.__wrapped__ if is_captured(device) else _on_device
    return make(known, device, current_stream(device))


@lru_cache(256)
def _on_device(
    rows: tuple[tuple[int, ...], ...], device: torch.device, stream: int
) -> torch.Tensor:
    # Without waiting: the values are staged before the call returns.
    return torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)


class KnownSets:
    """A cache of table sets, by their first table, as long as that lives."""

    def __init__(self) -> None:
        self._sets = WeakTensorKeyDictionary()

    def of(
        self, tables: Sequence[torch.Tensor], first_rows: tuple[int, ...] | None = None
    ) -> TableSet:
        """The set in which each table has one feature."""
        addresses = tuple([table.data_ptr() for table in tables])
        known: dict[Any, TableSet] | None = self._sets.get(tables[0])
        if known is None:
            known = self._sets[tables[0]] = {}
        found = known.get((addresses, first_rows))
        if found is None:
            # A table that moved does not come back to its old address.
            for key in [key for key in known if key[0][0] != addresses[0]]:
                del known[key]
            # Of detached aliases: the set must not keep its own key alive.
            aliases = [table.detach() for table in tables]
            found = known[addresses, first_rows] = TableSet(
                aliases, range(len(aliases)), first_rows
            )
        return found


@lru_cache(64)
def set_of_shape(table: Unread, first_row: int) -> TableSet:
    """The set of one shard of a table, for what does not depend on its values."""
    return TableSet([table], [0], (first_row,))


#: Read by captured graphs: kept alive.
_FIRSTS_IN_GRAPHS: list[torch.Tensor] = []


def first_bags(num_bags: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The first bag of each feature, and the number of bags."""
    firsts = _first_bags(num_bags, device)
    if is_captured(device):
        _FIRSTS_IN_GRAPHS.append(firsts)
    return firsts


@lru_cache(64)
def _first_bags(num_bags: tuple[int, ...], device: torch.device) -> torch.Tensor:
    # Most batches have the sizes of an earlier one.
    firsts = torch.tensor(list(accumulate(num_bags, initial=0)))
    return firsts.to(device, non_blocking=True)


def _check_states(states: Sequence[Sequence[torch.Tensor]]) -> None:
    for state in (tensor for each in states for tensor in each):
        if state.dtype != torch.float32 or not state.is_contiguous():
            raise ValueError(
                f"a state is {state.dtype} of shape {tuple(state.shape)}; the kernels take "
                "contiguous float32."
            )


def _in_one_buffer(
    tables: Sequence[torch.Tensor], states: Sequence[Sequence[torch.Tensor]]
) -> bool:
    first = tables[0]
    if any(t.dtype != first.dtype or t.shape[1] != first.shape[1] for t in tables):
        return False
    return all(_adjoin(each) for each in (tables, *states))


def _adjoin(tensors: Sequence[torch.Tensor]) -> bool:
    end = tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end:
            return False
        end += tensor.numel() * tensor.element_size()
    return True


def _starts(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(sizes, initial=0))[:-1]


def side_by_side(tables: TableSet, batch_size: int) -> OutputRows:
    """Outputs as the columns of one matrix, a row per example."""
    dims = [tables.tables[t].shape[1] for t in tables.feature_tables]
    return OutputRows(_starts(dims), (sum(dims),) * len(dims), batch_size * sum(dims))


def one_after_another(tables: TableSet, batch_sizes: Sequence[int]) -> OutputRows:
    """Outputs as one flat buffer, feature after feature, for batches of different sizes."""
    dims = [tables.tables[t].shape[1] for t in tables.feature_tables]
    sizes = [size * dim for size, dim in zip(batch_sizes, dims, strict=True)]
    return OutputRows(_starts(sizes), tuple(dims), sum(sizes))


# Note [Records]
# The check writes a small record, and nobody waits for it. Lookups of an invalid batch stay within
# its ids, and updates change no row. So the host may learn of it later: the lookup, the next launch
# after the check, writes one number to memory of the host, the ticket of the batch and whether it
# is invalid. So the host knows without asking the device, for which every question takes
# microseconds.
#
# A record begins with zeros: whether the batch is invalid; how far from the end of all bags the
# first wrong one is; the same of ids. Records come in blocks, which are cleared at once.


#: Numbers of a record.
WIDTH = 4
#: Records that are cleared at a time.
_BLOCK_OF_RECORDS = 256
#: Ids or bags that a program checks at a time, and the number of programs, about.
_BLOCK = 1024
_PROGRAMS = 4096


class Record(NamedTuple):
    """The memory that the kernels write and read, and the memory through which the host sees it."""

    numbers: torch.Tensor
    seen: torch.Tensor | None
    ticket: int

    def has_arrived(self) -> bool:
        return self.seen is not None and int(self.seen) >> 1 == self.ticket

    def is_invalid(self) -> bool:
        """Whether the batch is invalid, once the answer has arrived."""
        return self.seen is not None and int(self.seen) & 1 == 1


class Records:
    """A supply of cleared records."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._left: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._tickets = itertools.count(1)
        #: The results of replays of graphs; each replay clears only its own record.
        self.of_graphs = torch.zeros(WIDTH, dtype=torch.int64, device=device)
        self._fill()

    def _fill(self) -> None:
        num, pinned = _BLOCK_OF_RECORDS, self.device.type == "cuda"
        block = torch.zeros(num, WIDTH, dtype=torch.int64, device=self.device)
        seen = torch.zeros(num, WIDTH, dtype=torch.int64, pin_memory=pinned)
        self._left = list(zip(block.unbind(), seen[:, 0].unbind(), strict=True))

    def take(self) -> Record:
        if not self._left:
            self._fill()
        numbers, seen = self._left.pop()
        if is_captured(self.device):  # each replay clears it
            numbers = torch.zeros_like(numbers)
        return Record(numbers, seen, next(self._tickets))

    def add_to_graphs(self, record: Record) -> None:
        """Keep what a replay finds."""
        torch.maximum(self.of_graphs, record.numbers, out=self.of_graphs)


def assert_inside(ids: torch.Tensor, num_rows: int) -> None:
    """Contiguous ids that are not all rows of a table fail on the device."""
    num_ids = ids.numel()
    if num_ids:
        grid, numbers = (num_pieces(num_ids, _BLOCK), 1), (num_ids, num_rows)
        launches_on(ids.device).run(
            _assert_inside, grid, (ids,), numbers, (_BLOCK,), num_warps=4, debug=True
        )


@triton.jit(do_not_specialize=["num_ids", "num_rows"])
def _assert_inside(ids, num_ids, num_rows, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < num_ids
    row = tl.load(ids + at, mask=here, other=0)
    assert_owned((row >= 0) & (row < num_rows), here, None)


def check_bags(
    tables: TableSet,
    bags: IdBags,
    record: torch.Tensor,
    *,
    padded: bool,
) -> None:
    """Write to `record` whether bags and ids are valid.

    With `padded`, there may be ids after the last bag. See Note [Records].
    """
    ids, offsets, first_bag, _, rows = bags
    assert offsets is not None, "bags that are checked have offsets"
    num_features, num_bags, num_ids = first_bag.numel() - 1, offsets.numel() - 1, ids.numel()
    features = tables.features(rows)
    pieces = num_pieces(max(num_ids, num_bags), _BLOCK * num_features)
    tables.launches.run(
        _check_bags,
        (max(1, min(pieces, num_pieces(_PROGRAMS, num_features))), num_features),
        (features, first_bag, offsets, ids, record),
        (num_bags, num_ids),
        (padded, features.shape[1], _BLOCK),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_bags", "num_ids"])
def _check_bags(
    features,
    first_bag,
    offsets,
    ids,
    record,
    num_bags,
    num_ids,
    PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (i, f): every n-th block of the bags and of the ids of feature f."""
    number = tl.program_id(1)
    first = tl.load(first_bag + number).to(tl.int64)
    last = tl.load(first_bag + number + 1).to(tl.int64)
    here = tl.arange(0, BLOCK)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    for i in range(first + begin, last, step):
        bag = i + here
        inside = bag < last
        start = tl.load(offsets + bag, mask=inside, other=0).to(tl.int64)
        end = tl.load(offsets + bag + 1, mask=inside, other=0).to(tl.int64)
        wrong = inside & ((end < start) | (start < 0) | (end > num_ids))
        wrong = wrong | (inside & (bag == 0) & (start != 0))
        if not PADDED:
            wrong = wrong | (inside & (bag == num_bags - 1) & (end != num_ids))
        found = tl.max(tl.where(wrong, num_bags - bag, 0), 0)
        if found > 0:
            tl.atomic_max(record + 1, found)
            tl.store(record, 1)
    low = tl.minimum(tl.maximum(tl.load(offsets + first).to(tl.int64), 0), num_ids)
    high = tl.minimum(tl.maximum(tl.load(offsets + last).to(tl.int64), 0), num_ids)
    num_rows = tl.load(features + number * COLUMNS + 1)
    for i in range(low + begin, high, step):
        at = i + here
        inside = at < high
        row = tl.load(ids + at, mask=inside, other=0).to(tl.int64)
        wrong = inside & ((row < 0) | (row >= num_rows))
        found = tl.max(tl.where(wrong, num_ids - at, 0), 0)
        if found > 0:
            tl.atomic_max(record + 2, found)
            tl.store(record, 1)
