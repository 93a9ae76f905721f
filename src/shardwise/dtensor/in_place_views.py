"""Methods that turn a tensor into a view of itself (`t_`, `unsqueeze_`).

Torch's autograd takes the views of a tensor again, with their numbers, when it was written to. On a
plain tensor it does so by strides in memory; on a wrapper it calls `view(base, ...)`, which is
another view once the base has other dims. So the base has to stay as it is: the tensor of the
caller becomes a view of it, and the base goes on under a name that only the views know. A tensor
without views is turned as it is: as a view, it would keep more of a later write for backward.

These are methods and not kernels of the ops: only a name in Python can come to mean another tensor.
Torch's own C++ (`quantile`, the rules of `vmap`) goes on with the tensor that it handed over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise._torch.autograd import swap_tensors
from shardwise.dtensor.snapshots import take_over
from shardwise.errors import UnsupportedError
from shardwise.rules.ids import has_values


def becoming(name: str) -> Callable[..., Any]:
    """The method of this name, whose view has the same name without the last underscore."""
    turn, view_of = getattr(torch.Tensor, name), getattr(torch.Tensor, name[:-1])

    def method(x: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not has_values(x._local):
            return turn(x, *args, **kwargs)
        if x.is_leaf and x.requires_grad:
            return _turned_leaf(turn, x, *args, **kwargs)
        if x._use_count() == 1 and not x._is_view():
            return turn(x, *args, **kwargs)  # of which there is no view
        # Torch's checks, and its count of writes: this leaves all as it is.
        torch.Tensor.transpose_(x, 0, 0)
        with torch.enable_grad():
            view = view_of(x, *args, **kwargs)
        if view._layout.snapshot and not x._layout.snapshot:
            return turn(x, *args, **kwargs)  # which says why not
        swap_tensors(x, view)
        base = type(x)._wrap(view._local, view._layout)
        take_over(base, x)
        take_over(x, view)
        take_over(view, base)
        return x

    method.__name__ = name
    method.__doc__ = turn.__doc__
    return method


def _turned_leaf(turn: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """A leaf stays one: nothing may know it but by its name. Its gradient lies as it does now."""
    if not torch.is_grad_enabled() and x._use_count() > 1:
        raise UnsupportedError(
            f"{turn.__name__}() would turn a leaf that requires grad, {x._layout}, of which views "
            "or results that autograd remembers are still in use. Turn it before they are made, "
            "after they are gone, or use a view of it."
        )
    turn(x, *args, **kwargs)
    hook = x.__dict__.pop("_hooked", None)
    if hook is not None:
        hook.remove()
        x.requires_grad_()
    return x
