"""Ops on a batch of matrices, vectors or points: linear algebra.

The last dims of every operand, its core, must be whole. The dims in front of them are the batch,
broadcast from the right; any of these may be sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwise.core.placements import REPLICATE, Partial, Placement, Shard
from shardwise.core.sizes import equal, equal_shapes
from shardwise.dispatch.notation import Group, averages_too, linear_choices, rule
from shardwise.dispatch.rule import Call, Choice, Rule, Table, TensorMeta, empty_safe, table

aten = torch.ops.aten

#: The number of core dims of each input and of each output.
Cores = tuple[Sequence[int], Sequence[int]]


def batched(
    *ops: Any,
    inputs: Sequence[int] = (2,),
    outputs: Sequence[int] = (2,),
    linear: Sequence[Group] = (),
    cores: Callable[[Call], Cores] | None = None,
    fails_on_empty: bool = False,
    columns: int | None = None,
) -> tuple[tuple[Any, ...], Rule]:
    """An entry of a table. `cores` computes the core dims if they depend on shapes.

    `columns` numbers the operand whose columns are right-hand sides: the first output is linear
    in it, column by column.
    """

    def choices(call: Call) -> Iterator[Choice]:
        local = empty_safe(call.op) if fails_on_empty else None
        for choice in batch_choices(call, *(cores(call) if cores else (inputs, outputs))):
            yield replace(choice, local=local) if choice.outputs[0].is_shard() else choice
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
    for dim in range(len(longest)):
        from_right = dim - len(longest)
        size = max((b[from_right] for b in batches if len(b) >= -from_right), default=1)
        found = [_place(b, from_right, size) for b in batches]
        places = [(i, p) for i, p in enumerate(found) if p is not None]
        for sizes in call.splits(places) if not equal(size, 1) else ():
            yield Choice(
                tuple(_sharded(p, sizes) for p in found),
                tuple(
                    _sharded(_place(_batch(meta, core), from_right, size), sizes)
                    for meta, core in zip(call.outputs, outputs, strict=False)
                ),
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


def _place(batch: tuple[Any, ...], from_right: int, size: Any) -> int | None:
    """The number of the dim in a batch; None if it is absent or broadcast."""
    at = len(batch) + from_right
    return at if at >= 0 and batch[at] == size else None


def _sharded(dim: int | None, sizes: tuple[int, ...] | None) -> Placement:
    return REPLICATE if dim is None else Shard(dim, sizes)


def _solve_cores(call: Call) -> Cores:
    """The right-hand side of a system may be a batch of vectors."""
    a, b = call.inputs[0], call.inputs[1]
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and equal_shapes(b.shape, a.shape[:-1]))
    return (2, 2 - vector), (2 - vector, 2, 1, 0)


def _check_choices(call: Call) -> Iterator[Choice]:
    """Every rank must see every failure, so that all raise."""
    yield Choice((REPLICATE,), ())


RULES: Table = table(
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
    ((aten._linalg_check_errors.default,), Rule(_check_choices, "replicated -> ")),
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
