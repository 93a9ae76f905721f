"""Ops that need dims or operands whole: sorting, scans, Fourier transforms, search.

`whole` ops may be sharded along other dims; `gathered` ops run whole on every rank, each on purpose
(an op without a rule raises), and a comment says why no work can be done on shards. A search needs
the sorted sequence or set whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from shardwise.core.placements import REPLICATE, Placement, Shard
from shardwise.dispatch.notation import Group, linear_choices
from shardwise.dispatch.rule import Call, Choice, Rule, Table, empty_safe, merge, table
from shardwise.ops.math.reduce import reduced_dims

aten = torch.ops.aten

Dims = Callable[[Call], tuple[int, ...]]


def _listed_dims(call: Call) -> tuple[int, ...]:
    """The argument `dims`; all of them when it is empty."""
    ndim = call.inputs[0].ndim
    return tuple(d % ndim for d in call.argument("dims")) or tuple(range(ndim))


def _last_two(call: Call) -> tuple[int, ...]:
    ndim = call.inputs[0].ndim
    return (ndim - 2, ndim - 1)


def _padded(call: Call) -> tuple[int, ...]:
    """The padded dims; `pad` has pairs, starting at the last dim."""
    ndim, pad = call.inputs[0].ndim, call.argument("pad")
    return tuple(ndim - 1 - i for i in range(len(pad) // 2) if pad[2 * i] or pad[2 * i + 1])


def whole(
    *ops: Any, dims: Dims, linear: bool = False, fails_on_empty: bool = False
) -> tuple[tuple[Any, ...], Rule]:
    """An entry of a table: `ops` need `dims` whole, and may drop them from the result."""

    def choices(call: Call) -> Iterator[Choice]:
        needed = dims(call)
        local = empty_safe(call.op) if fails_on_empty else None
        yield call.replicated()
        for dim in range(call.inputs[0].ndim):
            if dim not in needed:
                dropped = call.outputs[0].ndim < call.inputs[0].ndim
                out = dim - sum(d < dim for d in needed) if dropped else dim
                for sizes in call.splits([(0, dim)]):
                    shards = (Shard(out, sizes),) * len(call.outputs)
                    yield Choice((Shard(dim, sizes),), shards, local)
        if linear:
            yield from linear_choices(call, ((0,),))

    return ops, Rule(choices, "... [n] -> ...")


def gathered(
    *ops: Any, linear: Sequence[Group] = (), found_shapes: bool = False
) -> tuple[tuple[Any, ...], Rule]:
    """An entry of a table. With `found_shapes`, output shapes are only known from the results."""

    def choices(call: Call) -> Iterator[Choice]:
        yield call.replicated()
        yield from linear_choices(call, linear)

    return ops, Rule(choices, "replicated -> replicated", found_shapes=found_shapes)


def _each_value(call: Call, values: int) -> Iterator[Choice]:
    """Each value is searched for on its own; the sequence or set is whole."""
    yield call.replicated()
    for dim in range(call.inputs[values].ndim):
        for sizes in call.splits([(values, dim)]):
            shard: Placement = Shard(dim, sizes)
            inputs = tuple(shard if i == values else REPLICATE for i, _ in enumerate(call.inputs))
            yield Choice(inputs, (shard,))


def bucketize_choices(call: Call) -> Iterator[Choice]:
    yield from _each_value(call, 0)


def searchsorted_choices(call: Call) -> Iterator[Choice]:
    """One sequence for all values, or one per row: then both are sharded by rows."""
    sequence = call.inputs[0]
    if sequence.ndim == 1:
        yield from _each_value(call, 1)
        return
    yield call.replicated()
    num = len(call.inputs)
    for dim in range(sequence.ndim - 1):
        for sizes in call.splits([(i, dim) for i in range(num)]):
            shard: Placement = Shard(dim, sizes)
            yield Choice((shard,) * num, (shard,))
    last = sequence.ndim - 1
    for sizes in call.splits([(1, last)]):
        shard = Shard(last, sizes)
        yield Choice((REPLICATE, shard, *(REPLICATE,) * (num - 2)), (shard,))


def searchsorted_number_choices(call: Call) -> Iterator[Choice]:
    yield call.replicated()


#: Ops that run whole on every rank.
GATHERED: Table = table(
    # Every pair of rows is compared.
    gathered(aten._pdist_forward.default, aten._pdist_backward.default),
    # The range of the bins, or the number of counts, depends on all values.
    gathered(aten.histc.default),
    gathered(
        aten.histogram.bin_ct,
        aten.histogram.bins_tensor,
        aten._histogramdd_bin_edges.default,
        aten._histogramdd_from_bin_cts.default,
        aten._histogramdd_from_bin_tensors.default,
        found_shapes=True,
    ),
    # Torch cannot infer their output shapes without running them.
    gathered(aten.linalg_lstsq.default, aten.geqrf.default, found_shapes=True),
    # A segment may span several ranks.
    gathered(aten.segment_reduce.default, aten._segment_reduce_backward.default),
    # The alignment of a sequence needs all its steps, classes and targets.
    gathered(
        aten._ctc_loss.default,
        aten._ctc_loss.Tensor,
        aten._ctc_loss_backward.default,
        aten._ctc_loss_backward.Tensor,
        found_shapes=True,
    ),
    # The result is mostly zeros, and each operand has rows and columns of its own.
    gathered(aten.block_diag.default),
)

RULES: Table = merge(
    table(
        whole(
            aten.max.dim,
            aten.min.dim,
            aten.argmax.default,
            aten.argmin.default,
            aten.var.correction,
            aten.std.correction,
            aten.logsumexp.default,
            aten.sort.default,
            aten.sort.stable,
            aten.topk.default,
            aten.kthvalue.default,
            aten.median.default,
            aten.median.dim,
            aten.nanmedian.default,
            aten.nanmedian.dim,
            aten.mode.default,
            aten.cummax.default,
            aten.cummin.default,
            aten.logcumsumexp.default,
            aten.cumprod.default,
            aten.var_mean.correction,
            aten.std_mean.correction,
            aten.hash_tensor.default,
            dims=reduced_dims,
        ),
        whole(aten.cumsum.default, dims=reduced_dims, linear=True),
        whole(aten.flip.default, aten.roll.default, dims=_listed_dims, linear=True),
        whole(aten.tril.default, aten.triu.default, dims=_last_two, linear=True),
        whole(aten.constant_pad_nd.default, dims=_padded),
        whole(
            aten._fft_r2c.default,
            aten._fft_c2r.default,
            aten._fft_c2c.default,
            dims=reduced_dims,
            linear=True,
            fails_on_empty=True,
        ),
        ((aten.bucketize.Tensor,), Rule(bucketize_choices, "..., [n] -> ...")),
        ((aten.searchsorted.Tensor,), Rule(searchsorted_choices, "... [n], ... m -> ... m")),
        ((aten.searchsorted.Scalar,), Rule(searchsorted_number_choices, "[n] -> ")),
        (
            (aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar),
            Rule(bucketize_choices, "..., [n] -> ..."),
        ),
    ),
    GATHERED,
)
