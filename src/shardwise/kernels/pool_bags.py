"""The kernel that pools bags of rows, for all features in one launch.

Note [One bag, one warp]
A program of one warp serves one bag: it loads ROWS rows at a time, so that as many loads are in
flight, and adds them in float32. Many warps hide memory latency, not wide programs. A
multiprocessor holds 32 programs at most, so in large batches a program serves several bags and
loads ids before it needs them: bags of narrow rows side by side, bags of wide rows in turn, which
leaves more registers for rows. With 64 registers per thread, 32 programs fit.

Note [Long bags]
A bag longer than LONG would keep its warp busy long after all others are done. Such bags have other
programs: all ids are split at multiples of LONG into chunks, and a program pools what its chunk has
of long bags. At most one long bag starts in a chunk and at most one ends there, so two partial
results per chunk are enough, and the host need not know which bags are long. The last of a bag's
programs to finish adds the partial results in order, so two runs agree in every bit. Each chunk in
which a long bag starts has a counter, which tells a program that it is the last; that program
resets the counter.

In small batches, where launches dominate, all programs are in one launch, which also asserts that
ids are in range. In large ones, programs for bags alone need fewer registers and no search; a
second launch handles the chunks: it asserts that no id was out of range, and returns unless a flag
says that a bag was long.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shardwise.kernels.launch import assert_owned, last_at_most, load_rows


@triton.jit
def _report(record, seen, ticket):
    """Let the host see, once per launch, whether the batch is valid; see Note [Records]."""
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(seen, ticket.to(tl.int64) * 2 + (tl.load(record) != 0).to(tl.int64))


@triton.jit
def _larger(value, position, other_value, other_position):
    """The larger value and where it stands; of equal ones the first."""
    other = (other_value > value) | ((other_value == value) & (other_position < position))
    return tl.where(other, other_value, value), tl.where(other, other_position, position)


@triton.jit
def _better(best, best_at, found, found_at):
    """The larger of two maxima; the first may be of no element yet."""
    # A row of -inf is more than nothing. Positions of nothing are -1 here, and the largest there.
    better = (found > best) | ((best_at < 0) & (found_at >= 0) & (found_at < 2147483647))
    return tl.where(better, found, best), tl.where(better, found_at, best_at)


@triton.jit
def _pool(
    feature,  # this feature's line of TableSet.features
    out_row,  # the position of its output row, recorded for backward
    start,
    end,
    bag_scale,
    ids,
    weights,
    keys,
    out_at,
    scale,
    flags,
    record,
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
        if not MASKED and record is None:
            assert_owned(owned, here, flags)
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
                tl.store(scale + at, factor * bag_scale, mask=here)
            elif MODE == 1:
                tl.store(scale + at, bag_scale + at * 0.0, mask=here)
        if MODE == 2:
            # NaN is passed over: whoever asks looks whether it is the first of a bag.
            counts = owned[:, None] & inside & (rows == rows)
            rows = tl.where(counts, rows, float("-inf"))
            position = tl.where(counts, at[:, None], 2147483647).to(tl.int32)
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
    """Combine the partial results of a long bag, from chunk `first` to chunk `last`, in order."""
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
            where = tl.where(where < 0, 2147483647, where)  # a part without an entry
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
    out_at, scale, flags, record, number, bag, chunk, low, high, slot,
    OF_CHUNK,  # a constant, unless programs of both kinds are in one launch
    num_ids, PART: tl.constexpr, MODE: tl.constexpr, WEIGHTED: tl.constexpr, TRACE: tl.constexpr,
    MASKED: tl.constexpr, DTYPES: tl.constexpr, COLUMNS: tl.constexpr, INDEX: tl.constexpr,
    LONG: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One bag, or what a chunk holds of one."""
    start = tl.load(offsets + bag).to(INDEX)
    end = tl.load(offsets + bag + 1).to(INDEX)
    if record is not None:
        if PART == 1:  # stay within the ids of an invalid batch
            start, end = tl.maximum(start, 0), tl.minimum(end, num_ids)
        else:  # its bags count as empty
            valid = (tl.load(record) == 0).to(INDEX)
            start, end = start * valid, end * valid
    # A bag that holds both the first and the last id of a chunk counts once, as the first's; ids
    # after the last bag belong to none.
    mine = (end - start > LONG) & ((slot == 0) | (start > low)) & (end > low)
    if not OF_CHUNK:
        mine = end - start <= LONG
    if mine:
        feature = features + number * COLUMNS
        nth = bag - tl.load(first_bag + number).to(tl.int32)
        out_row = tl.load(feature + 6) + nth.to(tl.int64) * tl.load(feature + 7)
        bag_scale = 1.0
        if MODE == 1:
            length = tl.where(tl.load(feature + 9) != 0, tl.maximum(end - start, 1), 1)
            bag_scale = 1.0 / length.to(tl.float32)
        from_, to = start, end
        if OF_CHUNK:
            from_, to = tl.maximum(start, low), tl.minimum(end, high)
        values, positions = _pool(
            feature, out_row, from_, to, bag_scale, ids, weights, keys, out_at, scale, flags,
            record, MODE, WEIGHTED, TRACE, MASKED, DTYPES, ROWS, DIM,
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


@triton.jit(do_not_specialize=["num_ids", "ticket"])
def pool_short_bags(
    features,
    first_bag,
    offsets,
    ids,
    weights,
    out,
    keys,
    out_at,
    scale,
    flags,
    record,
    seen,
    num_ids,
    ticket,
    MODE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TRACE: tl.constexpr,
    MASKED: tl.constexpr,
    CHECKED: tl.constexpr,  # a record says whether the batch is valid
    DTYPES: tl.constexpr,
    COLUMNS: tl.constexpr,
    INDEX: tl.constexpr,
    LONG: tl.constexpr,
    BAGS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Program (i, f) sums BAGS bags of feature f, ROWS ids of each at a time; not for max."""
    if seen is not None:
        _report(record, seen, ticket)
    number = tl.program_id(1)
    feature = features + number * COLUMNS
    first_of = tl.load(first_bag + number).to(tl.int32)
    last_of = tl.load(first_bag + number + 1).to(tl.int32)
    address, num_rows, dim = tl.load(feature), tl.load(feature + 1), tl.load(feature + 2)
    dtype, first_key, first_row = tl.load(feature + 3), tl.load(feature + 4), tl.load(feature + 5)
    out_start, stride = tl.load(feature + 6), tl.load(feature + 7)
    # Per id that is loaded at a time: its bag.
    lane = tl.arange(0, BAGS * ROWS)
    nth = tl.program_id(0) * BAGS + lane // ROWS
    there = first_of + nth < last_of
    start = tl.load(offsets + first_of + nth, mask=there, other=0).to(INDEX)
    end = tl.load(offsets + first_of + nth + 1, mask=there, other=0).to(INDEX)
    if CHECKED:  # stay within the ids of an invalid batch
        start, end = tl.maximum(start, 0), tl.minimum(end, num_ids)
    end = tl.where(end - start > LONG, start, end)
    longest = tl.max(end - start, 0)
    if TRACE:
        out_row = out_start + nth.to(tl.int64) * stride
        if MODE == 1:
            length = tl.where(tl.load(feature + 9) != 0, tl.maximum(end - start, 1), 1)
            id_scale = 1.0 / length.to(tl.float32)
    d = tl.arange(0, DIM)
    inside = (d < dim)[None, :]
    many = tl.zeros([BAGS * ROWS, DIM], tl.float32)
    at = start + lane % ROWS
    found = tl.load(ids + at, mask=at < end, other=0)
    for _ in range(0, longest, ROWS):
        here = at < end
        row = found.to(tl.int64) - first_row
        found = tl.load(ids + at + ROWS, mask=at + ROWS < end, other=0)
        owned = here & (row >= 0) & (row < num_rows)
        if not MASKED and not CHECKED:
            assert_owned(owned, here, flags)
        place = row[:, None] * dim + d[None, :]
        rows = load_rows(address, place, owned[:, None] & inside, dtype, DTYPES)
        if WEIGHTED:
            factor = tl.load(weights + at, mask=here, other=0.0).to(tl.float32)
            rows *= factor[:, None]
        if TRACE:
            key = tl.where(owned, row + first_key, tl.load(feature + 8))
            tl.store(keys + at, key.to(keys.dtype.element_ty), mask=here)
            tl.store(out_at + at, out_row.to(out_at.dtype.element_ty), mask=here)
            if WEIGHTED and MODE == 1:
                tl.store(scale + at, factor * id_scale, mask=here)
            elif WEIGHTED:
                tl.store(scale + at, factor, mask=here)
            elif MODE == 1:
                tl.store(scale + at, id_scale, mask=here)
        many += rows
        at += ROWS
    values = tl.sum(tl.reshape(many, [BAGS, ROWS, DIM]), 1)
    # Per bag.
    nth_bag = tl.program_id(0) * BAGS + tl.arange(0, BAGS)
    bag = first_of + nth_bag
    exists = bag < last_of
    length = tl.load(offsets + bag + 1, mask=exists, other=0).to(INDEX)
    length -= tl.load(offsets + bag, mask=exists, other=0).to(INDEX)
    is_long = length > LONG
    if flags is not None:
        any_long = tl.max((is_long & exists).to(tl.int32), 0)
        tl.store(flags + 1, 1, mask=any_long > 0)
    if MODE == 1:
        divisor = tl.where(tl.load(feature + 9) != 0, tl.maximum(length, 1), 1)
        values *= (1.0 / divisor.to(tl.float32))[:, None]
    target = out + (out_start + nth_bag.to(tl.int64) * stride)[:, None] + d[None, :]
    mask = (exists & (is_long == 0))[:, None] & inside
    tl.store(target, values.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_ids", "ticket"])
def pool_wide_bags(
    features,
    first_bag,
    offsets,
    ids,
    weights,
    out,
    keys,
    out_at,
    scale,
    flags,
    record,
    seen,
    num_ids,
    ticket,
    MODE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TRACE: tl.constexpr,
    MASKED: tl.constexpr,
    CHECKED: tl.constexpr,  # a record says whether the batch is valid
    DTYPES: tl.constexpr,
    COLUMNS: tl.constexpr,
    INDEX: tl.constexpr,
    ID: tl.constexpr,  # of rows: narrow ones leave registers for more loads at once
    LONG: tl.constexpr,
    BAGS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Program (i, f) sums BAGS bags of feature f in turn, ROWS ids at a time; not for max."""
    if seen is not None:
        _report(record, seen, ticket)
    number = tl.program_id(1)
    feature = features + number * COLUMNS
    first_of = tl.load(first_bag + number).to(tl.int32)
    last_of = tl.load(first_bag + number + 1).to(tl.int32)
    address, num_rows, dim = tl.load(feature), tl.load(feature + 1).to(ID), tl.load(feature + 2)
    dtype, first_row = tl.load(feature + 3), tl.load(feature + 5).to(ID)
    out_start, stride = tl.load(feature + 6), tl.load(feature + 7)
    lane = tl.arange(0, ROWS)
    d = tl.arange(0, DIM)
    inside = d < dim
    if TRACE:
        first_key = tl.load(feature + 4).to(keys.dtype.element_ty)
        beyond = tl.load(feature + 8).to(keys.dtype.element_ty)
    begin = first_of + tl.program_id(0) * BAGS
    start = tl.load(offsets + begin, mask=begin < last_of, other=0).to(INDEX)
    if CHECKED:  # stay within the ids of an invalid batch
        start = tl.minimum(tl.maximum(start, 0), num_ids)
    for bag in range(begin, tl.minimum(begin + BAGS, last_of)):
        end = tl.load(offsets + bag + 1).to(INDEX)
        if CHECKED:
            end = tl.minimum(tl.maximum(end, 0), num_ids)
        is_long = end - start > LONG
        if flags is not None:
            tl.store(flags + 1, 1, mask=is_long)
        stop = tl.where(is_long, start, end)
        out_row = out_start + (bag - first_of).to(tl.int64) * stride
        bag_scale = 1.0
        if MODE == 1:
            length = tl.where(tl.load(feature + 9) != 0, tl.maximum(end - start, 1), 1)
            bag_scale = 1.0 / length.to(tl.float32)
        total = tl.zeros([DIM], tl.float32)
        at = start + lane
        found = tl.load(ids + at, mask=at < stop, other=0).to(ID)
        for _ in range(start, stop, ROWS):
            here = at < stop
            row = found - first_row
            found = tl.load(ids + at + ROWS, mask=at + ROWS < stop, other=0).to(ID)
            owned = here & (row >= 0) & (row < num_rows)
            if not MASKED and not CHECKED:
                assert_owned(owned, here, flags)
            place = row.to(tl.int64)[:, None] * dim + d[None, :]
            rows = load_rows(address, place, owned[:, None] & inside[None, :], dtype, DTYPES)
            if WEIGHTED:
                factor = tl.load(weights + at, mask=here, other=0.0).to(tl.float32)
                rows *= factor[:, None]
            if TRACE:
                key = tl.where(owned, row.to(keys.dtype.element_ty) + first_key, beyond)
                tl.store(keys + at, key, mask=here)
                tl.store(out_at + at, out_row.to(out_at.dtype.element_ty), mask=here)
                if WEIGHTED:
                    tl.store(scale + at, factor * bag_scale, mask=here)
                elif MODE == 1:
                    tl.store(scale + at, bag_scale + at * 0.0, mask=here)
            total += tl.sum(rows, 0)
            at += ROWS
        total *= bag_scale
        kept = d < tl.where(is_long, 0, dim)
        tl.store(out + out_row + d, total.to(out.dtype.element_ty), mask=kept)
        start = end


@triton.jit(do_not_specialize=["num_features", "num_bags", "num_ids", "num_chunks", "ticket"])
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
    record,
    seen,
    num_features,
    num_bags,
    num_ids,
    num_chunks,
    ticket,
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
    if seen is not None:
        _report(record, seen, ticket)
    number = tl.program_id(1)
    bag = tl.load(first_bag + number).to(tl.int32) + tl.program_id(0)
    if PART == 1:
        if bag < tl.load(first_bag + number + 1):
            _serve(
                features, first_bag, offsets, ids, weights, out, argmax, partial, partial_at,
                arrived, keys, out_at, scale, flags, record, number, bag, bag, bag, bag, bag, False,
                num_ids, PART, MODE, WEIGHTED, TRACE, MASKED, DTYPES, COLUMNS, INDEX, LONG, ROWS,
                DIM,
            )  # fmt: skip
    else:
        # Those of chunks come first, as they may take longest.
        before = (num_chunks + num_features - 1) // num_features
        if PART == 2:
            before = tl.num_programs(0)
            if not MASKED and record is None:
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
                arrived, keys, out_at, scale, flags, record, number, bag, chunk, low, high, slot,
                of_chunk, num_ids, PART, MODE, WEIGHTED, TRACE, MASKED, DTYPES, COLUMNS, INDEX,
                LONG, ROWS, DIM,
            )  # fmt: skip
