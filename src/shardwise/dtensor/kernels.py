"""The short list of ops that are handled above autograd; see Note [Above autograd].

Each has an autograd function that knows the layouts of the forward pass when it runs backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from shardwise.core.layout import Layout
from shardwise.core.untraced import untraced
from shardwise.dtensor import attention, composites, norms, products, recurrent
from shardwise.dtensor.autograd import direct_apply, gradient_layout
from shardwise.dtensor.bags import embedding_bag
from shardwise.dtensor.row_sparse import RowSparse
from shardwise.dtensor.tensor import DTensor, run
from shardwise.errors import MixedTensorsError, UnsupportedError
from shardwise.rules.ids import has_values
from shardwise.rules.loss import nll, nll_grad
from shardwise.rules.matmul import (
    linear_bias_grad,
    linear_input_grad,
    linear_weight_grad,
    matmul_left_grad,
    matmul_right_grad,
)
from shardwise.rules.random import rrelu_slopes
from shardwise.rules.routed import Parcel, both_sharded, returned_grad, routed_lookup
from shardwise.rules.row_sparse import sparse_grad

aten = torch.ops.aten
_table_lookup = aten.embedding.default
_table_grad = aten.embedding_dense_backward.default


def _needs_grad(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


# -- embedding -------------------------------------------------------------------------------


class Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Any, ids: Any, options: tuple[int, bool, bool]) -> Any:
        rows, routing = _look_up(weight, ids)
        ctx.save_for_backward(ids)
        by_freq = options[1]
        ctx.plan = (gradient_layout(weight._layout), options, None if by_freq else routing)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (ids,) = ctx.saved_tensors
        layout, (padding_idx, by_freq, sparse), routing = ctx.plan
        num_rows = layout.shape[0]
        if torch.is_grad_enabled() and not sparse:  # double backward
            found = LookupGrad.apply(grad, ids, layout, padding_idx, by_freq)
        elif routing is not None:
            parcel = Parcel(routing)
            found = run(
                returned_grad, grad, ids, num_rows, padding_idx, sparse, parcel, wish=layout
            )
            parcel.routing = None
        elif sparse:
            found = run(sparse_grad, grad, ids, num_rows, padding_idx, by_freq, wish=layout)
        else:
            found = run(_table_grad, grad, ids, num_rows, padding_idx, by_freq, wish=layout)
        return RowSparse.of(*found) if sparse else found, None, None


def _look_up(weight: Any, ids: Any) -> tuple[Any, Any]:
    """The rows, and the routing where ids were exchanged."""
    if both_sharded(weight._layout, ids._layout):
        return run(routed_lookup, weight, ids, not has_values(ids._local))
    return run(_table_lookup, weight, ids), None


class LookupGrad(torch.autograd.Function):
    """The gradient of a table, itself differentiable for the gradient that it is made of."""

    @staticmethod
    def forward(
        ctx: Any, grad: Any, ids: Any, layout: Layout, padding_idx: int, by_freq: bool
    ) -> Any:
        ctx.save_for_backward(ids)
        ctx.options = (padding_idx, by_freq)
        return run(_table_grad, grad, ids, layout.shape[0], padding_idx, by_freq, wish=layout)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (ids,) = ctx.saved_tensors
        padding_idx, by_freq = ctx.options
        if by_freq:
            raise UnsupportedError(
                "The second derivative of an embedding with scale_grad_by_freq is not supported."
            )
        rows = embedding(grad, ids)
        if padding_idx >= 0:
            rows = rows * (ids != padding_idx).unsqueeze(-1)
        return rows, None, None, None, None


_apply_lookup = direct_apply(Lookup)


def embedding(
    weight: Any,
    ids: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if type(weight) is not DTensor or type(ids) is not DTensor:
        weight, ids = _both_distributed(aten.embedding.default, weight, ids)
    if sparse and not has_values(ids._local):
        raise UnsupportedError(
            "aten.embedding.default does not have a sharding strategy registered for sparse=True "
            "in compiled code: how many rows have a gradient depends on the ids. Without "
            "fullgraph=True the graph breaks here and the lookup runs as it is; or use "
            "sparse=False."
        )
    if weight.requires_grad and torch.is_grad_enabled():
        return _apply_lookup(weight, ids, (int(padding_idx), scale_grad_by_freq, sparse))
    return _look_up(weight, ids)[0]


def _both_distributed(op: Any, weight: Any, ids: Any) -> tuple[Any, Any]:
    for name, tensor in (("weight", weight), ("input", ids)):
        if not isinstance(tensor, DTensor):
            raise MixedTensorsError(
                f"{op}: {name} is a plain {type(tensor).__name__} of shape {tuple(tensor.shape)}, "
                "the other operand a DTensor. Wrap it: DTensor.from_local(x, mesh, [Replicate()]) "
                "where each rank holds the same values."
            )
    return weight, ids


# -- linear ----------------------------------------------------------------------------------


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return _linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        again = torch.is_grad_enabled()  # double backward
        if for_x:
            if again and _needs_grad(grad, weight):
                grad_x = F.linear(grad, weight.t())
            else:
                grad_x = run(linear_input_grad, grad, weight)
        if for_weight:
            wish = gradient_layout(weight._layout)
            if again and _needs_grad(grad, x):
                grad_weight = LinearWeightGrad.apply(grad, x, wish)
            else:
                grad_weight = run(linear_weight_grad, grad, x, wish=wish)
        if for_bias:
            if again:
                grad_bias = grad.sum(list(range(grad.dim() - 1))) if grad.dim() > 1 else grad
            else:
                grad_bias = run(linear_bias_grad, grad)
        return grad_x, grad_weight, grad_bias


class LinearWeightGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Any, x: Any, wish: Layout) -> Any:
        ctx.save_for_backward(grad, x)
        return run(linear_weight_grad, grad, x, wish=wish)

    @staticmethod
    def backward(ctx: Any, grad_weight: Any) -> Any:
        grad, x = ctx.saved_tensors
        return F.linear(x, grad_weight), F.linear(grad, grad_weight.t()), None


_apply_linear = direct_apply(Linear)


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    distributed = type(x) is DTensor and type(weight) is DTensor
    if not distributed or not (bias is None or type(bias) is DTensor) or not x._layout.shape:
        # The ordinary path says which operand is plain, or what is wrong with the shapes.
        return DTensor.__torch_dispatch__(aten.linear.default, None, (x, weight, bias))
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return _apply_linear(x, weight, bias)
    return _linear(x, weight, bias)


def _linear(x: Any, weight: Any, bias: Any) -> Any:
    op = aten.linear.default
    return run(op, x, weight) if bias is None else run(op, x, weight, bias)


# -- matmul ----------------------------------------------------------------------------------


class Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Any, right: Any) -> Any:
        ctx.save_for_backward(left, right)
        return run(_matmul, left, right)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        left, right = ctx.saved_tensors
        for_left, for_right = ctx.needs_input_grad
        grad_left = grad_right = None
        if torch.is_grad_enabled():  # double backward
            if for_left:
                grad_left = grad @ right.mT
            if for_right:
                grad_right = (left.mT @ grad).sum_to_size(right.shape)
            return grad_left, grad_right
        if for_left:
            grad_left = run(matmul_left_grad, grad, right)
        if for_right:
            op = matmul_right_grad if right.dim() == left.dim() else linear_weight_grad
            grad_right = run(op, left, grad, wish=gradient_layout(right._layout))
        return grad_left, grad_right


_matmul = aten.matmul.default
_apply_matmul = direct_apply(Matmul)


def matmul(left: Any, right: Any) -> Any:
    """A batched product as one op: torch would fold the batch dims, which cannot stay sharded."""
    whole = type(left) is DTensor and type(right) is DTensor and left.dim() > 2
    if whole:
        batch, others = left._layout.shape[:-2], right._layout.shape[:-2]
        whole = batch == others or right.dim() == 2
    if not whole or left.dtype.is_complex:
        return products.matmul(left, right)
    if torch.is_grad_enabled() and (left.requires_grad or right.requires_grad):
        return _apply_matmul(left, right)
    return run(_matmul, left, right)


# -- cross entropy ---------------------------------------------------------------------------


class NLL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_probs: Any, target: Any, ignore_index: int) -> Any:
        ctx.save_for_backward(target)
        ctx.options = (ignore_index, log_probs.shape[-1])
        return run(nll, log_probs, target, ignore_index)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (target,) = ctx.saved_tensors
        return run(nll_grad, grad, target, *ctx.options), None, None


_NONE, _MEAN = 0, 1


def cross_entropy(
    logits: Any,
    target: Any,
    weight: Any = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Cross entropy out of ops that each have a rule, so that a sharded batch stays sharded."""
    options = (reduction, ignore_index, label_smoothing)
    _check_loss(aten.cross_entropy_loss.default, logits, target, weight, *options)
    classes_last = logits.movedim(1, -1) if logits.dim() > 1 else logits
    log_probs = classes_last.log_softmax(-1)
    if target.is_floating_point():
        soft = target.movedim(1, -1) if target.dim() > 1 else target
        losses, count = _soft_losses(log_probs, soft, weight, label_smoothing)
    else:
        losses, count = _losses(log_probs, target, weight, ignore_index, label_smoothing)
    return _reduced(losses, count, reduction)


