"""A sample on one device."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from shardwise.testing.op_sweep.compare import same
from shardwise.testing.op_sweep.table import Sample, tensors_of


class Alone:
    """A sample on one device: the result, the gradients, and the same in double precision."""

    def __init__(self, entry: Any, sample: Sample) -> None:
        self.entry, self.sample = entry, sample
        self.result, self.grads = self._run(sample, seed=0)
        if self.without_values:
            self.result = [torch.zeros_like(x) for x in self.result]
        again, _ = self._run(sample, seed=1)
        self.random = not self.without_values and not same(self.result, again)
        #: The tensor that the form in place has written to.
        self.written: torch.Tensor | None = None
        self._double: tuple[Any, Any] | None = None

    def _run(self, sample: Sample, seed: int) -> tuple[list[Any], list[Any] | None]:
        args, kwargs, leaves = placed(sample, copied)
        torch.default_generator.manual_seed(seed)
        result = self.entry(*args, **kwargs)
        #: The result as the op returns it, in its tuples and lists.
        self.whole = tree_map_only(torch.Tensor, torch.Tensor.detach, result)
        grads = None
        if self.entry.supports_autograd and leaves:
            with contextlib.suppress(Exception):
                grads = gradients(sample.differentiable(result), leaves, lambda t, _: t)
        return _detached(result), grads

    def double(self) -> tuple[list[Any], list[Any] | None]:
        if self._double is None:
            self._double = self._run(doubled(self.sample), seed=0)
        return self._double

    def without_gradients(self) -> Alone:
        """The same, of a sample that wants no gradient."""
        other = copy.copy(self)
        nothing = (False,) * len(self.sample.wants_grad)
        other.sample, other.grads = replace(self.sample, wants_grad=nothing), None
        return other

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
        args, kwargs, _ = placed(self.sample, copied)
        try:
            with torch.no_grad():
                torch.default_generator.manual_seed(0)
                self.entry.get_inplace()(*args, **kwargs)
        except Exception:
            return False
        self.written = args[0]
        return True


def copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _detached(result: Any) -> list[Any]:
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in tree_leaves(result)]


def placed(
    sample: Sample, place: Callable[[torch.Tensor], torch.Tensor]
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
    result: Any, leaves: Sequence[torch.Tensor], like: Callable[[torch.Tensor, Any], torch.Tensor]
) -> list[Any]:
    """The gradients of the leaves for fixed gradients of the results, laid out by `like`."""
    results = [t for t in tensors_of(result) if t.requires_grad]
    generator = torch.Generator().manual_seed(7)
    given = [like(torch.randn(t.shape, dtype=t.dtype, generator=generator), t) for t in results]
    return list(torch.autograd.grad(results, leaves, given, allow_unused=True))


def doubled(sample: Sample) -> Sample:
    wider = {torch.float32: torch.float64, torch.complex64: torch.complex128}

    def widen(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dtype in wider:
            return leaf.detach().to(wider[leaf.dtype])
        return leaf

    args, kwargs = tree_map(widen, (sample.args, sample.kwargs))
    return Sample(args, kwargs, sample.wants_grad, sample.differentiable)
