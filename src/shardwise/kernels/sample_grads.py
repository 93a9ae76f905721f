"""The gradient of per-sample weights: each id's row times its bag's gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shardwise.kernels.memory import load_rows, rows_in_flight
from shardwise.kernels.tables import OutputRows, TableSet


@triton.jit
def _weight_grads(
    features,
    first_bag,
    offsets,
    ids,
    grad,
    out,
    DTYPES: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Program (b, f) serves bag b of feature f."""
    number = tl.program_id(1)
    first = tl.load(first_bag + number)
    bag = first + tl.program_id(0)
    if bag < tl.load(first_bag + number + 1):
        feature = features + number * COLUMNS
        address, num_rows, dim = tl.load(feature), tl.load(feature + 1), tl.load(feature + 2)
        dtype, first_row = tl.load(feature + 3), tl.load(feature + 5)
        out_row = tl.load(feature + 6) + (bag - first).to(tl.int64) * tl.load(feature + 7)
        d = tl.arange(0, DIM)
        inside = d < dim
        bag_grad = tl.load(grad + out_row + d, mask=inside, other=0.0).to(tl.float32)
        end = tl.load(offsets + bag + 1)
        for i in range(tl.load(offsets + bag), end, ROWS):
            at = i + tl.arange(0, ROWS)
            here = at < end
            row = tl.load(ids + at, mask=here, other=0).to(tl.int64) - first_row
            owned = here & (row >= 0) & (row < num_rows)
            place = row[:, None] * dim + d[None, :]
            rows = load_rows(address, place, owned[:, None] & inside[None, :], dtype, DTYPES)
            found = tl.sum(rows * bag_grad[None, :], 1)
            tl.store(out + at, found.to(out.dtype.element_ty), mask=here)


def per_sample_weight_grads(
    tables: TableSet,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    first_bag: torch.Tensor,
    max_bags: int,
    rows: OutputRows,
    grad: torch.Tensor,
) -> torch.Tensor:
    """The gradient of a weighted sum for its weights; bags are given as to a pooled lookup.

    That of ids which stand after the last bag is 0.
    """
    out = torch.zeros(ids.numel(), dtype=torch.float32, device=tables.device)
    features = tables.features(rows)
    dim = tables.padded_dim
    if max_bags and first_bag.numel() > 1:
        tables.launches.run(
            _weight_grads,
            (max_bags, first_bag.numel() - 1),
            (features, first_bag, offsets, ids, grad, out),
            (),
            (tables.dtypes, features.shape[1], rows_in_flight(dim), dim),
        )
    return out
