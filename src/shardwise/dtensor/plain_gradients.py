"""Gradients of the other kind than their tensors, brought to the kind that the tensors have.

A number needs no wrapping, and inside `implicit_replication` no tensor does. Torch's formulas then
give the plain tensor a gradient that is a DTensor, which an optimizer could not add to it. The
other way round, the formula of `cat` makes plain zeros for operands of shape (0,), which it skips.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwise.comm.watch import because
from shardwise.core.untraced import untraced
from shardwise.dtensor import autograd
from shardwise.dtensor.entries import Entry
from shardwise.dtensor.wrapped import Wrapped

#: The tensors that have the hook, by id.
_hooked: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


def keep_plain(tensor: torch.Tensor) -> None:
    """Hand the gradient of `tensor`, which meets a DTensor now, on as a plain one.

    What a compiler traces, and what differs between played ranks, is left alone.
    """
    if not torch.is_grad_enabled() or _hooked.get(id(tensor)) is tensor:
        return
    if type(tensor) is torch.Tensor or type(tensor) is nn.Parameter:
        tensor.register_hook(_as_plain)
        _hooked[id(tensor)] = tensor


@untraced
def _as_plain(grad: Any) -> Any:
    if not isinstance(grad, Wrapped):
        return None
    with because("the gradient of a plain tensor", implicit=False):
        whole = autograd.redistribute(grad, autograd.whole_layout(grad._layout))
    return autograd.to_local(whole, autograd.own_entries(whole._layout), False, True)


def wrap_skipped(kind: Any, op: Any, layouts: Sequence[Any], entry: Entry) -> None:
    """Let a planned `cat` wrap the plain gradients of the operands that it skips."""
    if op is not torch.ops.aten.cat.default:
        return
    skipped = [i for i, layout in enumerate(layouts[0]) if tuple(layout.shape) == (0,)]
    move = entry.move

    def hooked(operands: list[Any], args: Sequence[Any]) -> None:
        for x in [args[0][i] for i in skipped]:
            if torch.is_grad_enabled() and x.requires_grad and not x.is_leaf:  # a leaf has a hook
                layout = autograd.gradient_layout(x._layout)
                x.register_hook(functools.partial(autograd.lies_like, kind, layout))
        if move is not None:
            move(operands, args)

    if skipped:
        entry.move = hooked
