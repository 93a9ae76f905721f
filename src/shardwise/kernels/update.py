"""Updates and gradients of every row that was looked up; see Note [Sorted segments].

A plain gradient is what an SGD step with lr=-1 makes of zeros: sums are taken in float32, always in
the same order, and each row is written once, in the table's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from shardwise.kernels.launch import load_rows, num_pieces, store_rows
from shardwise.kernels.lookup import FULL_OCCUPANCY, Trace
from shardwise.kernels.tables import TableSet

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
#: Up to this many columns, full occupancy is worth fewer registers.
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
    trace: Trace, grad: torch.Tensor, num_rows: int, dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of one table that were looked up, each once and in order, and their gradients.

    The trace's keys are rows, or `num_rows` for none. How many differ is data-dependent: this
    waits for the device.
    """
    keys, order = torch.sort(trace.keys)
    numbers = torch.zeros(keys.shape, dtype=torch.int64, device=keys.device)
    num_found = 0
    if keys.shape[0]:
        torch.cumsum(torch.ne(keys[1:], keys[:-1]), 0, out=numbers[1:])
        last_number, last_key = torch.stack([numbers[-1], keys[-1].long()]).tolist()
        num_found = last_number + (last_key != num_rows)
    sums = torch.zeros(num_found, dim, dtype=dtype, device=grad.device)
    if not num_found:
        return numbers[:0], sums
    rows = torch.empty_like(numbers[: last_number + 1]).scatter_(0, numbers, keys.long())
    at_rate_one = (-1, 0, 0, 0, 0, 1, 1)
    update_sorted(TableSet([sums], [0]), trace, numbers, order, grad, "sgd", (), at_rate_one)
    return rows[:num_found], sums


# -- update rows ---------------------------------------------------------------------------------
# Kernels for the gradient of every touched row and the optimizer's step, in one pass.
#
# Note [Sorted segments]
# The keys of all ids are sorted; equal keys form a segment, whose ids touch one row. Each touched
# row is read and written once, and no table gradient is materialised. A program takes SPAN sorted
# ids, four at a time: it loads their bags' gradients and the rows that end a segment together, so
# that the loads overlap, then adds in order and updates at each segment's last id. Sums are always
# taken in the same order, so two runs agree in every bit.
#
# Note [Segments that cross programs]
# A program's tail is its partial sum of a segment that continues in the next program; its head is
# that of a segment that began earlier and ends here. A second launch finds, for each head, where
# its segment began, adds the tails in order and the head, and updates the row. So a row with a
# million ids is summed by many programs.


@triton.jit
def _locate(
    tables, num_tables, key, ONE_SHAPE: tl.constexpr, COLUMNS: tl.constexpr, SEARCH: tl.constexpr
):
    """The line of the table that a key belongs to, and the row within that table."""
    if ONE_SHAPE:
        # All tables are adjacent in one buffer: a key is a row of it.
        return tables, key.to(tl.int64)
    low = key.to(tl.int32) * 0
    high = low + num_tables
    for _ in range(SEARCH):
        middle = (low + high) // 2
        below = tl.load(tables + middle * COLUMNS + 1) <= key
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    line = tables + low * COLUMNS
    return line, key.to(tl.int64) - tl.load(line + 1)


@triton.jit
def _fetch(
    tables,
    num_tables,
    key,
    done,
    d,
    OPTIMIZER: tl.constexpr,
    DTYPES: tl.constexpr,
    ONE_SHAPE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEARCH: tl.constexpr,
):
    """Load what the step of a row needs: the row, and its optimizer state."""
    line, row = _locate(tables, num_tables, key, ONE_SHAPE, COLUMNS, SEARCH)
    dim = tl.load(line + 2)
    mask = d < tl.where(done, dim, 0)
    at = row * dim + d
    weight = load_rows(tl.load(line), at, mask, tl.load(line + 3), DTYPES)
    state, second = weight, weight
    if (OPTIMIZER == 1) | (OPTIMIZER == 3):
        state = tl.load(
            tl.load(line + 4).to(tl.pointer_type(tl.float32)) + at, mask=mask, other=0.0
        )
    if OPTIMIZER == 2:
        state = tl.load(
            tl.load(line + 4).to(tl.pointer_type(tl.float32)) + row, mask=done, other=0.0
        )
    if OPTIMIZER == 3:
        second = tl.load(
            tl.load(line + 5).to(tl.pointer_type(tl.float32)) + at, mask=mask, other=0.0
        )
    return line, row, weight, state, second


