"""Comparison with one device: the reference call, the values on ranks, values of programs.

`compare`, for operators, accepts what `torch.allclose` accepts; otherwise float64 decides.
`differences`, for training runs, returns the difference of each tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from shardwise._torch.functions import tree_leaves, tree_map, tree_map_only
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import MixedTensorsError, UnsupportedError
from shardwise.simulation.ranks import on_rank, parts_of


class Different(Exception):
    """A number, shape or type that differs from one device's."""


def gathered(result: Any) -> list[Any]:
    """The leaves of a result as one device would hold them; raises if ranks disagree."""
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
    """Raise `Different`, naming `what` was compared, if the two differ by more than rounding."""
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

#: A difference is relative to the largest finite entry of the tensor on one device, and at least
#: to this share of that of all tensors: a value that is zero in theory is rounding on both sides.
SMALLEST = 1e-3


@dataclass(frozen=True)
class Difference:
    """One tensor: the largest difference and its scale; `remark` if it cannot be compared."""

    what: str
    name: str
    largest: float
    scale: float
    remark: str = ""

    def within(self, tolerance: float) -> bool:
        return not self.remark and self.largest <= tolerance * self.scale


def differences(what: str, one: Values, many: Values) -> Iterator[Difference]:
    """Compare the tensors of one device with those of many, by name."""
    largest = max((_scale(value) for value in one.values()), default=0.0)
    for name, expected in one.items():
        found = many.get(name)
        scale = max(_scale(expected), SMALLEST * largest)
        if found is None:
            yield Difference(what, name, 0.0, scale, "missing when sharded")
        elif found.shape != expected.shape:
            shapes = f"{tuple(found.shape)}, not {tuple(expected.shape)}"
            yield Difference(what, name, 0.0, scale, f"has shape {shapes}")
        else:
            ours, theirs = _in_double(found), _in_double(expected)
            gap = _largest(torch.where(ours == theirs, 0, ours - theirs))  # inf - inf is NaN
            remark = "" if gap == gap else "not a number"
            yield Difference(what, name, gap, scale, remark)
    for name in many.keys() - one.keys():
        yield Difference(what, name, 0.0, 0.0, "missing on one device")


def _largest(tensor: torch.Tensor) -> float:
    return float(_in_double(tensor).abs().max()) if tensor.numel() else 0.0


def _scale(tensor: torch.Tensor) -> float:
    """The largest of the finite entries."""
    return _largest(tensor[tensor.isfinite()])


def _in_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


# -- alone ---------------------------------------------------------------------------------------
# One call of an op on one device, the reference for the same call on shards.


@dataclass(frozen=True)
class OpCall:
    """One call: the op's arguments, tensors detached, and what to do before backward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: Whether each tensor of `args` and `kwargs`, in order, wants a gradient.
    wants_grad: tuple[bool, ...]
    #: From the op's result to what may be differentiated (a singular vector has no sign).
    differentiable: Any

    def __str__(self) -> str:
        return ", ".join(f"{str(t.dtype)[6:]}{list(t.shape)}" for t in self.tensors)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return tensors_of((self.args, self.kwargs))


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def full_name(entry: Any) -> str:
    """The name of an entry; several variants of one op have a second word."""
    return ".".join(filter(None, (entry.name, entry.variant_test_name)))


def outcome_of(case: Callable[[], None]) -> tuple[str, str]:
    """The outcome of a case, and why it is not ok."""
    try:
        case()
    except Different as error:
        return "wrong", brief(error)
    except (UnsupportedError, MixedTensorsError) as error:
        return "raises", brief(error)
    except Exception as error:
        return "error", f"{type(error).__name__}: {brief(error)}"
    return "ok", ""


# -- what one device refuses: refused with an error of the same type ---------------------------


@dataclass
class CallResult:
    """The result of a call, its tensors detached, in order."""

    result: list[Any]
    #: The tensors that a loss reads: those to differentiate, or else all.
    read: list[torch.Tensor]
    grads: list[Any] | None
    #: The generator's state after the call.
    state: torch.Tensor
    #: The result as the op returns it, in its tuples and lists.
    whole: Any


class Alone:
    """A sample on one device: the result, the gradients, and the same in double precision."""

    def __init__(self, entry: Any, sample: OpCall) -> None:
        self.entry, self.sample = entry, sample
        run = self._run(sample, seed=0)
        self.result, self.grads, self.whole = run.result, run.grads, run.whole
        self.read, self.state = run.read, run.state
        if self.without_values:
            self.result = [torch.zeros_like(x) for x in self.result]
        self._others: dict[tuple[bool, bool], CallResult] = {}

    def _run(self, sample: OpCall, seed: int, flat: bool = False) -> CallResult:
        args, kwargs, leaves = placed(sample, copied)
        torch.default_generator.manual_seed(seed)
        result = self.entry(*args, **kwargs)
        state = torch.default_generator.get_state()
        whole = tree_map_only(torch.Tensor, torch.Tensor.detach, result)
        read, grads = tensors_of(result), None
        if self.entry.supports_autograd and leaves:
            with contextlib.suppress(Exception):
                differentiable = sample.differentiable(result)
                grads = gradients(differentiable, leaves, lambda t, _: t, flat)
                read = [t for t in tensors_of(differentiable) if t.requires_grad]
        return CallResult(_detached(result), [t.detach() for t in read], grads, state, whole)

    def double(self) -> CallResult:
        return self.other(double=True)

    def other(self, *, double: bool = False, flat: bool = False) -> CallResult:
        """The run in double precision, or with an expanded gradient of ones (`flat`)."""
        if (double, flat) not in self._others:
            sample = doubled(self.sample) if double else self.sample
            self._others[double, flat] = self._run(sample, seed=0, flat=flat)
        return self._others[double, flat]

    def read_as_it_is(self) -> bool:
        """Whether every result is differentiated as it is (a singular vector has no sign)."""
        return self.grads is not None and same(self.read, tensors_of(self.whole))

    @property
    def without_values(self) -> bool:
        """Whether the op promises a shape and a type, and no values."""
        return "empty" in self.entry.name


def copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _detached(result: Any) -> list[Any]:
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in tree_leaves(result)]


def placed(
    sample: OpCall, place: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any], list[torch.Tensor]]:
    """The sample's arguments with each tensor placed, and the leaves that want a gradient."""
    wants, leaves = iter(sample.wants_grad), []

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        moved = place(leaf)
        if next(wants):
            leaves.append(moved.requires_grad_())
        return moved

    args, kwargs = tree_map(move, (sample.args, sample.kwargs))
    return args, kwargs, leaves


