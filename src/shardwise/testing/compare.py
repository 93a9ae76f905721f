"""Comparison of what ranks hold with what one device holds.

`compare`, for operators, accepts what `torch.allclose` accepts, and else lets float64 decide.
`differences`, for training runs, returns the numbers, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from shardwise._torch.pytree import tree_leaves
from shardwise.dtensor.tensor import DTensor
from shardwise.simulation.parts import on_rank, parts_of


class Different(Exception):
    """A number, a shape or a type that one device does not give."""


def gathered(result: Any) -> list[Any]:
    """The leaves of a result as one device would hold them; raises where ranks disagree."""
    return [_gathered(leaf) for leaf in tree_leaves(result, is_leaf=lambda x: x is None)]


def _gathered(leaf: Any) -> Any:
    if isinstance(leaf, DTensor):
        _check_shards(leaf)
        leaf = cast(DTensor, leaf.detach()).full_tensor()
    first, *others = parts_of(leaf)
    if any(_difference(other, first, CLOSE) for other in others):
        raise Different("ranks hold different values after a gather")
    return first


def _check_shards(x: DTensor) -> None:
    layout, local = x._layout, x._local
    if tuple(x.shape) != tuple(layout.shape):
        raise Different(f"a tensor of shape {tuple(x.shape)} has {layout!r}")
    for rank in layout.grid.ranks:
        shard = on_rank(local, rank)
        wanted = layout.local_shape(layout.grid.coordinates[rank])
        if tuple(shard.shape) != wanted or shard.dtype != layout.dtype:
            raise Different(f"rank {rank} holds {shard.dtype}{list(shard.shape)} of {layout!r}")


def mismatch(found: torch.Tensor, expected: torch.Tensor) -> str:
    """How dtype or shape differ."""
    if found.dtype != expected.dtype:
        return f"is {found.dtype} instead of {expected.dtype}"
    if found.shape != expected.shape:
        return f"has shape {list(found.shape)} instead of {list(expected.shape)}"
    return ""


def equal(found: Any, expected: Any) -> bool:
    """Whether two Python values are equal, two NaNs included."""
    return found == expected or (found != found and expected != expected)


def brief(error: BaseException) -> str:
    """An error, its notes and its causes on one line."""
    cause = error.__cause__
    text = " ".join(str(error).split())[:300]
    text += "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"{text} <- {brief(cause)}" if cause is not None else text


# -- operators -------------------------------------------------------------------------------

#: Closer than this is the same in float32; else float64 decides, with a tighter bound.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
CLOSE_DOUBLE = {"rtol": 1e-7, "atol": 1e-8}


def compare(
    found: list[Any],
    expected: list[Any],
    in_double: Callable[[], tuple[list[Any], list[Any]]] | None,
    what: str = "result",
) -> None:
    """Raise `Different`, with `what` was compared, where the two differ by more than rounding."""
    if len(found) != len(expected):
        raise Different(f"{len(found)} {what}s instead of {len(expected)}")
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        why = _difference(ours, theirs, CLOSE)
        if not why:
            continue
        # A difference that comes from the order of rounding vanishes in double precision.
        if in_double is not None and "differs by" in why:
            wide_found, wide_expected = in_double()
            if not _difference(wide_found[number], wide_expected[number], CLOSE_DOUBLE):
                continue
        raise Different(f"{what} {number} {why}")


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and not any(
        _difference(a, b, CLOSE) for a, b in zip(one, other, strict=True)
    )


def _difference(ours: Any, theirs: Any, close: dict[str, float]) -> str:
    if isinstance(ours, torch.Tensor) and theirs is None:
        theirs = torch.zeros_like(ours)
    if isinstance(theirs, torch.Tensor) and ours is None:
        ours = torch.zeros_like(theirs)
    if not isinstance(theirs, torch.Tensor) or not isinstance(ours, torch.Tensor):
        return "" if equal(ours, theirs) else f"is {ours!r} instead of {theirs!r}"
    if why := mismatch(ours, theirs):
        return why
    if ours.dtype is torch.complex32:  # which torch does not compare
        ours, theirs = ours.to(torch.complex64), theirs.to(torch.complex64)
    if torch.allclose(ours, theirs, equal_nan=True, **close):
        return ""
    return f"differs by {(ours - theirs).abs().max().item():.3g}"


# -- training runs ---------------------------------------------------------------------------

Values = dict[str, torch.Tensor]

#: A difference is relative to the largest entry of the tensor on one device, and at least to this
#: share of the largest of all tensors: a value that is zero in theory is rounding on both sides.
SMALLEST = 1e-3


@dataclass(frozen=True)
class Difference:
    """One tensor: the largest difference and its scale; `remark` where it cannot be compared."""

    what: str
    name: str
    largest: float
    scale: float
    remark: str = ""

    def within(self, tolerance: float) -> bool:
        return not self.remark and self.largest <= tolerance * self.scale


def differences(what: str, one: Values, many: Values) -> Iterator[Difference]:
    """Compare the tensors of one device with those of many, by name."""
    largest = max((_largest(value) for value in one.values()), default=0.0)
    for name, expected in one.items():
        found = many.get(name)
        scale = max(_largest(expected), SMALLEST * largest)
        if found is None:
            yield Difference(what, name, 0.0, scale, "missing when sharded")
        elif found.shape != expected.shape:
            shapes = f"{tuple(found.shape)}, not {tuple(expected.shape)}"
            yield Difference(what, name, 0.0, scale, f"has shape {shapes}")
        else:
            gap = _largest(found.double() - expected.double())
            remark = "" if gap == gap else "not a number"
            yield Difference(what, name, gap, scale, remark)
    for name in many.keys() - one.keys():
        yield Difference(what, name, 0.0, 0.0, "missing on one device")


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0
