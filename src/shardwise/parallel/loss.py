"""Cross entropy on logits whose classes are sharded, without gathering them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shardwise.comm import collectives
from shardwise.comm.watch import because
from shardwise.core.layout import Layout
from shardwise.core.mesh import Coordinate
from shardwise.core.placements import short
from shardwise.core.untraced import UntracedFunction
from shardwise.dtensor.autograd import with_dtype
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import ArgumentError, LayoutError
from shardwise.parallel.vocab_loss import (
    Terms,
    accurate,
    check_target,
    class_axes,
    class_dim,
    local_coefficients,
    local_gradient,
    local_maximum,
    local_sums,
    placed_target,
    placed_weight,
    token_layout,
    without_partials,
)
from shardwise.simulation.ranks import each_rank

_REDUCTIONS = ("none", "mean", "sum")


def parallel_cross_entropy(
    logits: DTensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> DTensor:
    """`F.cross_entropy` for a DTensor of logits, sharded over its classes or not.

    The ranks exchange one maximum and two to four sums for each token; backward exchanges nothing.
    A plain `target` or `weight` must be equal on every rank.

    >>> import shardwise, torch
    >>> from shardwise.parallel import parallel_cross_entropy
    >>> logits, target = torch.randn(3, 10), torch.tensor([1, 9, 4])
    >>> expected = torch.nn.functional.cross_entropy(logits, target)
    >>> with shardwise.simulate(4):
    ...     mesh = shardwise.init_device_mesh("cpu", (4,))
    ...     sharded = shardwise.distribute_tensor(logits, mesh, [shardwise.Shard(1)])
    ...     loss = parallel_cross_entropy(sharded, target)
    ...     torch.testing.assert_close(loss.full_tensor().agreed(), expected)
    """
    if not isinstance(logits, DTensor):
        raise ArgumentError(
            f"parallel_cross_entropy takes a DTensor of logits, found {type(logits).__name__}. Use "
            "F.cross_entropy for plain tensors, or keep the head's output distributed: "
            "ColwiseParallel(use_local_output=False)."
        )
    if reduction not in _REDUCTIONS:
        raise LayoutError(f"reduction={reduction!r} is not one of {', '.join(_REDUCTIONS)}.")
    logits = without_partials(logits)
    tokens = token_layout(logits._layout)
    soft = target.is_floating_point()
    check_target(logits, target, soft)
    placed = placed_target(target, logits._layout if soft else tokens)
    weights = None if weight is None else placed_weight(weight, logits._layout)
    terms = Terms(
        dim=class_dim(logits._layout),
        num_classes=logits.shape[class_dim(logits._layout)],
        ignore_index=ignore_index,
        smoothing=label_smoothing,
        weighted=weight is not None,
        soft=soft,
    )
    losses, counted = ClassShardedLoss.apply(logits, placed, weights, terms)
    return _reduced(losses, counted, reduction, soft).to(logits.dtype)


def _reduced(losses: DTensor, counted: DTensor, reduction: str, soft: bool) -> Any:
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    return total / (losses.numel() if soft else counted.sum())


class ClassShardedLoss(UntracedFunction):
    """The loss of every token, and the weight with which it counts in a mean."""

    @staticmethod
    def forward(
        ctx: Any, logits: Any, target: Any, weight: Any, terms: Terms
    ) -> tuple[DTensor, DTensor]:
        layout = logits._layout
        tokens = token_layout(layout)
        parts = [t._local for t in (target, weight) if t is not None]
        with because("parallel_cross_entropy", implicit=False):
            maximum = _all_reduced(_mapped(layout, terms, _maximum, logits._local), "max", layout)
            sums = _mapped(layout, terms, _sums, logits._local, maximum, *parts)
            sums = _all_reduced(sums, "sum", layout)
        losses, log_sum, total, counted = _mapped(layout, terms, _losses, maximum, sums, parts[0])
        ctx.save_for_backward(logits, log_sum, total, target, weight)
        ctx.terms = terms
        out = DTensor._wrap(losses, tokens), DTensor._wrap(counted, tokens)
        ctx.mark_non_differentiable(out[1])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any, _: Any) -> Any:
        logits, log_sum, total, target, weight = ctx.saved_tensors
        layout = logits._layout
        tokens = token_layout(layout)
        grad = grad.redistribute(placements=tokens.placements, order=tokens.order)
        if torch.is_grad_enabled():
            found = _gradient_by_ops(ctx.terms, grad, logits, log_sum, total, target, weight)
            return found, None, None, None
        parts = [t._local for t in (target, weight) if t is not None]
        local = _mapped(
            layout, ctx.terms, _gradient, grad._local, logits._local, log_sum, total, *parts
        )
        return DTensor._wrap(local, layout), None, None, None


def _gradient_by_ops(
    terms: Terms, grad: Any, logits: Any, log_sum: Any, total: Any, target: Any, weight: Any
) -> Any:
    """`local_gradient` by ops that can be differentiated again."""
    layout, dim = logits._layout, terms.dim
    tokens = token_layout(layout)
    parts = [t._local for t in (target, weight) if t is not None]
    local = _mapped(layout, terms, _coefficients, logits._local, *parts)
    coefficients = DTensor._wrap(local, with_dtype(layout, tokens.dtype))
    shift, scale = (DTensor._wrap(t, tokens).unsqueeze(dim) for t in (log_sum, total))
    # The shift is a constant; the quotient does not depend on it.
    powers = (logits.to(tokens.dtype) - shift).exp()
    softmax = powers / powers.sum(dim, keepdim=True)
    if not terms.soft:
        grad = torch.where(terms.kept(target), grad, 0.0)
    return (grad.unsqueeze(dim) * (scale * softmax - coefficients)).to(logits.dtype)


def _mapped(layout: Layout, terms: Terms, fn: Any, *tensors: torch.Tensor) -> Any:
    """`fn(terms, number of the first class here, *tensors)` on every rank present."""

    def here(coordinate: Coordinate, *parts: torch.Tensor) -> Any:
        return fn(terms, layout.box(coordinate)[0][terms.dim], *parts)

    return each_rank(layout.grid, here, *tensors, axes=class_axes(layout))


def _all_reduced(local: torch.Tensor, reduce_op: str, layout: Layout) -> torch.Tensor:
    for axis in class_axes(layout):
        local = collectives.all_reduce(local, reduce_op, layout.grid, axis)
    return local


def _maximum(terms: Terms, _: int, x: torch.Tensor) -> torch.Tensor:
    return local_maximum(x, terms.dim)


def _sums(
    terms: Terms, offset: int, x: Any, maximum: Any, target: Any, weight: Any = None
) -> torch.Tensor:
    _check_classes(terms, target)
    weight = None if weight is None else weight.to(maximum.dtype)
    return local_sums(terms, offset, x, maximum, target, weight)


def _check_classes(terms: Terms, target: torch.Tensor) -> None:
    """A class out of range raises as on one device; every rank has the same targets."""
    if terms.soft or type(target) is not torch.Tensor or target.is_cuda:
        return
    kept = target[terms.kept(target)]
    if kept.numel() and not 0 <= int(kept.min()) <= int(kept.max()) < terms.num_classes:
        raise IndexError(
            f"Targets run from {int(kept.min())} to {int(kept.max())}, but there are "
            f"{terms.num_classes} classes; only ignore_index={terms.ignore_index} may lie outside."
        )


def _losses(
    terms: Terms, _: int, maximum: torch.Tensor, sums: torch.Tensor, target: torch.Tensor
) -> Sequence[torch.Tensor]:
    row = dict(zip(terms.rows, sums.unbind(0), strict=True))
    log_s = row["S"].log()
    total = row["A"] if "A" in row else torch.ones_like(log_s)
    losses = total * log_s - row["B"]
    counted = row.get("W", total)
    if not terms.soft:
        kept = terms.kept(target)
        losses, counted = torch.where(kept, losses, 0.0), torch.where(kept, counted, 0.0)
    return losses, maximum + log_s, total, counted


def _gradient(
    terms: Terms,
    offset: int,
    grad: torch.Tensor,
    x: torch.Tensor,
    log_sum: torch.Tensor,
    total: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    weight = None if weight is None else weight.to(log_sum.dtype)
    return local_gradient(terms, offset, grad, x, log_sum, total, target, weight)


def _coefficients(
    terms: Terms, offset: int, x: torch.Tensor, target: torch.Tensor, weight: Any = None
) -> torch.Tensor:
    weight = None if weight is None else accurate(weight)
    return local_coefficients(terms, offset, x, target, weight)


class _ClassSharded(TorchFunctionMode):
    """Handles `F.cross_entropy` of class-sharded logits; passes everything else on."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy and args and isinstance(args[0], DTensor):
            if torch.compiler.is_dynamo_compiling():
                return torch.ops.shardwise.cross_entropy(*args, **kwargs)
            return _cross_entropy(*args, **kwargs)
        if func is torch.Tensor.unflatten:
            func = torch.unflatten  # the method calls `super()`, which the compiler cannot follow
        return func(*args, **kwargs)