@triton.jit
def _step(fetched, grad, d, numbers, OPTIMIZER: tl.constexpr, DTYPES: tl.constexpr):
    """One optimizer step of one row, whose values and state were fetched."""
    line, row, weight, state, second = fetched
    lr, eps, decay, beta1, beta2, correction1, correction2 = numbers
    dim = tl.load(line + 2)
    mask = d < dim
    at = row * dim + d
    beside = tl.load(line + 4).to(tl.pointer_type(tl.float32))
    grad = tl.where(mask, grad + decay * weight, 0.0)
    if OPTIMIZER == 0:
        change = lr * grad
    if OPTIMIZER == 1:
        state += grad * grad
        tl.store(beside + at, state, mask=mask)
        change = lr * grad / (tl.sqrt(state) + eps)
    if OPTIMIZER == 2:
        state += tl.sum(grad * grad, 0) / dim.to(tl.float32)
        tl.store(beside + row, state)
        change = grad * (lr / (tl.sqrt(state) + eps))
    if OPTIMIZER == 3:
        state = beta1 * state + (1 - beta1) * grad
        second = beta2 * second + (1 - beta2) * grad * grad
        tl.store(beside + at, state, mask=mask)
        tl.store(tl.load(line + 5).to(tl.pointer_type(tl.float32)) + at, second, mask=mask)
        change = lr * (state / correction1) / (tl.sqrt(second / correction2) + eps)
    store_rows(tl.load(line), at, weight - change, mask, tl.load(line + 3), DTYPES)


@triton.jit
def _term(
    order, out_at, scale, argmax, grad, at, live, width, d, SCALED: tl.constexpr, MAX: tl.constexpr
):
    """What the sorted id number `at` adds to the gradient of its row."""
    which = at
    if order is not None:
        which = tl.load(order + at, mask=live, other=0)
    place = tl.load(out_at + which, mask=live, other=0).to(tl.int64) + d
    mask = d < tl.where(live, width, 0)
    if MAX:
        mask = mask & (tl.load(argmax + place, mask=mask, other=-1) == which)
    found = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
    if SCALED:
        found *= tl.load(scale + which, mask=live, other=0.0)
    return found


