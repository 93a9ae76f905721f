"""Matrix products and linear layers: rules, and kernels above autograd.

Torch would merge batch dims for a product of matrices, and a merged dim cannot stay sharded.
Backward would also not know the weight's layout. See Note [Above autograd].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.core.layout import Layout
from shardwise.core.placements import REPLICATE, SUM, Placement, Shard
from shardwise.core.sizes import Size
from shardwise.core.untraced import SkipsNone, UntracedFunction
from shardwise.dispatch.catalog import functional_twin
from shardwise.dispatch.rule import (
    Call,
    Choice,
    Dims,
    LocalCall,
    Rule,
    Table,
    TensorMeta,
    linear_choices,
    parse,
    pattern_choices,
    rule,
    sharded_choices,
    table,
)
from shardwise.dtensor.autograd import bare_apply, direct_apply, gradient_layout, gradient_layout_of
from shardwise.dtensor.snapshots import current
from shardwise.dtensor.tensor import DTensor, run
from shardwise.ops.math.einsum import Like, matmul_letters, product, spread
from shardwise.ops.operands import all_distributed, are_distributed, is_mergeable

aten = torch.ops.aten


def conjugate(x: Any) -> Any:
    """The conjugate, computed: inside an op the lazy conjugate bit is ignored."""
    return torch.conj_physical(x) if x.is_complex() else x


def linear_input_grad(grad: Any, weight: Any) -> Any:
    """The gradient of `linear(x, weight)` for `x`."""
    return grad @ (conjugate(weight) if weight.is_complex() else weight)


def linear_weight_grad(grad: Any, x: Any) -> Any:
    """The gradient of `linear(x, weight)` for `weight`."""
    matrix = _as_matrix(x)
    return torch.mm(_as_matrix(grad).t(), conjugate(matrix) if x.is_complex() else matrix)


def linear_bias_grad(grad: Any) -> Any:
    """The gradient of `linear(x, weight, bias)` for `bias`."""
    return _as_matrix(grad).sum(0)


def matmul_left_grad(grad: Any, right: Any) -> Any:
    """The gradient of `left @ right` for `left`, of the same batch dims."""
    return grad @ right.mT


def matmul_right_grad(left: Any, grad: Any) -> Any:
    """The gradient of `left @ right` for `right`, of the same batch dims."""
    return left.mT @ grad


def _as_matrix(x: Any) -> Any:
    # Not reshape(-1, n), which is ambiguous for an empty shard.
    if x.dim() == 2:
        return x
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


EACH = ((0,), (1,))


@dataclass(frozen=True, slots=True)
class AddedInFull:
    """The op, with the added tensor expanded to the shape of this rank's result."""

    op: Any

    def __call__(
        self, coordinate: Any, layouts: Sequence[Any], added: Any, *rest: Any, **named: Any
    ) -> Any:
        return self.op(added.expand(layouts[-1].local_shape(coordinate)), *rest, **named)


def adding(*ops: Any, product: str, guarded: bool = False) -> tuple[tuple[Any, ...], Rule]:
    """An entry of a table: a product plus the first operand, which is broadcast.

    A `guarded` op would give a product of empty shards the shape of the added tensor.
    """
    result = product.partition("->")[2].split()
    # By the number of dims that the added tensor has.
    patterns = {
        n: parse(f"{' '.join(result[len(result) - n :])}, {product}")
        for n in range(len(result) + 1)
    }

    def choices(call: Call) -> Iterator[Choice]:
        pattern = patterns[call.inputs[0].ndim]
        op = functional_twin(call.op) or call.op
        local = LocalCall(AddedInFull(op), per_rank=True) if guarded else None
        for choice in pattern_choices(pattern, call, linear=((0, 1), (0, 2)), added=(0,)):
            yield replace(choice, local=local)

    return ops, Rule(choices, f"{' '.join(result)}, {product}")


_LINEAR, _LINEAR_OF_VECTOR = parse("... k, n k, ... n -> ... n"), parse("... k, k, ... -> ...")


def linear_layer_choices(call: Call) -> Iterator[Choice]:
    """A linear layer; with a vector in place of the weight, one number per row."""
    pattern = _LINEAR if call.inputs[1].ndim > 1 else _LINEAR_OF_VECTOR
    yield from pattern_choices(pattern, call, linear=((0, 2), (1, 2)), added=(2,))


