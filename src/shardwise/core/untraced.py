"""Keeping torch.compile's bytecode tracer and torch.autocast out of this package.

Inside a compiled graph this package is traced below Python, op by op. But where a graph breaks (in
`step` of torch's optimizers, at `backward()`), dynamo would try to compile every Python frame that
runs in between: `__torch_dispatch__`, hooks, what autograd calls, and all that those call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from shardwise._torch.dispatch import OpOverload, autocast_off, has_kernel_for_key, is_autocast
from shardwise._torch.dynamo import break_graph, leave_untraced
from shardwise.errors import UnsupportedError

_Fn = TypeVar("_Fn", bound=Callable[..., Any])


def untraced(fn: _Fn) -> _Fn:
    """Make dynamo skip `fn` and all that it calls; returns `fn` itself, at no cost."""
    leave_untraced(fn.__code__)
    return fn


class UntracedFunction(torch.autograd.Function):
    """An autograd function that dynamo does not trace, also where a compiled region breaks.

    A graph breaks at `loss.backward()`, and the engine calls Python from there.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("forward", "backward"):
            if name in cls.__dict__:
                untraced(inspect.unwrap(getattr(cls, name)))


class SkipsNone(UntracedFunction):
    """An untraced function with one differentiable result; without its gradient, inputs get none.

    Torch would replace the missing gradient by plain zeros, but `backward` expects a DTensor.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        forward, backward = cls.forward, cls.backward

        @untraced
        def run(ctx: Any, *args: Any) -> Any:
            ctx.materialize_grads = False
            return forward(ctx, *args)

        @untraced
        def run_backward(ctx: Any, grad: Any, *others: Any) -> Any:
            if grad is None:
                return (None,) * len(ctx.needs_input_grad)
            return backward(ctx, grad, *others)

        cls.forward = staticmethod(functools.wraps(forward)(run))  # type: ignore[method-assign]
        cls.backward = staticmethod(  # type: ignore[method-assign]
            functools.wraps(backward)(run_backward)
        )
        super().__init_subclass__(**options)


def breaks_graph(fn: _Fn, because: str = "it makes a tensor, or sets what one is") -> _Fn:
    """`fn`, untraced; a compiled region that calls it breaks its graph there."""
    break_graph(fn, f"{because}; call it outside, or without fullgraph=True")
    return untraced(fn)


# -- no second derivative --------------------------------------------------------------------


def differentiated_once(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates the `backward` of an autograd function; a second derivative of `what` raises.

    Torch's `once_differentiable` raises only if backward runs through the whole graph. Under
    `torch.autograd.grad` of some tensors the term is silently missing, and so is a term that
    depends only on saved tensors. Here the gradient keeps its history, and raises if that is used.
    """

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


# -- autocast ------------------------------------------------------------------------------------
# Keeping torch.autocast away from local tensors.
#
# Autocast has already run when a call reaches a DTensor, and planning relies on the dtypes that it
# chose. Torch ops that later run on local tensors, in local functions and around collectives, must
# not be cast a second time.


def is_cast_before(op: OpOverload) -> bool:
    """Whether autocast has a kernel for this op on every device.

    If so, it has run before the op reaches a DTensor, and autocast is off inside the op.
    """
    return all(has_kernel_for_key(op.name(), key) for key in ("AutocastCPU", "AutocastCUDA"))


def without_autocast(fn: _Fn) -> _Fn:
    """`fn`, whose torch ops are not cast."""

    @functools.wraps(fn, assigned=("__name__", "__qualname__", "__doc__"), updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        if is_autocast():
            with autocast_off():
                return fn(*args, **kwargs)
        # Most calls are positional, and passing no keywords is cheaper than an empty dict.
        return fn(*args, **kwargs) if kwargs else fn(*args)

    return run  # type: ignore[return-value]
