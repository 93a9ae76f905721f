"""The sizes that a compiler records for a LocalTensor whose parts differ in size.

A program that reads the shape of such a tensor gets an error that names the ranks, compiled or not.
But the compiler records a size for all that enters and leaves a region. It gets placeholders: each
part has its own sizes in the graph, and its own guards. Placeholders are never 0 or 1, which the
compiler treats as constants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.core.sizes import surely_equal
from shardwise.errors import UnsupportedError


def no_constants() -> tuple[Any]:
    """Sizes without constants, for a compiler that looks for some; it asks again when needed."""
    import sympy  # type: ignore[import-untyped]

    return (sympy.Symbol("a_size_per_rank"),)


def differing(tuples: Sequence[Sequence[Any]]) -> list[int]:
    """The positions at which tuples of sizes are not the same."""
    return [at for at, sizes in enumerate(zip(*tuples, strict=True)) if not _alike(sizes)]


def _alike(sizes: Sequence[Any]) -> bool:
    """Whether sizes are equal; guards on symbols whose hints are equal."""
    first = sizes[0]
    if all(surely_equal(size, first) for size in sizes):
        return True
    hints = [size.node.hint if type(size) is torch.SymInt else size for size in sizes]
    if hints[0] is None or any(hint != hints[0] for hint in hints):
        return False
    return all(bool(size == first) for size in sizes)


def stand_in(parts: Sequence[torch.Tensor]) -> tuple[torch.Size, tuple[int, ...]]:
    """A shape and strides for the parts of a real tensor."""
    shape, shapes = list(parts[0].shape), [part.shape for part in parts]
    stride, strides = list(parts[0].stride()), [part.stride() for part in parts]
    uneven = differing(shapes)
    for dim in uneven:
        shape[dim] = 2 + max(each[dim] for each in shapes)
    # Larger than any product of sizes and strides, which the compiler would recognise.
    beyond = math.prod(max(size, 2) for size in shape) * (2 + max(map(max, strides), default=0))
    for dim in differing(strides):
        if not uneven:
            raise UnsupportedError(
                f"A LocalTensor whose parts have one shape, {tuple(shape)}, but strides {strides} "
                "cannot enter a compiled region. Call contiguous() on it first."
            )
        stride[dim] = beyond
        beyond *= 2
    return torch.Size(shape), tuple(stride)


def traced_stand_in(ndim: int) -> tuple[torch.Size, tuple[int, ...]]:
    """A shape and strides for a tensor that is made while a compiler traces.

    Constants, since a symbol that becomes one between two passes would contradict the compiler's
    records; and unlikely ones.
    """
    unlikely = 3001
    return torch.Size([unlikely] * ndim), tuple(unlikely ** (ndim - 1 - dim) for dim in range(ndim))