def trilinear_choices(call: Call) -> Iterator[Choice]:
    """A product of three tensors, each expanded along some dims, summed over others."""
    expanded = [call.argument(f"expand{i}") for i in (1, 2, 3)]
    summed = call.argument("sumdim")
    letters = [f"d{d}" for d in range(call.inputs[0].ndim + len(expanded[0]))]
    dims = Dims(
        tuple(
            tuple(letter for d, letter in enumerate(letters) if d not in without)
            for without in expanded
        ),
        (tuple(letter for d, letter in enumerate(letters) if d not in summed),),
    )
    yield call.replicated()
    yield from sharded_choices(call, dims, frozenset(), (), "sum")
    yield from linear_choices(call, ((0,), (1,), (2,)))


# -- matmul, above autograd ------------------------------------------------------------------

_matmul = aten.matmul.default


def matmul(left: Any, right: Any) -> Any:
    """`torch.matmul`, with a fast path for a batch of matrices times as many, or times one."""
    batched = type(left) is DTensor and type(right) is DTensor
    if batched:
        batch, others = left._layout.shape[:-2], right._layout.shape[:-2]
        if left.dim() == right.dim() == 2:
            return torch.mm(left, right)
        batched = left.dim() > 2 and (batch == others or right.dim() == 2)
    if not batched or left.dtype.is_complex:
        return _broadcast_matmul(left, right)
    if torch.is_grad_enabled() and (left.requires_grad or right.requires_grad):
        layout = left._layout
        if right.requires_grad and right.dim() == 2:
            left = left if layout.symbolic or is_mergeable(layout) else left.contiguous()
        return _apply_batched(left, right)
    return run(_matmul, left, right)


class BatchedMatmul(UntracedFunction):
    @staticmethod
    def forward(ctx: Any, left: Any, right: Any) -> Any:
        ctx.materialize_grads = False  # as in SkipsNone, without its call
        for_left, for_right = ctx.needs_input_grad
        ctx.save_for_backward(left if for_right else None, right if for_left else None)
        ctx.right_layout, ctx.num_dims = right._layout, left.dim()
        return run(_matmul, left, right)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return None, None
        left, right = ctx.saved_tensors
        for_left, for_right = ctx.needs_input_grad
        grad_left = grad_right = None
        if torch.is_grad_enabled():  # double backward
            if for_left:
                grad_left = grad @ right.mT
            if for_right:
                grad_right = (left.mT @ grad).sum_to_size(ctx.right_layout.shape)
            return grad_left, grad_right
        if for_left:
            grad_left = run(matmul_left_grad, grad, right)
        if for_right:
            alike = ctx.right_layout.ndim == ctx.num_dims
            op = matmul_right_grad if alike else linear_weight_grad
            grad_right = run(op, left, grad, preferred=gradient_layout(ctx.right_layout))
        return grad_left, grad_right


_apply_batched = direct_apply(BatchedMatmul)


def _broadcast_matmul(left: Any, right: Any) -> Any:
    if left.dim() == 1 and right.dim() == 2:
        # torch squeezes a product in place. A view would lose its hooks when it is written to.
        return torch.mv(right.t(), left)
    if max(left.dim(), right.dim()) <= 2:  # matrices or vectors: nothing is merged
        return _matmul.decompose(left, right)
    if not are_distributed(left, right):
        return matmul(*all_distributed(_matmul, (left, right)))
    if type(left) is not DTensor or type(right) is not DTensor or not (left.dim() and right.dim()):
        # The ordinary path raises for wrong shapes.
        return DTensor.__torch_dispatch__(_matmul, None, (left, right))
    if torch.is_grad_enabled() and (left.requires_grad or right.requires_grad):
        return _apply_product(left, right)
    return run(product, left, right)


class Product(SkipsNone):
    @staticmethod
    def forward(ctx: Any, left: Any, right: Any) -> Any:
        for_left, for_right = ctx.needs_input_grad
        ctx.save_for_backward(left if for_right else None, right if for_left else None)
        ctx.likes = (Like.of(left), Like.of(right))
        return run(product, left, right)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        left, right = ctx.saved_tensors
        for_left, for_right = ctx.needs_input_grad
        of_left, of_right = ctx.likes
        a, b, out = matmul_letters(of_left.shape, of_right.shape)
        return (
            spread(a, of_left, [out, b], [grad, right]) if for_left else None,
            spread(b, of_right, [out, a], [grad, left]) if for_right else None,
        )


_apply_product = direct_apply(Product)


