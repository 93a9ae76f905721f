"""Cross entropy on logits whose classes are sharded, without gathering them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shardwise.comm import collectives
from shardwise.comm.watch import because
from shardwise.core.layout import Layout, contiguous_stride, make_layout
from shardwise.core.mesh import Coordinate
from shardwise.core.placements import REPLICATE, Partial, Placement, Shard, short
from shardwise.core.untraced import UntracedFunction
from shardwise.dtensor.autograd import with_dtype
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import ArgumentError, LayoutError, MixedTensorsError, UnsupportedError
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
    if not 0 <= label_smoothing <= 1:
        raise LayoutError(f"label_smoothing is between 0 and 1, found {label_smoothing}.")
    logits = without_partials(logits)
    tokens = token_layout(logits._layout)
    soft = target.is_floating_point()
    check_target(logits, target, soft)
    placed = placed_target(target, logits._layout if soft else tokens)
    weights = None if weight is None else placed_weight(weight, logits._layout).to(tokens.dtype)
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
    """The loss of every token, and its weight in a mean."""

    @staticmethod
    def forward(
        ctx: Any, logits: Any, target: Any, weight: Any, terms: Terms
    ) -> tuple[DTensor, DTensor]:
        layout = logits._layout
        tokens = token_layout(layout)
        parts = [t._local for t in (target, weight) if t is not None]
        with because("parallel_cross_entropy", implicit=False):
            maximum = _mapped(layout, terms, local_maximum, logits._local)
            maximum = _all_reduced(maximum, "max", layout)
            sums = _mapped(layout, terms, local_sums, logits._local, maximum, *parts)
            sums = _all_reduced(sums, "sum", layout)
        found = _mapped(layout, terms, local_losses, maximum, sums, parts[0])
        losses, log_sum, total, counted = found
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
        sums = (log_sum, total)
        local = _mapped(
            layout, ctx.terms, local_gradient, grad._local, logits._local, *sums, *parts
        )
        return DTensor._wrap(local, layout), None, None, None


def _gradient_by_ops(
    terms: Terms, grad: Any, logits: Any, log_sum: Any, total: Any, target: Any, weight: Any
) -> Any:
    """`local_gradient` by ops that can be differentiated again."""
    layout, dim = logits._layout, terms.dim
    tokens = token_layout(layout)
    parts = [t._local for t in (target, weight) if t is not None]
    local = _mapped(layout, terms, local_coefficients, logits._local, *parts)
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


def _cross_entropy(
    input: DTensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """`parallel_cross_entropy` with the arguments of torch."""
    layout = input._layout
    if not class_axes(layout):
        raise LayoutError(
            "loss_parallel() is for logits that are sharded over their classes, dim "
            f"{class_dim(layout)}; found {short(layout.placements)}. Leave the context out: cross "
            "entropy takes such logits as they are."
        )
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


# An op, since the compiler would trace a Python function.
_library = torch.library.Library("shardwise", "FRAGMENT")
_library.define(
    "cross_entropy(Tensor input, Tensor target, Tensor? weight=None, bool? size_average=None, "
    "int ignore_index=-100, bool? reduce=None, str reduction='mean', "
    "float label_smoothing=0.0) -> Tensor"
)
_library.impl("cross_entropy", _cross_entropy, "CompositeImplicitAutograd")


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


# Note [Cross entropy by classes]
# Every form of cross entropy is, for one token with logits x over classes c,
#
#     sum over c of a_c * (log_sum_exp(x) - x_c)
#
# with coefficients a: the class weight of the target; spread out by label smoothing; or the
# weighted probabilities of a soft target. With the maximum m subtracted, a rank adds its classes to
#
#     S = sum exp(x_c - m)      A = sum a_c      B = sum a_c * (x_c - m)
#
# and the loss is A log S - B. So the ranks exchange one maximum and a few sums for each token,
# never a logit. The gradient for x_c is A softmax(x)_c - a_c, which each rank computes locally.
#
# The local functions below get the first class of a rank as `offset`, and the class weights in the
# dtype of the sums.


@dataclass(frozen=True, slots=True)
class Terms:
    """The constants of one call. `dim` is the dim of the classes."""

    dim: int
    num_classes: int
    ignore_index: int
    smoothing: float
    weighted: bool
    soft: bool

    @property
    def rows(self) -> tuple[str, ...]:
        """The sums that are exchanged; the others are constant. W is the weight of the target."""
        if self.soft:
            return ("S", "B", "A")
        if not self.weighted:
            return ("S", "B")
        return ("S", "B", "A", "W") if self.smoothing else ("S", "B", "A")

    def kept(self, target: torch.Tensor) -> torch.Tensor:
        return target != self.ignore_index


def accurate(x: torch.Tensor) -> torch.Tensor:
    """At least single precision, for sums over classes."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def local_maximum(terms: Terms, offset: int, x: torch.Tensor) -> torch.Tensor:
    x = accurate(x)
    if x.shape[terms.dim] == 0:
        return x.new_full(x.sum(terms.dim).shape, -torch.inf)
    return x.amax(terms.dim)


