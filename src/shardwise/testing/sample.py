"""A call on one device, with which the same call on parts is compared."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise._torch.pytree import tree_leaves, tree_map
from shardwise.core.placements import Placement
from shardwise.dispatch.catalog import find_rule
from shardwise.dispatch.infer import infer_outputs
from shardwise.dispatch.rule import Call, Rule, TensorMeta
from shardwise.dispatch.schema import plain_op
from shardwise.ops.lookup.row_gradients import SparseRows


@dataclass(frozen=True)
class Sample:
    """A call on one device. `wish` lists placements that a caller may ask the output for.

    `unread` has the places, in the result, of tensors whose values nobody reads, such as the seed
    of a dropout that does not drop.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    wish: tuple[Placement, ...] = ()
    unread: tuple[int, ...] = ()


def rule_for(sample: Sample) -> Rule:
    """The rule of the sample's op."""
    rule = find_rule(plain_op(sample.op))
    if rule is None:
        raise KeyError(f"{sample.op} has no rule")
    return rule


class SampleAlone:
    """The sample on one device: found out once, compared with many times."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.tensors = _tensors(sample.args)
        inputs = tuple(TensorMeta(tuple(t.shape), tuple(t.stride()), t.dtype) for t in self.tensors)
        outputs, self._shape = _outputs(sample)
        self.call = Call(plain_op(sample.op), sample.args, sample.kwargs, inputs, outputs)
        # The op may write to its operands.
        self.result = self.run([t.clone() for t in self.tensors], sample.op)

    def run(self, tensors: Sequence[torch.Tensor], fn: Any) -> Any:
        """`fn` with the sample's arguments, `tensors` in place of its own."""
        remaining = iter(tensors)
        with _same_seed():
            return fn(*[_replace(arg, remaining) for arg in self.sample.args], **self.sample.kwargs)

    def places(self) -> list[int]:
        """The places in the result of the tensors that `asked` gives."""
        if isinstance(self._shape, TensorMeta):
            return [0]
        return [place for place, meta in enumerate(self._shape) if isinstance(meta, TensorMeta)]

    def ignored(self) -> set[int]:
        """The operands whose values make no difference, by number."""
        found = set()
        for number, tensor in enumerate(self.tensors):
            if tensor.is_floating_point() and tensor.numel():
                changed = [t.clone() for t in self.tensors]
                changed[number] += 1
                try:
                    results = self.asked(self.run(changed, self.sample.op))
                except Exception:
                    continue  # it is read, and refused
                if all(map(_same, results, self.asked(self.result))):
                    found.add(number)
        return found

    def asked(self, result: Any) -> list[torch.Tensor]:
        """The tensors of a result; kernels may return some that nobody asked for."""
        if isinstance(result, torch.Tensor):
            return [result]
        pairs = zip(result, self._shape, strict=True)
        asked = [r for r, meta in pairs if isinstance(meta, TensorMeta)]
        return [r.dense() if isinstance(r, SparseRows) else r for r in asked]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _tensors(args: Sequence[Any]) -> list[torch.Tensor]:
    flat = itertools.chain.from_iterable(a if isinstance(a, (list, tuple)) else [a] for a in args)
    return [a for a in flat if isinstance(a, torch.Tensor)]


def _outputs(sample: Sample) -> tuple[tuple[TensorMeta, ...], Any]:
    """As the rule's user would infer them; of some ops only the data tell the shapes."""
    try:
        return infer_outputs(sample.op, sample.args, sample.kwargs, symbolic=False)
    except NotImplementedError:
        result = sample.op(*sample.args, **sample.kwargs)
        shape = tree_map(lambda t: TensorMeta(tuple(t.shape), tuple(t.stride()), t.dtype), result)
        return tuple([shape] if isinstance(shape, TensorMeta) else tree_leaves(shape)), shape


@contextlib.contextmanager
def _same_seed() -> Iterator[None]:
    """Draws inside take the same random numbers every time, and none from outside."""
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: without a GPU it formats a stack for every kind of device.
        torch.default_generator.manual_seed(0)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)
        yield


def _replace(arg: Any, parts: Iterator[torch.Tensor]) -> Any:
    if isinstance(arg, torch.Tensor):
        return next(parts)
    if isinstance(arg, (list, tuple)):
        return [_replace(a, parts) for a in arg]
    return arg
