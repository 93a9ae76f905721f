"""Tensors without dims are numbers: they may meet tensors of any mesh, and plain ones.

A gradient norm is computed over parameters of several meshes, and scales every gradient. Where a
number is still Partial it is reduced first, all numbers of a mesh together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise.core.grid import Grid
from shardwise.simulation.ranks import one_for_all


def numbers_as_plain(args: Sequence[Any]) -> list[Any] | None:
    """`args` with the numbers of other meshes as plain tensors; None when there are none.

    The mesh that counts is that of the first tensor with dims, or else of the first tensor.
    """
    tensors = [x for arg in args for x in _listed(arg) if _is_distributed(x)]
    if len({x._layout.grid for x in tensors}) < 2:
        return None
    home = next((x for x in tensors if x.dim()), tensors[0])._layout.grid
    foreign = [x for x in tensors if not x.dim() and x._layout.grid is not home]
    return _replaced(args, _whole(foreign)) if foreign else None


def beside_plain(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> Any:
    """Run an op on plain tensors whose DTensors are all numbers; else raise `error`."""
    tensors = [x for arg in args for x in _listed(arg) if _is_distributed(x)]
    by_keyword = any(_is_distributed(x) for arg in kwargs.values() for x in _listed(arg))
    if by_keyword or any(x.dim() or x.requires_grad for x in tensors):
        raise error
    return op(*_replaced(args, _whole(tensors)), **kwargs)


def _whole(numbers: Sequence[Any]) -> Callable[[Any], Any]:
    """Finds the plain value of each of `numbers`; other things are left as they are."""
    alike: dict[tuple[Grid, torch.dtype], list[Any]] = defaultdict(list)
    for number in numbers:
        alike[number._layout.grid, number.dtype].append(number)
    values: dict[int, torch.Tensor] = {}
    for members in alike.values():
        together = members[0].full_tensor() if len(members) == 1 else _stacked(members)
        plain = one_for_all(together)
        parts = [plain] if len(members) == 1 else list(plain.unbind())
        values.update(zip(map(id, members), parts, strict=True))
    return lambda x: values.get(id(x), x)


def _stacked(numbers: Sequence[Any]) -> torch.Tensor:
    stacked: Any = torch.stack(list(numbers))
    return stacked.full_tensor()


def _replaced(args: Sequence[Any], replace: Callable[[Any], Any]) -> list[Any]:
    return [[replace(x) for x in a] if isinstance(a, (list, tuple)) else replace(a) for a in args]


def _is_distributed(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and hasattr(x, "_layout")


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)