def local_sums(
    terms: Terms,
    offset: int,
    x: torch.Tensor,
    maximum: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """The rows of `terms` over the classes of this rank."""
    _check_classes(terms, target)
    dim = terms.dim
    shifted = accurate(x) - maximum.unsqueeze(dim)
    found = {"S": shifted.exp().sum(dim)}
    if terms.soft:
        spread = soft_coefficients(terms, target, weight, x.shape)
        found["A"], found["B"] = spread.sum(dim), (spread * shifted).sum(dim)
    else:
        index, owned = owned_classes(terms, offset, x, target)
        of_target = target_weight(index, owned, weight, shifted)
        chosen = shifted.gather(dim, index.unsqueeze(dim)).squeeze(dim) if x.shape[dim] else 0.0
        found["W"], found["A"] = of_target, of_target
        # Not a product: a class may be impossible, and 0 times minus infinity is not 0.
        found["B"] = torch.where(owned, of_target * chosen, 0.0)
        if terms.smoothing:
            each = shifted if weight is None else shifted * along(weight, dim, x.dim())
            rest = terms.smoothing / terms.num_classes
            found["B"] = (1 - terms.smoothing) * found["B"] + rest * each.sum(dim)
            if weight is not None:
                found["A"] = (1 - terms.smoothing) * of_target + rest * weight.sum()
    return torch.stack([found[row] for row in terms.rows])


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


def local_losses(
    terms: Terms, offset: int, maximum: torch.Tensor, sums: torch.Tensor, target: torch.Tensor
) -> Sequence[torch.Tensor]:
    """For each token: the loss, log_sum_exp, A, and its weight in a mean."""
    row = dict(zip(terms.rows, sums.unbind(0), strict=True))
    log_s = row["S"].log()
    total = row["A"] if "A" in row else torch.ones_like(log_s)
    losses = total * log_s - row["B"]
    counted = row.get("W", total)
    if not terms.soft:
        kept = terms.kept(target)
        losses, counted = torch.where(kept, losses, 0.0), torch.where(kept, counted, 0.0)
    return losses, maximum + log_s, total, counted


def local_gradient(
    terms: Terms,
    offset: int,
    grad: torch.Tensor,
    x: torch.Tensor,
    log_sum: torch.Tensor,
    total: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient for this rank's logits; `total` is A of the note."""
    dim = terms.dim
    grad = accurate(grad).unsqueeze(dim)
    if not terms.soft:
        grad = torch.where(terms.kept(target).unsqueeze(dim), grad, 0.0)
    result = (accurate(x) - log_sum.unsqueeze(dim)).exp_().mul_(grad * total.unsqueeze(dim))
    if terms.soft:
        return result.sub_(grad * soft_coefficients(terms, target, weight, x.shape)).to(x.dtype)
    if x.shape[dim]:
        index, owned = owned_classes(terms, offset, x, target)
        of_target = target_weight(index, owned, weight, result).unsqueeze(dim)
        result.scatter_add_(dim, index.unsqueeze(dim), -(1 - terms.smoothing) * of_target * grad)
    if terms.smoothing:
        rest = grad * (terms.smoothing / terms.num_classes)
        result.sub_(rest if weight is None else rest * along(weight, dim, x.dim()))
    return result.to(x.dtype)


def local_coefficients(
    terms: Terms,
    offset: int,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """a of the note for this rank's classes, 0 for tokens that are ignored."""
    dim = terms.dim
    if terms.soft:
        return soft_coefficients(terms, target, weight, x.shape).expand(x.shape)
    found = torch.zeros_like(accurate(x))
    if x.shape[dim]:
        index, owned = owned_classes(terms, offset, x, target)
        of_target = (1 - terms.smoothing) * target_weight(index, owned, weight, found)
        found.scatter_add_(dim, index.unsqueeze(dim), of_target.unsqueeze(dim))
    if terms.smoothing:
        rest = terms.smoothing / terms.num_classes
        found.add_(rest if weight is None else rest * along(weight, dim, x.dim()))
    return torch.where(terms.kept(target).unsqueeze(dim), found, 0.0)


def owned_classes(
    terms: Terms, offset: int, x: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each target as an index into this rank's classes, and whether it is one of them."""
    index = target.long() - offset
    owned = terms.kept(target) & (index >= 0) & (index < x.shape[terms.dim])
    return torch.where(owned, index, 0), owned


def target_weight(
    index: torch.Tensor, owned: torch.Tensor, weight: torch.Tensor | None, like: torch.Tensor
) -> torch.Tensor:
    """The weight of each target that this rank owns, 0 for the others."""
    if weight is None or weight.shape[0] == 0:
        return owned.to(like.dtype)
    return torch.where(owned, weight[index], 0.0)


def soft_coefficients(
    terms: Terms, target: torch.Tensor, weight: torch.Tensor | None, shape: torch.Size
) -> torch.Tensor:
    spread = accurate(target)
    if terms.smoothing:
        spread = spread * (1 - terms.smoothing) + terms.smoothing / terms.num_classes
    return spread if weight is None else spread * along(weight, terms.dim, len(shape))


def along(weight: torch.Tensor, dim: int, num_dims: int) -> torch.Tensor:
    """One number per class, shaped to broadcast with logits of `num_dims` dims."""
    return weight.view([-1 if d == dim else 1 for d in range(num_dims)])


def class_dim(layout: Layout) -> int:
    return 1 if layout.ndim > 1 else 0


def class_axes(layout: Layout) -> tuple[int, ...]:
    """The mesh axes that shard the classes."""
    return layout.axes_of(class_dim(layout))


def token_layout(layout: Layout) -> Layout:
    """The layout of one number per token: replicated over the axes that shard the classes.

    At least in single precision, until the loss is reduced.
    """
    dim = class_dim(layout)
    shape = (*layout.shape[:dim], *layout.shape[dim + 1 :])
    placements = tuple(_without_classes(p, dim) for p in layout.placements)
    dtype = torch.promote_types(layout.dtype, torch.float32)
    return make_layout(
        layout.grid, placements, shape, contiguous_stride(shape), dtype, layout.order
    )


def _without_classes(placement: Placement, dim: int) -> Placement:
    if not isinstance(placement, Shard):
        return placement
    if placement.dim == dim:
        return REPLICATE
    return Shard(placement.dim - (placement.dim > dim), placement.sizes)


def without_partials(logits: DTensor) -> DTensor:
    if not any(isinstance(p, Partial) for p in logits.placements):
        return logits
    placements = [REPLICATE if isinstance(p, Partial) else p for p in logits.placements]
    return logits.redistribute(placements=placements, order=logits._layout.order)


def check_target(logits: DTensor, target: torch.Tensor, soft: bool) -> None:
    layout = logits._layout
    tokens = token_layout(layout)
    if not isinstance(target, DTensor) and any(p.is_shard() for p in tokens.placements):
        raise MixedTensorsError(
            f"The logits' batch is sharded ({tokens!r}) and the target is a plain tensor. If it is "
            "this rank's shard, write DTensor.from_local(target, logits.device_mesh, "
            f"{list(tokens.placements)}); if it is whole, distribute_tensor with the same "
            "arguments."
        )
    expected = layout.shape if soft else tokens.shape
    if tuple(target.shape) != tuple(expected):
        raise LayoutError(
            f"Logits of shape {tuple(layout.shape)} need a target of shape {tuple(expected)}, "
            f"found {tuple(target.shape)}."
        )
    if target.requires_grad:
        raise UnsupportedError(
            "parallel_cross_entropy has no gradient for its target: detach() it."
        )


def placed_target(target: torch.Tensor, like: Layout) -> DTensor:
    if not isinstance(target, DTensor):
        whole = [REPLICATE] * like.grid.num_axes
        target = DTensor.from_local(target, like.grid.mesh, whole)
    return target.redistribute(placements=like.placements, order=like.order)


def placed_weight(weight: torch.Tensor, logits: Layout) -> DTensor:
    dim, grid = class_dim(logits), logits.grid
    if tuple(weight.shape) != (logits.shape[dim],):
        raise LayoutError(
            f"weight holds one number per class, {logits.shape[dim]}; found shape "
            f"{tuple(weight.shape)}."
        )
    if weight.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            "parallel_cross_entropy has no gradient for its weight: detach() it."
        )
    if not isinstance(weight, DTensor):
        weight = DTensor.from_local(weight, grid.mesh, [REPLICATE] * grid.num_axes)
    placements = [
        Shard(0, p.sizes) if isinstance(p, Shard) and p.dim == dim else REPLICATE
        for p in logits.placements
    ]
    return weight.redistribute(placements=placements, order=logits.order)
