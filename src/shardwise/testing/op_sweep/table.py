"""Torch's own table of operators: its samples, and what they give on one device."""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import importlib
import random
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise._torch.pytree import tree_leaves, tree_map, tree_map_only
from shardwise.testing.compare import same
from shardwise.testing.op_sweep.ways import Pick, evenly

_TABLE = "torch.testing._internal.common_methods_invocations"
#: Ops that run on CUDA alone.
_NOT_ON_CPU = "jiterator"


def operators(patterns: Sequence[str] = ()) -> list[Any]:
    """The entries of torch's table for the CPU whose name matches a pattern."""
    chosen = []
    for entry in _op_db():
        if _dtype_of(entry) is None or _NOT_ON_CPU in entry.name:
            continue
        name = full_name(entry)
        if not patterns or any(
            fnmatch.fnmatchcase(name, p) or fnmatch.fnmatchcase(entry.name, p) for p in patterns
        ):
            chosen.append(entry)
    return chosen


def _dtype_of(entry: Any) -> torch.dtype | None:
    """The dtype that an op is played with: float32, where the op takes it."""
    dtypes = (torch.float32, torch.complex64, torch.int64)
    return next((dtype for dtype in dtypes if entry.supports_dtype(dtype, "cpu")), None)


def full_name(entry: Any) -> str:
    """The name of an entry; several variants of one op have a second word."""
    return ".".join(filter(None, (entry.name, entry.variant_test_name)))


def _op_db() -> list[Any]:
    # Torch's test helpers import this package; the table only needs its base class.
    if "expecttest" not in sys.modules:
        try:
            import expecttest  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
        except ImportError:
            stand_in = types.ModuleType("expecttest")
            stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
            sys.modules["expecttest"] = stand_in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: list[Any] = importlib.import_module(_TABLE).op_db
    return found


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


def samples(entry: Any, count: int, pick: Pick[Any] = evenly) -> list[OpCall]:
    """`count` of the entry's samples, spread over all of them; those without tensors left out."""
    _same_every_time()
    dtype = _dtype_of(entry)
    wants_grad = dtype is not torch.int64
    made = [
        sample
        for sample in entry.sample_inputs("cpu", dtype, requires_grad=wants_grad)
        if _has_dense_tensors(sample)
    ]
    return [_sample(each) for each in pick(made, count)]


@contextlib.contextmanager
def own_seed() -> Iterator[None]:
    """Inside, random ops of the table use the caller's seed.

    The table seeds them itself, in a way that cannot be compiled.
    """
    table: Any = importlib.import_module(_TABLE)

    def unseeded(op: Any, *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    seeded, table.wrapper_set_seed = table.wrapper_set_seed, unseeded
    try:
        yield
    finally:
        table.wrapper_set_seed = seeded


def _same_every_time() -> None:
    torch.manual_seed(0)
    random.seed(0)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(0)


def _has_dense_tensors(sample: Any) -> bool:
    found = tensors_of((sample.input, sample.args, sample.kwargs))
    return bool(found) and all(t.layout is torch.strided and t.device.type == "cpu" for t in found)


def _sample(made: Any) -> OpCall:
    args = (made.input, *made.args)
    wants = tuple(t.requires_grad for t in tensors_of((args, made.kwargs)))
    return OpCall(args, dict(made.kwargs), wants, made.output_process_fn_grad)


def error_samples(entry: Any) -> Iterator[tuple[OpCall, type[BaseException]]]:
    """Calls that one device refuses, with the type that it raises."""
    if entry.error_inputs_func is None:
        return
    _same_every_time()
    for each in entry.error_inputs("cpu"):
        made = each.sample_input
        if not _has_dense_tensors(made):
            continue
        sample = _sample(made)
        try:
            entry(*sample.args, **sample.kwargs)
        except Exception as error:
            yield sample, type(error)


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
        again = self._run(sample, seed=1)
        self.random = not self.without_values and not same(self.result, again.result)
        #: What the in-place variant has written, and the state of the generator then.
        self.written: torch.Tensor | None = None
        self.written_state: torch.Tensor | None = None
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

    def without_gradients(self) -> Alone:
        """The same for a sample without gradients."""
        other = copy.copy(self)
        nothing = (False,) * len(self.sample.wants_grad)
        other.sample, other.grads = replace(self.sample, wants_grad=nothing), None
        return other

    def read_as_it_is(self) -> bool:
        """Whether every result is differentiated as it is (a singular vector has no sign)."""
        return self.grads is not None and same(self.read, tensors_of(self.whole))

    @property
    def without_values(self) -> bool:
        """Whether the op promises a shape and a type, and no values."""
        return "empty" in self.entry.name

    def takes_out(self) -> bool:
        """Whether the variant with `out=` runs."""
        args, kwargs, _ = placed(self.sample, copied)
        try:
            with torch.no_grad():
                self.entry(*args, **kwargs, out=tree_map(torch.zeros_like, self.whole))
        except Exception:
            return False
        return True

    def can_write(self) -> bool:
        """Whether the in-place variant runs; it sets `written`."""
        if not isinstance(self.sample.args[0], torch.Tensor) or len(self.result) != 1:
            return False
        try:
            self.written = self.write(self.sample)
        except Exception:
            return False
        self.written_state = torch.default_generator.get_state()
        return True

    def write(self, sample: OpCall) -> torch.Tensor:
        """What the in-place variant writes."""
        args, kwargs, _ = placed(sample, copied)
        with torch.no_grad():
            torch.default_generator.manual_seed(0)
            self.entry.get_inplace()(*args, **kwargs)
        written: torch.Tensor = args[0]
        return written


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
