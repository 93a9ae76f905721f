"""Torch's own Python binding of an op, which is quicker to call than the op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise._torch.dispatch import TorchDispatchMode, outside_modes
from shardwise._torch.schema import BINDINGS, OpOverload
from shardwise.rules.infer import hollowed
from shardwise.rules.positional import in_order
from shardwise.rules.rule import TensorMeta

#: Bindings of composite ops: a mode sees only what these consist of, so they cannot be tried.
_COMPOSITE = {torch.ops.aten.linear.default: torch.nn.functional.linear}


def fastest(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any
) -> Callable[..., Any]:
    """Torch's own binding of an op where there is one, else the op.

    An OpOverload called from Python takes about twice as long as the binding. The binding is tried
    without data under a mode that lets nothing but the very op through; `made` is what that makes,
    as `infer_outputs` says it.
    """
    if op in _COMPOSITE:
        return _COMPOSITE[op]
    with outside_modes(), torch.no_grad():
        for binding in _bindings(op):
            hollow_args, hollow_kwargs = hollowed(args, kwargs)
            try:
                with _Only(op, hollow_args, hollow_kwargs, made):
                    binding(*hollow_args, **hollow_kwargs)
            except (_OtherOp, TypeError, RuntimeError, NotImplementedError):
                continue
            return binding
    return op._op  # without the Python method around it


def _bindings(op: OpOverload) -> list[Callable[..., Any]]:
    name = op._schema.name.partition("::")[2]
    return [getattr(home, name) for home in BINDINGS if hasattr(home, name)]


class _OtherOp(Exception):
    """A Python function led to another op than the one it was tried for."""


class _Only(TorchDispatchMode):
    """Lets exactly one call through: some bindings have other defaults than their op."""

    def __init__(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> None:
        super().__init__()
        self.op, self.made = op, made
        self.given = in_order(op, args, kwargs)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what wraps it otherwise imports the compiler, for most of a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not self.op or not all(
            map(_same, in_order(func, args, kwargs or {}), self.given)
        ):
            raise _OtherOp
        # It need not run: its shape function may be one that imports the compiler.
        schema, made = func._schema, self.made
        if isinstance(made, TensorMeta) and len(schema.returns) == 1:
            first = schema.arguments[0].alias_info
            if schema.returns[0].alias_info is None:
                return torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
            if first is not None and first.is_write:
                return args[0]
        return func(*args, **(kwargs or {}))


def _same(one: Any, other: Any) -> bool:
    """Whether two arguments are the same; any tensor is as good as any other."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and one == other