def _cross_entropy(input: DTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    layout = input._layout
    if not class_axes(layout):
        raise LayoutError(
            "loss_parallel() is for logits that are sharded over their classes, dim "
            f"{class_dim(layout)}; found {short(layout.placements)}. Leave the context out: cross "
            "entropy takes such logits as they are."
        )
    return _as_torch_calls_it(input, *args, **kwargs)


# An op, since the compiler would trace a Python function.
_library = torch.library.Library("shardwise", "FRAGMENT")
_library.define(
    "cross_entropy(Tensor input, Tensor target, Tensor? weight=None, bool? size_average=None, "
    "int ignore_index=-100, bool? reduce=None, str reduction='mean', "
    "float label_smoothing=0.0) -> Tensor"
)
_library.impl("cross_entropy", _cross_entropy, "CompositeImplicitAutograd")


def _as_torch_calls_it(
    input: DTensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> DTensor:
    if size_average is not None or reduce is not None:
        raise ArgumentError(
            "Inside loss_parallel(), say reduction=... for size_average and reduce."
        )
    return parallel_cross_entropy(
        input,
        target,
        weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


@contextlib.contextmanager
def loss_parallel() -> Iterator[None]:
    """Inside, cross entropy of logits sharded over their classes does not gather them.

    Covers `F.cross_entropy` and `nn.CrossEntropyLoss`; backward may run inside or outside. Logits
    whose classes are not sharded are refused, as by torch. See `parallel_cross_entropy` for what
    is communicated.

    >>> import shardwise, torch
    >>> from shardwise.debug import CommDebugMode
    >>> from shardwise.parallel import loss_parallel
    >>> with shardwise.simulate(4):
    ...     mesh = shardwise.init_device_mesh("cpu", (4,))
    ...     logits = shardwise.randn(
    ...         6, 100, device_mesh=mesh, placements=[shardwise.Shard(1)], requires_grad=True
    ...     )
    ...     with loss_parallel(), CommDebugMode() as comm:
    ...         torch.nn.functional.cross_entropy(logits, torch.arange(6)).backward()
    >>> sum(event.num_bytes for event in comm.events)       # three floats for each of six tokens
    72
    """
    with _ClassSharded():
        yield
