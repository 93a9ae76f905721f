"""Samples of linear algebra, transforms, diagonals, searches, margin losses and ops that run whole.

Matrices are well-conditioned, so that a difference is a mistake and not rounding.
"""

import torch

from shardwise.dispatch.catalog import positional
from shardwise.testing import Sample

aten = torch.ops.aten
_generator = torch.Generator().manual_seed(1)


def t(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator)


def _square(*batch: int) -> torch.Tensor:
    return t(*batch, 3, 3) + 4 * torch.eye(3)


def _positive(*batch: int) -> torch.Tensor:
    root = _square(*batch)
    return root @ root.mT


def algebra_samples() -> list[Sample]:
    return [
        *_solvers(),
        *_factors(),
        *_distances(),
        *_transforms(),
        *_pads(),
        *_diagonals(),
        *_searches(),
        *_margins(),
        *_running_whole(),
        *_more_whole_dims(),
    ]


def _solvers() -> list[Sample]:
    a, b = _square(2, 5), t(2, 5, 3, 2)
    lu, pivots, _ = aten.linalg_lu_factor_ex.default(a)
    ld, ld_pivots, _ = aten.linalg_ldl_factor_ex.default(_positive(2, 5))
    triangle = a.triu()
    q, tau = aten.geqrf.default(t(2, 5, 3, 3))
    return [
        Sample(aten._linalg_solve_ex.default, (a, b)),
        Sample(aten._linalg_solve_ex.default, (a, t(2, 5, 3))),
        Sample(aten.linalg_lu_solve.default, (lu, pivots, b)),
        Sample(aten.linalg_lu_solve.default, (lu[0], pivots[0], t(2, 5, 3, 2))),
        Sample(aten.linalg_ldl_solve.default, (ld, ld_pivots, b)),
        Sample(aten.linalg_solve_triangular.default, (triangle, b), {"upper": True}),
        Sample(aten.triangular_solve.default, (b, triangle)),
        Sample(aten.cholesky_solve.default, (b, torch.linalg.cholesky(_positive(2, 5)))),
        Sample(aten.linalg_householder_product.default, (q, tau)),
        Sample(aten.ormqr.default, (q, tau, b)),
        Sample(aten.linalg_pinv.atol_rtol_tensor, (a,)),
        Sample(
            aten._linalg_check_errors.default, (torch.zeros(5).int(), "x"), {"is_matrix": False}
        ),
    ]


def _factors() -> list[Sample]:
    a, spd = _square(2, 5), _positive(2, 5)
    lu, pivots, _ = aten.linalg_lu_factor_ex.default(a)
    return [
        Sample(aten.cholesky.default, (spd,)),
        Sample(aten.cholesky_inverse.default, (torch.linalg.cholesky(spd),)),
        Sample(aten.linalg_cholesky_ex.default, (spd,)),
        Sample(aten.linalg_inv_ex.default, (a,)),
        Sample(aten.linalg_matrix_exp.default, (t(2, 5, 3, 3),)),
        Sample(aten._linalg_eigvals.default, (a,)),
        Sample(aten.linalg_eig.default, (a,)),
        Sample(aten._linalg_eigh.default, (spd,)),
        Sample(aten._linalg_svd.default, (t(2, 5, 3, 4),)),
        Sample(aten._linalg_svd.default, (t(2, 5, 3, 4), False, False)),
        Sample(aten.linalg_lu.default, (a,)),
        Sample(aten.linalg_lu_factor_ex.default, (a,)),
        Sample(aten.linalg_ldl_factor_ex.default, (spd,)),
        Sample(aten.lu_unpack.default, (lu, pivots)),
        Sample(aten._linalg_det.default, (a,)),
        Sample(aten._linalg_slogdet.default, (a,)),
        Sample(aten.linalg_qr.default, (t(2, 5, 4, 3),)),
    ]


def _distances() -> list[Sample]:
    x1, x2 = t(2, 5, 3), t(2, 4, 3)
    between = aten._cdist_forward.default(x1, x2, 2.0, None)
    return [
        Sample(aten.linalg_cross.default, (t(5, 3), t(5, 3))),
        Sample(aten.linalg_cross.default, (t(3, 4, 5), t(3, 1, 5)), {"dim": 0}),
        Sample(aten._cdist_forward.default, (x1, x2, 2.0, None)),
        Sample(aten._cdist_backward.default, (t(2, 5, 4), x1, x2, 2.0, between)),
        Sample(
            aten._trilinear.default, (t(5, 2), t(4, 2, 3), t(5, 3), [1, 3], [0], [1, 2], [2, 3])
        ),
    ]


