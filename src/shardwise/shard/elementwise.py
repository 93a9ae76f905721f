"""Ops that do the same to every value."""

from __future__ import annotations

import functools
from typing import Any

import torch

aten = torch.ops.aten

#: Such ops that torch does not tag as pointwise.
_EACH_VALUE = {
    aten.alias.default,
    aten.clone.default,
    aten.copy_.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.fill_.Scalar,
    aten.full_like.default,
    aten.ones_like.default,
    aten.zero_.default,
    aten.zeros_like.default,
    aten._to_copy.default,
    aten.lerp_.Scalar,
    aten.lerp_.Tensor,
}


@functools.lru_cache(maxsize=1024)
def is_elementwise(op: Any) -> bool:
    return op in _EACH_VALUE or torch.Tag.pointwise in getattr(op, "tags", ())
