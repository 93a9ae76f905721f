"""Ops that need dims or operands whole: linear algebra, sorting, scans, Fourier transforms, search.

`whole` ops may be sharded along their other dims. `gathered` ops run whole on every rank: a comment
on each says why it cannot work on shards (an op without a rule would raise instead). A search needs
the sorted sequence or set whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from shardwise.core.placements import REPLICATE, Partial, Placement, Shard
from shardwise.core.sizes import equal, equal_shapes
from shardwise.dispatch.rule import (
    Call,
    Choice,
    Group,
    Rule,
    Table,
    TensorMeta,
    averages_too,
    linear_choices,
    merge,
    rule,
    sharded_together,
    table,
    unless_empty,
)
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
        local = unless_empty(call.op) if fails_on_empty else None
        yield call.replicated()
        for dim in range(call.inputs[0].ndim):
            if dim not in needed:
                dropped = call.outputs[0].ndim < call.inputs[0].ndim
                out = dim - sum(d < dim for d in needed) if dropped else dim
                yield from sharded_together(call, (dim,), [out] * len(call.outputs), local)
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
    """Each value is searched for independently; the sequence or set is whole."""
    yield call.replicated()
    for dim in range(call.inputs[values].ndim):
        inputs = [dim if i == values else REPLICATE for i, _ in enumerate(call.inputs)]
        yield from sharded_together(call, inputs, (dim,))


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
    last = sequence.ndim - 1
    for dim in range(last):
        yield from sharded_together(call, [dim] * num, (dim,))
    yield from sharded_together(call, (REPLICATE, last, *[REPLICATE] * (num - 2)), (last,))


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


# The last dims of every operand, its core, must be whole. The dims in front of them are the batch,
# broadcast from the right; any of these may be sharded.


#: The number of core dims of each input and of each output.
Cores = tuple[Sequence[int], Sequence[int]]


def batched(
    *ops: Any,
    inputs: Sequence[int] = (2,),
    outputs: Sequence[int] = (2,),
    linear: Sequence[Group] = (),
    cores: Callable[[Call], Cores] | None = None,
    columns: int | None = None,
) -> tuple[tuple[Any, ...], Rule]:
    """An entry of a table. `cores` computes the core dims if they depend on shapes.

    `columns` numbers the operand whose columns are right-hand sides: the first output is linear
    in it, column by column.
    """

    def choices(call: Call) -> Iterator[Choice]:
        yield from batch_choices(call, *(cores(call) if cores else (inputs, outputs)))
        yield from linear_choices(call, linear)
        if columns is not None:
            yield from _column_choices(call, columns)

    return ops, Rule(choices, "... [m] [n] -> ...")


def batch_choices(call: Call, inputs: Sequence[int], outputs: Sequence[int]) -> Iterator[Choice]:
    """Replicated, or one dim of the batch sharded.

    A placeholder (an output that was not requested) has too few dims and is replicated.
    """
    yield call.replicated()
    batches = [_batch(meta, core) for meta, core in zip(call.inputs, inputs, strict=False)]
    longest = max(batches, key=len)
    for from_right in range(-len(longest), 0):
        size = max((b[from_right] for b in batches if len(b) >= -from_right), default=1)
        if not equal(size, 1):
            yield from sharded_together(
                call,
                [_place(batch, from_right, size) for batch in batches],
                [
                    _place(_batch(meta, core), from_right, size)
                    for meta, core in zip(call.outputs, outputs, strict=False)
                ],
            )


def _column_choices(call: Call, number: int) -> Iterator[Choice]:
    def alone(placement: Placement) -> Choice:
        inputs = tuple(placement if i == number else REPLICATE for i in range(len(call.inputs)))
        return Choice(inputs, (placement, *(REPLICATE,) * (len(call.outputs) - 1)))

    yield from (alone(Partial(op)) for op in averages_too(call.inputs[number]))
    names = {a.name for a in call.op._schema.arguments}
    if "left" in names and not call.argument("left"):
        return
    last, solution = call.inputs[number].ndim - 1, call.outputs[0]
    if last < 1 or solution.ndim != last + 1 or _is_vector(call, number):
        return
    for sizes in call.splits([(number, last)]):
        yield alone(Shard(last, sizes))


def _is_vector(call: Call, number: int) -> bool:
    """Whether the operand is a batch of single right-hand sides."""
    matrices = max(m.ndim for i, m in enumerate(call.inputs) if i != number)
    return call.inputs[number].ndim < matrices and call.op is aten._linalg_solve_ex.default


def _batch(meta: TensorMeta, core: int) -> tuple[Any, ...]:
    return meta.shape[: meta.ndim - core] if meta.ndim >= core else ()


def _place(batch: tuple[Any, ...], from_right: int, size: Any) -> int | Placement:
    """The number of the dim in a batch; replicated if it is absent or broadcast."""
    at = len(batch) + from_right
    return at if at >= 0 and batch[at] == size else REPLICATE


def _solve_cores(call: Call) -> Cores:
    """The right-hand side of a system may be a batch of vectors."""
    a, b = call.inputs[0], call.inputs[1]
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and equal_shapes(b.shape, a.shape[:-1]))
    return (2, 2 - vector), (2 - vector, 2, 1, 0)


LINALG: Table = table(
    batched(
        aten.cholesky.default,
        aten.cholesky_inverse.default,
        aten.linalg_matrix_exp.default,
    ),
    batched(aten.linalg_cholesky_ex.default, aten.linalg_inv_ex.default, outputs=(2, 0)),
    batched(aten.cholesky_solve.default, inputs=(2, 2), columns=0),
    batched(aten.linalg_eig.default, aten._linalg_eigh.default, outputs=(1, 2)),
    batched(aten._linalg_eigvals.default, outputs=(1,)),
    batched(aten._linalg_svd.default, outputs=(2, 1, 2)),
    batched(aten.linalg_lu.default, outputs=(2, 2, 2)),
    batched(aten.linalg_lu_factor_ex.default, outputs=(2, 1, 0)),
    batched(aten.linalg_ldl_factor_ex.default, outputs=(2, 1, 0)),
    batched(aten.lu_unpack.default, inputs=(2, 1), outputs=(2, 2, 2)),
    batched(
        aten.linalg_lu_solve.default,
        aten.linalg_ldl_solve.default,
        inputs=(2, 1, 2),
        columns=2,
    ),
    batched(aten._linalg_solve_ex.default, cores=_solve_cores, columns=1),
    batched(aten._linalg_det.default, outputs=(0, 2, 1)),
    batched(aten._linalg_slogdet.default, outputs=(0, 0, 2, 1)),
    batched(aten.linalg_qr.default, outputs=(2, 2)),
    batched(aten.linalg_householder_product.default, inputs=(2, 1)),
    batched(aten.ormqr.default, inputs=(2, 1, 2), columns=2),
    batched(aten.linalg_pinv.atol_rtol_tensor, inputs=(2, 0, 0)),
    batched(aten.linalg_solve_triangular.default, inputs=(2, 2), columns=1),
    batched(aten.triangular_solve.default, inputs=(2, 2), outputs=(2, 2), columns=0),
    # Every rank must see every failure, so that all raise.
    gathered(aten._linalg_check_errors.default),
    rule(
        aten.linalg_cross.default,
        like="... [n], ... [n] -> ... [n]",
        linear=((0,), (1,)),
        n="dim",
    ),
    rule(aten._cdist_forward.default, like="... p [m], ... r [m] -> ... p r"),
    rule(
        aten._cdist_backward.default,
        like="... p r, ... p m, ... r m, ... p r -> ... p m",
        linear=((0,),),
    ),
)

#: One matrix of a batch may have no factors, or no decomposition that a solver finds. Torch raises
#: when the solver has told it so, on a GPU too.
ON_HOST = (
    aten.cholesky.default,
    aten.linalg_cholesky_ex.default,
    aten.linalg_eig.default,
    aten._linalg_eigh.default,
    aten._linalg_eigvals.default,
    aten.linalg_inv_ex.default,
    aten.linalg_ldl_factor_ex.default,
    aten.linalg_lu_factor_ex.default,
    aten.linalg_pinv.atol_rtol_tensor,
    aten._linalg_solve_ex.default,
    aten._linalg_svd.default,
)

#: The inputs whose values the op may refuse; see `dispatch.local_call`.
REFUSED: dict[Any, slice] = {
    **dict.fromkeys((*ON_HOST, aten.cholesky_inverse.default), slice(0, 1)),
    aten.lu_unpack.default: slice(1, 2),
    aten.searchsorted.Tensor: slice(2, 3),  # the sorter
}

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
        # They read a number.
        gathered(
            aten._local_scalar_dense.default,
            aten.equal.default,
            aten.allclose.default,
            aten.is_nonzero.default,
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
        gathered(aten.searchsorted.Scalar),
        (
            (aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar),
            Rule(bucketize_choices, "..., [n] -> ..."),
        ),
    ),
    GATHERED,
    LINALG,
)
