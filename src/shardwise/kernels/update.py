"""Updates and gradients of every row that was looked up; see Note [Sorted segments].

A plain gradient is what an SGD step with lr=-1 makes of zeros: sums are taken in float32, always in
the same order, and each row is written once, in the table's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.kernels.lookup import FULL_OCCUPANCY, Trace
from shardwise.kernels.memory import num_pieces
from shardwise.kernels.tables import TableSet
from shardwise.kernels.update_rows import update_rows, update_split_rows

SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM = 0, 1, 2, 3
OPTIMIZERS = {
    "sgd": SGD,
    "adagrad": ADAGRAD,
    "rowwise_adagrad": ROWWISE_ADAGRAD,
    "adam": ADAM,
}
#: Ids per program in large batches.
SPAN = 128
#: Ids from which on their traces are sorted first.
IN_ORDER = 2**20
#: Up to so many columns, full occupancy is worth fewer registers.
_NOT_WIDE = 128
#: About as many programs run at once on a device.
_PROGRAMS = 2**12


def update(
    tables: TableSet,
    trace: Trace,
    grad: torch.Tensor,
    optimizer: str,
    states: Sequence[Sequence[torch.Tensor]] = (),
    *,
    lr: float = 0.0,
    eps: float = 0.0,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.0, 0.0),
    step: int = 1,
    record: torch.Tensor | None = None,
) -> None:
    """One step of `optimizer` on every row that was looked up; none if `record` says invalid.

    `grad` is the gradient of the lookup's flat output. `states` holds for each of the optimizer's
    states one tensor per table, float32: of the table's shape, or one number per row for row-wise
    Adagrad.
    """
    if trace.keys.shape[0]:
        beta1, beta2 = betas
        numbers = (lr, eps, weight_decay, beta1, beta2, 1 - beta1**step, 1 - beta2**step)
        order: torch.Tensor | None
        keys, order = torch.sort(trace.keys)
        if keys.shape[0] >= IN_ORDER and trace.argmax is None:
            trace, order = _in_order(trace, order), None
        update_sorted(tables, trace, keys, order, grad, optimizer, states, numbers, record)


def _in_order(trace: Trace, order: torch.Tensor) -> Trace:
    """The trace in the order of keys, so that the update's loads do not wait for one another."""
    scale = None if trace.scale is None else trace.scale.index_select(0, order)
    return trace._replace(out_at=trace.out_at.index_select(0, order), scale=scale)


def update_sorted(
    tables: TableSet,
    trace: Trace,
    keys: torch.Tensor,
    order: torch.Tensor | None,
    grad: torch.Tensor,
    optimizer: str,
    states: Sequence[Sequence[torch.Tensor]],
    numbers: tuple[float, ...],
    record: torch.Tensor | None = None,
) -> None:
    """`update` with sorted keys: `keys[i]` is of id number `order[i]`, or i without `order`."""
    num_ids = keys.shape[0]
    dim, span = tables.padded_dim, _span(num_ids)
    num_blocks = num_pieces(num_ids, span)
    heads, tails = torch.empty(2, num_blocks, dim, device=tables.device)
    lines, in_one_buffer = tables.lines(states)
    numbers = (len(tables.tables), num_ids, tables.num_keys, *map(float, numbers))
    search = max(1, len(tables.tables).bit_length())
    known = (OPTIMIZERS[optimizer], tables.dtypes, in_one_buffer, lines.shape[1], search, span)
    tables.launches.run(
        update_rows,
        (num_blocks, 1),
        (lines, keys, order, trace.out_at, trace.scale, trace.argmax, grad, heads, tails, record),
        numbers,
        (trace.scale is not None, trace.argmax is not None, *known, dim),
        max_registers=FULL_OCCUPANCY if dim <= _NOT_WIDE else None,
    )
    if num_blocks > 1:
        tables.launches.run(
            update_split_rows,
            (num_blocks - 1, 1),
            (lines, keys, heads, tails, record),
            numbers,
            (*known, 2, max(2, min(64, 8192 // dim)), dim),
            num_warps=4,
        )


def _span(num_ids: int) -> int:
    """Ids per program: a power of two, smaller in small batches, so that no SM idles."""
    return min(SPAN, max(16, 1 << (num_ids // _PROGRAMS - 1).bit_length()))


def add_gradients(tables: TableSet, trace: Trace, grad: torch.Tensor) -> None:
    """Add the dense gradients to `tables`, which have the shapes of those looked up."""
    update(tables, trace, grad, "sgd", lr=-1)


def row_sums(
    trace: Trace, grad: torch.Tensor, dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of one table that were looked up, each once and in order, and their gradients.

    The trace's keys are rows. Their count is data-dependent: this waits for the device.
    """
    keys, order = torch.sort(trace.keys)
    rows, numbers = torch.unique_consecutive(keys, return_inverse=True)
    sums = torch.zeros(rows.shape[0], dim, dtype=dtype, device=grad.device)
    if rows.shape[0]:
        at_rate_one = (-1, 0, 0, 0, 0, 1, 1)
        tables = TableSet([sums], [0])
        update_sorted(tables, trace, numbers, order, grad, "sgd", (), at_rate_one)
    return rows.long(), sums
