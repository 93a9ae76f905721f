"""The catalog: every family of ops, with its tables.

A family is a module. `RULES` say how its ops run on shards (see `dispatch.rule`), `KERNELS`
are called above autograd (see Note [Above autograd]), `DECOMPOSITIONS` compute an op with others,
and `REFUSED` lists the inputs whose values an op may refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise._torch.autograd import unless_forward_mode
from shardwise.core.untraced import untraced
from shardwise.dispatch import catalog
from shardwise.dispatch.local_call import ON_HOST, REFUSED
from shardwise.dispatch.rule import Table, merge
from shardwise.dtensor import fallback
from shardwise.ops import composites, random
from shardwise.ops.lookup import embedding, rules
from shardwise.ops.math import einsum, matmul, pointwise, reduce, whole
from shardwise.ops.nn import attention, image, loss, norm, recurrent
from shardwise.ops.shape import indexing, join, views

FAMILIES: tuple[Any, ...] = (
    pointwise,
    matmul,
    einsum,
    reduce,
    whole,
    views,
    join,
    indexing,
    loss,
    norm,
    attention,
    image,
    recurrent,
    rules,
    embedding,
    random,
)


def _tables(name: str) -> list[Any]:
    """The tables of this name; few families have all."""
    return [getattr(family, name) for family in FAMILIES if hasattr(family, name)]


RULES: Table = merge(*_tables("RULES"))
KERNELS: tuple[tuple[str, Callable[..., Any]], ...] = sum(_tables("KERNELS"), ())

# Kept alive: torch drops the kernels of a deleted library.
_library = torch.library.Library("aten", "IMPL")
_any_library = torch.library.Library("_", "IMPL")


_KEY = "AutogradPrivateUse3"


def _op(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _register_kernels() -> None:
    """Register the kernels for DTensors: no other tensor has the dispatch key."""
    for name, kernel in KERNELS:
        fallback.kernels_above[_op(name)] = untraced(kernel)
        _library.impl(name, untraced(unless_forward_mode(_op(name), kernel)), _KEY)
    for name, kernel in composites.kernels():
        fallback.kernels_above[_op(name)] = kernel
        _library.impl(name, kernel, _KEY)
    for name, kernel in composites.kernels_with_out():
        _library.impl(name, kernel, _KEY)
    # Ops without a kernel for the key fall through to the device's autograd.
    _any_library.fallback(torch.library.fallthrough_kernel, _KEY)


catalog.CATALOG.update(RULES)
catalog.DEFAULT_RULES.append(pointwise.pointwise_rule)
for _table in _tables("REFUSED"):
    REFUSED.update(_table)
for _ops in _tables("ON_HOST"):
    ON_HOST.update(_ops)
for _table in _tables("DECOMPOSITIONS"):
    fallback.DECOMPOSITIONS.update(_table)
_register_kernels()
