"""The gradient of per-sample weights: each id's row times its bag's gradient.

A program takes SPAN ids, whatever their bags: several programs share a long bag.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shardwise.kernels.memory import last_at_most, load_rows, num_pieces, rows_in_flight
from shardwise.kernels.tables import IdBags, TableSet

SPAN = 128


@triton.jit
def _holder(edges, count, known, wanted):
    """The last of `count` edges that is at most `wanted`: mostly the one after `known`."""
    found = tl.minimum(known + 1, count - 1)
    if (tl.load(edges + found) > wanted) | (tl.load(edges + found + 1) <= wanted):
        found = last_at_most(edges, count, wanted)
    return found


@triton.jit(do_not_specialize=["num_features", "num_bags", "num_ids"])
def _weight_grads(
    features,
    first_bag,
    offsets,
    ids,
    grad,
    out,
    num_features,
    num_bags,
    num_ids,
    DTYPES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Program i serves the ids from i SPAN on, bag by bag."""
    begin = tl.program_id(0).to(tl.int64) * SPAN
    last = tl.minimum(begin + SPAN, num_ids).to(tl.int64)
    d = tl.arange(0, DIM)
    bag = last_at_most(offsets, num_bags, begin) - 1
    number = last_at_most(first_bag, num_features, bag + 1)
    while begin < last:
        bag = _holder(offsets, num_bags, bag, begin)
        start = tl.load(offsets + bag).to(tl.int64)
        end = tl.minimum(tl.load(offsets + bag + 1).to(tl.int64), last)
        number = _holder(first_bag, num_features, number - 1, bag)
        feature = features + number * COLUMNS
        address, num_rows, dim = tl.load(feature), tl.load(feature + 1), tl.load(feature + 2)
        dtype, first_row = tl.load(feature + 3), tl.load(feature + 5)
        nth = (bag - tl.load(first_bag + number)).to(tl.int64)
        out_row = tl.load(feature + 6) + nth * tl.load(feature + 7)
        inside = d < dim
        bag_grad = tl.load(grad + out_row + d, mask=inside, other=0.0).to(tl.float32)
        for i in range(begin, end, ROWS):
            at = i + tl.arange(0, ROWS)
            here = at < end
            row = tl.load(ids + at, mask=here, other=0).to(tl.int64) - first_row
            owned = here & (row >= 0) & (row < num_rows)
            place = row[:, None] * dim + d[None, :]
            rows = load_rows(address, place, owned[:, None] & inside[None, :], dtype, DTYPES)
            found = tl.sum(rows * bag_grad[None, :], 1)
            tl.store(out + at, found.to(out.dtype.element_ty), mask=here)
        # What stands after the last bag, or before the first, is in none.
        begin = tl.where((start <= begin) & (begin < end), end, last)


def per_sample_weight_grads(tables: TableSet, bags: IdBags, grad: torch.Tensor) -> torch.Tensor:
    """The gradient of a weighted sum for its weights; 0 for ids that stand after the last bag."""
    ids, offsets, first_bag, max_bags, rows = bags
    assert offsets is not None, "bags that are pooled have offsets"
    num_ids, dim = ids.numel(), tables.padded_dim
    out = torch.zeros(num_ids, dtype=torch.float32, device=tables.device)
    features = tables.features(rows)
    if max_bags and num_ids:
        tables.launches.run(
            _weight_grads,
            (num_pieces(num_ids, SPAN), 1),
            (features, first_bag, offsets, ids, grad, out),
            (first_bag.numel() - 1, offsets.numel() - 1, num_ids),
            (tables.dtypes, features.shape[1], SPAN, rows_in_flight(dim), dim),
        )
    return out
