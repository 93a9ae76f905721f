"""What the kernels know of the tables: addresses and sizes, in device memory.

Tables may differ in rows, dim and dtype, and several features may look up one table; one launch
serves all. A *key* is a row counted through all tables, so that sorting keys groups the ids of all
features by the row that they touch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from shardwise.kernels.launch import Launches

#: The dtypes of tables, by their number in the kernels.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

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
)
#: Columns of `TableSet.tables`.
TABLE_COLUMNS = ("address", "first_key", "dim", "dtype", "state", "second_state")


class OutputRows(NamedTuple):
    """Where the output rows of each feature lie: the first one's place, and the step to the next.

    Both count elements of one buffer of `num_elements`.
    """

    starts: tuple[int, ...]
    strides: tuple[int, ...]
    num_elements: int


class TableSet:
    """Tables on one device, and the features that look them up.

    `first_rows[t]` is the row of the whole table that the first row of `tables[t]` is, for a table
    of which this is a row-wise shard: ids count in the whole table, and those of other shards are
    skipped.
    """

    def __init__(
        self,
        tables: Sequence[torch.Tensor],
        feature_tables: Sequence[int],
        first_rows: Sequence[int] | None = None,
    ) -> None:
        for number, table in enumerate(tables):
            if table.dtype not in DTYPES or table.dim() != 2 or not table.is_contiguous():
                raise ValueError(
                    f"table {number} is {table.dtype} of shape {tuple(table.shape)}; the kernels "
                    "take contiguous matrices of float32, bfloat16 or float16."
                )
        self.tables = list(tables)
        self.feature_tables = tuple(feature_tables)
        self.first_rows = tuple(first_rows) if first_rows is not None else (0,) * len(tables)
        self.masked = first_rows is not None
        counts = [table.shape[0] for table in tables]
        #: The key of each table's first row, and the number of keys.
        self.first_keys = tuple(sum(counts[:n]) for n in range(len(counts)))
        self.num_keys = sum(counts)
        self.max_dim = max((table.shape[1] for table in tables), default=0)
        #: Which dtypes occur, as bits: kernels for one dtype do not branch.
        self.dtypes = 0
        for table in tables:
            self.dtypes |= 1 << DTYPES.index(table.dtype)
        self._cached: dict[str, tuple[object, torch.Tensor]] = {}
        #: Set by the kernels and never taken back: an id was out of range; a bag was long.
        self.flags = torch.zeros(2, dtype=torch.int32, device=self.device)
        self._counters = self.flags[:0]
        self.launches = Launches()

    @property
    def device(self) -> torch.device:
        return self.tables[0].device

    def counters(self, num: int) -> torch.Tensor:
        """Zeros, which kernels count in and set back to zero."""
        if self._counters.numel() < num:
            self._counters = torch.zeros(num, dtype=torch.int32, device=self.device)
        return self._counters

    def features(self, out: OutputRows) -> torch.Tensor:
        """One row per feature, as FEATURE_COLUMNS says."""
        addresses = self._addresses()

        def rows() -> list[list[int]]:
            return [
                [
                    addresses[t],
                    self.tables[t].shape[0],
                    self.tables[t].shape[1],
                    DTYPES.index(self.tables[t].dtype),
                    self.first_keys[t],
                    self.first_rows[t],
                    start,
                    stride,
                    self.num_keys,
                ]
                for t, start, stride in zip(
                    self.feature_tables, out.starts, out.strides, strict=True
                )
            ]

        return self._remember("features", (addresses, out), rows)

    def table_rows(self, *states: Sequence[torch.Tensor]) -> torch.Tensor:
        """One row per table, as TABLE_COLUMNS says, and one after the last that ends the keys."""
        addresses = self._addresses()
        beside = tuple(tuple(tensor.data_ptr() for tensor in state) for state in states)

        def rows() -> list[list[int]]:
            found = [
                [
                    addresses[t],
                    self.first_keys[t],
                    table.shape[1],
                    DTYPES.index(table.dtype),
                    *(state[t] for state in beside),
                    *[0] * (2 - len(beside)),
                ]
                for t, table in enumerate(self.tables)
            ]
            return [*found, [0, self.num_keys, 0, 0, 0, 0]]

        return self._remember("tables", (addresses, beside), rows)

    def _addresses(self) -> tuple[int, ...]:
        """Read anew: who owns a table may have given it other memory."""
        return tuple([table.data_ptr() for table in self.tables])

    def _remember(
        self, name: str, key: object, rows: Callable[[], list[list[int]]]
    ) -> torch.Tensor:
        known = self._cached.get(name)
        if known is None or known[0] != key:
            made = torch.tensor(rows(), dtype=torch.int64).to(self.device)
            known = self._cached[name] = (key, made)
        return known[1]


def side_by_side(tables: TableSet, batch_size: int) -> OutputRows:
    """Outputs as the columns of one matrix, a row per example."""
    dims = [tables.tables[t].shape[1] for t in tables.feature_tables]
    starts = tuple(sum(dims[:n]) for n in range(len(dims)))
    return OutputRows(starts, (sum(dims),) * len(dims), batch_size * sum(dims))


def one_after_another(tables: TableSet, batch_sizes: Sequence[int]) -> OutputRows:
    """Outputs as one flat buffer, a block of rows per feature, for batches of different sizes."""
    dims = [tables.tables[t].shape[1] for t in tables.feature_tables]
    sizes = [size * dim for size, dim in zip(batch_sizes, dims, strict=True)]
    starts = tuple(sum(sizes[:n]) for n in range(len(sizes)))
    return OutputRows(starts, tuple(dims), sum(sizes))
