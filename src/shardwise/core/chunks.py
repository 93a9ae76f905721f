"""The arithmetic of pieces: which part of a dim a coordinate owns.

Sizes may be ints or torch's symbolic ints.

Note [Pieces of symbols]
A compiler reasons about every size of every tensor, and where one process plays all ranks, that is
most of what it does. There it is asked whether a symbolic size divides, and whether only the last
piece is shorter: it has a graph for each answer, and in it lengths are sums and quotients, equal
where pieces are. Only where several ranks have less than a whole piece are they minima. Uneven ones
add up to the size itself, not to a longer expression, which would enter all that is computed from
the whole. A process that is one rank has few sizes; it asks nothing, and one graph serves them all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from shardwise.core.symbols import decided

#: An int or torch's SymInt; torch's stubs do not let the two mix in arithmetic.
Size: TypeAlias = Any


def splits_evenly(size: Size, parts: int) -> bool:
    """Whether all pieces have one length. See Note [Pieces of symbols]."""
    if type(size) is int:
        return size % parts == 0
    return parts == 1 or decided(lambda: size % parts == 0)


def chunk_length(size: Size, parts: int) -> Size:
    """The length of all but the last pieces when `size` is split as `torch.chunk` splits it."""
    if parts == 1:
        return size
    if type(size) is not int and splits_evenly(size, parts):
        return size // parts
    return (size + parts - 1) // parts


def piece(size: Size, parts: int, index: int, sizes: tuple[int, ...] | None) -> tuple[Size, Size]:
    """`(start, length)` of piece `index` of `parts`.

    >>> [piece(5, 4, i, None) for i in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    >>> piece(5, 2, 1, (1, 4))
    (1, 4)
    """
    if sizes is not None:
        return sum(sizes[:index]), sizes[index]
    length = chunk_length(size, parts)
    if type(length) is not int and (splits_evenly(size, parts) or _only_last_is_short(size, parts)):
        start = index * length
        short = index == parts - 1 and not splits_evenly(size, parts)
        return start, size - start if short else length
    # The first two starts and the outer two lengths need no minimum, which a compiler of symbolic
    # sizes would otherwise have to reason about.
    if index == 0:
        return 0, length
    start = length if index == 1 else _minimum(index * length, size)
    end = size if index == parts - 1 else _minimum((index + 1) * length, size)
    return start, end - start


def _only_last_is_short(size: Size, parts: int) -> bool:
    return parts == 2 or decided(lambda: (parts - 1) * chunk_length(size, parts) <= size)


def lengths(size: Size, parts: int, sizes: tuple[int, ...] | None) -> tuple[Size, ...]:
    """The length of every piece.

    >>> lengths(5, 4, None)
    (2, 2, 1, 0)
    """
    return (
        sizes if sizes is not None else tuple(piece(size, parts, i, None)[1] for i in range(parts))
    )


def shared(before: Sequence[int], after: Sequence[int]) -> list[list[int]]:
    """How much of each piece of one split lies in each piece of another split of the same dim.

    >>> shared((2, 3), (4, 1))
    [[2, 0], [2, 1]]
    """
    ends_after = list(itertools.accumulate(after))
    table, start = [], 0
    for length in before:
        end = start + length
        spans = zip(after, ends_after, strict=True)
        table.append([max(0, min(end, stop) - max(start, stop - n)) for n, stop in spans])
        start = end
    return table


def settled(size: Size) -> Size:
    """A symbolic size that a guard has fixed, as the int that it is.

    The compiler's graphs do not return symbols that are constants.
    """
    if type(size) is int:
        return size
    node = getattr(size, "node", None)
    constant = None if node is None else node.maybe_as_int()
    return size if constant is None else constant


def surely_equal(a: Size, b: Size) -> bool:
    """Whether two sizes are equal whatever their symbols stand for: nothing is guarded."""
    if type(a) is not torch.SymInt and type(b) is not torch.SymInt:
        return bool(a == b)
    if a is b:
        return True
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(a == b)


def equal(a: Size, b: Size) -> bool:
    """Whether two sizes are equal, which a guard notes; where only values can tell, no.

    What follows from a "no" must hold for equal sizes as well.
    """
    return (a == b) if type(a) is int and type(b) is int else _found(a == b)


def equal_shapes(a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Whether all sizes are equal, as in `equal`."""
    return len(a) == len(b) and all(equal(m, n) for m, n in zip(a, b, strict=True))


def divides(parts: int, size: Size) -> bool:
    """Whether `parts` divides `size`, as in `equal`."""
    return size % parts == 0 if type(size) is int else _found(size % parts == 0)


def smaller(a: Size, b: Size) -> bool:
    """Whether `a` is less than `b`, as in `equal`."""
    return (a < b) if type(a) is int and type(b) is int else _found(a < b)


def _found(answer: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(answer)


def _minimum(a: Size, b: Size) -> Size:
    if type(a) is int and type(b) is int:
        return a if a < b else b
    return torch.sym_min(a, b)