def nll_loss(
    log_probs: Any,
    target: Any,
    weight: Any = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
) -> Any:
    """Cross entropy without its softmax."""
    _check_loss(aten.nll_loss_nd.default, log_probs, target, weight, reduction, ignore_index)
    classes_last = log_probs.movedim(1, -1) if log_probs.dim() > 1 else log_probs
    return _reduced(*_losses(classes_last, target, weight, ignore_index, 0.0), reduction)


def _reduced(losses: Any, count: Any, reduction: int) -> Any:
    if reduction == _NONE:
        return losses
    total = losses.sum()
    return total / count if reduction == _MEAN else total


def _soft_losses(log_probs: Any, target: Any, weight: Any, smoothing: float) -> tuple[Any, Any]:
    """The loss of each sample for probabilities as target, and what a mean divides by."""
    if smoothing:
        target = target * (1 - smoothing) + smoothing / log_probs.shape[-1]
    terms = log_probs * target
    if weight is not None:
        terms = terms * weight
    losses = -terms.sum(-1)
    return losses, max(losses.numel(), 1)


def _losses(
    log_probs: Any, target: Any, weight: Any, ignore_index: int, smoothing: float
) -> tuple[Any, Any]:
    """The loss of each sample for classes as target, and what a mean divides by."""
    losses = NLL.apply(log_probs, target, ignore_index)
    kept = target != ignore_index
    count = kept.sum()
    if weight is not None:
        own = torch.where(kept, weight.detach()[torch.where(kept, target, 0)], 0.0)
        losses, count = losses * own, own.sum()
    if smoothing:
        spread = log_probs if weight is None else log_probs * weight
        smooth = torch.where(kept, -spread.sum(-1), 0.0)
        losses = losses * (1 - smoothing) + smooth * (smoothing / log_probs.shape[-1])
    return losses, count


