"""Roster: which rank holds which part of a LocalTensor; RankInt: an int that differs between ranks.

Note [Uneven sizes]
The sizes of a LocalTensor whose parts differ in shape are torch SymInts that hold one value per
rank. Torch passes them through its own formulas (a gradient expanded to the size of its input), the
LocalTensor runs each part with its own rank's value, and code that reads *the* value gets an error
that names the ranks. Only equality has an answer if ranks differ: sizes count as equal only if they
are equal on all ranks, which suits torch's questions when it looks for shortcuts. While a compiler
traces, the values may be symbols; see `traced_rank_int`.
"""

from __future__ import annotations

import functools
import math
import operator
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from shardwise.core.sizes import statically_equal
from shardwise.core.world import World, simulated_world, world_caches
from shardwise.errors import LayoutError, RankMismatchError, UnsupportedError, WorldError

# Ranks that hold one tensor share a part, so a replicated value is stored and written once. Rosters
# are interned per world: tensors whose ranks share alike have the same roster.


class Roster:
    """`index[i]` is the part that `ranks[i]` holds. Compared by identity."""

    __slots__ = ("__weakref__", "_parts", "index", "num_parts", "ranks", "world")

    def __init__(self, world: World, ranks: tuple[int, ...], index: tuple[int, ...]) -> None:
        self.world, self.ranks, self.index = world, ranks, index
        self.num_parts = max(index) + 1
        self._parts = dict(zip(ranks, index, strict=True))

    def __deepcopy__(self, memo: Any) -> Roster:
        return self  # one object per value

    def __reduce__(self) -> Any:
        return _make_here, (self.ranks, self.index)

    def ranks_of(self, part: int) -> list[int]:
        return [r for r, p in zip(self.ranks, self.index, strict=True) if p == part]

    def part_of(self, rank: int) -> int:
        try:
            return self._parts[rank]
        except KeyError:
            raise LayoutError(
                f"Rank {rank} holds nothing of a LocalTensor that is on ranks {spans(self.ranks)}."
            ) from None


_interned: weakref.WeakValueDictionary[Any, Roster] = weakref.WeakValueDictionary()


def make_roster(world: World, ranks: tuple[int, ...], index: tuple[int, ...]) -> Roster:
    key = (world, ranks, index)
    roster = _interned.get(key)
    if roster is None:
        roster = _interned[key] = Roster(world, ranks, index)
    return roster


def _make_here(ranks: tuple[int, ...], index: tuple[int, ...]) -> Roster:
    return make_roster(simulated_world("A LocalTensor"), ranks, index)


def grouped(
    world: World, ranks: tuple[int, ...], keys: Sequence[Hashable]
) -> tuple[Roster, list[int]]:
    """The roster in which ranks with equal keys share a part, and the first rank of each part.

    The first ranks are given as positions in `ranks`.
    """
    parts: dict[Hashable, int] = {}
    firsts: list[int] = []
    index = []
    for place, key in enumerate(keys):
        if key not in parts:
            parts[key] = len(parts)
            firsts.append(place)
        index.append(parts[key])
    return make_roster(world, ranks, tuple(index)), firsts


@functools.lru_cache(maxsize=256)
def join(rosters: tuple[Roster, ...]) -> tuple[Roster, tuple[tuple[int, ...], ...]]:
    """The coarsest roster that is at least as fine as each, and each one's part per joined part."""
    first = rosters[0]
    for other in rosters[1:]:
        if other.ranks != first.ranks or other.world is not first.world:
            raise WorldError(
                f"One call mixes tensors of ranks {first.ranks} ({first.world}) and of ranks "
                f"{other.ranks} ({other.world}); both must be on the same ranks."
            )
    rows = list(zip(*(r.index for r in rosters), strict=True))
    joined, firsts = grouped(first.world, first.ranks, rows)
    picks = tuple(tuple(r.index[place] for place in firsts) for r in rosters)
    return joined, picks


world_caches.append(join.cache_clear)


