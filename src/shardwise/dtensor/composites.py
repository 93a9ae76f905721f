"""Ops that torch puts together from others, and that make plain tensors on the way.

They are the same on every rank, so they count as replicated inside; see Note [Above autograd].
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shardwise.comm.watch import implicit_replication
from shardwise.dtensor.tensor import DTensor, check_plain

aten = torch.ops.aten

_MAKE_TENSORS = (
    aten.quantile.default,
    aten.quantile.scalar,
    aten.nanquantile.default,
    aten.nanquantile.scalar,
    aten.combinations.default,
    aten.linalg_matrix_power.default,
)


def _put_together(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor):
            check_plain(op, leaf)
    with implicit_replication():
        return op.decompose(*args, **kwargs)


def tensor_split(x: Any, where: Any, dim: int = 0) -> Any:
    """Where to split is read off a tensor: it has to be whole, and every rank reads the same."""
    if isinstance(where, DTensor):
        where = where.detach().full_tensor().tolist()  # type: ignore[attr-defined]
    else:
        check_plain(aten.tensor_split.tensor_indices_or_sections, where)
        where = where.tolist()
    return torch.tensor_split(x, where, dim)


def register(library: torch.library.Library) -> None:
    for op in _MAKE_TENSORS:
        name = op._schema.name.partition("::")[2]
        overload = op._schema.overload_name
        library.impl(
            f"{name}.{overload}" if overload else name,
            functools.partial(_put_together, op),
            "AutogradPrivateUse3",
        )
    library.impl("tensor_split.tensor_indices_or_sections", tensor_split, "AutogradPrivateUse3")
