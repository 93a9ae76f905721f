"""Ops that do the same: one writes in place or copies a view, its twin returns a new tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise._torch.schema import OpOverload


def functional_twin(op: OpOverload) -> OpOverload | None:
    """The op that does what `op` does to its first argument, but returns a new tensor.

    >>> functional_twin(torch.ops.aten.add_.Tensor)
    <OpOverload(op='aten.add', overload='Tensor')>
    """
    namespace, _, name = op._schema.name.partition("::")
    if not name.endswith("_") or name.startswith("__") or not op._schema.is_mutable:
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    # Not by the overload's name: pow_.Scalar is pow.Tensor_Scalar, and pow.Scalar is another op.
    return with_arguments(packet, [(a.name, str(a.type)) for a in op._schema.arguments])


def with_arguments(packet: Any, wanted: Sequence[tuple[str, str]]) -> OpOverload | None:
    """The overload that takes these arguments (name and type) and writes to none of them."""
    for overload in packet.overloads() if packet is not None else ():
        op = getattr(packet, overload)
        has = [(a.name, str(a.type)) for a in op._schema.arguments]
        if has == wanted and not op._schema.is_mutable:
            return op
    return None


def view_twin(op: OpOverload) -> OpOverload | None:
    """The view of which `op` returns a copy.

    >>> view_twin(torch.ops.aten.permute_copy.default)
    <OpOverload(op='aten.permute', overload='default')>
    """
    namespace, _, name = op._schema.name.partition("::")
    if not name.endswith("_copy") or op._schema.is_mutable:
        return None
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_copy"), None)
    return getattr(packet, op._schema.overload_name or "default", None)