def _transforms() -> list[Sample]:
    signal = t(2, 5, 6)
    spectrum = torch.complex(t(2, 5, 4), t(2, 5, 4))
    return [
        Sample(aten._fft_r2c.default, (signal, [2], 0, True)),
        Sample(aten._fft_r2c.default, (signal, [0, 2], 1, False)),
        Sample(aten._fft_c2r.default, (spectrum, [2], 2, 6)),
        Sample(aten._fft_c2c.default, (spectrum, [1], 0, True)),
        Sample(aten.view_as_real.default, (spectrum,)),
        Sample(aten.view.dtype, (t(5, 4), torch.int32)),
        Sample(aten.view.dtype, (t(5, 4), torch.int16)),
        Sample(aten.view.dtype, (t(5, 8), torch.float64)),
        Sample(aten.view_as_complex.default, (t(3, 5, 2),)),
        Sample(aten._conj.default, (spectrum,)),
        Sample(aten._conj_physical.default, (spectrum,)),
        Sample(aten._neg_view.default, (t(3, 5),)),
    ]


def _pads() -> list[Sample]:
    forward = {
        1: (aten.reflection_pad1d, aten.replication_pad1d),
        2: (aten.reflection_pad2d, aten.replication_pad2d),
        3: (aten.reflection_pad3d, aten.replication_pad3d),
    }
    backward = {
        1: (aten.reflection_pad1d_backward, aten.replication_pad1d_backward),
        2: (aten.reflection_pad2d_backward, aten.replication_pad2d_backward),
        3: (aten.reflection_pad3d_backward, aten.replication_pad3d_backward),
    }
    found = []
    for num, ops in forward.items():
        x, padding = t(5, 2, *range(3, 3 + num)), [1, 1, 0, 2, 1, 0][: 2 * num]
        padded = ops[0].default(x, padding)
        found += [Sample(op.default, (x, padding)) for op in ops]
        found += [Sample(op.default, (torch.ones_like(padded), x, padding)) for op in backward[num]]
    return found


def _diagonals() -> list[Sample]:
    cube = t(3, 5, 4)
    return [
        Sample(aten.diagonal.default, (cube,)),
        Sample(aten.diagonal.default, (cube, 1, 0, -1)),
        Sample(aten.diagonal.default, (cube, -2, 1, 2)),
        Sample(aten.diagonal_backward.default, (t(5, 3), [3, 5, 4], 0, 0, 2)),
        Sample(aten.diag_embed.default, (t(2, 5), 1)),
        Sample(aten.diag_embed.default, (t(2, 5), 0, 0, 2)),
        Sample(aten.unfold.default, (cube, 1, 2, 2)),
        Sample(aten.unfold_backward.default, (t(3, 2, 4, 2), [3, 5, 4], 1, 2, 2)),
    ]


def _searches() -> list[Sample]:
    edges = torch.tensor([-1.0, 0.0, 0.5, 2.0])
    rows = t(5, 4).sort().values
    order = torch.tensor([3, 1, 0, 2])
    return [
        Sample(aten.bucketize.Tensor, (t(3, 5), edges)),
        Sample(aten.searchsorted.Tensor, (edges, t(3, 5))),
        Sample(aten.searchsorted.Tensor, (rows, t(5, 3))),
        Sample(aten.searchsorted.Scalar, (edges, 0.3)),
        Sample(
            positional(aten.searchsorted.Tensor),
            (edges[order].clone(), t(5), False, False, None, order.argsort()),
        ),
        Sample(aten.isin.Tensor_Tensor, (torch.arange(10).view(2, 5), torch.tensor([8, 1, 4]))),
        Sample(aten.isin.Tensor_Scalar, (torch.arange(10).view(2, 5), 4)),
    ]


def _margins() -> list[Sample]:
    scores, target = t(5, 4), torch.tensor([0, 3, 1, 2, 2])
    labels = torch.tensor([[0, 2, -1, -1], [3, -1, -1, -1], [1, 0, 2, -1], [2, -1, 0, 1], [-1] * 4])
    many = aten.multilabel_margin_loss_forward.default
    return [
        *(
            Sample(aten.multi_margin_loss.default, (scores, target, 1, 1.0, weight, reduction))
            for weight in (None, torch.rand(4, generator=_generator))
            for reduction in (0, 1, 2)
        ),
        *(Sample(many, (scores, labels, reduction)) for reduction in (0, 1, 2)),
        *(
            Sample(
                aten.multi_margin_loss_backward.default,
                (t(5) if reduction == 0 else t(), scores, target, 1, 1.0, None, reduction),
            )
            for reduction in (0, 1, 2)
        ),
        *(
            Sample(
                aten.multilabel_margin_loss_backward.default,
                (grad, scores, labels, reduction, many(scores, labels, reduction)[1]),
            )
            for reduction, grad in ((0, t(5)), (1, t()), (2, t()))
        ),
    ]