def _check_loss(op: Any, scores: Any, target: Any, weight: Any, *options: Any) -> None:
    """Where the arguments do not fit, torch says so, on tensors without data."""
    shape = tuple(scores.shape)
    classes = shape[min(1, len(shape) - 1)] if shape else None
    each = (*shape[:1], *shape[2:]) if len(shape) > 1 else ()
    fits = tuple(target.shape) == (shape if target.is_floating_point() else each)
    fits = fits and (weight is None or tuple(weight.shape) == (classes,))
    if fits and classes is not None and (len(options) < 3 or 0 <= options[2] <= 1):
        return
    hollow = [
        t if t is None else torch.empty(t.shape, dtype=t.dtype, device="meta")
        for t in (scores, target, weight)
    ]
    op(*hollow, *options)


# -- rrelu -----------------------------------------------------------------------------------


def rrelu(
    x: Any,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Any:
    """Not torch's own: that one writes the slopes to a second tensor besides its result."""
    slopes = _slopes(x, lower, upper, training, generator)
    return F.leaky_relu(x, (lower + upper) / 2) if slopes is None else x * slopes


def rrelu_(
    x: Any,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Any:
    slopes = _slopes(x, lower, upper, training, generator)
    return F.leaky_relu_(x, (lower + upper) / 2) if slopes is None else x.mul_(slopes)


def _slopes(x: Any, lower: float, upper: float, training: bool, generator: Any) -> Any:
    if not lower <= upper:
        torch.rrelu(torch.empty(0), lower, upper, training)  # torch says what is wrong
    return run(rrelu_slopes, x.detach(), lower, upper, generator) if training else None


# -- registration ----------------------------------------------------------------------------

_library = torch.library.Library("aten", "IMPL")
_any_library = torch.library.Library("_", "IMPL")


def register() -> None:
    """Give torch these kernels for DTensors alone: no other tensor has the dispatch key."""
    kernels: tuple[tuple[str, Any], ...] = (
        ("embedding", embedding),
        ("embedding_bag", embedding_bag),
        ("embedding_bag.padding_idx", embedding_bag),
        ("linear", linear),
        ("matmul", matmul),
        ("cross_entropy_loss", cross_entropy),
        ("rrelu", rrelu),
        ("rrelu_", rrelu_),
        ("nll_loss_nd", nll_loss),
        *norms.KERNELS,
        *products.KERNELS,
        *recurrent.KERNELS,
        *attention.KERNELS,
    )
    for name, kernel in kernels:
        _library.impl(name, untraced(kernel), "AutogradPrivateUse3")
    composites.register(_library)
    # Ops of other libraries know nothing of the key: they go on to the device's autograd.
    _any_library.fallback(torch.library.fallthrough_kernel, "AutogradPrivateUse3")
