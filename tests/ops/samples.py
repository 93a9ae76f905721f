"""One or more calls of every op that has a rule: what the rule checks play.

Sizes are small, and no two dims of a tensor are equal where a mistake could hide behind that.
"""

import torch
from samples_algebra import algebra_samples
from samples_image import IMAGE_KERNELS, image_samples
from samples_indexing import indexing_samples
from samples_norm import norm_samples
from samples_product import product_samples
from samples_recurrent import RECURRENT_KERNELS, recurrent_samples

from shardwise import Replicate, Shard
from shardwise.dispatch.catalog import positional
from shardwise.ops import random
from shardwise.ops.lookup import embedding, rank_bags, rules
from shardwise.ops.math import matmul
from shardwise.ops.nn import loss, norm
from shardwise.testing import Sample

aten = torch.ops.aten
_generator = torch.Generator().manual_seed(0)


def t(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator)


x, y = t(4, 6), t(4, 6)
# Id 5 stands twice, in another row and another column.
ids = torch.tensor([[5, 0, 2], [4, 1, 5]])
classes = torch.tensor([1, -100, 3, 5])
any_table = (Shard(0), Shard(1), Replicate())


def samples() -> list[Sample]:
    return [
        *_pointwise(),
        *_matmul(),
        *_reduce(),
        *_views(),
        *_join(),
        *_create(),
        *_loss(),
        *_norm(),
        *_attention(),
        *_embedding(),
        *_bags(),
        *_whole(),
        *algebra_samples(),
        *_random(),
        *image_samples(),
        *indexing_samples(),
        *norm_samples(),
        *product_samples(),
        *recurrent_samples(),
    ]


def _pointwise() -> list[Sample]:
    binary = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
    unary = (aten.neg.default, aten.clone.default, aten.positive.default)
    complex_x = torch.complex(x, y)
    return [
        *(Sample(op, (x, y)) for op in binary),
        *(Sample(op, (x, t(6))) for op in binary),
        *(Sample(op, (t(4, 1), x)) for op in binary),
        *(Sample(op, (x, 1.5)) for op in binary),
        *(Sample(op, (x, torch.tensor(1.5))) for op in binary),
        *(Sample(op, (x,)) for op in unary),
        Sample(aten.add.Tensor, (x, y), {"alpha": 2.0}),
        Sample(aten.mul.Scalar, (x, 2.0)),
        Sample(aten.div.Scalar, (x, 2.0)),
        Sample(aten._to_copy.default, (x,), {"dtype": torch.float64}),
        Sample(aten._to_copy.default, (x,), {"dtype": torch.float16}),
        Sample(aten._to_copy.default, (x,), {"dtype": torch.int32}),
        Sample(aten.copy.default, (x, y)),
        Sample(aten.copy.default, (x, t(6))),
        Sample(aten.zero.default, (x,)),
        Sample(aten.fill.Scalar, (x, 2.0)),
        Sample(aten.fill.Tensor, (x, torch.tensor(2.0))),
        Sample(aten.real.default, (complex_x,)),
        Sample(aten.imag.default, (complex_x,)),
    ]


def _matmul() -> list[Sample]:
    return [
        Sample(aten.mm.default, (x, t(6, 5))),
        Sample(aten.addmm.default, (t(5), x, t(6, 5))),
        Sample(aten.addmm.default, (t(4, 5), x, t(6, 5)), {"beta": 0.5, "alpha": 2.0}),
        Sample(aten.addmm.default, (t(4, 1), x, t(6, 5))),
        Sample(aten.addmm.default, (t(), x, t(6, 5))),
        Sample(aten.bmm.default, (t(4, 3, 5), t(4, 5, 2))),
        Sample(aten.matmul.default, (t(4, 2, 3, 5), t(4, 2, 5, 2))),
        Sample(aten.matmul.default, (t(4, 3, 5), t(5, 2))),
        Sample(matmul.matmul_left_grad, (t(4, 2, 3, 5), t(4, 2, 6, 5))),
        Sample(matmul.matmul_left_grad, (t(4, 3, 5), t(6, 5))),
        Sample(matmul.matmul_right_grad, (t(4, 2, 3, 5), t(4, 2, 3, 6))),
        Sample(aten.dot.default, (t(5), t(5))),
        Sample(aten.mv.default, (x, t(6))),
        Sample(aten.linear.default, (t(3, 4, 6), t(5, 6), t(5))),
        Sample(aten.linear.default, (t(4, 6), t(5, 6))),
        Sample(aten.linear.default, (t(6), t(5, 6))),
        Sample(matmul.linear_input_grad, (t(3, 4, 5), t(5, 6))),
        Sample(matmul.linear_input_grad, (t(5), t(5, 6))),
        Sample(matmul.linear_weight_grad, (t(3, 4, 5), t(3, 4, 6))),
        Sample(matmul.linear_weight_grad, (t(5), t(6))),
        Sample(matmul.linear_bias_grad, (t(3, 4, 5),)),
        Sample(matmul.linear_bias_grad, (t(5),)),
    ]


