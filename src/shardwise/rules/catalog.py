"""The one list of all rules, and how an op finds its own."""

from __future__ import annotations

import functools
from typing import Any

import torch

from shardwise.rules import (
    attention,
    create,
    embedding,
    join,
    loss,
    matmul,
    norm,
    pointwise,
    reduce,
    routed,
    row_sparse,
    views,
    whole,
)
from shardwise.rules.rule import Rule, Table, merge

CATALOG: Table = merge(
    pointwise.RULES,
    matmul.RULES,
    reduce.RULES,
    views.RULES,
    create.RULES,
    join.RULES,
    loss.RULES,
    norm.RULES,
    attention.RULES,
    embedding.RULES,
    routed.RULES,
    row_sparse.RULES,
    whole.RULES,
)


@functools.lru_cache(maxsize=4096)
def find_rule(op: Any) -> Rule | None:
    """The rule of an op; an in-place op has that of the op that returns a new tensor."""
    rule = CATALOG.get(op)
    if rule is not None or not isinstance(op, torch._ops.OpOverload):
        return rule
    functional = functional_twin(op)
    if functional is not None:
        return find_rule(functional)
    return pointwise.pointwise_rule(op)


def functional_twin(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The op that does what `op` does to its first argument, but returns a new tensor.

    >>> functional_twin(torch.ops.aten.add_.Tensor)
    <OpOverload(op='aten.add', overload='Tensor')>
    """
    namespace, _, name = op._schema.name.partition("::")
    if not name.endswith("_") or name.startswith("__") or not op._schema.is_mutable:
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    overload = op._schema.overload_name or "default"
    return getattr(packet, overload, None)


def written_inputs(op: Any) -> tuple[int, ...]:
    """The positions of the arguments that the op writes to."""
    if not isinstance(op, torch._ops.OpOverload):
        return ()
    return tuple(
        position
        for position, arg in enumerate(op._schema.arguments)
        if arg.alias_info is not None and arg.alias_info.is_write
    )


def is_view(op: Any) -> bool:
    """Whether the op returns an alias of an argument that it does not write to."""
    return isinstance(op, torch._ops.OpOverload) and any(
        r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns
    )
