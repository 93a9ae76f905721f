"""Ops without a rule of their own: taken apart into ops that have one.

Each part is planned like any other call, so the result is right where the parts are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise.dtensor.foreach import is_foreach
from shardwise.rules.catalog import rule_caches

aten = torch.ops.aten


@functools.lru_cache(maxsize=1024)
def parts_of(op: Any) -> Callable[..., Any] | None:
    """A function that does what `op` does with other ops, or None."""
    if not isinstance(op, torch._ops.OpOverload):
        return None
    if is_foreach(op):
        return functools.partial(_one_by_one, op)
    if op._schema.is_mutable:
        return None
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
        return op.decompose
    # Imported late: it takes most of a second, and most programs never need it.
    from torch._decomp import decomposition_table

    return decomposition_table.get(op)


rule_caches.append(parts_of.cache_clear)


def _one_by_one(op: Any, *args: Any, **kwargs: Any) -> Any:
    """A foreach op as a loop: the same op for a single tensor, once per tensor."""
    single = getattr(aten, op._schema.name.removeprefix("aten::_foreach_"), None)
    if single is None:
        raise NotImplementedError(f"{op} has no form for a single tensor")
    # What is positional for many tensors may be a keyword for one: the value of addcmul.
    schema = getattr(single, single.overloads()[0])._schema
    num_positional = sum(not a.kwarg_only for a in schema.arguments)
    names = [a.name for a in schema.arguments if a.kwarg_only]
    kwargs |= dict(zip(names, args[num_positional:], strict=False))
    args = args[:num_positional]
    results = [single(*_item(args, i), **_named_item(kwargs, i)) for i in range(len(args[0]))]
    return None if op._schema.is_mutable else results


def _item(args: Sequence[Any], number: int) -> list[Any]:
    return [a[number] if isinstance(a, (list, tuple)) else a for a in args]


def _named_item(kwargs: Mapping[str, Any], number: int) -> dict[str, Any]:
    return {k: v[number] if isinstance(v, (list, tuple)) else v for k, v in kwargs.items()}
