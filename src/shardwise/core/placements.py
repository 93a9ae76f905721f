"""Placements: how one mesh axis holds a tensor.

Immutable values. `axis` is always of a mesh and `dim` of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from shardwise._torch.dynamo import IS_OLD_COMPILER, ValueBase, register_value
from shardwise.errors import ArgumentError, LayoutError

_Class = TypeVar("_Class", bound=type)


def graph_constant(cls: _Class) -> _Class:
    """Let compiled code make, read and pass a frozen dataclass, as a constant of its graph."""
    fields: tuple[str, ...] = cls.__match_args__  # type: ignore[attr-defined]
    methods = [name for base in cls.__mro__[:-1] for name in vars(base) if name.startswith("is_")]
    names = (*fields, *methods, "__repr__", *(("__eq__",) if IS_OLD_COMPILER else ()))
    cls.__fx_repr__ = _fx_repr  # type: ignore[attr-defined]
    register_value(cls, names)
    return cls


def _fx_repr(self: Any) -> tuple[str, dict[str, type]]:
    """The value as code of a graph, and the names that the code uses."""
    cls = type(self)
    fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in cls.__match_args__)
    return f"{cls.__name__}({fields})", {cls.__name__: cls}


REDUCE_OPS: Final = ("sum", "avg", "product", "max", "min")


class Placement(ValueBase):
    """How the coordinates of one mesh axis hold a tensor."""

    #: The compiler keeps weak references to placements made in a compiled region.
    __slots__ = () if hasattr(ValueBase, "__weakref__") else ("__weakref__",)

    def is_shard(self, dim: int | None = None) -> bool:
        return False

    def is_replicate(self) -> bool:
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return False


@graph_constant
@dataclass(frozen=True, slots=True, repr=False)
class Shard(Placement):
    """Each coordinate holds one shard of `dim`.

    Without `sizes` the shards are those of `torch.chunk`: as equal as possible, the last ones
    shorter or empty. With `sizes`, coordinate `i` holds `sizes[i]` entries; zero is allowed.

    >>> Shard(0)
    Shard(0)
    >>> Shard(0, sizes=(100, 0, 0, 0))      # a table that lives on one rank
    Shard(0, sizes=(100, 0, 0, 0))
    """

    dim: int
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or isinstance(self.dim, bool):
            raise ArgumentError(f"Shard(dim) takes an int, found {self.dim!r}.")
        if self.sizes is None:
            return
        if not isinstance(self.sizes, Iterable):
            raise ArgumentError(f"Shard sizes are a tuple of ints, found {self.sizes!r}.")
        sizes = tuple(self.sizes)
        if any(not isinstance(s, int) or isinstance(s, bool) for s in sizes):
            raise ArgumentError(f"Shard sizes must be ints, found {self.sizes!r}.")
        if any(s < 0 for s in sizes):
            raise LayoutError(f"Shard sizes must not be negative, found {sizes}.")
        object.__setattr__(self, "sizes", sizes)

    # As of any dataclass, in half the time: caches of conversions are keyed by placements.
    def __hash__(self) -> int:
        return self.dim if self.sizes is None else hash((self.dim, self.sizes))

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.dim == other.dim and self.sizes == other.sizes

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def __repr__(self) -> str:
        return (
            f"Shard({self.dim})" if self.sizes is None else f"Shard({self.dim}, sizes={self.sizes})"
        )


@graph_constant
@dataclass(frozen=True, slots=True, repr=False)
class Replicate(Placement):
    """Each coordinate holds the whole tensor."""

    def is_replicate(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "Replicate()"


@graph_constant
@dataclass(frozen=True, slots=True, repr=False)
class Partial(Placement):
    """Each coordinate holds a term; the tensor is the reduction of the terms.

    >>> Partial()
    Partial(sum)
    >>> Partial("max").is_partial("max")
    True
    """

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in REDUCE_OPS:
            raise LayoutError(
                f"Partial({self.reduce_op!r}) is not a reduction; use one of "
                f"{', '.join(REDUCE_OPS)}."
            )

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return reduce_op is None or reduce_op == self.reduce_op

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op})"


@graph_constant
@dataclass(frozen=True, slots=True, repr=False)
class MaskPartial(Partial):
    """The `Partial("sum")` of a lookup in a table whose rows are sharded.

    It holds no mask: rows that another rank owns are zero already. It records the table
    (`logical_shape`, sharded along `logical_dim`) and behaves as a sum.
    """

    logical_shape: tuple[int, ...] = ()
    logical_dim: int = 0

    def __post_init__(self) -> None:
        if self.reduce_op != "sum":
            raise LayoutError(f"A MaskPartial is a sum, found reduce_op={self.reduce_op!r}.")

    def __repr__(self) -> str:
        return f"MaskPartial(logical_shape={self.logical_shape}, logical_dim={self.logical_dim})"


@dataclass(frozen=True, slots=True, repr=False)
class NormPartial(Partial):
    """Each coordinate holds the norm of its shard; the tensor is the norm of these norms.

    It stands for `(sum over terms of term ** norm_type) ** (1 / norm_type)`. A norm is not
    negative, but a value written in place may be: powers keep the sign of their base.
    Norms of sharded tensors have this placement, and so have stacks and norms of those: only the
    last is reduced.
    """

    reduce_op: str = "norm"
    norm_type: float = 2.0

    def __post_init__(self) -> None:
        if self.reduce_op != "norm" or not self.norm_type > 0:
            raise LayoutError(
                f"A NormPartial has reduce_op='norm' and a positive norm_type, found "
                f"reduce_op={self.reduce_op!r}, norm_type={self.norm_type!r}."
            )

    def __repr__(self) -> str:
        return f"NormPartial(norm_type={self.norm_type:g})"


REPLICATE: Final = Replicate()
SUM: Final = Partial("sum")


def plain(placement: Placement) -> Placement:
    """The placement as rules and redistribution see it: a `MaskPartial` is a sum."""
    return SUM if type(placement) is MaskPartial else placement


def short(placements: Sequence[Placement]) -> str:
    """Placements in short form, for messages.

    >>> short([Shard(0), Replicate(), Partial()])
    '[S(0), R, P(sum)]'
    """
    return "[" + ", ".join(map(_short, placements)) + "]"


def _short(placement: Placement) -> str:
    match placement:
        case Shard(dim, None):
            return f"S({dim})"
        case Shard(dim, sizes):
            return f"S({dim}, {sizes})"
        case Replicate():
            return "R"
        case NormPartial():
            return f"P(norm {placement.norm_type:g})"
        case Partial(reduce_op):
            return f"P({reduce_op})"
    return repr(placement)
