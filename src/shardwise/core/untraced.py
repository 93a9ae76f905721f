"""Keeping torch.compile's bytecode tracer out of this package.

Inside a compiled graph this package is traced below Python, op by op. But where a graph breaks (in
`step` of torch's optimizers, at `backward()`), dynamo would try to compile every Python frame that
runs in between: `__torch_dispatch__`, hooks, what autograd calls, and all that those call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from shardwise._torch.dynamo import break_graph, leave_untraced

_Fn = TypeVar("_Fn", bound=Callable[..., Any])


def untraced(fn: _Fn) -> _Fn:
    """Have dynamo skip `fn` and all that it calls; returns `fn` itself, at no cost."""
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


def breaks_graph(fn: _Fn, because: str = "it makes a tensor, or sets what one is") -> _Fn:
    """`fn`, untraced; a compiled region that calls it breaks its graph there."""
    break_graph(fn, f"{because}; call it outside, or without fullgraph=True")
    return untraced(fn)
