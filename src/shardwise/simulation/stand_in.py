"""The sizes that a compiler notes down for a LocalTensor whose parts differ in size.

A program that asks such a tensor for its shape gets an error that names the ranks, compiled or not.
But the compiler keeps books: it wants numbers for what enters a region, and symbols for what
leaves. It gets numbers that say nothing: each part has its own sizes in the graph, and its own
guards. They may not be 0 or 1, which the compiler takes for constants.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

import torch

from shardwise.errors import UnsupportedError
from shardwise.simulation.rank_int import surely_equal

_torch = os.path.dirname(torch.__file__) + os.sep


def _places(*names: str) -> tuple[str, ...]:
    return tuple(_torch + name.replace("/", os.sep) for name in names)


#: Not all of `_functorch`: vmap and its kin run in eager code, and compute with the sizes they get.
_BOOKS = _places(
    "_dynamo",
    "_functorch/_aot_autograd",
    "_functorch/aot_autograd.py",
    "_functorch/partitioners.py",
    "_subclasses",
    "fx",
    "utils/_python_dispatch.py",
)
_FORMULAS = _places("_decomp", "_refs")
#: Files that the compiler shares with programs, and the function of it that asks from there.
_SHARED = dict(
    zip(
        (*_places("_prims_common/__init__.py", "autograd/__init__.py"), "<string>"),
        ("suggest_memory_format", "_make_grads", "guard"),
        strict=True,
    )
)
#: Where the compiler answers a program that it reads.
_FOR_THE_PROGRAM = frozenset({"_method_size_stride", "method_attr_shape"})
#: Where it looks for constants, to answer later without asking again; how far below that it asks.
_LOOKS_FOR_CONSTANTS, _DEPTH = "specialize", 6


class Asker(Enum):
    """Who wants to know a size."""

    PROGRAM = auto()
    #: The compiler, for its books.
    COMPILER = auto()
    #: The compiler, which wants to know what will never change.
    FOR_CONSTANTS = auto()
    #: One of torch's own formulas, written in Python.
    FORMULA = auto()


def asker(own_file: str) -> Asker:
    """Who asks: the first caller outside of `own_file`."""
    frame: Any = sys._getframe(1)
    while frame.f_code.co_filename == own_file:
        frame = frame.f_back
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    if file.startswith(_FORMULAS):
        return Asker.FORMULA
    if not file.startswith(_BOOKS):
        above = frame.f_back.f_code.co_filename if frame.f_back is not None else ""
        # A guard is evaluated once more, to say why it failed.
        again = name == "<module>" and above.startswith(_BOOKS)
        return Asker.COMPILER if again or _SHARED.get(file) == name else Asker.PROGRAM
    for _ in range(_DEPTH):
        if frame is not None and frame.f_code.co_name == _LOOKS_FOR_CONSTANTS:
            return Asker.FOR_CONSTANTS
        frame = None if frame is None else frame.f_back
    return Asker.PROGRAM if name in _FOR_THE_PROGRAM else Asker.COMPILER


def no_constants() -> tuple[Any]:
    """Sizes in which a compiler that looks for constants finds none; it asks again when needed."""
    import sympy  # type: ignore[import-untyped]

    return (sympy.Symbol("a_size_per_rank"),)


def differing(tuples: Sequence[Sequence[Any]]) -> list[int]:
    """The positions at which tuples of sizes are not the same."""
    return [at for at, sizes in enumerate(zip(*tuples, strict=True)) if not _alike(sizes)]


def _alike(sizes: Sequence[Any]) -> bool:
    """Whether sizes are equal. Symbols are from now on, where all of them happen to be."""
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
    # Larger than all that sizes and strides multiply to: the compiler would recognise that.
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
    """A shape and strides for what is made while a compiler traces.

    Constants: a symbol that turns out to be one between two passes would upset the books. And none
    that a program would ask for.
    """
    unlikely = 3001
    return torch.Size([unlikely] * ndim), tuple(unlikely ** (ndim - 1 - dim) for dim in range(ndim))
