"""Variants of an op: functional twins, view twins, and calls by position."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise._torch.schema import OpOverload


def functional_twin(op: OpOverload) -> OpOverload | None:
    """The op that returns as a new tensor what `op` writes to its first argument.

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


class Positional:
    """An op with keyword-only tensors, called with all arguments in the order of the schema.

    Rules, plans and the hot path know tensors by position.
    """

    __slots__ = ("_names", "_num_positional", "_schema", "op")

    def __init__(self, op: OpOverload) -> None:
        self.op = op
        self._schema = op._schema
        arguments = op._schema.arguments
        self._num_positional = sum(not a.kwarg_only for a in arguments)
        self._names = [a.name for a in arguments if a.kwarg_only]

    def __call__(self, *args: Any) -> Any:
        return self.call(self.op, *args)

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call `fn`, which has the op's signature, with keywords where it needs them."""
        named = zip(self._names, args[self._num_positional :], strict=True)
        return fn(*args[: self._num_positional], **dict(named))

    def __repr__(self) -> str:
        return repr(self.op)


@functools.lru_cache(maxsize=1024)
def positional(op: OpOverload) -> Positional:
    """The Positional of an op, interned: cache keys compare ops by identity."""
    return Positional(op)


def in_order(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """All arguments in the order of the schema, defaults filled in."""
    return [
        args[position] if position < len(args) else kwargs.get(a.name, a.default_value)
        for position, a in enumerate(op._schema.arguments)
    ]


def plain_op(op: Any) -> Any:
    """The op that a Positional stands for; any other op itself."""
    return op.op if isinstance(op, Positional) else op
