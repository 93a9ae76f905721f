"""Keeping torch.compile's bytecode tracer out of this package.

What runs inside a compiled graph is traced below Python, op by op. But where a graph breaks
(torch's optimizers do that in `step`, and a call of `backward()` does), torch would look at every
Python frame that runs in between and try to compile it by itself: `__torch_dispatch__`, hooks, what
autograd calls, and all that those call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from shardwise._torch.dynamo import break_graph, leave_untraced

_Fn = TypeVar("_Fn", bound=Callable[..., Any])


def untraced(fn: _Fn) -> _Fn:
    """`fn`, to be run as it is, with all that it calls; the same function, at no cost."""
    leave_untraced(fn.__code__)
    return fn


class UntracedFunction(torch.autograd.Function):
    """An autograd function that runs as it is where backward does, also inside a compiled region.

    A graph breaks at `loss.backward()`, and the engine calls Python from there.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("forward", "backward"):
            if name in cls.__dict__:
                untraced(inspect.unwrap(getattr(cls, name)))


def breaks_graph(fn: _Fn, because: str = "it makes a tensor, or sets what one is") -> _Fn:
    """`fn`, untraced; a compiled region that calls it has one graph before and one after."""
    break_graph(fn, f"{because}; call it outside, or without fullgraph=True")
    return untraced(fn)
