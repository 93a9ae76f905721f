"""The values at hand while a program grows, from which rows of the tables pick their arguments."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

import torch

from shardwise.core.placements import REDUCE_OPS, REPLICATE, Partial, Placement, Shard
from shardwise.testing.fuzz.program import Leaf, placed

T = TypeVar("T")
#: Entries of a tensor at most.
MOST = 96
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex128, torch.complex64)
INEXACT = (*FLOATS, *COMPLEX)
INTS = (torch.int64, torch.int32)
#: For ops whose kernels take no half precision.
WIDE = FLOATS[:2]


class NoFit(Exception):
    """No value at hand fits the needs of a table's row."""


@dataclass(frozen=True)
class Draft:
    """A row's proposal: an expression, or a statement that makes no slot.

    `before` opens a block around it. `local` says that the result is a plain tensor, whole on every
    rank; `frozen` names slots that must not be written to from now on, and neither must the result.
    """

    code: str
    before: str = ""
    statement: bool = False
    local: bool = False
    frozen: tuple[str, ...] = ()


Row = Callable[["Hand"], "str | Draft"]


class Hand:
    """Picks slots that fit, or makes leaves that do; `hand[name]` is the value of a slot."""

    def __init__(self, random: Random, mesh: tuple[int, ...], main: torch.dtype) -> None:
        self.random, self.mesh, self.main = random, mesh, main
        self.values: Mapping[str, Any] = {}
        #: Slots that are plain tensors on every rank, and slots that must not be written to.
        self.local: set[str] = set()
        self.frozen: set[str] = set()
        #: Leaves that the current row has made.
        self.made: list[Leaf] = []
        #: The slot that the current row writes to, for its other arguments.
        self.chosen = ""
        self.next_number = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        value = self.values.get(name)
        if value is None:
            leaf = next(leaf for leaf in self.made if leaf.name == name)
            return torch.empty(leaf.shape, dtype=leaf.dtype)
        assert isinstance(value, torch.Tensor), f"slot {name} holds no tensor"
        return value

    # -- chance ------------------------------------------------------------------------------

    def pick(self, options: Sequence[T]) -> T:
        if not options:
            raise NoFit
        return self.random.choice(options)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def between(self, low: int, high: int) -> int:
        """An integer from `low` to `high`, both included."""
        if high < low:
            raise NoFit
        return self.random.randint(low, high)

    def number(self) -> float:
        """A float that every dtype holds exactly."""
        return self.random.choice((-1.5, -0.75, -0.25, 0.25, 0.5, 0.75, 1.25, 2.0))

    def flag(self) -> bool:
        return self.chance(0.5)

    # -- values ------------------------------------------------------------------------------

    def names(self, fits: Callable[[torch.Tensor], bool]) -> list[str]:
        return [
            name
            for name, value in self.values.items()
            if isinstance(value, torch.Tensor) and name not in self.local and fits(value)
        ]

    def tensor(
        self,
        dtypes: Sequence[torch.dtype] | None = None,
        dims: tuple[int, int] = (0, 4),
        nonempty: bool = False,
        where: Callable[[torch.Tensor], bool] = lambda t: True,
    ) -> str:
        """A slot that fits; a new leaf where none does, and now and then."""

        def fits(value: torch.Tensor) -> bool:
            return (
                (dtypes is None or value.dtype in dtypes)
                and dims[0] <= value.dim() <= dims[1]
                and (value.numel() > 0 or not nonempty)
                and where(value)
            )

        found = self.names(fits)
        if found and not self.chance(0.12):
            # Later values are the more interesting ones.
            return self.pick(found[-4:] if self.chance(0.6) else found)
        for _ in range(4):
            shape = self.shape(dims[0], max(dims[0], min(dims[1], 3)), nonempty)
            dtype = self.dtype(dtypes)
            if where(torch.empty(shape, dtype=dtype)):
                return self.new(shape, dtype)
        raise NoFit

    def floats(self, *dims: int, nonempty: bool = False) -> str:
        """A slot of real floats with the given minimum and maximum of dims."""
        return self.tensor(FLOATS, _range(dims), nonempty)

    def inexact(self, *dims: int, nonempty: bool = False) -> str:
        """As `floats`, or complex."""
        return self.tensor(INEXACT, _range(dims), nonempty)

    def ints(self, *dims: int) -> str:
        return self.tensor(INTS, _range(dims))

    def bools(self, *dims: int) -> str:
        return self.tensor((torch.bool,), _range(dims))

    def any(self, *dims: int, nonempty: bool = False) -> str:
        return self.tensor(None, _range(dims), nonempty)

    def real(self, *dims: int, nonempty: bool = False) -> str:
        """Anything that can be ordered."""
        return self.tensor((*FLOATS, *INTS), _range(dims), nonempty)

    def whole(self) -> str:
        """A slot that is a plain tensor, whole on every rank."""
        return self.pick(sorted(self.local & set(self.values)))

    def like(self, x: str, dtype: torch.dtype | None = None, exact: bool = False) -> str:
        """A slot that broadcasts with `x`: of its shape with `exact`."""
        value = self[x]
        dtype = dtype or value.dtype

        def fits(other: torch.Tensor) -> bool:
            if exact or not self.mixes:
                same = other.dtype == dtype
            else:
                same = other.is_floating_point() == dtype.is_floating_point
            return same and (
                other.shape == value.shape if exact else _broadcasts(other.shape, value.shape)
            )

        found = self.names(fits)
        if found and self.chance(0.75):
            return self.pick(found)
        shape = list(value.shape)
        if not exact and self.chance(0.4):
            shape = [1 if self.chance(0.4) else size for size in shape]
            shape = shape[self.between(0, len(shape)) :]
        return self.new(tuple(shape), dtype)

    def same(self, x: str) -> str:
        """A slot of the shape and dtype of `x`."""
        return self.like(x, exact=True)

    def resized(self, x: str, dim: int, size: int) -> list[int]:
        """The shape of `x` with another size of a dim."""
        shape = list(self[x].shape)
        shape[dim] = size
        return shape

    @property
    def mixes(self) -> bool:
        """Whether this pick may bring another dtype in."""
        return self.chance(0.2)

    def writable(self, where: Callable[[torch.Tensor], bool] = lambda t: True) -> str:
        """A slot that may be written to: no conversion has made it or used it."""
        shut = {_storage(self[name]) for name in self.frozen if name in self.values}
        found = self.names(lambda t: _storage(t) not in shut and where(t))
        return self.pick(found)

    def write(self, target: str, code: str, frozen: tuple[str, ...] = ()) -> Draft:
        """A statement that writes to `target`, without grad where autograd forbids the write."""
        value = self[target]
        if value.requires_grad and value.is_leaf and not self.chance(0.06):
            code = f"with torch.no_grad(): {code}"
        return Draft(code, statement=True, frozen=frozen)

    # -- new leaves --------------------------------------------------------------------------

    def shape(self, low: int = 0, high: int = 3, nonempty: bool = False) -> tuple[int, ...]:
        while True:
            dims = self.random.choice([n for n in (0, 1, 1, 2, 2, 2, 3, 3, 4) if low <= n <= high])
            shape = tuple(self.size(nonempty) for _ in range(dims))
            if math.prod(shape) <= MOST:
                return shape

    def size(self, nonempty: bool = False) -> int:
        if not nonempty and self.chance(0.025):
            return 0
        return self.random.choice((1, 2, 2, 3, 3, 4, 4, 5, 6))

    def dtype(self, among: Sequence[torch.dtype] | None = None) -> torch.dtype:
        if among is None:
            among = (*FLOATS, *INTS, torch.bool, *COMPLEX)
        if self.main in among and self.chance(0.85):
            return self.main
        if among == FLOATS or self.main in among:
            # Half precision now and then: its values depend on the order of sums.
            among = [d for d in among if d.itemsize > 2 or self.chance(0.2)] or among
        return self.random.choice(list(among))

    def new(
        self,
        shape: Sequence[int],
        dtype: torch.dtype | None = None,
        high: int = 5,
        grad: bool | None = None,
    ) -> str:
        """A new leaf of the given shape."""
        if math.prod(shape) > 2 * MOST:
            raise NoFit
        dtype = dtype or self.main
        name = f"v{self.next_number}"
        self.next_number += 1
        differentiable = dtype.is_floating_point or dtype.is_complex
        grad = differentiable and (self.chance(0.6) if grad is None else grad)
        placements, order = self.placements(tuple(shape), dtype)
        leaf = Leaf(name, tuple(shape), dtype, placements, order, grad, max(high, 1))
        self.made.append(leaf)
        return name

    # -- places ------------------------------------------------------------------------------

    def dim(self, x: str, least: int = 1) -> int:
        """A dim of `x`, counted from either end, of `least` entries."""
        value = self[x]
        dim = self.pick([d for d, size in enumerate(value.shape) if size >= least])
        return dim if self.chance(0.7) else dim - value.dim()

    def placements(
        self, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[tuple[Placement, ...], tuple[int, ...] | None]:
        """Any placements for a tensor of this shape, and the order of axes."""
        chosen: list[Placement] = []
        term = Partial(self.random.choice(reductions(dtype)))
        for parts in self.mesh:
            kind = self.random.random()
            if kind < 0.5 and shape:
                chosen.append(self._shard(shape, parts, chosen))
            elif kind < 0.75:
                chosen.append(REPLICATE)
            elif self.chance(0.3) and term.reduce_op in ("sum", "avg") and dtype.is_floating_point:
                chosen.append(Partial("avg" if term.reduce_op == "sum" else "sum"))
            else:
                chosen.append(term)
        order: tuple[int, ...] | None = None
        twice = len({p.dim for p in chosen if isinstance(p, Shard)}) < sum(
            isinstance(p, Shard) for p in chosen
        )
        if twice and self.chance(0.5):
            order = tuple(self.random.sample(range(len(chosen)), len(chosen)))
            chosen = [Shard(p.dim) if isinstance(p, Shard) else p for p in chosen]
        return tuple(chosen), order

    def _shard(self, shape: tuple[int, ...], parts: int, before: Sequence[Placement]) -> Placement:
        dim = self.random.randrange(len(shape))
        if self.chance(0.2) and not any(p.is_shard(dim) for p in before):
            stops = sorted(self.random.randint(0, shape[dim]) for _ in range(parts - 1))
            bounds = itertools.pairwise([0, *stops, shape[dim]])
            return Shard(dim, tuple(stop - start for start, stop in bounds))
        return Shard(dim)

    def anywhere(self, x: str) -> str:
        """Placements for `x` as arguments of `w.redistribute`."""
        value = self[x]
        placements, order = self.placements(tuple(value.shape), value.dtype)
        return placed(placements) + (f", {order}" if order is not None else "")

    def sharded(self, x: str) -> str:
        """Placements without terms, as `distribute_tensor` takes them."""
        placements, _ = self.placements(tuple(self[x].shape), self[x].dtype)
        return placed(tuple(REPLICATE if p.is_partial() else p for p in placements))


def reductions(dtype: torch.dtype) -> tuple[str, ...]:
    """The reductions of a Partial tensor of this dtype."""
    if dtype is torch.bool:
        return ("max", "min")
    if dtype.is_complex:
        return ("sum", "avg")
    if not dtype.is_floating_point:
        return ("sum", "max", "min", "product")
    return ("sum", "sum", *REDUCE_OPS)


def _range(dims: tuple[int, ...]) -> tuple[int, int]:
    low, high = (*dims, 4)[:2] if dims else (0, 4)
    return low, high


def _broadcasts(one: Sequence[int], other: Sequence[int]) -> bool:
    pairs = zip(reversed(one), reversed(other), strict=False)
    return all(a == b or a == 1 or b == 1 for a, b in pairs)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