def gradients(
    result: Any,
    leaves: Sequence[torch.Tensor],
    like: Callable[[torch.Tensor, Any], torch.Tensor],
    flat: bool = False,
) -> list[Any]:
    """The gradients of the leaves for fixed gradients of the results, laid out by `like`."""
    results = [t for t in tensors_of(result) if t.requires_grad]
    given = [like(g, t) for g, t in zip(fixed_gradients(results, flat), results, strict=True)]
    return list(torch.autograd.grad(results, leaves, given, allow_unused=True))


def fixed_gradients(results: Sequence[torch.Tensor], flat: bool = False) -> list[torch.Tensor]:
    """A gradient of each result; with `flat` that of its sum, an expanded 1."""
    if flat:
        return [torch.ones((), dtype=t.dtype).expand(t.shape) for t in results]
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in results]


def doubled(sample: OpCall) -> OpCall:
    wider = {torch.float32: torch.float64, torch.complex64: torch.complex128}

    def widen(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dtype in wider:
            return leaf.detach().to(wider[leaf.dtype])
        return leaf

    args, kwargs = tree_map(widen, (sample.args, sample.kwargs))
    return OpCall(args, kwargs, sample.wants_grad, sample.differentiable)


# -- compare -------------------------------------------------------------------------------------
# Comparison of a program's values with one device's: relative to the largest entry.


#: How far a value may be off, relative to the largest one, or to 1 where that is smaller. A
#: program has the tolerance of the coarsest dtype in it. Other dtypes are exact.
TOLERANCES = {
    torch.float64: 1e-10,
    torch.complex128: 1e-10,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 1.2e-1,
}


def tolerance(values: Iterable[Any], casts: Iterable[torch.dtype] = ()) -> float:
    """The tolerance of a program that holds these values and has run ops under autocast to `casts`.

    Such an op may return float32 and round inside: `F.bilinear` adds products of bfloat16.
    """
    dtypes = {v.dtype for v in values if isinstance(v, torch.Tensor)} | set(casts)
    return max((TOLERANCES.get(dtype, 0.0) for dtype in dtypes), default=0.0)


def difference(found: Any, expected: Any, allowed: float) -> str:
    """How `found` differs from `expected`; empty if it does not."""
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        return _scalar_difference(found, expected, allowed)
    if why := mismatch(found, expected):
        return why
    if not (expected.is_floating_point() or expected.is_complex()):
        return "" if torch.equal(found, expected) else f"is {_short(found)}, not {_short(expected)}"
    ours, theirs = _wide(found), _wide(expected)
    if not torch.equal(ours.isnan(), theirs.isnan()):
        return f"is {_short(found)}, not {_short(expected)}"
    if not ours.numel():
        return ""
    ours, theirs = (x.nan_to_num(posinf=1e30, neginf=-1e30) for x in (ours, theirs))
    off = (ours - theirs).abs().max().item()
    if off <= allowed * max(1.0, theirs.abs().max().item()):
        return ""
    return f"differs by {off:.3g}: {_short(found)}, not {_short(expected)}"


def _wide(value: torch.Tensor) -> torch.Tensor:
    value = value.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(_in_double(value)) if value.is_complex() else _in_double(value)


def _scalar_difference(found: Any, expected: Any, allowed: float) -> str:
    if type(found) is type(expected):
        if equal(found, expected):
            return ""
        if isinstance(found, float) and abs(found - expected) <= allowed * max(1.0, abs(expected)):
            return ""
    return f"is {found!r}, not {expected!r}"


def _short(value: torch.Tensor) -> str:
    text = str(value.detach().flatten()[:6].tolist())
    return text if value.numel() <= 6 else text[:-1] + ", ...]"
