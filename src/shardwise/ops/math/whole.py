"""Ops that need some dims whole (sorting, scans, Fourier transforms); others may be sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from shardwise.core.placements import Shard
from shardwise.dispatch.notation import linear_choices
from shardwise.dispatch.rule import Call, Choice, Rule, Table, empty_safe, table
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


RULES: Table = table(
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
)
