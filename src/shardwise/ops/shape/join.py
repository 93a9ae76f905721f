"""Joining and splitting tensors along a dim, and the gradients of slices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core.layout import shard_with
from shardwise.core.placements import NormPartial, Placement, Shard
from shardwise.core.sizes import lengths, statically_equal
from shardwise.dispatch.rule import (
    Call,
    Choice,
    LocalCall,
    Rule,
    Table,
    linear_choices,
    sharded_together,
    table,
)
from shardwise.ops.shape.views import DimSlice, all_but, link_choices, slice_cut, unchanged

aten = torch.ops.aten


def _cat_dim(call: Call) -> int:
    return call.argument("dim") % call.outputs[0].ndim


def cat_choices(call: Call) -> Iterator[Choice]:
    """Any dim but the joined one may be sharded, in all tensors alike."""
    at, num = _cat_dim(call), len(call.inputs)
    # torch accepts empty 1-D tensors in any cat; they have no dim to shard.
    alike = all(meta.ndim == call.outputs[0].ndim for meta in call.inputs)
    yield call.replicated()
    for dim in range(call.outputs[0].ndim) if alike else ():
        if dim != at:
            yield from sharded_together(call, [dim] * num, (dim,))
    yield from linear_choices(call, (tuple(range(num)),))


def stack_choices(call: Call) -> Iterator[Choice]:
    at, num = _cat_dim(call), len(call.inputs)
    yield call.replicated()
    for dim in range(call.inputs[0].ndim):
        yield from sharded_together(call, [dim] * num, (dim + (dim >= at),))
    yield from linear_choices(call, (tuple(range(num)),))
    for norm in dict.fromkeys(p for p in call.placed if isinstance(p, NormPartial)):
        yield Choice((norm,) * num, (norm,))


@dataclass(frozen=True, slots=True)
class OwnedSplit:
    """The entries of each section in this rank's shard, as views of it."""

    cuts: tuple[DimSlice, ...]

    def __call__(self, coordinate: Any, layouts: Sequence[Any], x: torch.Tensor, *_: Any) -> Any:
        offset = layouts[0].box(coordinate)[0][self.cuts[0].dim]
        return [cut.of(x, offset) for cut in self.cuts]


def split_choices(call: Call) -> Iterator[Choice]:
    """Like slices: each rank keeps each section's entries in its shard."""
    num = len(call.outputs)
    ndim, at = call.inputs[0].ndim, call.argument("dim") % call.inputs[0].ndim
    yield call.replicated()
    for dim in range(ndim):
        if dim != at:
            yield from sharded_together(call, (dim,), [dim] * num)
    yield from linear_choices(call, ((0,),))
    sections = [meta.shape[at] for meta in call.outputs]
    if any(type(s) is not int for s in sections):
        return
    starts = [sum(sections[:i]) for i in range(num)]
    cuts = tuple(DimSlice(at, start, 1, n) for start, n in zip(starts, sections, strict=True))
    local = LocalCall(OwnedSplit(cuts), per_rank=True)
    for sizes in call.splits([(0, at)]):
        shard_sizes = lengths(sum(sections), call.axis_size, sizes)
        targets: tuple[Placement, ...] = tuple(
            shard_with(at, cut.lengths(shard_sizes), n, call.axis_size)
            for cut, n in zip(cuts, sections, strict=True)
        )
        yield Choice((Shard(at, sizes),), targets, local, alone=((0, at),))


@dataclass(frozen=True, slots=True)
class OwnedSliceGrad:
    """Writes the gradient of a slice's entries to their positions in this rank's shard."""

    cut: DimSlice

    def __call__(
        self, coordinate: Any, layouts: Sequence[Any], grad: torch.Tensor, *_: Any
    ) -> torch.Tensor:
        offset, shape = layouts[-1].box(coordinate)
        whole = grad.new_zeros(shape)
        self.cut.of(whole, offset[self.cut.dim]).copy_(grad)
        return whole


def _whole_grad(grad: torch.Tensor, *_: Any) -> torch.Tensor:
    """The gradient of a slice of the whole dim."""
    return aten.clone.default(grad)


def slice_grad_choices(call: Call) -> Iterator[Choice]:
    """The gradient of a slice of shards stays on the ranks that own the entries."""
    at = call.argument("dim") % call.outputs[0].ndim
    size, count = call.outputs[0].shape[at], call.inputs[0].shape[at]
    if statically_equal(size, count):
        yield from link_choices(call, unchanged(call), LocalCall(_whole_grad))
        return
    yield from link_choices(call, all_but(call, at))
    cut = slice_cut(call, at, size, count)
    if cut is not None:
        shard_sizes = lengths(size, call.axis_size, None)
        source = shard_with(at, cut.lengths(shard_sizes), count, call.axis_size)
        local = LocalCall(OwnedSliceGrad(cut), per_rank=True)
        yield Choice((source,), (Shard(at),), local, alone=((0, at),))


RULES: Table = table(
    ((aten.cat.default,), Rule(cat_choices, "... [n], ... [m] -> ... [n+m]")),
    ((aten.stack.default,), Rule(stack_choices, "..., ... -> ... [2]")),
    (
        (aten.split.Tensor, aten.split_with_sizes.default),
        Rule(split_choices, "... n -> ... a, ... b"),
    ),
    (
        (aten.slice_backward.default,),
        Rule(slice_grad_choices, "... m -> ... n", {"input_sizes": 0}),
    ),
)
