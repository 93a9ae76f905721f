"""What the sweep plays beside `testing.cases`: the variants that write, in place and to `out=`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from shardwise._torch.functions import tree_map
from shardwise.dtensor.autograd import gradient_layout
from shardwise.dtensor.create import distribute_tensor
from shardwise.dtensor.tensor import DTensor
from shardwise.testing import cases
from shardwise.testing.cases import compare_states
from shardwise.testing.compare import (
    Alone,
    OpCall,
    compare,
    copied,
    doubled,
    gathered,
    placed,
    same,
)


class VariantsAlone(Alone):
    """A sample on one device, with the op's variants."""

    def __init__(self, entry: Any, sample: OpCall) -> None:
        super().__init__(entry, sample)
        again = self._run(sample, seed=1)
        self.random = not self.without_values and not same(self.result, again.result)
        #: What the in-place variant has written, and the state of the generator then.
        self.written: torch.Tensor | None = None
        self.written_state: torch.Tensor | None = None

    def without_gradients(self) -> VariantsAlone:
        """The same for a sample without gradients."""
        other = copy.copy(self)
        nothing = (False,) * len(self.sample.wants_grad)
        other.sample, other.grads = replace(self.sample, wants_grad=nothing), None
        return other

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


class Cases(cases.Cases):
    """A sample in one layout, and the variants that write."""

    _alone: VariantsAlone

    def each(self) -> Iterator[tuple[str, Callable[[], None]]]:
        yield from super().each()
        alone = self._alone
        if alone.entry.get_inplace() is not None and alone.can_write():
            yield "inplace", self.inplace
        if alone.entry.supports_out and not alone.random and alone.takes_out():
            yield "out", self.out

    def inplace(self) -> None:
        alone = self._alone

        def there(sample: OpCall) -> list[Any]:
            """What the form in place returns, and what it has written to."""
            with torch.no_grad():
                args, kwargs, _ = self._spread(sample)
                torch.default_generator.manual_seed(0)
                result = self._through(alone.entry.get_inplace())(*args, **kwargs)
            return [*gathered(result), *gathered(args[0])]

        found = there(alone.sample)
        compare_states(alone.written_state)
        self.found["inplace"] = found[:1]
        double = doubled(alone.sample)
        compare(found, [alone.written] * 2, lambda: (there(double), [alone.write(double)] * 2))

    def out(self) -> None:
        alone = self._alone

        def there(sample: OpCall, result: Any) -> list[Any]:
            """What is written to tensors like `result`."""
            with torch.no_grad():
                args, kwargs, _ = self._spread(sample)
                targets = tree_map(_blank, result)
                torch.default_generator.manual_seed(0)
                self._through(alone.entry.op)(*args, **kwargs, out=targets)
            return gathered(targets)

        def in_double() -> tuple[list[Any], list[Any]]:
            sample = doubled(alone.sample)
            return there(sample, self._run(sample)[0]), alone.double().result

        self.found["out"] = there(alone.sample, self._result)
        compare(self.found["out"], alone.result, in_double)


def _blank(leaf: Any) -> Any:
    """A tensor for `out=`, laid out like the result, and replicated where that is Partial."""
    if not isinstance(leaf, DTensor):
        return leaf
    layout = gradient_layout(leaf._layout)
    blank = torch.zeros(leaf.shape, dtype=leaf.dtype)
    return distribute_tensor(blank, layout.grid.mesh, layout.placements, src_data_rank=None)
