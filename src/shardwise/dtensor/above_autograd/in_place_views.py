"""Ops that turn a tensor into a view of itself (`t_`, `unsqueeze_`), above autograd.

Torch's autograd takes the views of a tensor again, with their numbers, when it was written to. On a
plain tensor it does so by strides in memory; on a wrapper it calls `view(base, ...)`, which is
another view once the base has other dims. So the base has to stay as it is: the tensor of the
caller becomes a view of it, and the base goes on under a name that only the views know.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from shardwise.dtensor.snapshots import take_over
from shardwise.dtensor.tensor import DTensor

aten = torch.ops.aten

_VIEWS = {
    "t_": aten.t.default,
    "transpose_": aten.transpose.int,
    "squeeze_": aten.squeeze.default,
    "squeeze_.dim": aten.squeeze.dim,
    "squeeze_.dims": aten.squeeze.dims,
    "unsqueeze_": aten.unsqueeze.default,
}
_Keys, _Key = torch._C.DispatchKeySet, torch._C.DispatchKey
#: The bit of the backend that has no tensors.
_BACKEND = _Keys(_Key.AutogradPrivateUse3).raw_repr() & ~_Keys(_Key.AutogradCPU).raw_repr()


def _become_view(name: str, x: Any, *args: Any) -> Any:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(aten, packet), overload or "default")
    if type(x) is not DTensor or not _has_values(x):
        return _below(op, x, *args)
    if x.is_leaf and x.requires_grad:
        return _turned_leaf(op, x, *args)
    # Torch's checks, and its count of writes: this leaves all as it is.
    _below(aten.transpose_.default, x, 0, 0)
    with torch.enable_grad():
        view = _VIEWS[name](x, *args)
    if view._layout.snapshot and not x._layout.snapshot:
        return _below(op, x, *args)  # which says why not
    torch._C._swap_tensor_impl(x, view)
    base = DTensor.wrap(view._local, view._layout)
    take_over(base, x)
    take_over(x, view)
    take_over(view, base)
    return x


def _turned_leaf(op: Any, x: Any, *args: Any) -> Any:
    """A leaf stays one: nothing may know it but by its name. Its gradient lies as it does then."""
    _below(op, x, *args)
    hook = x.__dict__.pop("_hooked", None)
    if hook is not None:
        hook.remove()
        x.requires_grad_()
    return x


def _below(op: Any, x: Any, *args: Any) -> Any:
    """The op as torch's autograd runs it on the device of `x`."""
    keys = _Keys.from_raw_repr(torch._C._dispatch_keys(x).raw_repr() & ~_BACKEND)
    for passed in (_Key.AutocastCPU, _Key.AutocastCUDA, _Key.PythonTLSSnapshot):
        keys = keys.remove(passed)
    return op.redispatch(keys, x, *args)


def _has_values(x: Any) -> bool:
    return type(getattr(x._local, "_parts", (x._local,))[0]) is torch.Tensor


KERNELS = tuple((name, functools.partial(_become_view, name)) for name in _VIEWS)
