"""Redistribution in another dtype: what travels is cast before it leaves, on the way back too."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.core.layout import Layout
from shardwise.core.untraced import UntracedFunction
from shardwise.dtensor import autograd
from shardwise.dtensor.snapshots import current
from shardwise.errors import ArgumentError


class CastParts(UntracedFunction):
    """Each rank's part in another dtype: also the terms of a Partial, before they are added."""

    @staticmethod
    def forward(ctx: Any, x: Any, dtype: torch.dtype) -> Any:
        ctx.dtype = x.dtype
        layout = autograd.with_dtype(autograd.own_entries(x._layout), dtype)
        return type(x)._wrap(current(x).to(dtype), layout)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _cast(grad, ctx.dtype), None


class CastAndMove(UntracedFunction):
    """One node, since autograd casts what passes between two to the dtype of the tensor there."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, target: Layout, dtype: torch.dtype, back: torch.dtype, async_op: bool
    ) -> Any:
        ctx.layout, ctx.back, ctx.async_op = x._layout, back, async_op
        cast = _cast(x, dtype)
        moved = autograd.redistribute(cast, autograd.relaid(target, cast._layout), async_op)
        return moved.clone() if moved is x else moved

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        cast = _cast(grad, ctx.back)
        target = autograd.relaid(autograd.gradient_layout(ctx.layout), cast._layout)
        moved = autograd.redistribute(cast, target, ctx.async_op)
        return _cast(moved, ctx.layout.dtype), None, None, None, None


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return x if x.dtype == dtype else CastParts.apply(x, dtype)


def redistribute_as(
    x: Any,
    target: Layout,
    forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
    async_op: bool,
) -> Any:
    """`x` in the placements of `target` and in `forward_dtype`; its gradient in `x`'s own dtype."""
    for name, dtype in (("forward_dtype", forward_dtype), ("backward_dtype", backward_dtype)):
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ArgumentError(f"{name} is a torch.dtype or None, found {dtype!r}.")
    own = x.dtype
    return CastAndMove.apply(x, target, forward_dtype or own, backward_dtype or own, async_op)