def _reduce() -> list[Sample]:
    return [
        Sample(aten.sum.default, (x,)),
        Sample(aten.sum.dim_IntList, (x, [0])),
        Sample(aten.sum.dim_IntList, (t(2, 3, 5), [0, -1], True)),
        Sample(aten.sum.dim_IntList, (x, [])),
        Sample(aten.sum.default, (torch.arange(5),)),
        Sample(aten.mean.default, (x,)),
        *(
            Sample(aten.linalg_vector_norm.default, (t(5, 3), order, *rest))
            for order in (2, 1.0, 3.5, 0, float("inf"), -1, float("-inf"))
            for rest in ((), ([1],), ([-2], True))
        ),
        Sample(aten.linalg_vector_norm.default, (t(5),), {"dtype": torch.float64}),
        Sample(aten.linalg_vector_norm.default, (x.abs(),)),  # norms of parts, their norm
        Sample(aten.mean.dim, (x, [0])),
        Sample(aten.mean.dim, (t(2, 3, 5), [1, -1], True)),
        Sample(aten._local_scalar_dense.default, (torch.tensor(3.0),)),
        Sample(aten.is_nonzero.default, (torch.tensor(3.0),)),
        Sample(aten.equal.default, (x, x.clone())),
    ]


def _views() -> list[Sample]:
    return [
        Sample(aten.view.default, (x, [24])),
        Sample(aten.view.default, (x, [2, 2, 6])),
        Sample(aten.view.default, (x, [4, 2, 3])),
        Sample(aten.view.default, (x, [-1, 3])),
        Sample(aten.view.default, (t(5, 4), [20])),
        Sample(aten.view.default, (t(20), [5, 4])),
        Sample(aten.view.default, (t(1, 5, 1), [5])),
        Sample(aten.view.default, (t(2, 3, 4, 5), [6, 20])),
        Sample(aten.view.default, (t(0, 4), [0, 2, 2])),
        Sample(aten._unsafe_view.default, (x, [2, 12])),
        Sample(aten.t.default, (x,)),
        Sample(aten.t.default, (t(5),)),
        Sample(aten.numpy_T.default, (x,)),
        Sample(aten.transpose.int, (t(2, 3, 4), 0, -1)),
        Sample(aten.permute.default, (t(2, 3, 4), [2, 0, -2])),
        Sample(aten.unsqueeze.default, (x, 1)),
        Sample(aten.unsqueeze.default, (x, -1)),
        Sample(aten.squeeze.default, (t(2, 1, 3),)),
        Sample(aten.squeeze.dim, (t(2, 1, 3), 0)),
        Sample(aten.squeeze.dim, (t(2, 1, 3), -2)),
        Sample(aten.squeeze.dims, (t(2, 1, 3, 1), [0, 1])),
        Sample(aten.expand.default, (t(1, 3), [4, 3])),
        Sample(aten.expand.default, (t(3), [4, -1])),
        Sample(aten.select.int, (x, 0, 1)),
        Sample(aten.select.int, (x, 1, -1)),
        Sample(aten.slice.Tensor, (x, 0, 1, 3)),
        Sample(aten.slice.Tensor, (x, 1, 0, 6, 2)),
        Sample(aten.slice.Tensor, (x, 0, 0, 4)),
        Sample(aten.slice.Tensor, (t(7, 5), 0, -5, 100, 3)),
        Sample(aten.detach.default, (x,)),
        Sample(aten.alias.default, (x,)),
    ]


def _join() -> list[Sample]:
    return [
        Sample(aten.cat.default, ([x, t(3, 6)],)),
        Sample(aten.cat.default, ([x, t(4, 2), t(4, 3)], -1)),
        Sample(aten.stack.default, ([x, y],)),
        Sample(aten.stack.default, ([x, y], -1)),
        Sample(aten.stack.default, ([t(5).abs(), t(5).abs()],)),  # may be norms of parts
        Sample(aten.split.Tensor, (x, 4, 1)),
        Sample(aten.split_with_sizes.default, (t(7, 3), [1, 4, 2])),
        Sample(aten.unbind.int, (t(3, 5),)),
        Sample(aten.slice_backward.default, (t(3, 5), [7, 5], 0, 1, 6, 2)),
        Sample(aten.select_backward.default, (t(6), [4, 6], 0, 2)),
    ]


