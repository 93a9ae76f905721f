"""How an op finds its rule, and what its schema says about it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise._torch.schema import OpOverload
from shardwise.rules.rule import Rule, Table
from shardwise.rules.twins import functional_twin, view_twin

#: The rules of all families in `ops`; `ops.catalog` fills it.
CATALOG: Table = {}

#: Asked in turn about an op that no table names, such as one that torch tags as elementwise.
DEFAULT_RULES: list[Callable[[Any], Rule | None]] = []

#: Rules that a program added (rules.register); they come before those of the catalog.
REGISTERED: Table = {}

#: Emptied when a rule is added: what was planned without it may be planned otherwise now.
rule_caches: list[Callable[[], None]] = []


@functools.lru_cache(maxsize=4096)
def find_rule(op: Any) -> Rule | None:
    """The rule of an op; one that writes in place or copies a view has that of its twin."""
    rule = REGISTERED.get(op) or CATALOG.get(op)
    if rule is not None or not isinstance(op, OpOverload):
        return rule
    twin = functional_twin(op) or view_twin(op)
    if twin is not None:
        return find_rule(twin)
    return next((rule for default in DEFAULT_RULES if (rule := default(op))), None)


rule_caches.append(find_rule.cache_clear)


@functools.lru_cache(maxsize=4096)
def written_twin(op: Any) -> OpOverload | None:
    """The functional twin of an op that writes to its first argument alone, and returns it."""
    if not isinstance(op, OpOverload) or written_inputs(op) != (0,):
        return None
    if torch.Tag.nondeterministic_seeded in op.tags:
        return None  # the twin would draw other numbers
    twin = functional_twin(op)
    # `copy_` is what writes back; the others do not read what they write to. A table is never
    # gathered, not even to scale its rows down.
    aten = torch.ops.aten
    if twin is None or twin in (
        aten.copy.default,
        aten.set.default,
        aten.embedding_renorm.default,
    ):
        return None
    return twin if len(op._schema.returns) == 1 and not changes_shape(op) else None


def copies_view(op: Any) -> bool:
    """Whether the op returns a copy of a view."""
    return isinstance(op, OpOverload) and view_twin(op) is not None


def written_inputs(op: Any) -> tuple[int, ...]:
    """The positions of the arguments that the op writes to."""
    if not isinstance(op, OpOverload):
        return ()
    return tuple(
        position
        for position, arg in enumerate(op._schema.arguments)
        if arg.alias_info is not None and arg.alias_info.is_write
    )


def changes_shape(op: Any) -> bool:
    """Whether the op turns its argument into a view of itself."""
    return isinstance(op, OpOverload) and torch.Tag.inplace_view in op.tags


def has_unknown_shape(op: OpOverload, args: Sequence[Any]) -> bool:
    """Whether the values of the operands decide the shape of the result.

    `args` has layouts in place of tensors.
    """
    if op is torch.ops.aten._unique.default:
        return True  # torch before 2.13 does not tag it
    if torch.Tag.dynamic_output_shape not in op.tags:
        return False
    if op is torch.ops.aten.index.Tensor:  # a mask; with numbers, the shape is that of the index
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return True


def is_view(op: Any) -> bool:
    """Whether the op returns an alias of an argument that it does not write to."""
    return isinstance(op, OpOverload) and any(
        r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns
    )
