"""`F.embedding` and `F.embedding_bag` of each rank's local ids in a sharded table.

Results equal those of one device that holds the whole table.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from shardwise.errors import ArgumentError, UnsupportedError
from shardwise.lookup.ids import has_values
from shardwise.shard.compile import LayerCall, declare, traced
from shardwise.shard.lookup import table_lookup
from shardwise.shard.lookup.linear import gather_whole
from shardwise.shard.lookup.lookup_args import BagBatch, Lookup, split_of
from shardwise.shard.tensor import ShardedTensor

MODES = ("sum", "mean", "max")


def embedding(
    input: torch.Tensor,
    weight: ShardedTensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """`F.embedding` for each rank's local plain ids."""
    what = "F.embedding"
    lookup = _lookup(what, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if not all(weight._tiling.shape):
        return F.embedding(input, gather_whole(weight), **lookup.options())
    if not has_values(weight._local):
        return traced(_EMBEDDING, weight, lookup.options(), input=input)
    return table_lookup.embedding(lookup, input)


def embedding_bag(
    input: torch.Tensor,
    weight: ShardedTensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> torch.Tensor:
    """`F.embedding_bag` for each rank's local plain bags."""
    what = "F.embedding_bag"
    lookup = _lookup(what, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    _check_mode(what, mode, per_sample_weights, scale_grad_by_freq, sparse)
    options = lookup.options() | {"mode": mode, "include_last_offset": include_last_offset}
    tensors: dict[str, Any] = {"offsets": offsets, "per_sample_weights": per_sample_weights}
    if not all(weight._tiling.shape):
        return F.embedding_bag(input, gather_whole(weight), **options, **tensors)
    if not has_values(weight._local):
        return traced(_EMBEDDING_BAG, weight, options, input=input, **tensors)
    batch = BagBatch(input, offsets, per_sample_weights, include_last_offset, mode)
    return table_lookup.embedding_bag(lookup, batch)


def _lookup(
    what: str,
    weight: ShardedTensor,
    padding_idx: int | None,
    max_norm: float | None,
    norm_type: float,
    by_frequency: bool,
    sparse: bool,
) -> Lookup:
    split = split_of(weight, what)
    if sparse and not weight._tiling.natural:
        raise UnsupportedError(
            f"{what} has sparse gradients only for shards in the order of ranks, found "
            f"{weight.sharding_spec()}. Use sparse=False, or reshard(spec) first."
        )
    if max_norm is not None and not norm_type > 0:
        raise ArgumentError(f"{what}: norm_type is a positive number, found {norm_type}.")
    padding = _row(padding_idx, weight, what)
    return Lookup(what, weight, split, padding, max_norm, norm_type, by_frequency, sparse)


def _row(padding_idx: int | None, weight: ShardedTensor, what: str) -> int | None:
    num_rows = weight._tiling.shape[0]
    if padding_idx is None:
        return None
    if not -num_rows <= padding_idx < num_rows:
        raise ArgumentError(
            f"{what}: padding_idx={padding_idx} is no row of a table of {num_rows} rows."
        )
    return padding_idx % num_rows


def _check_mode(
    what: str, mode: str, weights: torch.Tensor | None, scale_grad_by_freq: bool, sparse: bool
) -> None:
    if mode not in MODES:
        raise ArgumentError(f"{what}: mode is one of {', '.join(MODES)}; found {mode!r}.")
    if weights is not None and mode != "sum":
        raise UnsupportedError(f"{what}: per_sample_weights go with mode='sum', found {mode!r}.")
    if mode == "max" and scale_grad_by_freq:
        raise ArgumentError(f"{what}: mode='max' has no scale_grad_by_freq, as in torch.")
    if mode == "max" and sparse:
        raise ArgumentError(f"{what}: mode='max' has no sparse gradients, as in torch.")


# The results' shapes, for compiled graphs.


def _rows_of(call: LayerCall, weight: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    return weight.new_empty((*input.shape, call.tiling.shape[1]))


def _bags_of(
    call: LayerCall,
    weight: torch.Tensor,
    input: torch.Tensor,
    offsets: torch.Tensor | None = None,
    per_sample_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    num_bags = input.shape[0]
    if offsets is not None:
        num_bags = offsets.shape[0] - int(call.options["include_last_offset"])
    return weight.new_empty((num_bags, call.tiling.shape[1]))


_EMBEDDING = declare("embedding", embedding, _rows_of)
_EMBEDDING_BAG = declare("embedding_bag", embedding_bag, _bags_of)
