"""The plain gradient of tables, for ordinary optimizers: dense, or of the rows that have one.

A gradient is what a step of SGD at the rate -1 makes of zeros: sums are taken in float32, always in
the same order, and each row is written once, in the table's dtype.
"""

from __future__ import annotations

import torch

from shardwise.kernels.lookup import Trace
from shardwise.kernels.tables import TableSet
from shardwise.kernels.update import update, update_sorted


def add_gradients(tables: TableSet, trace: Trace, grad: torch.Tensor) -> None:
    """Add to each table the gradient of a table of its shape, whose keys are in the trace."""
    update(tables, trace, grad, "sgd", lr=-1)


def row_sums(
    trace: Trace, grad: torch.Tensor, dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of one table that were looked up, each once and in order, and their gradients.

    The trace's keys are rows. How many there are depends on the ids: this waits for the device.
    """
    keys, order = torch.sort(trace.keys)
    rows, numbers = torch.unique_consecutive(keys, return_inverse=True)
    sums = torch.zeros(rows.shape[0], dim, dtype=dtype, device=grad.device)
    if rows.shape[0]:
        at_rate_one = (-1, 0, 0, 0, 0, 1, 1)
        tables = TableSet([sums], [0])
        update_sorted(tables, trace, numbers, order, grad, "sgd", (), at_rate_one)
    return rows.long(), sums
