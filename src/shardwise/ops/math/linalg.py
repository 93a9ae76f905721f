"""Linear algebra: a batch of matrices may be sharded, a matrix is whole."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardwise.core.placements import REPLICATE
from shardwise.core.sizes import equal_shapes
from shardwise.dispatch.notation import rule
from shardwise.dispatch.rule import Call, Choice, Rule, Table, table
from shardwise.ops.math.batched import Cores, batched

aten = torch.ops.aten


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