# -- linear layers, above autograd -----------------------------------------------------------
class Linear(UntracedFunction):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any) -> Any:
        ctx.materialize_grads = False  # as in SkipsNone, without its call
        # Each is saved only for the other's gradient: a frozen layer keeps no activations.
        for_x, for_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if for_weight else None, weight if for_x else None)
        if not for_x:
            ctx.weight_layout = weight._layout
        if bias is not None:
            ctx.biased = x._layout, bias._layout  # for `retain_grad`
        return _linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return None, None, None
        for_x, for_weight, for_bias = ctx.needs_input_grad
        # If only the bias is trained, nothing is saved, and backward may run any number of times.
        saved: Any = ctx.saved_tensors if for_x or for_weight else (None, None)
        x, weight = saved
        grad_x = grad_weight = grad_bias = None
        again = torch.is_grad_enabled()  # double backward
        if for_x:
            if again and (grad.requires_grad or weight.requires_grad):
                grad_x = F.linear(grad, conjugate(weight.t()))
            else:
                grad_x = run(linear_input_grad, grad, weight)
        if for_weight:
            layout = weight._layout if for_x else ctx.weight_layout
            preferred = gradient_layout_of[layout.symbolic](layout)
            if again and (grad.requires_grad or x.requires_grad):
                grad_weight = LinearWeightGrad.apply(grad, x, preferred)
            else:
                grad_weight = run(linear_weight_grad, grad, x, preferred=preferred)
        if for_bias:
            if again:
                grad_bias = grad.sum(list(range(grad.dim() - 1))) if grad.dim() > 1 else grad
            else:
                grad_bias = run(linear_bias_grad, grad)
        return grad_x, grad_weight, grad_bias


class LinearWeightGrad(SkipsNone):
    @staticmethod
    def forward(ctx: Any, grad: Any, x: Any, preferred: Layout) -> Any:
        for_grad, for_x, _ = ctx.needs_input_grad
        ctx.save_for_backward(grad if for_x else None, x if for_grad else None)
        return run(linear_weight_grad, grad, x, preferred=preferred)

    @staticmethod
    def backward(ctx: Any, grad_weight: Any) -> Any:
        grad, x = ctx.saved_tensors
        of_grad = None if x is None else F.linear(x, grad_weight)
        of_x = None if grad is None else F.linear(grad, conjugate(grad_weight.t()))
        return of_grad, of_x, None


_apply_linear = bare_apply(Linear)


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    distributed = type(x) is DTensor and type(weight) is DTensor
    if not distributed or not (bias is None or type(bias) is DTensor) or not x._layout.shape:
        operands = (x, weight, bias)
        if not are_distributed(*operands):
            return linear(*all_distributed(aten.linear.default, operands))
        # The ordinary path raises for wrong shapes.
        return DTensor.__torch_dispatch__(aten.linear.default, None, operands)
    layout, of_weight = x._layout, weight._layout
    of_bias = of_weight if bias is None else bias._layout
    shape = of_weight.shape
    if len(shape) != 2 or (bias is not None and of_bias.shape != (shape[0],)):
        # A vector, or a broadcast bias: torch's decomposition, which also raises for wrong shapes.
        return aten.linear.default.decompose(x, weight, bias)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        if layout.snapshot or of_weight.snapshot or of_bias.snapshot:
            for operand in (x, weight, bias):
                if operand is not None:
                    current(operand)
        splits = len(layout.shape) > 2 and not (layout.symbolic or is_mergeable(layout))
        if splits and weight.requires_grad:
            out = _apply_linear(x.contiguous(), weight, bias)
            out.grad_fn.biased = None
            return out
        return _apply_linear(x, weight, bias)
    return _linear(x, weight, bias)


_LINEAR_OP = aten.linear.default


def _linear(x: Any, weight: Any, bias: Any) -> Any:
    operands = (x, weight) if bias is None else (x, weight, bias)
    return DTensor.__torch_dispatch__(_LINEAR_OP, None, operands)


# -- products of groups of rows, and of scaled float8 matrices -------------------------------
#
# Their kernels load 16 bytes at a time, so each rank's part of a sharded dim must be a multiple of
# 16 bytes.


_LOADED_BYTES = 16

#: By the dims of both operands: where a letter is in the first, in the second and in the result.
#: The groups are told apart by `offs` along the rows of a matrix, which cannot be sharded.
_GROUPED: dict[tuple[int, int], dict[str, tuple[int | None, int | None, int | None]]] = {
    (2, 3): {"k": (1, 1, None), "n": (None, 2, 1)},
    (3, 3): {"g": (0, 0, 0), "m": (1, None, 1), "k": (2, 1, None), "n": (None, 2, 2)},
    (2, 2): {"m": (0, None, 1), "n": (None, 1, 2)},
    (3, 2): {"m": (1, None, 0), "k": (2, 0, None)},
}


