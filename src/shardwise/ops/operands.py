"""Helpers for the operands of kernels above autograd."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.core.layout import Layout
from shardwise.core.placements import REPLICATE
from shardwise.core.untraced import SkipsNone
from shardwise.core.world import world_caches
from shardwise.dtensor.operands import check_plain
from shardwise.dtensor.tensor import DTensor


def all_distributed(op: Any, operands: Sequence[Any]) -> list[Any]:
    """`operands` with replicated tensors in place of plain ones, differentiable.

    Raises for a plain tensor that may differ between ranks.
    """
    like = next(x for x in operands if isinstance(x, DTensor))
    found = []
    for position, x in enumerate(operands):
        if isinstance(x, torch.Tensor) and not isinstance(x, DTensor):
            check_plain(op, x, position)
            x = replicated(x, like)
        found.append(x)
    return found


def replicated(plain: torch.Tensor, like: DTensor) -> DTensor:
    """`plain`, which every rank has, on the mesh of `like`."""
    mesh = like.device_mesh
    return DTensor.from_local(plain, mesh, [REPLICATE] * mesh.ndim)


def are_distributed(*operands: Any) -> bool:
    return all(x is None or isinstance(x, DTensor) for x in operands)


def fake(x: Any) -> Any:
    """`x` without values: torch's ops check shapes and dtypes on the meta device."""
    return None if x is None else torch.empty(x.shape, dtype=x.dtype, device="meta")


@functools.lru_cache(maxsize=4096)
def is_mergeable(layout: Layout) -> bool:
    """Whether all dims but the last can be one dim of the same memory.

    Torch saves a copy for backward where it cannot merge them, so `x` may be written to later.
    """
    if 0 in layout.shape:
        return True
    expected: Any = None
    for stride, size in zip(layout.stride[-2::-1], layout.shape[-2::-1], strict=True):
        if size == 1:
            continue
        if expected is not None and stride != expected:
            return False
        expected = stride * size
    return True


world_caches.append(is_mergeable.cache_clear)


class Constant(SkipsNone):
    """A gradient that depends on `x` only formally: its derivative with respect to `x` is zero.

    Torch's formulas for some gradients read a tensor on which they do not depend. On one device
    such a gradient requires grad; without this class, backward() through it would raise here.
    """

    @staticmethod
    def forward(ctx: Any, grad: Any, x: Any) -> Any:
        return grad.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, torch.zeros_like(grad)


def read_from(grad: Any, x: Any) -> Any:
    """`grad`, which requires grad if `x` does, in a double backward."""
    if torch.is_grad_enabled() and x.requires_grad:
        return Constant.apply(grad, x)
    return grad


def as_view(x: Any) -> Any:
    """`x`, as a view to autograd: one device returns a view of a tensor that the op makes inside.

    With `retain_grad`, a program sees which tensor the views of `x` belong to.
    """
    return x.view(x.shape) if x.requires_grad and not x._is_view() else x