@triton.jit
def _read(
    tables, num_tables, order, out_at, scale, argmax, grad, at, key, after, began, num_keys, d,
    SCALED: tl.constexpr, MAX: tl.constexpr, OPTIMIZER: tl.constexpr, DTYPES: tl.constexpr,
    ONE_SHAPE: tl.constexpr, COLUMNS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """Sorted id number `at`: what it adds, whether it ends a segment, and the row if it does."""
    # Keys beyond the last belong to other shards' rows.
    live = (key >= 0) & (key < num_keys)
    line = tables
    if not ONE_SHAPE:
        line = _locate(tables, num_tables, key, ONE_SHAPE, COLUMNS, SEARCH)[0]
    term = _term(order, out_at, scale, argmax, grad, at, live, tl.load(line + 2), d, SCALED, MAX)
    ends = live & (key != after)
    row = _fetch(
        tables, num_tables, key, ends & began, d, OPTIMIZER, DTYPES, ONE_SHAPE, COLUMNS, SEARCH
    )
    return term, ends, row


@triton.jit
def _finish(
    total, ends, began, row, head, d, numbers, OPTIMIZER: tl.constexpr, DTYPES: tl.constexpr
):
    """At the end of a segment: update its row, or store the partial sum as the head."""
    if ends:
        if began:
            _step(row, total, d, numbers, OPTIMIZER, DTYPES)
        else:
            tl.store(head, total)


@triton.jit(do_not_specialize=["num_tables", "num_ids", "num_keys"])
def update_rows(
    tables,
    keys,
    order,
    out_at,
    scale,
    argmax,
    grad,
    heads,
    tails,
    record,
    num_tables,
    num_ids,
    num_keys,
    lr,
    eps,
    decay,
    beta1,
    beta2,
    correction1,
    correction2,
    SCALED: tl.constexpr,
    MAX: tl.constexpr,
    OPTIMIZER: tl.constexpr,
    DTYPES: tl.constexpr,
    ONE_SHAPE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEARCH: tl.constexpr,
    SPAN: tl.constexpr,
    DIM: tl.constexpr,
):
    """Sum up and update the rows of the segments within SPAN sorted ids, four ids at a time.

    Unrolled rather than a block of four, so that the branches of each id are scalar: an id that
    does not end a segment reads and writes no row.
    """
    if record is not None:  # an invalid batch changes no row
        num_keys = tl.where(tl.load(record) == 0, num_keys, 0)
    block = tl.program_id(0)
    low = block * SPAN
    d = tl.arange(0, DIM)
    total = tl.zeros([DIM], tl.float32)
    # Whether the segment that is being summed began in this program.
    began = low < 0
    before = tl.load(keys + low - 1, mask=low > 0, other=-2)
    key = tl.load(keys + low)
    for at in range(low, low + SPAN, 4):
        k0 = key
        k1 = tl.load(keys + at + 1, mask=at + 1 < num_ids, other=-1)
        k2 = tl.load(keys + at + 2, mask=at + 2 < num_ids, other=-1)
        k3 = tl.load(keys + at + 3, mask=at + 3 < num_ids, other=-1)
        key = tl.load(keys + at + 4, mask=at + 4 < num_ids, other=-1)
        began0 = began | (k0 != before)
        began1 = began0 | (k1 != k0)
        began2 = began1 | (k2 != k1)
        began3 = began2 | (k3 != k2)
        # All loads before any sum: what each id adds, and the rows that end a segment.
        g0, ends0, row0 = _read(
            tables, num_tables, order, out_at, scale, argmax, grad, at, k0, k1, began0, num_keys, d,
            SCALED, MAX, OPTIMIZER, DTYPES, ONE_SHAPE, COLUMNS, SEARCH,
        )  # fmt: skip
        g1, ends1, row1 = _read(
            tables, num_tables, order, out_at, scale, argmax, grad, at + 1, k1, k2, began1,
            num_keys, d, SCALED, MAX, OPTIMIZER, DTYPES, ONE_SHAPE, COLUMNS, SEARCH,
        )  # fmt: skip
        g2, ends2, row2 = _read(
            tables, num_tables, order, out_at, scale, argmax, grad, at + 2, k2, k3, began2,
            num_keys, d, SCALED, MAX, OPTIMIZER, DTYPES, ONE_SHAPE, COLUMNS, SEARCH,
        )  # fmt: skip
        g3, ends3, row3 = _read(
            tables, num_tables, order, out_at, scale, argmax, grad, at + 3, k3, key, began3,
            num_keys, d, SCALED, MAX, OPTIMIZER, DTYPES, ONE_SHAPE, COLUMNS, SEARCH,
        )  # fmt: skip
        numbers = (lr, eps, decay, beta1, beta2, correction1, correction2)
        head = heads + block.to(tl.int64) * DIM + d
        total = tl.where(k0 != before, g0, total + g0)
        _finish(total, ends0, began0, row0, head, d, numbers, OPTIMIZER, DTYPES)
        total = tl.where(k1 != k0, g1, total + g1)
        _finish(total, ends1, began1, row1, head, d, numbers, OPTIMIZER, DTYPES)
        total = tl.where(k2 != k1, g2, total + g2)
        _finish(total, ends2, began2, row2, head, d, numbers, OPTIMIZER, DTYPES)
        total = tl.where(k3 != k2, g3, total + g3)
        _finish(total, ends3, began3, row3, head, d, numbers, OPTIMIZER, DTYPES)
        before = k3
        began = began3
    # `key` is the first of the next program, `before` this one's last.
    if (key == before) & (key >= 0) & (key < num_keys):
        tl.store(tails + block.to(tl.int64) * DIM + d, total)


@triton.jit
def _sum_tails(tails, begin, end, d, ROWS: tl.constexpr, DIM: tl.constexpr):
    """The sum of the tails of blocks `begin` to `end`, in order."""
    many = tl.zeros([ROWS, DIM], tl.float32)
    for b in range(begin, end, ROWS):
        which = b + tl.arange(0, ROWS)
        at = which.to(tl.int64)[:, None] * DIM + d[None, :]
        many += tl.load(tails + at, mask=(which < end)[:, None], other=0.0)
    return tl.sum(many, 0)


@triton.jit(do_not_specialize=["num_tables", "num_ids", "num_keys"])
def update_split_rows(
    tables,
    keys,
    heads,
    tails,
    record,
    num_tables,
    num_ids,
    num_keys,
    lr,
    eps,
    decay,
    beta1,
    beta2,
    correction1,
    correction2,
    OPTIMIZER: tl.constexpr,
    DTYPES: tl.constexpr,
    ONE_SHAPE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEARCH: tl.constexpr,
    SPAN: tl.constexpr,
    FEW: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Update the row whose segment began in an earlier program and ends in this one."""
    if record is not None:
        num_keys = tl.where(tl.load(record) == 0, num_keys, 0)
    block = tl.program_id(0) + 1
    low = block * SPAN
    key = tl.load(keys + low)
    end = low + SPAN
    goes_on = tl.load(keys + end, mask=end < num_ids, other=-1) == key
    if (tl.load(keys + low - 1) == key) & (goes_on == 0) & (key >= 0) & (key < num_keys):
        # The first block that holds the key: mostly the one before, or look back in growing steps.
        begin, known, step = block - 1, block, 1
        while (tl.load(keys + tl.maximum(begin * SPAN - 1, 0)) == key) & (begin > 0):
            known = begin
            step *= 2
            begin = tl.maximum(begin - step, 0)
        while known - begin > 1:
            middle = (begin + known) // 2
            if tl.load(keys + middle * SPAN - 1) == key:
                known = middle
            else:
                begin = middle
        d = tl.arange(0, DIM)
        if block - begin <= FEW:
            total = _sum_tails(tails, begin, block, d, FEW, DIM)
        else:
            total = _sum_tails(tails, begin, block, d, ROWS, DIM)
        total += tl.load(heads + block.to(tl.int64) * DIM + d)
        row = _fetch(
            tables, num_tables, key, key >= 0, d, OPTIMIZER, DTYPES, ONE_SHAPE, COLUMNS, SEARCH
        )
        numbers = (lr, eps, decay, beta1, beta2, correction1, correction2)
        _step(row, total, d, numbers, OPTIMIZER, DTYPES)