def _norm() -> list[Sample]:
    batch, weight, bias = t(2, 3, 4), t(4), t(4)
    _, mean, deviation = aten.native_layer_norm.default(batch, [4], weight, bias, 1e-5)
    grad = aten.native_layer_norm_backward.default
    return [
        Sample(aten.native_layer_norm.default, (batch, [4], weight, bias, 1e-5)),
        Sample(aten.native_layer_norm.default, (batch, [3, 4], None, None, 1e-5)),
        Sample(grad, (t(2, 3, 4), batch, [4], mean, deviation, weight, bias, [True, True, True])),
    ]


def _attention() -> list[Sample]:
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    q, k, v = t(2, 4, 5, 8), t(2, 4, 6, 8), t(2, 4, 6, 8)
    out, logsumexp = forward(q, k, v)
    grad = t(2, 4, 5, 8)
    return [
        Sample(forward, (q, k, v)),
        Sample(forward, (q, q, q, 0.0, True)),
        Sample(forward, (q, k, v), {"attn_mask": None, "scale": 0.3}),
        Sample(backward, (grad, q, k, v, out, logsumexp, 0.0, False)),
        Sample(aten._fused_sdp_choice.default, (q, k, v)),
        *_masked_attention(q, k, v, grad),
    ]


def _masked_attention(q, k, v, grad) -> list[Sample]:
    forward = positional(aten._scaled_dot_product_flash_attention_for_cpu.default)
    backward = positional(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
    found = []
    for mask in (t(5, 6), t(1, 4, 5, 6), t(2, 1, 5, 6)):
        out, logsumexp = forward(q, k, v, 0.0, False, mask, None)
        found += [
            Sample(forward, (q, k, v, 0.0, False, mask, None)),
            Sample(backward, (grad, q, k, v, out, logsumexp, 0.0, False, mask, None)),
        ]
    return found


def _create() -> list[Sample]:
    return [
        Sample(aten.zeros_like.default, (x,)),
        Sample(aten.ones_like.default, (x,)),
        Sample(aten.full_like.default, (x, 2.0)),
        Sample(aten.new_zeros.default, (x, [4, 6])),
        Sample(aten.new_ones.default, (x, [3])),
        Sample(aten.new_full.default, (x, [4, 6], 2.0)),
    ]


def _loss() -> list[Sample]:
    return [
        Sample(aten._softmax.default, (x, -1, False)),
        Sample(aten._log_softmax.default, (t(2, 3, 4), 1, False)),
        Sample(aten._softmax_backward_data.default, (x, y, 1, torch.float32)),
        Sample(aten._log_softmax_backward_data.default, (x, y, 0, torch.float32)),
        Sample(aten.nll_loss_forward.default, (x, classes, None, 1, -100)),
        Sample(aten.nll_loss_forward.default, (x, classes, t(6), 2, -100)),
        Sample(loss.nll, (x, classes, -100, 1)),
        Sample(loss.nll, (t(4, 6, 3), torch.arange(12).view(4, 3) % 6, -100, 1)),
        Sample(aten.complex.default, (x, y)),
        Sample(aten.polar.default, (x, y)),
        Sample(loss.bce, (x.sigmoid(), y.sigmoid())),
        Sample(loss.nll_grad, (t(4), classes, -100, 1, 6)),
        Sample(loss.nll_grad, (t(4, 3), torch.arange(12).view(4, 3) % 6, -100, 1, 6)),
    ]


def _embedding() -> list[Sample]:
    rows = t(2, 3, 4)
    return [
        Sample(aten.embedding.default, (t(7, 4), ids)),
        Sample(aten.embedding.default, (t(7, 4), ids[0, 0])),
        Sample(
            aten.embedding_dense_backward.default, (rows, ids, 7, -1, False), preferred=any_table
        ),
        Sample(
            aten.embedding_dense_backward.default, (rows, ids, 7, 5, False), preferred=any_table
        ),
        Sample(aten.embedding_dense_backward.default, (rows, ids, 7, 2, True), preferred=any_table),
        Sample(aten.embedding_renorm_.default, (t(7, 4), ids, 1.5, 2.0)),
        Sample(embedding.routed_lookup, (t(7, 4), ids)),
        Sample(embedding.routed_lookup, (t(7, 4), ids[0, 0])),
        Sample(rules.sparse_grad, (rows, ids, None, None, -1, 7, 0, False), preferred=any_table),
        Sample(rules.sparse_grad, (rows, ids, None, None, 5, 7, 0, False), preferred=any_table),
        Sample(rules.sparse_grad, (rows, ids, None, None, 2, 7, 0, True), preferred=any_table),
    ]


def _bags() -> list[Sample]:
    # Three bags of two, one of them of one id; and ragged ones, two of them empty.
    square = torch.tensor([[5, 0], [2, 2], [3, 1]])
    ragged, offsets = torch.tensor([5, 0, 2, 2, 5, 1, 3]), torch.tensor([0, 2, 2, 6, 7, 7])
    weight = t(7, 4)
    samples = []
    for i, o in ((square, None), (ragged, offsets)):
        num_bags = 3 if o is None else 5
        for mode in (rank_bags.MODE_SUM, rank_bags.MODE_MEAN):
            for padding_idx in (-1, 5):
                samples.append(Sample(rank_bags.pooled, (weight, i, o, None, padding_idx, mode)))
                options = (padding_idx, 7, mode, padding_idx < 0)
                grad = (t(num_bags, 4), i, o, None, *options)
                samples.append(Sample(rank_bags.pooled_grad, grad, preferred=any_table))
        weights, up = t(*i.shape), t(num_bags, 4)
        samples += [
            Sample(rank_bags.pooled, (weight, i, o, weights, 2, rank_bags.MODE_SUM)),
            Sample(
                rank_bags.pooled_grad,
                (up, i, o, weights, 2, 7, rank_bags.MODE_SUM, False),
                preferred=any_table,
            ),
            Sample(
                rules.sparse_grad,
                (up, i, o, weights, -1, 7, rank_bags.MODE_SUM, False),
                preferred=any_table,
            ),
            Sample(rank_bags.sample_grad, (up, i, o, None, 2, weight)),
            Sample(rules.largest, (weight, i, o, -1)),
            Sample(rules.largest, (weight, i, o, 5)),
            Sample(
                rules.largest_grad,
                (up, torch.randint(-1, 7, (num_bags, 4), generator=_generator), 7),
                preferred=any_table,
            ),
        ]
    return samples


def _whole() -> list[Sample]:
    cube = t(2, 3, 5)
    # Rows and columns of which one half decides, in either half, and of which none does.
    flags = torch.tensor(
        [[1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0]]
    ).bool()
    one = torch.zeros(4, 6, dtype=torch.bool)
    one[0, 0] = True
    return [
        Sample(aten.amax.default, (cube, [1])),
        Sample(aten.amin.default, (cube, [0, 2], True)),
        Sample(aten.max.default, (x,)),
        Sample(aten.min.default, (x,)),
        Sample(aten.max.dim, (cube, 1)),
        Sample(aten.min.dim, (cube, -1, True)),
        Sample(aten.argmax.default, (cube, 1)),
        Sample(aten.argmin.default, (x,)),
        Sample(aten.var.correction, (cube, [1])),
        Sample(aten.std.correction, (cube, [-1]), {"correction": 0, "keepdim": True}),
        Sample(aten.logsumexp.default, (cube, [1])),
        Sample(aten.prod.default, (x,)),
        Sample(aten.prod.dim_int, (cube, 1)),
        Sample(aten.any.default, (one,)),
        Sample(aten.any.dim, (flags, 1)),
        Sample(aten.all.default, (~one,)),
        Sample(aten.all.dim, (flags, 0, True)),
        Sample(aten.sort.default, (cube, 1)),
        Sample(aten.topk.default, (cube, 2, 1)),
        Sample(aten.cumprod.default, (cube, 1)),
        Sample(aten.cumsum.default, (cube, -1)),
        Sample(aten.flip.default, (cube, [0, 2])),
        Sample(aten.roll.default, (cube, [1], [1])),
        Sample(aten.roll.default, (x, [1])),
        Sample(aten.tril.default, (cube,)),
        Sample(aten.triu.default, (x, 1)),
        Sample(aten.constant_pad_nd.default, (cube, [1, 0, 0, 0, 2, 1], 0.5)),
    ]


def _random() -> list[Sample]:
    by_name = (
        "uniform.default",
        "normal_functional.default",
        "normal_.default",
        "exponential.default",
        "cauchy.default",
        "log_normal.default",
        "random.default",
        "rand_like.default",
        "randn_like.default",
    )
    named = [getattr(getattr(aten, n), o) for n, o in (each.split(".") for each in by_name)]
    chances = t(4, 6).sigmoid()
    samples = [
        *(Sample(op, (t(4, 6),)) for op in named),
        *(Sample(op, (t(5, 3, 7).transpose(0, 2),)) for op in named),
        Sample(aten.bernoulli_.float, (t(4, 6), 0.3)),
        Sample(aten.bernoulli.p, (t(4, 6), 0.3)),
        Sample(aten.geometric.default, (t(4, 6), 0.3)),
        Sample(aten.random.to, (t(4, 6), 9)),
        Sample(getattr(aten.random, "from"), (t(4, 6), 2, 9)),
        Sample(aten.randint_like.default, (t(4, 6), 9), {"dtype": torch.int64}),
        Sample(aten.randint_like.low_dtype, (t(4, 6), 2, 9)),
        Sample(aten.bernoulli.default, (chances,)),
        Sample(aten.bernoulli.Tensor, (t(4, 6), chances)),
        Sample(aten.normal.Tensor_float, (x, 2.0)),
        Sample(aten.normal.float_Tensor, (2.0, chances)),
        Sample(aten.normal.Tensor_Tensor, (t(6), chances)),
        Sample(aten.native_dropout.default, (x, 0.3, True)),
        Sample(aten.native_dropout.default, (x, 0.3, False)),
        Sample(aten.poisson.default, (chances,)),
        Sample(aten._standard_gamma.default, (chances,)),
        Sample(aten._standard_gamma_grad.default, (chances, 1 + chances)),
        Sample(aten._sample_dirichlet.default, (chances,)),
        Sample(aten._dirichlet_grad.default, (chances, 1 + chances, 6 + chances)),
        Sample(aten.binomial.default, (t(4, 6).abs().ceil(), chances)),
        Sample(aten.multinomial.default, (chances, 3)),
        Sample(random.rrelu_slopes, (x, 0.1, 0.3)),
    ]
    for packet, overload, args in (
        (aten.rand_like, "generator", ()),
        (aten.randn_like, "generator", ()),
        (aten.randint_like, "generator", (9,)),
        (aten.randint_like, "low_generator_dtype", (2, 9)),
    ):
        if hasattr(packet, overload):  # newer torch
            op = getattr(packet, overload)
            samples.append(Sample(op, (t(4, 6), *args), {"generator": None}))
    return samples


#: Ops whose results have no values to compare.
WITHOUT_VALUES = {
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}

#: Kernels that crash on operands that do not fit together: nothing can be tried out on them.
UNCHECKED_KERNELS = {
    aten._segment_reduce_backward.default,
    aten.linalg_ldl_solve.default,
    aten.linalg_lu_solve.default,
    aten.lu_unpack.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    *IMAGE_KERNELS,
    *RECURRENT_KERNELS,
}

#: What is right for the few entries that these samples pick need not be right for others.
BY_CHANCE = {
    aten.index_put.default,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.scatter_reduce.two,
    aten.index_fill.int_Scalar,
    aten.index_fill.int_Tensor,
    aten.masked_scatter.default,
    aten.masked_fill.Tensor,
    aten.as_strided_scatter.default,
}

#: Kernels that need a GPU: tests/ops/test_gpu_rules.py has their samples.
ON_GPU = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._fused_rms_norm_backward.default,
}

#: Of float8, which has no arithmetic to compare with: see tests/dtensor/test_float8.py.
OF_FLOAT8 = {aten._scaled_mm.default}

#: A hook for other devices, which torch has no kernel for.
NOT_IN_TORCH = {
    aten._scaled_dot_product_fused_attention_overrideable.default,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default,
}

#: Choices with Partial operands that are right and would never be taken: a norm's parameters and
#: class weights are not Partial, torch's own loss runs in inference mode alone, and a distance is
#: linear in two points that are both Partial only where all its results are known.
NEVER_TAKEN = {
    aten._cdist_backward.default,
    aten.multi_margin_loss.default,
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten.nll_loss_forward.default,
    aten.native_group_norm.default,
    aten.native_group_norm_backward.default,
    aten.native_batch_norm.default,
    aten.native_batch_norm_backward.default,
    aten._fused_rms_norm.default,
    norm.through_statistics,
}
