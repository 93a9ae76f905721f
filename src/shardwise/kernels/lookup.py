"""Lookup kernels: bags of rows, pooled, for all features in one launch.

Note [One bag, one warp]
A program of one warp serves one bag: it reads ROWS rows at a time, so that that many row reads are
in flight, and adds them in float32. Memory latency is hidden by many warps, not by wide programs.

Note [Long bags]
A bag longer than LONG would keep its warp busy long after all others are done. Such bags are left
to programs of their own: all ids are cut at multiples of LONG into chunks, and a program pools what
its chunk holds of long bags. At most one long bag starts in a chunk and at most one ends there, so
two partial results per chunk are enough, and the host need not know which bags are long. Of the
programs that hold a part of a bag, the one that is done last adds the parts in order, so the result
is the same from run to run; a counter per chunk in which a long bag starts tells it that it is the
last, and it sets the counter back.

In small batches all programs are of one launch, which also asserts that ids are in range: launching
is what costs there. In large ones, programs for bags alone need fewer registers and no search; the
chunks follow in a launch of their own, which asserts that no id was out of range, and leaves unless
a flag says that a bag was long.

Note [What backward needs]
In training, the lookup writes down for every id its key (see tables), where its bag's output row
lies, and by how much it was scaled. Backward sorts the keys and needs nothing else of the input.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from shardwise.kernels.memory import last_at_most, load_rows, num_pieces, rows_in_flight
from shardwise.kernels.tables import IdBags, OutputRows, TableSet

SUM, MEAN, MAX = 0, 1, 2
MODES = {"sum": SUM, "mean": MEAN, "max": MAX}
#: Up to as many ids, one launch does it all.
SMALL = 2**20
#: Bags of more ids are split: in small batches, and in large ones. A warp takes about as long for
#: a chunk of them as for the parts of a bag that has the square of as many.
LONG_IN_SMALL = 256
LONG = 512
_BAGS, _CHUNKS, _BOTH = 1, 2, 3
#: As many programs serve the chunks of a large batch.
_CHUNK_PROGRAMS = 4096


class Trace(NamedTuple):
    """What a lookup leaves for its backward; see Note [What backward needs]."""

    keys: torch.Tensor
    out_at: torch.Tensor
    scale: torch.Tensor | None
    #: For max: the position among the ids that each output element came from, or -1.
    argmax: torch.Tensor | None


@triton.jit
def _assert_owned(owned, here, flags):
    """A wrong id reads nothing, and fails on the device or is written down."""
    tl.device_assert(owned | (here == 0), "an embedding id is out of the range of its table")
    if flags is not None:
        wrong = (here & (owned == 0)).to(tl.int32)
        tl.store(flags + wrong * 0, wrong, mask=wrong > 0)


@triton.jit
def _larger(value, position, other_value, other_position):
    """The larger value and where it stands; of equal ones the first."""
    other = (other_value > value) | ((other_value == value) & (other_position < position))
    return tl.where(other, other_value, value), tl.where(other, other_position, position)


@triton.jit
def _better(best, best_at, found, found_at):
    """The larger of two maxima, of which the first may be of nothing yet."""
    # A row of -inf is more than nothing. Positions of nothing are -1 here, and the largest there.
    better = (found > best) | ((best_at < 0) & (found_at >= 0) & (found_at < 2147483647))
    return tl.where(better, found, best), tl.where(better, found_at, best_at)


@triton.jit
def _pool(
    feature,  # this feature's line of TableSet.features
    out_row,  # where its output row lies, written down for backward
    start,
    end,
    bag_scale,
    ids,
    weights,
    keys,
    out_at,
    scale,
    flags,
    MODE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TRACE: tl.constexpr,
    MASKED: tl.constexpr,
    DTYPES: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """The rows of ids `start` to `end`, pooled: values and, for max, positions."""
    address, num_rows, dim = tl.load(feature), tl.load(feature + 1), tl.load(feature + 2)
    dtype, first_key, first_row = tl.load(feature + 3), tl.load(feature + 4), tl.load(feature + 5)
    d = tl.arange(0, DIM)
    inside = (d < dim)[None, :]
    many = tl.zeros([ROWS, DIM], tl.float32)
    best = tl.full([DIM], float("-inf"), tl.float32)
    best_at = tl.full([DIM], -1, tl.int32)
    for i in range(start, end, ROWS):
        at = i + tl.arange(0, ROWS)
        here = at < end
        row = tl.load(ids + at, mask=here, other=0).to(tl.int64) - first_row
        owned = here & (row >= 0) & (row < num_rows)
        if not MASKED:
            _assert_owned(owned, here, flags)
        place = row[:, None] * dim + d[None, :]
        rows = load_rows(address, place, owned[:, None] & inside, dtype, DTYPES)
        if WEIGHTED:
            factor = tl.load(weights + at, mask=here, other=0.0).to(tl.float32)
            rows *= factor[:, None]
        if TRACE:
            # Rows of other shards get a key beyond all others, and are left alone.
            key = tl.where(owned, row + first_key, tl.load(feature + 8))
            tl.store(keys + at, key.to(keys.dtype.element_ty), mask=here)
            tl.store(out_at + at, (out_row + at * 0).to(out_at.dtype.element_ty), mask=here)
            if WEIGHTED:
                tl.store(scale + at, factor, mask=here)
            elif MODE == 1:
                tl.store(scale + at, bag_scale + at * 0.0, mask=here)
        if MODE == 2:
            rows = tl.where(owned[:, None] & inside, rows, float("-inf"))
            position = tl.where(owned, at, 2147483647).to(tl.int32)
            position = position[:, None] + tl.zeros([ROWS, DIM], tl.int32)
            found, found_at = tl.reduce((rows, position), 0, _larger)
            best, best_at = _better(best, best_at, found, found_at)
        else:
            many += rows
    if MODE == 2:
        return best, best_at
    return tl.sum(many, 0), best_at


@triton.jit
def _join(
    partial, partial_at, first, last, start, MODE: tl.constexpr, LONG: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """The parts of a long bag, from chunk `first` to chunk `last`, in order."""
    d = tl.arange(0, DIM)
    # Its first part is in the second slot of its chunk, unless the bag starts with the chunk.
    slot = (start > first * LONG).to(tl.int64)
    many = tl.zeros([ROWS, DIM], tl.float32)
    best = tl.full([DIM], float("-inf"), tl.float32)
    best_at = tl.full([DIM], -1, tl.int32)
    for i in range(first, last + 1, ROWS):
        chunk = i + tl.arange(0, ROWS).to(tl.int64)
        at = (chunk * 2 + tl.where(chunk == first, slot, 0))[:, None] * DIM + d[None, :]
        here = (chunk <= last)[:, None]
        if MODE == 2:
            # Past the caches of one multiprocessor: others wrote it.
            found = tl.load(partial + at, mask=here, other=float("-inf"), cache_modifier=".cg")
            where = tl.load(partial_at + at, mask=here, other=2147483647, cache_modifier=".cg")
            found, where = tl.reduce((found, where), 0, _larger)
            best, best_at = _better(best, best_at, found, where)
        else:
            many += tl.load(partial + at, mask=here, other=0.0, cache_modifier=".cg")
    if MODE == 2:
        return best, best_at
    return tl.sum(many, 0), best_at


@triton.jit
def _serve(
    features, first_bag, offsets, ids, weights, out, argmax, partial, partial_at, arrived, keys,
    out_at, scale, flags, number, bag, chunk, low, high, slot,
    OF_CHUNK,  # a constant, unless programs of both kinds are in one launch
    MODE: tl.constexpr, WEIGHTED: tl.constexpr, TRACE: tl.constexpr, MASKED: tl.constexpr,
    DTYPES: tl.constexpr, COLUMNS: tl.constexpr, INDEX: tl.constexpr, LONG: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One bag, or what a chunk holds of one."""
    start = tl.load(offsets + bag).to(INDEX)
    end = tl.load(offsets + bag + 1).to(INDEX)
    # A bag that holds both the first and the last id of a chunk counts once, as the first's; ids
    # that stand after the last bag are nobody's.
    mine = (end - start > LONG) & ((slot == 0) | (start > low)) & (end > low)
    if not OF_CHUNK:
        mine = end - start <= LONG
    if mine:
        feature = features + number * COLUMNS
        nth = bag - tl.load(first_bag + number).to(tl.int32)
        out_row = tl.load(feature + 6) + nth.to(tl.int64) * tl.load(feature + 7)
        bag_scale = 1.0 / tl.maximum(end - start, 1).to(tl.float32)
        from_, to = start, end
        if OF_CHUNK:
            from_, to = tl.maximum(start, low), tl.minimum(end, high)
        values, positions = _pool(
            feature, out_row, from_, to, bag_scale, ids, weights, keys, out_at, scale, flags,
            MODE, WEIGHTED, TRACE, MASKED, DTYPES, ROWS, DIM,
        )  # fmt: skip
        d = tl.arange(0, DIM)
        num_columns = tl.load(feature + 2)
        # Not in one: what is a constant decides at compile time, what is not, in the kernel.
        if OF_CHUNK:  # noqa: SIM102
            if partial is not None:
                at = (chunk * 2 + slot).to(tl.int64) * DIM + d
                tl.store(partial + at, values)
                if MODE == 2:
                    tl.store(partial_at + at, positions)
                first, last = start // LONG, (end - 1) // LONG
                tl.debug_barrier()  # all of the parts are there before they are counted
                done = tl.atomic_add(arrived + first, 1) == last - first
                num_columns = tl.where(done, num_columns, 0)
                if done:
                    values, positions = _join(
                        partial, partial_at, first, last, start, MODE, LONG, 2 * ROWS, DIM
                    )
                    tl.store(arrived + first, 0)
        inside = d < num_columns
        if MODE == 1:
            values *= bag_scale
        if MODE == 2:
            values = tl.where(positions >= 0, values, 0.0)
            if TRACE:
                tl.store(argmax + out_row + d, positions, mask=inside)
        tl.store(out + out_row + d, values.to(out.dtype.element_ty), mask=inside)
    elif not OF_CHUNK:  # noqa: SIM102
        if flags is not None:
            tl.store(flags + 1, 1)