def grouped_choices(call: Call) -> Iterator[Choice]:
    """Each group is a product: its rows, its columns, or what is summed over may be sharded."""
    yield call.replicated()
    first, second = call.inputs[:2]
    if call.argument("bias") is not None:
        return
    rest = (REPLICATE,) * (len(call.inputs) - 2)  # where the groups begin
    for letter, dims in _GROUPED[first.ndim, second.ndim].items():
        places = [(number, dim) for number, dim in enumerate(dims[:2]) if dim is not None]
        if letter != "g" and not all(_fits(call, number, dim) for number, dim in places):
            continue
        found = [_sharded(dim) for dim in dims]
        out = SUM if dims[2] is None else found[2]
        yield Choice((found[0], found[1], *rest), (out,), even=tuple(places), alone=tuple(places))
    yield from linear_choices(call, ((0,), (1,)))


def scaled_choices(call: Call) -> Iterator[Choice]:
    """Scales are one number, or one for each row of the first operand and column of the second."""
    yield call.replicated()
    names = call.tensor_names()
    placed: dict[str, dict[str, Placement]] = {
        "m": {"self": Shard(0), "scale_a": Shard(0)},
        "n": {"mat2": Shard(1), "scale_b": Shard(1), "bias": Shard(0)},
        "k": {"self": Shard(1), "mat2": Shard(0)},
    }
    metas = dict(zip(names, call.inputs, strict=True))
    rows, columns = call.inputs[0].shape[0], call.inputs[1].shape[1]
    known = _is_scale(metas["scale_a"], (rows, 1)) and _is_scale(metas["scale_b"], (1, columns))
    if not known or "scale_result" in names:
        return
    wide = call.outputs[0].dtype.itemsize > 1
    results: dict[str, Placement] = {"m": Shard(0), "n": Shard(1), "k": SUM}
    for letter, out in results.items():
        if letter == "k" and ("bias" in names or not wide):
            continue
        inputs = tuple(
            REPLICATE if _is_number(metas[name]) else placed[letter].get(name, REPLICATE)
            for name in names
        )
        places = tuple((i, p.dim) for i, p in enumerate(inputs[:2]) if isinstance(p, Shard))
        if letter == "m" or all(_fits(call, number, dim) for number, dim in places):
            yield Choice(inputs, (out,), even=places, alone=places)


def _is_scale(meta: TensorMeta, shape: tuple[Size, ...]) -> bool:
    return _is_number(meta) or tuple(meta.shape) == shape


def _is_number(meta: TensorMeta) -> bool:
    return all(size == 1 for size in meta.shape)


def _fits(call: Call, number: int, dim: int) -> bool:
    size, itemsize = call.inputs[number].shape[dim], call.inputs[number].dtype.itemsize
    return type(size) is int and size % (call.axis_size * _LOADED_BYTES // itemsize) == 0


def _sharded(dim: int | None) -> Placement:
    return REPLICATE if dim is None else Shard(dim)


RULES: Table = table(
    rule(aten.mm.default, like="m k, k n -> m n", linear=EACH),
    adding(aten.addmm.default, product="m k, k n -> m n"),
    adding(aten.baddbmm.default, product="b m k, b k n -> b m n"),
    adding(aten.addbmm.default, product="b m k, b k n -> m n"),
    adding(aten.addmv.default, product="m k, k -> m", guarded=True),
    adding(aten.addr.default, product="m, n -> m n"),
    ((aten._trilinear.default,), Rule(trilinear_choices, "a k, k l n, b l -> a b n")),
    rule(aten.bmm.default, like="b m k, b k n -> b m n", linear=EACH),
    rule(matmul_left_grad, like="... m n, ... k n -> ... m k", linear=EACH),
    rule(matmul_right_grad, like="... m k, ... m n -> ... k n", linear=EACH),
    rule(aten.dot.default, aten.vdot.default, like="k, k -> ", linear=EACH),
    rule(aten.mv.default, like="m k, k -> m", linear=EACH),
    ((aten.linear.default,), Rule(linear_layer_choices, "... k, n k, n -> ... n")),
    rule(linear_input_grad, like="... n, n k -> ... k", linear=EACH),
    rule(linear_bias_grad, like="... n -> n", linear=((0,),)),
    rule(linear_weight_grad, like="... n, ... k -> n k", linear=EACH),
    ((aten._grouped_mm.default,), Rule(grouped_choices, "t k, g k n, [g] -> t n")),
    ((aten._scaled_mm.default,), Rule(scaled_choices, "m k, k n, m, n, n -> m n")),
)

KERNELS: tuple[tuple[str, Any], ...] = (
    ("matmul", matmul),
    ("linear", linear),
)
