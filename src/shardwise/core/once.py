"""Backward functions without a second derivative, which raise where one is needed.

Torch's `once_differentiable` raises only where backward runs through the whole graph: under
`torch.autograd.grad` of some tensors the term is silently missing, and so is one that depends on
saved tensors alone. Here the gradient keeps its history, and raises where that is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.core.untraced import UntracedFunction, untraced
from shardwise.errors import UnsupportedError


def differentiated_once(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates the `backward` of an autograd function; a second derivative of `what` raises."""

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        @untraced
        def once(ctx: Any, *grads: Any) -> Any:
            if not torch.is_grad_enabled():
                return backward(ctx, *grads)
            with torch.no_grad():
                found = backward(ctx, *grads)
            given = (*grads, *(ctx.saved_tensors or ()))
            depends = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
            if not depends:
                return found
            if isinstance(found, tuple):
                return tuple(_marked(what, grad, depends) for grad in found)
            return _marked(what, found, depends)

        return once

    return decorate


def _marked(what: str, grad: Any, depends: Sequence[torch.Tensor]) -> Any:
    return _NotAgain.apply(what, grad, *depends) if isinstance(grad, torch.Tensor) else grad


class _NotAgain(UntracedFunction):
    @staticmethod
    def forward(ctx: Any, what: str, grad: torch.Tensor, *depends: torch.Tensor) -> torch.Tensor:
        ctx.what = what
        return grad.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError(
            f"The gradient of {ctx.what} is not differentiated again: it was made with "
            "create_graph=True, and a second derivative goes through it. Compute the penalty from "
            "later tensors, or detach() the gradient."
        )