@triton.jit(do_not_specialize=["num_features", "num_bags", "num_ids", "num_chunks"])
def pool_bags(
    features,
    first_bag,
    offsets,
    ids,
    weights,
    out,
    argmax,
    partial,
    partial_at,
    arrived,
    keys,
    out_at,
    scale,
    flags,
    num_features,
    num_bags,
    num_ids,
    num_chunks,
    PART: tl.constexpr,
    MODE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TRACE: tl.constexpr,
    MASKED: tl.constexpr,
    DTYPES: tl.constexpr,
    COLUMNS: tl.constexpr,
    INDEX: tl.constexpr,  # of positions among the ids
    LONG: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Program (b, f) for bag b of feature f, programs for the chunks of long bags, or both."""
    number = tl.program_id(1)
    bag = tl.load(first_bag + number).to(tl.int32) + tl.program_id(0)
    if PART == 1:
        if bag < tl.load(first_bag + number + 1):
            _serve(
                features, first_bag, offsets, ids, weights, out, argmax, partial, partial_at,
                arrived, keys, out_at, scale, flags, number, bag, bag, bag, bag, bag, False,
                MODE, WEIGHTED, TRACE, MASKED, DTYPES, COLUMNS, INDEX, LONG, ROWS, DIM,
            )  # fmt: skip
    else:
        # Those of chunks come first, as they may take longest.
        before = (num_chunks + num_features - 1) // num_features
        if PART == 2:
            before = tl.num_programs(0)
            if not MASKED:
                tl.device_assert(
                    tl.load(flags) == 0, "an embedding id is out of the range of its table"
                )
        of_chunk = tl.program_id(0) < before
        bag -= before
        # This program's first chunk, and the step to the next if it has several.
        first_chunk, step = tl.program_id(0) * num_features + number, before * num_features
        last_bag = tl.load(first_bag + number + 1).to(tl.int32)
        # A chunk: what it holds of the bag with its first id, and of the one with its last.
        of_this = tl.maximum(num_chunks - first_chunk + step - 1, 0) // tl.maximum(step, 1)
        rounds = tl.where(of_chunk, of_this * 2, (bag < last_bag) * 1)
        if PART == 2:
            rounds *= tl.load(flags + 1)
        for turn in range(rounds):
            slot = turn % 2
            chunk = first_chunk + turn // 2 * step
            low = chunk.to(INDEX) * LONG
            high = tl.minimum(low + LONG, num_ids)
            if of_chunk:
                wanted = tl.where(slot == 0, low, high - 1)
                bag = last_at_most(offsets, num_bags, wanted).to(tl.int32)
                number = last_at_most(first_bag, num_features, bag).to(tl.int32)
            _serve(
                features, first_bag, offsets, ids, weights, out, argmax, partial, partial_at,
                arrived, keys, out_at, scale, flags, number, bag, chunk, low, high, slot, of_chunk,
                MODE, WEIGHTED, TRACE, MASKED, DTYPES, COLUMNS, INDEX, LONG, ROWS, DIM,
            )  # fmt: skip


@triton.jit
def copy_rows(
    features,
    first_id,
    ids,
    out,
    keys,
    out_at,
    flags,
    TRACE: tl.constexpr,
    MASKED: tl.constexpr,
    DTYPES: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Unpooled: program (i, f) copies ROWS rows of feature f."""
    number = tl.program_id(1)
    feature = features + number * COLUMNS
    first, end = tl.load(first_id + number), tl.load(first_id + number + 1)
    at = first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = at < end
    address, num_rows, dim = tl.load(feature), tl.load(feature + 1), tl.load(feature + 2)
    dtype = tl.load(feature + 3)
    row = tl.load(ids + at, mask=here, other=0).to(tl.int64) - tl.load(feature + 5)
    owned = here & (row >= 0) & (row < num_rows)
    if not MASKED:
        _assert_owned(owned, here, flags)
    d = tl.arange(0, DIM)
    inside = (d < dim)[None, :]
    place = row[:, None] * dim + d[None, :]
    rows = load_rows(address, place, owned[:, None] & inside, dtype, DTYPES)
    out_row = tl.load(feature + 6) + (at - first).to(tl.int64) * tl.load(feature + 7)
    target = out + out_row[:, None] + d[None, :]
    tl.store(target, rows.to(out.dtype.element_ty), mask=here[:, None] & inside)
    if TRACE:
        key = tl.where(owned, row + tl.load(feature + 4), tl.load(feature + 8))
        tl.store(keys + at, key.to(keys.dtype.element_ty), mask=here)
        tl.store(out_at + at, out_row.to(out_at.dtype.element_ty), mask=here)


def pooled_lookup(
    tables: TableSet,
    bags: IdBags,
    mode: str = "sum",
    weights: torch.Tensor | None = None,
    trace: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, Trace | None]:
    """The pooled rows of every bag, as one flat buffer laid out as `bags.rows` says."""
    ids, offsets, first_bag, max_bags, rows = bags
    assert offsets is not None, "bags that are pooled have offsets"
    num_features, num_bags, num_ids = first_bag.numel() - 1, offsets.numel() - 1, ids.numel()
    out = torch.empty(rows.num_elements, dtype=dtype, device=tables.device)
    known = _trace(tables, num_ids, rows, mode, weights is not None) if trace else None
    if not max_bags or not num_features:
        return out, known
    keys, out_at, scale, argmax = known if known is not None else (None, None, None, None)
    features = tables.features(rows)
    dim = tables.padded_dim
    small = num_ids <= SMALL
    long = min(LONG, LONG_IN_SMALL) if small else LONG
    num_chunks = num_pieces(num_ids, long) if num_ids > long else 0
    partial = partial_at = arrived = None
    if num_chunks:
        is_max = mode == "max"
        arrived, partial, partial_at = tables.scratch.parts(
            num_chunks, num_chunks * 2 * dim, is_max
        )
        partial_at = partial_at if is_max else None
    index = tl.int32 if num_ids < 2**31 - long else tl.int64
    flags = None if small and tables.device.type == "cuda" else tables.flags

    def launch(part: int, grid: tuple[int, int]) -> None:
        tables.launches.run(
            pool_bags,
            grid,
            (features, first_bag, offsets, ids, weights, out, argmax, partial, partial_at, arrived,
             keys, out_at, scale, flags),
            (num_features, num_bags, num_ids, num_chunks),
            (part, MODES[mode], weights is not None, trace, tables.masked, tables.dtypes,
             features.shape[1], index, long, rows_in_flight(dim), dim),
            debug=part != _BAGS and not tables.masked,
        )  # fmt: skip

    num_columns = num_pieces(num_chunks, num_features)
    if small:
        launch(_BOTH, (num_columns + max_bags, num_features))
    else:
        launch(_BAGS, (max_bags, num_features))
        most = num_pieces(_CHUNK_PROGRAMS, num_features)
        launch(_CHUNKS, (max(1, min(num_columns, most)), num_features))
    if not tables.masked:
        _check(flags)
    return out, known


def row_lookup(
    tables: TableSet,
    ids: torch.Tensor,
    first_id: torch.Tensor,
    max_ids: int,
    rows: OutputRows,
    trace: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, Trace | None]:
    """The row of every id; feature f has ids `first_id[f]` to `first_id[f + 1]`."""
    out = torch.empty(rows.num_elements, dtype=dtype, device=tables.device)
    known = _trace(tables, ids.numel(), rows, "sum", False) if trace else None
    keys, out_at = known[:2] if known is not None else (None, None)
    features = tables.features(rows)
    dim = tables.padded_dim
    in_flight = rows_in_flight(dim)
    flags = None if tables.device.type == "cuda" else tables.flags
    if max_ids:
        tables.launches.run(
            copy_rows,
            (num_pieces(max_ids, in_flight), first_id.numel() - 1),
            (features, first_id, ids, out, keys, out_at, flags),
            (),
            (trace, tables.masked, tables.dtypes, features.shape[1], in_flight, dim),
            debug=not tables.masked,
        )
        if not tables.masked:
            _check(flags)
    return out, known


def _trace(tables: TableSet, num_ids: int, rows: OutputRows, mode: str, weighted: bool) -> Trace:
    device = tables.device
    keys = torch.empty(num_ids, dtype=index_dtype(tables.num_keys + 1), device=device)
    out_at = torch.empty(num_ids, dtype=index_dtype(rows.num_elements), device=device)
    scale = argmax = None
    if weighted or mode == "mean":
        scale = torch.empty(num_ids, device=device)
    if mode == "max":
        argmax = torch.empty(rows.num_elements, dtype=torch.int32, device=device)
    return Trace(keys, out_at, scale, argmax)


def index_dtype(count: int) -> torch.dtype:
    """Wide enough for numbers below `count`."""
    return torch.int32 if count < 2**31 else torch.int64


def _check(flags: torch.Tensor | None) -> None:
    """Where kernels are interpreted, fail as they do on the device."""
    if flags is not None and not flags.is_cuda and flags[0]:
        raise IndexError("an embedding id is out of the range of its table")
