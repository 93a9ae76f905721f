"""One call of an op on one device, the reference for the same call on shards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise._torch.pytree import tree_leaves, tree_map, tree_map_only
from shardwise.errors import MixedTensorsError, UnsupportedError
from shardwise.testing.compare import Different, brief, same


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
