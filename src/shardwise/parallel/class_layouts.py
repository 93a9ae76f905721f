"""How targets and class weights have to lie to meet logits that are sharded over their classes."""

from __future__ import annotations

import torch

from shardwise.core.layout import Layout, contiguous_stride, make_layout
from shardwise.core.placements import REPLICATE, Partial, Placement, Shard
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import LayoutError, MixedTensorsError, UnsupportedError


def class_dim(layout: Layout) -> int:
    return 1 if layout.ndim > 1 else 0


def class_axes(layout: Layout) -> tuple[int, ...]:
    """The mesh axes that shard the classes."""
    return layout.axes_of(class_dim(layout))


def token_layout(layout: Layout) -> Layout:
    """Where one number per token lies: whole over the axes that shard the classes.

    At least in single precision, until the loss is done.
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
    expected = layout.shape if soft else token_layout(layout).shape
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
        if any(p.is_shard() for p in _batch_placements(like, target)):
            raise MixedTensorsError(
                f"The logits' batch is sharded ({like!r}) and the target is a plain tensor. Lay it "
                "out likewise: distribute_tensor(target, mesh, placements), or DTensor.from_local "
                "where each rank holds its own part."
            )
        whole = [REPLICATE] * like.grid.num_axes
        target = DTensor.from_local(target, like.grid.mesh, whole)
    return target.redistribute(placements=like.placements, order=like.order)


def _batch_placements(like: Layout, target: torch.Tensor) -> tuple[Placement, ...]:
    """The placements of the batch: those of a soft target without its classes."""
    if not target.is_floating_point():
        return like.placements
    return token_layout(like).placements


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
