"""What torch leaves open or gets wrong on one device, so that there is nothing to compare with.

A program is compared up to the step at which one of these is found, and counted as `undefined`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shardwise._torch.dispatch import TorchDispatchMode
from shardwise._torch.pytree import tree_leaves

aten = torch.ops.aten

OVERLAP = "overlapping write"
MEDIAN = "median of equal values"
ZERO_TENSOR = "gradient that is a ZeroTensor"
ROUNDING = "rounding"

#: Every reason not to compare, and why it is one.
REASONS = {
    OVERLAP: "an op writes to memory that it also reads at other places: what comes out depends on "
    "the order in which a kernel goes through memory",
    MEDIAN: "torch does not say which index it gives, and along an expanded dim its kernel reads "
    "memory that nobody has written to",
    ZERO_TENSOR: "the gradient of sgn is a ZeroTensor, and one device cannot add the gradient of a "
    "second backward to it",
    ROUNDING: "one device gives another number in this place when rounding errors are added, and "
    "with leaves in float64 both give the same",
}
_MEDIANS = frozenset({aten.median.dim, aten.nanmedian.dim})


class Watch(TorchDispatchMode):
    """Notes the first reason, at the moment in which an op runs on one device."""

    found: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.found is None:
            if _overlaps(func, args, kwargs):
                self.found = OVERLAP
            elif func in _MEDIANS and _has_equal(*args[:2]):
                self.found = MEDIAN
        return func(*args, **kwargs)


def raised(error: Exception, code: str) -> str | None:
    """The reason by which one device raises and should not."""
    known = "backward(" in code and "ZeroTensors are immutable" in str(error)
    return ZERO_TENSOR if known else None


def _overlaps(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    written: list[torch.Tensor] = []
    read: list[torch.Tensor] = []
    for argument, value in _named(op, args, kwargs):
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        writes = argument.alias_info is not None and argument.alias_info.is_write
        (written if writes else read).extend(tensors)
    return any(_share_some(x, y) for x in written for y in read)


def _named(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    for number, argument in enumerate(op._schema.arguments):
        if number < len(args):
            yield argument, args[number]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _share_some(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether entries share memory and are not the same entries in the same places."""
    if x.untyped_storage()._cdata != y.untyped_storage()._cdata:
        return False
    ours, theirs = _addresses(x), _addresses(y)
    return ours != theirs and not set(ours).isdisjoint(theirs)


def _addresses(x: torch.Tensor) -> list[int]:
    end = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    places = torch.arange(max(end, 0)).as_strided(x.shape, x.stride()).flatten()
    return [x.data_ptr() + place * x.itemsize for place in places.tolist()]


def _has_equal(x: torch.Tensor, dim: int) -> bool:
    if not x.dim():
        return False
    ordered = x.sort(dim)[0]
    return bool((ordered.diff(dim=dim) == 0).any())
