"""Softmax over a whole dim, the losses built on it, and margin losses.

Cross entropy is decomposed above autograd into ops that have rules, so that a sharded batch stays
sharded; see Note [Above autograd].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shardwise._torch.dispatch import decompositions
from shardwise.core.placements import REPLICATE, SUM
from shardwise.core.sizes import Size, equal
from shardwise.core.untraced import SkipsNone
from shardwise.dispatch.catalog import in_order
from shardwise.dispatch.rule import (
    Call,
    Choice,
    LocalCall,
    Rule,
    Table,
    UnlessEmpty,
    linear_choices,
    rule,
    sharded_together,
    table,
    unless_empty,
)
from shardwise.dtensor.operands import class_losses
from shardwise.dtensor.tensor import run
from shardwise.errors import UnsupportedError
from shardwise.ops.operands import fake, read_from

aten = torch.ops.aten

_NONE, _MEAN, _SUM = 0, 1, 2


def nll(log_probs: torch.Tensor, target: torch.Tensor, ignore_index: int, dim: int) -> torch.Tensor:
    """Minus the log-probability of each target, 0 where it is ignored. Classes lie along `dim`."""
    if not target.dim():
        return nll(log_probs.unsqueeze(0), target.unsqueeze(0), ignore_index, 1).squeeze(0)
    # The kernel of one device checks the targets and raises its errors.
    rows, ids = log_probs.movedim(dim, -1).flatten(0, -2), target.flatten()
    # Not F.nll_loss: its fake implementation in the compiler loses the reduction.
    losses, _ = aten.nll_loss_forward.default(rows, ids, None, 0, ignore_index)
    return losses.view(target.shape)


def nll_grad(
    grad: torch.Tensor, target: torch.Tensor, ignore_index: int, dim: int, num_classes: int
) -> torch.Tensor:
    """The gradient of `nll` for the log-probabilities."""
    kept = target != ignore_index
    grad = torch.where(kept, -grad, 0.0).unsqueeze(dim)
    index = torch.where(kept, target, 0).unsqueeze(dim)
    zeros = grad.new_zeros((*target.shape[:dim], num_classes, *target.shape[dim:]))
    if num_classes == 0:
        return zeros  # every target was ignored
    return zeros.scatter(dim, index, grad)


def bce(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The binary cross entropy of each element; the kernel raises outside of [0, 1]."""
    return aten.binary_cross_entropy.default(x, target, None, 0)


def nll_loss_choices(call: Call) -> Iterator[Choice]:
    """Torch's own kernel. The batch may be sharded; a mean needs all of it."""
    yield call.replicated()
    reduction = call.argument("reduction")
    if reduction == _MEAN or call.inputs[0].ndim != 2:
        return
    others = (REPLICATE,) * (len(call.inputs) - 2)
    outputs = (0, REPLICATE) if reduction == _NONE else (SUM, SUM)
    yield from sharded_together(call, (0, 0, *others), outputs)


# -- cross entropy, above autograd -----------------------------------------------------------
class NLL(SkipsNone):
    @staticmethod
    def forward(ctx: Any, log_probs: Any, target: Any, ignore_index: int, dim: int) -> Any:
        ctx.save_for_backward(log_probs, target)
        ctx.options = (ignore_index, dim, log_probs.shape[dim])
        return run(nll, log_probs, target, ignore_index, dim)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        log_probs, target = ctx.saved_tensors
        if torch.is_grad_enabled():  # double backward
            found = NLLGrad.apply(grad, target, *ctx.options)
            return read_from(found, log_probs), None, None, None
        return run(nll_grad, grad, target, *ctx.options), None, None, None


class NLLGrad(SkipsNone):
    """The gradient of `NLL`, linear in `grad`; its own gradient is `NLL` again."""

    @staticmethod
    def forward(ctx: Any, grad: Any, target: Any, *options: int) -> Any:
        ctx.save_for_backward(target)
        ctx.options = options
        return run(nll_grad, grad, target, *options)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (target,) = ctx.saved_tensors
        ignore_index, dim, _ = ctx.options
        return NLL.apply(grad, target, ignore_index, dim), None, None, None, None