# -- one value of all ranks ------------------------------------------------------------------


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal; NaN equals NaN. Without values, equal shapes suffice."""
    if one.is_meta or other.is_meta:
        return one.shape == other.shape
    if torch.equal(one, other):
        return True
    if one.shape != other.shape or not (one.is_floating_point() or one.is_complex()):
        return False
    return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def agreed_value(values: Sequence[Any], roster: Roster, asked: str) -> Any:
    """The value that all parts have, or an error that names the ranks."""
    first = values[0]
    for value in values[1:]:
        if value != first and not (value != value and first != first):
            raise mismatch(asked, roster, values)
    return first


def mismatch(asked: str, roster: Roster, values: Sequence[Any]) -> RankMismatchError:
    found = "; ".join(
        f"rank {spans(roster.ranks_of(part))} has {_brief(value)}"
        for part, value in enumerate(values)
    )
    return RankMismatchError(
        f"One value was asked for ({asked}), but the ranks differ: {found}. Ask for one rank with "
        ".on_rank(r), or map over ranks with LocalTensor.per_rank(fn)."
    )


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return str(value)


def spans(ranks: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` as `0-2, 5`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    return ", ".join("-".join(map(str, span)) for span in spans)


# -- RankInt -------------------------------------------------------------------------------------


#: Decodes a SymInt that torch computed from a RankInt. Set while tracing.
decode_mixed: Callable[[Any], RankIntNode | None] | None = None


def rank_int(
    world: World,
    ranks: tuple[int, ...],
    values: Sequence[Any],
    node: type[RankIntNode] | None = None,
) -> Any:
    """The integer itself when all ranks agree, else a SymInt with a node of this type.

    With a traced node type, symbols become such SymInts too, since the sizes of one tensor are
    multiplied with each other.
    """
    kept = node is None or type(values[0]) is int
    if kept and all(statically_equal(value, values[0]) for value in values):
        return values[0]
    return torch.SymInt((node or RankIntNode)(world, ranks, tuple(values)))


def value_key(value: Any) -> Hashable:
    """A hashable key of a value; a symbol has no hash, but its expression has."""
    if isinstance(value, (torch.SymInt, torch.SymBool)):
        return value.node.expr
    return value


def rank_values_of(value: Any) -> RankIntNode | None:
    """The node behind a SymInt that differs between ranks."""
    node = value.node if isinstance(value, torch.SymInt) else None
    if node is None or isinstance(node, RankIntNode):
        return node
    return None if decode_mixed is None else decode_mixed(node)


class RankIntNode:
    """The node of a SymInt, with a value per rank."""

    def __init__(self, world: World, ranks: tuple[int, ...], values: tuple[Any, ...]) -> None:
        self.world, self.ranks, self.values = world, ranks, values

    def parts(self) -> tuple[Roster, list[Any]]:
        """Which ranks share a value, and the values."""
        roster, firsts = grouped(self.world, self.ranks, list(map(value_key, self.values)))
        return roster, [self.values[place] for place in firsts]

    def _agreed(self, asked: str) -> Any:
        roster, values = self.parts()
        plain = [bool(v) if isinstance(v, torch.SymBool) else v for v in values]
        return agreed_value(plain, roster, asked)

    # -- what kind of number it is -------------------------------------------------------------

    def is_int(self) -> bool:
        return not self.is_bool()

    def is_bool(self) -> bool:
        return isinstance(self.values[0], (bool, torch.SymBool))

    def is_float(self) -> bool:
        return False

    is_nested_int = is_symbolic = is_constant = is_float

    def has_hint(self) -> bool:
        return True

    def maybe_as_int(self) -> int | None:
        return None

    def clone(self) -> RankIntNode:
        return self

    def _str(self) -> str:
        return "{" + ", ".join(map(str, self.values)) + "}"

    __str__ = __repr__ = _graph_repr = _str

    # -- asking for the value ------------------------------------------------------------------

    def guard_int(self, file: str, line: int) -> int:
        return int(self._agreed("a size"))

    def guard_bool(self, file: str, line: int) -> bool:
        return bool(self._agreed("a comparison of sizes"))

    expect_true = expect_size = guard_size_oblivious = guard_or_false = guard_or_true = guard_bool

    def statically_known_true(self, file: str, line: int) -> bool:
        return all(self.values)

    def int_(self) -> int:
        return self.guard_int("", 0)

    def bool_(self) -> bool:
        return self.guard_bool("", 0)

    # -- arithmetic ----------------------------------------------------------------------------

    def wrap_int(self, number: int) -> RankIntNode:
        return type(self)(self.world, self.ranks, (number,) * len(self.ranks))

    wrap_bool = wrap_int

    def _with(self, other: Any, fn: Callable[[Any, Any], Any]) -> RankIntNode:
        others = self._values_of(other)
        results = tuple(fn(a, b) for a, b in zip(self.values, others, strict=True))
        return type(self)(self.world, self.ranks, results)

    def _values_of(self, other: Any) -> tuple[Any, ...]:
        if isinstance(other, RankIntNode):
            return other.values
        return (other,) * len(self.ranks)

    def eq(self, other: Any) -> RankIntNode:
        return self.wrap_bool(all(self._with(other, operator.eq).values))

    def ne(self, other: Any) -> RankIntNode:
        return self.wrap_bool(not all(self._with(other, operator.eq).values))

    def neg(self) -> RankIntNode:
        return self._with(0, lambda a, _: -a)

    def sym_not(self) -> RankIntNode:
        return self._with(0, lambda a, _: not a)


def _binary(fn: Callable[[Any, Any], Any]) -> Callable[[RankIntNode, Any], RankIntNode]:
    return lambda self, other: self._with(other, fn)


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "int_floordiv": operator.floordiv,
    "mod": operator.mod,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "sym_min": min,
    "sym_max": max,
    "and_": lambda a, b: a and b,
    "or_": lambda a, b: a or b,
    "sym_and": lambda a, b: a and b,
    "sym_or": lambda a, b: a or b,
}
# Not in the class body, where it would hide the type `str`.
setattr(RankIntNode, "str", RankIntNode._str)  # noqa: B010
for _name, _fn in _OPERATORS.items():
    setattr(RankIntNode, _name, _binary(_fn))


# -- placeholders---------------------------------------------------------------------------------
# The sizes that a compiler records for a LocalTensor whose parts differ in size.
#
# A program that reads the shape of such a tensor gets an error that names the ranks, compiled or
# not. But the compiler records sizes for everything that enters and leaves a region. It gets
# placeholders: each part has its own sizes in the graph, and its own guards. Placeholders are never
# 0 or 1, which the compiler treats as constants.


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
    if all(statically_equal(size, first) for size in sizes):
        return True
    hints = [size.node.hint if type(size) is torch.SymInt else size for size in sizes]
    if hints[0] is None or any(hint != hints[0] for hint in hints):
        return False
    return all(bool(size == first) for size in sizes)


def placeholder(parts: Sequence[torch.Tensor]) -> tuple[torch.Size, tuple[int, ...]]:
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


def traced_placeholder(ndim: int) -> tuple[torch.Size, tuple[int, ...]]:
    """A shape and strides for a tensor that is made while a compiler traces.

    Constants, since a symbol that becomes one between two passes would contradict the compiler's
    records; and unlikely ones.
    """
    unlikely = 3001
    return torch.Size([unlikely] * ndim), tuple(unlikely ** (ndim - 1 - dim) for dim in range(ndim))
