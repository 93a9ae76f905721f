"""A sample on one device."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise._torch.pytree import tree_leaves, tree_map, tree_map_only
from shardwise.testing.op_sweep.compare import same
from shardwise.testing.op_sweep.table import OpCall, tensors_of


@dataclass
class CallResult:
    """What a call gives: its tensors detached, in order."""

    result: list[Any]
    #: The tensors that are read before a loss: those to differentiate, or else all.
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
        #: The tensor that the form in place has written to, and the state of the generator then.
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
        """The run in double precision, or with a gradient of ones that have no memory."""
        if (double, flat) not in self._others:
            sample = doubled(self.sample) if double else self.sample
            self._others[double, flat] = self._run(sample, seed=0, flat=flat)
        return self._others[double, flat]

    def without_gradients(self) -> Alone:
        """The same, of a sample that wants no gradient."""
        other = copy.copy(self)
        nothing = (False,) * len(self.sample.wants_grad)
        other.sample, other.grads = replace(self.sample, wants_grad=nothing), None
        return other

    def read_as_it_is(self) -> bool:
        """Whether every result may be differentiated (a singular vector has no sign)."""
        return self.grads is not None and same(self.read, tensors_of(self.whole))

    @property
    def without_values(self) -> bool:
        """Whether the op promises a shape and a type, and no values."""
        return "empty" in self.entry.name

    def takes_out(self) -> bool:
        """Whether the form with `out=` runs."""
        args, kwargs, _ = placed(self.sample, copied)
        try:
            with torch.no_grad():
                self.entry(*args, **kwargs, out=tree_map(torch.zeros_like, self.whole))
        except Exception:
            return False
        return True

    def can_write(self) -> bool:
        """Whether the form in place runs; `written` is then what it has written to."""
        if not isinstance(self.sample.args[0], torch.Tensor) or len(self.result) != 1:
            return False
        try:
            self.written = self.write(self.sample)
        except Exception:
            return False
        self.written_state = torch.default_generator.get_state()
        return True

    def write(self, sample: OpCall) -> torch.Tensor:
        """What the form in place writes."""
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
    """A gradient of each result; `flat`, that of its sum: a single one, expanded."""
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
