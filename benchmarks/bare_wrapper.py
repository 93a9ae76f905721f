"""A minimal tensor subclass: a wrapper around one tensor, without layout, rules or hooks.

Its cost in compiled code is torch's own handling of subclasses: the lower bound for any distributed
tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree


class BareWrapper(torch.Tensor):
    __slots__ = ("_local",)
    _local: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, local: torch.Tensor) -> BareWrapper:
        out = torch.Tensor._make_wrapper_subclass(
            cls, local.shape, local.stride(), dtype=local.dtype, device=local.device
        )
        out._local = local
        return out

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(cls, lambda x: x._local, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, cls, func(*args, **kwargs))

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_local"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: None, size: Any, stride: Any) -> BareWrapper:
        return BareWrapper(inner["_local"])

    def to_local(self) -> torch.Tensor:
        return _Held.apply(self)  # type: ignore[no-any-return]


class _Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: BareWrapper) -> torch.Tensor:
        return x._local

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> BareWrapper:
        return BareWrapper(grad)
