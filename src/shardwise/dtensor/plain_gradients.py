"""Gradients of plain tensors that meet DTensors: plain ones, whole on every rank.

A number needs no wrapping, and inside `implicit_replication` no tensor does. Torch's formulas then
give the plain tensor a gradient that is a DTensor, which an optimizer could not add to it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from shardwise.comm.watch import because
from shardwise.core.untraced import untraced
from shardwise.dtensor import autograd
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
