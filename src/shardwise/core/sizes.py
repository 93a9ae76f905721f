"""Sizes: how a dim is split over ranks, and comparisons of symbolic sizes.

Sizes may be ints or torch's symbolic ints.

Note [Shards of symbolic sizes]
The compiler reasons about every size of every tensor; in a simulated world, which has the shards of
all ranks, that dominates its time. So there we guard on whether a symbolic size is divisible, and
on whether only the last shard is shorter. Each answer has its own graph, in which lengths are
simple sums and quotients, and equal shards have equal lengths. Lengths are minima only if several
shards are short. Uneven lengths add up to the size itself, not to a longer expression that would
enter everything computed from it. A real process has few sizes: it adds no guards, and one graph
serves all sizes.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch

from shardwise._torch.functions import compute
from shardwise.core.world import in_simulated_world

_Result = TypeVar("_Result")
#: An int or torch's SymInt; torch's stubs do not let the two mix in arithmetic.
Size: TypeAlias = Any


def length_of(x: torch.Tensor) -> Size:
    """`len(x)`. torch.tensor() of a list asks each entry for it, so the error names that too."""
    if not x.dim():
        raise TypeError(
            "len() of a 0-d tensor. If torch.tensor([...]) or torch.as_tensor([...]) asked for it: "
            "they take numbers, and this list holds tensors of several ranks. Use "
            "torch.stack([...])."
        )
    return x.shape[0]


def splits_evenly(size: Size, parts: int) -> bool:
    """Whether all shards have one length. See Note [Shards of symbolic sizes]."""
    if type(size) is int:
        return size % parts == 0
    return parts == 1 or decided(lambda: size % parts == 0)


def chunk_length(size: Size, parts: int) -> Size:
    """The length of all but the last shards when `size` is split as `torch.chunk` does."""
    if parts == 1:
        return size
    if type(size) is not int and splits_evenly(size, parts):
        return size // parts
    return (size + parts - 1) // parts


def shard_range(
    size: Size, parts: int, index: int, sizes: tuple[int, ...] | None
) -> tuple[Size, Size]:
    """`(start, length)` of shard `index` of `parts`.

    >>> [shard_range(5, 4, i, None) for i in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    >>> shard_range(5, 2, 1, (1, 4))
    (1, 4)
    """
    if sizes is not None:
        return sum(sizes[:index]), sizes[index]
    length = chunk_length(size, parts)
    if type(length) is not int and (splits_evenly(size, parts) or _only_last_is_short(size, parts)):
        start = index * length
        short = index == parts - 1 and not splits_evenly(size, parts)
        return start, size - start if short else length
    # The first two starts and the outer two lengths need no minimum: simpler for the compiler.
    if index == 0:
        return 0, length
    start = length if index == 1 else _minimum(index * length, size)
    end = size if index == parts - 1 else _minimum((index + 1) * length, size)
    return start, end - start


def _only_last_is_short(size: Size, parts: int) -> bool:
    return parts == 2 or decided(lambda: (parts - 1) * chunk_length(size, parts) <= size)


def lengths(size: Size, parts: int, sizes: tuple[int, ...] | None) -> tuple[Size, ...]:
    """The length of every shard.

    >>> lengths(5, 4, None)
    (2, 2, 1, 0)
    """
    if sizes is not None:
        return sizes
    if type(size) is int and size > 0:
        length = chunk_length(size, parts)
        full, rest = divmod(size, length)
        whole = (length,) * full + ((rest,) if rest else ())
        return whole + (0,) * (parts - len(whole))
    return tuple(shard_range(size, parts, i, None)[1] for i in range(parts))


def overlaps(before: Sequence[int], after: Sequence[int]) -> list[list[int]]:
    """The overlap of each shard of one split with each shard of another split of the same dim.

    >>> overlaps((2, 3), (4, 1))
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


def as_sizes(sizes: Iterable[Any]) -> tuple[Size, ...]:
    """A user's sizes as ints: a numpy integer would count as a symbol."""
    return tuple(n if isinstance(n, (int, torch.SymInt)) else operator.index(n) for n in sizes)


def settled(size: Size) -> Size:
    """A symbolic size that a guard has fixed, as an int.

    The compiler's graphs do not return symbols that are constants.
    """
    if type(size) is int:
        return size
    node = getattr(size, "node", None)
    constant = None if node is None else node.maybe_as_int()
    return size if constant is None else constant


def statically_equal(a: Size, b: Size) -> bool:
    """Whether two sizes are equal whatever their symbols stand for; adds no guard."""
    if type(a) is not torch.SymInt and type(b) is not torch.SymInt:
        return bool(a == b)
    if a is b:
        return True
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(a == b)


def equal(a: Size, b: Size) -> bool:
    """Whether two sizes are equal, with a guard; False if that is data-dependent.

    So a caller's code for False must be right for equal sizes as well.
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


# -- symbolic sizes while a compiler traces ------------------------------------------------------


def unrecorded(fn: Callable[..., _Result], *args: Any) -> _Result:
    """`fn(*args)`; its arithmetic of sizes is not recorded in a graph that is being traced.

    When `fn` makes a tensor, torch records how it computed a size, such as `s = 1 + (s - 1)` for
    the memory of `s` entries, and uses the last record for every `s` without one: the graph would
    refer to itself. Sizes without a record are built from the graph's inputs when needed.
    """
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    with disable_proxy_modes_tracing():
        return fn(*args)


def decided(claim: Callable[[], Any]) -> bool:
    """Whether a claim about symbolic sizes holds, which makes graphs simpler.

    A simulated world guards on the answer and has a graph for each: it holds the sizes of all
    ranks, so simple ones matter. In a real process, and in an exported program, one graph serves
    all sizes: the answer is True only if it is known. The same holds for data-dependent sizes.
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

    one_graph = torch.compiler.is_exporting() or not in_simulated_world()
    answer = statically_known_true if one_graph else guard_or_false
    if torch.compiler.is_dynamo_compiling():
        return bool(answer(claim()))
    return unrecorded(lambda: bool(answer(claim())))


def recorded(numbers: Sequence[Any]) -> Sequence[Any]:
    """`numbers`, recorded in the graph that is being traced; the same object if nothing changes.

    torch builds some expressions of sizes when it needs them, but not powers, such as `s * s`, nor
    products of three: those must be recorded. A size without a record is looked up by its symbol
    each time, which may lead back to itself (see `unrecorded`).
    """
    if all(type(n) is not torch.SymInt for n in numbers):
        return numbers
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    if mode is None:
        return numbers
    found = tuple(_recorded(n, mode.tracer) if type(n) is torch.SymInt else n for n in numbers)
    changed = any(a is not b for a, b in zip(found, numbers, strict=True))
    return found if changed else numbers


def _recorded(number: torch.SymInt, tracer: Any) -> Any:
    if not number.node.is_symbolic() or number in tracer.symnode_tracker:
        return number
    is_symbol = number.node.expr.is_Symbol
    return _tracked(number, tracer) if is_symbol else _computed(number, tracer)


def _tracked(number: Any, tracer: Any) -> Any:
    from torch.fx.experimental.proxy_tensor import get_proxy_slot, set_proxy_slot

    proxy = get_proxy_slot(number, tracer, None)
    if proxy is None:
        proxy = _under_another_name(number, tracer)
    if proxy is not None:
        set_proxy_slot(number, tracer, proxy)
    return number


def _under_another_name(number: torch.SymInt, tracer: Any) -> Any:
    """The proxy of a data-dependent size, for which each trace has its own symbol.

    Torch then gives it the name of the first trace, and keeps its proxy under the other one.
    """
    env, name = number.node.shape_env, number.node.expr
    found = (e.proxy for s, e in tracer.sympy_expr_tracker.items() if env.replace(s) == name)
    return next(found, None)


def _computed(number: torch.SymInt, tracer: Any) -> Any:
    expr, env = number.node.expr, number.node.shape_env
    symbols = {
        symbol: _tracked(env.create_symintnode(symbol, hint=None), tracer)
        for symbol in expr.free_symbols
    }
    found = compute(expr, symbols)
    # Sizes computed through floats, such as those of scaled images, are not computed in Python.
    return found if isinstance(found, (int, torch.SymInt)) else number


def settle_ones(sizes: Sequence[Any]) -> None:
    """Let the compiler decide now which of these sizes are 1, and so are not symbols.

    For ints that a program passes, such as `(1, n, 1)` for a split, it may find out while tracing
    the graph: too late, since it has recorded by then which output sizes are symbols.
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    for size in sizes:
        if type(size) is torch.SymInt and size.node.is_symbolic():
            guard_or_false(size == 1)