def cross_entropy(
    logits: Any,
    target: Any,
    weight: Any = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Cross entropy, decomposed into ops with rules."""
    options = (reduction, ignore_index, label_smoothing)
    _check_loss(aten.cross_entropy_loss.default, logits, target, weight, *options)
    log_probs = logits.log_softmax(_class_dim(logits))
    if target.is_floating_point():
        losses, count = _soft_losses(log_probs, target, weight, label_smoothing)
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
    """Cross entropy without the softmax."""
    _check_loss(aten.nll_loss_nd.default, log_probs, target, weight, reduction, ignore_index)
    if torch.is_autocast_enabled(log_probs.device.type):  # as torch's decomposition does
        log_probs, weight = _as_float(log_probs), _as_float(weight)
    return _reduced(*_losses(log_probs, target, weight, ignore_index, 0.0), reduction)


def _class_dim(scores: Any) -> int:
    return min(1, scores.dim() - 1)


def _by_class(weight: Any, log_probs: Any) -> Any:
    """The weights of classes, to be multiplied with log-probabilities."""
    return weight.view(-1, *(1,) * (log_probs.dim() - 1 - _class_dim(log_probs)))


def _as_float(x: Any) -> Any:
    return x if x is None or x.dtype == torch.float64 else x.float()


def _reduced(losses: Any, count: Any, reduction: int) -> Any:
    if reduction == _NONE:
        return losses
    total = losses.sum()
    return total / count if reduction == _MEAN else total


def _soft_losses(log_probs: Any, target: Any, weight: Any, smoothing: float) -> tuple[Any, Any]:
    """The loss of each sample for probabilities as target, and the divisor of a mean."""
    if smoothing:
        target = target * (1 - smoothing) + _share(smoothing, log_probs)
    terms = log_probs * target
    if weight is not None:
        terms = terms * _by_class(weight, log_probs)
    dim = _class_dim(log_probs)
    losses = -terms.sum(dim)
    return losses, losses.numel() if log_probs.shape[dim] else 0  # a mean over no class is NaN


def _losses(
    log_probs: Any, target: Any, weight: Any, ignore_index: int, smoothing: float
) -> tuple[Any, Any]:
    """The loss of each sample for classes as target, and the divisor of a mean."""
    if weight is not None and weight.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            "A loss of classes is not differentiable with respect to argument 'weight', as on one "
            "device: weight.detach() it, or give probabilities as the target of cross_entropy."
        )
    dim = _class_dim(log_probs)
    if log_probs.dim() == 3 or log_probs.dim() > 4:
        # One device copies what is not contiguous, so a later write to it is no error in backward.
        log_probs, target = log_probs.contiguous(), target.contiguous()
    losses = NLL.apply(log_probs, target, ignore_index, dim)
    kept = target != ignore_index
    count = kept.sum()
    if weight is not None:
        own = losses * 0  # without classes, every target is ignored
        if log_probs.shape[dim]:
            own = torch.where(kept, _rows(weight, torch.where(kept, target, 0)), 0.0)
        losses, count = losses * own, own.sum()
    if smoothing:
        spread = log_probs if weight is None else log_probs * _by_class(weight, log_probs)
        smooth = torch.where(kept, -spread.sum(dim), 0.0)
        losses = losses * (1 - smoothing) + smooth * _share(smoothing, log_probs)
    return losses, count


def _rows(weight: Any, target: Any) -> Any:
    """The weight of each target; a 0-dim index would be read as a number, which breaks graphs."""
    return weight[target] if target.dim() else weight[target.unsqueeze(0)].squeeze(0)


def _share(smoothing: float, log_probs: Any) -> float:
    """The probability that smoothing adds to each class."""
    return smoothing / max(log_probs.shape[_class_dim(log_probs)], 1)


def _check_loss(op: Any, scores: Any, target: Any, weight: Any, *options: Any) -> None:
    """If the arguments do not fit, torch raises, on fake tensors."""
    shape = tuple(scores.shape)
    classes = shape[min(1, len(shape) - 1)] if shape else None
    each = (*shape[:1], *shape[2:]) if len(shape) > 1 else ()
    fits = tuple(target.shape) == (shape if target.is_floating_point() else each)
    fits = fits and (weight is None or tuple(weight.shape) == (classes,))
    if fits and classes is not None and (len(options) < 3 or 0 <= options[2] <= 1):
        return
    op(fake(scores), fake(target), fake(weight), *options)


def _mean_loss_grad(op: Any, grad: torch.Tensor, x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The gradient of a mean; torch's decomposition divides by the number of elements, even 0."""
    return decompositions()[op](grad, x, *rest) if x.numel() else x * grad


def _binary_cross_entropy(
    x: Any, target: Any, weight: Any = None, reduction: int = 1
) -> torch.Tensor:
    """With the kernel of one device, which checks the values; torch's decomposition does not."""
    losses = type(x).__torch_dispatch__(bce, None, (x, target))
    losses = losses if weight is None else losses * weight
    return losses if reduction == 0 else losses.mean() if reduction == 1 else losses.sum()


# -- margin losses: samples may be sharded, classes are whole ------------------------------------


@dataclass(frozen=True, slots=True)
class OverAll:
    """This rank's term of a mean over all samples: its sum over the global count."""

    op: Any
    position: int
    count: Size

    def __call__(self, coordinate: Any, layouts: Any, *args: Any, **kwargs: Any) -> Any:
        here = in_order(self.op, args, kwargs)
        here[self.position] = _SUM
        results = UnlessEmpty(self.op)(coordinate, layouts, *here)
        first, *rest = results if isinstance(results, tuple) else (results,)
        return (first / self.count, *rest) if rest else first / self.count


def _margin_local(call: Call) -> LocalCall:
    names = [a.name for a in call.op._schema.arguments]
    if call.argument("reduction") != _MEAN:
        return unless_empty(call.op)
    samples = next(m for m in call.inputs if m.ndim == 2).shape[0]
    return LocalCall(OverAll(call.op, names.index("reduction"), samples), per_rank=True)


def margin_choices(call: Call) -> Iterator[Choice]:
    """Input and target, then class weights -> loss, and further results per sample."""
    yield call.replicated()
    if call.inputs[0].ndim != 2:
        return
    others = (REPLICATE,) * (len(call.inputs) - 2)
    loss = 0 if call.argument("reduction") == _NONE else SUM
    outputs = (loss, *[0] * (len(call.outputs) - 1))
    yield from sharded_together(call, (0, 0, *others), outputs, _margin_local(call))


def margin_grad_choices(call: Call) -> Iterator[Choice]:
    """Gradient, input, target, and further results per sample; class weights are whole."""
    yield call.replicated()
    yield from linear_choices(call, ((0,),))
    if call.inputs[1].ndim != 2:
        return
    samples = call.inputs[1].shape[0]
    inputs = [
        0 if name != "weight" and meta.ndim and equal(meta.shape[0], samples) else REPLICATE
        for name, meta in zip(call.tensor_names(), call.inputs, strict=True)
    ]
    yield from sharded_together(call, inputs, (0,), _margin_local(call))


RULES: Table = table(
    ((aten.nll_loss_forward.default,), Rule(nll_loss_choices, "n [c], n -> n, ")),
    rule(aten._softmax.default, aten._log_softmax.default, like="... [n] -> ... [n]", n="dim"),
    rule(
        aten._softmax_backward_data.default,
        aten._log_softmax_backward_data.default,
        like="... [n], ... [n] -> ... [n]",
        linear=((0,),),
        n="dim",
    ),
    rule(nll, like="... [c], ... -> ...", linear=((0,),), c="dim"),
    rule(bce, like="..., ... -> ..."),
    rule(nll_grad, like="..., ... -> ... [c]", linear=((0,),), c="dim"),
    (
        (aten.multi_margin_loss.default, aten.multilabel_margin_loss_forward.default),
        Rule(margin_choices, "n [c], n -> n"),
    ),
    (
        (
            aten.multi_margin_loss_backward.default,
            aten.multilabel_margin_loss_backward.default,
        ),
        Rule(margin_grad_choices, "n, n [c], n -> n [c]", shaped_like=1),
    ),
)

class_losses[nll] = "cross_entropy or nll_loss"

#: The inputs whose values the op may refuse; see `dispatch.local_call`.
REFUSED: dict[Any, slice] = {
    aten.nll_loss_forward.default: slice(1, 2),
    nll: slice(1, 2),
    bce: slice(0, 2),
    aten.multi_margin_loss.default: slice(1, 2),
    aten.multilabel_margin_loss_forward.default: slice(1, 2),
}

KERNELS: tuple[tuple[str, Any], ...] = (
    ("cross_entropy_loss", cross_entropy),
    ("nll_loss_nd", nll_loss),
)

#: Ops that torch does not decompose, or not for all sizes.
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.binary_cross_entropy.default: _binary_cross_entropy,
    **{
        op: functools.partial(_mean_loss_grad, op)
        for op in (
            aten.mse_loss_backward.default,
            aten.smooth_l1_loss_backward.default,
            aten.huber_loss_backward.default,
        )
    },
}
