"""Cross entropy over sharded classes: local computation, and layouts of targets and weights.

Note [Cross entropy by classes]
Every form of cross entropy is, for one token with logits x over classes c,

    sum over c of a_c * (log_sum_exp(x) - x_c)

with coefficients a: the class weight of the target; spread out by label smoothing; or the weighted
probabilities of a soft target. With the maximum m subtracted, a rank adds its classes to

    S = sum exp(x_c - m)      A = sum a_c      B = sum a_c * (x_c - m)

and the loss is A log S - B. So the ranks exchange one maximum and a few sums for each token,
never a logit. The gradient for x_c is A softmax(x)_c - a_c, which each rank computes locally.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.core.layout import Layout, contiguous_stride, make_layout
from shardwise.core.placements import REPLICATE, Partial, Placement, Shard
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import LayoutError, MixedTensorsError, UnsupportedError


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


def local_maximum(x: torch.Tensor, dim: int) -> torch.Tensor:
    x = accurate(x)
    if x.shape[dim] == 0:
        return x.new_full(x.sum(dim).shape, -torch.inf)
    return x.amax(dim)


def local_sums(
    terms: Terms,
    offset: int,
    x: torch.Tensor,
    maximum: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
) -> torch.Tensor:
    """The rows of `terms` over the classes of this rank, which start at `offset`."""
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


def local_gradient(
    terms: Terms,
    offset: int,
    grad: torch.Tensor,
    x: torch.Tensor,
    log_sum: torch.Tensor,
    total: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
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
    weight: torch.Tensor | None,
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
    index = target - offset
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