def _running_whole() -> list[Sample]:
    points = t(4, 3)
    apart = aten._pdist_forward.default(points)
    data, lengths = t(5, 2), torch.tensor([2, 3])
    reduced = aten.segment_reduce.default(data, "sum", lengths=lengths)
    steps, labels = t(6, 2, 4).log_softmax(-1), torch.tensor([[1, 2, 3], [1, 1, 2]])
    lengths_in, lengths_out = torch.tensor([6, 6]), torch.tensor([3, 3])
    loss, alpha = aten._ctc_loss.Tensor(steps, labels, lengths_in, lengths_out)
    as_lists = (lengths_in.tolist(), lengths_out.tolist())
    return [
        Sample(aten._pdist_forward.default, (points,)),
        Sample(aten._pdist_backward.default, (t(6), points, 2.0, apart)),
        Sample(aten.histc.default, (t(5, 3), 4)),
        Sample(aten.histogram.bin_ct, (t(5, 3), 4)),
        Sample(aten.histogram.bins_tensor, (t(5, 3), torch.tensor([-2.0, 0.0, 2.0]))),
        Sample(aten._histogramdd_bin_edges.default, (t(5, 2), [2, 3])),
        Sample(aten._histogramdd_from_bin_cts.default, (t(5, 2), [2, 3])),
        Sample(
            aten._histogramdd_from_bin_tensors.default,
            (t(5, 2), [torch.tensor([-2.0, 0.0, 2.0]), torch.tensor([-1.0, 1.0])]),
        ),
        Sample(aten.linalg_lstsq.default, (t(5, 3), t(5, 2))),
        Sample(aten.geqrf.default, (t(2, 4, 3),)),
        Sample(
            positional(aten.segment_reduce.default),
            (data, "sum", lengths, None, None, 0, False, None),
        ),
        Sample(
            positional(aten._segment_reduce_backward.default),
            (t(2, 2), reduced, data, "sum", lengths, None, 0, None),
        ),
        Sample(aten._ctc_loss.default, (steps, labels, *as_lists)),
        Sample(aten._ctc_loss.Tensor, (steps, labels, lengths_in, lengths_out)),
        Sample(
            aten._ctc_loss_backward.default, (t(2), steps, labels, *as_lists, loss, alpha, 0, False)
        ),
        Sample(
            aten._ctc_loss_backward.Tensor,
            (t(2), steps, labels, lengths_in, lengths_out, loss, alpha, 0, False),
        ),
        Sample(aten.block_diag.default, ([t(2, 3), t(4, 1)],)),
    ]


def _more_whole_dims() -> list[Sample]:
    cube = t(2, 3, 5)
    # One entry decides for its row, in either half of the other dims; one row has none.
    flags = torch.zeros(2, 3, 5, dtype=torch.bool)
    flags[0, 0, 0] = flags[1, 1, 4] = True
    return [
        Sample(aten.sort.stable, (cube,), {"stable": True, "dim": 1}),
        Sample(aten.kthvalue.default, (cube, 2, 1)),
        Sample(aten.median.default, (t(5, 3),)),
        Sample(aten.median.dim, (cube, 1)),
        Sample(aten.nanmedian.default, (t(5, 3),)),
        Sample(aten.nanmedian.dim, (cube, -1, True)),
        Sample(aten.mode.default, (torch.tensor([[1.0, 2, 2], [3, 3, 1]]), 1)),
        Sample(aten.cummax.default, (cube, 1)),
        Sample(aten.cummin.default, (cube, 2)),
        Sample(aten.logcumsumexp.default, (cube, 1)),
        Sample(aten.var_mean.correction, (cube, [1])),
        Sample(aten.std_mean.correction, (cube, [0, 2]), {"keepdim": True}),
        Sample(aten.aminmax.default, (cube,), {"dim": 1}),
        Sample(aten.any.dims, (flags, [0, 2])),
        Sample(aten.all.dims, (~flags, [1], True)),
        Sample(aten.hash_tensor.default, (cube, [1])),
        Sample(aten.allclose.default, (cube, cube.clone())),
        Sample(aten.softshrink_backward.default, (t(4, 3), t(4, 3), 0.5)),
        Sample(aten.hardshrink_backward.default, (t(4, 3), t(4, 3), 0.5)),
    ]
