"""Joining and splitting tensors along a dim, and the gradients of slices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.core.layout import shard_with
from shardwise.core.placements import NormPartial, Placement, Shard
from shardwise.core.sizes import lengths, surely_equal
from shardwise.dispatch.rule import Call, Choice, LocalCall, Rule, Table, linear_choices, table
from shardwise.ops.shape.views import DimSlice, link_choices, slice_cut, unchanged

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
            for sizes in call.splits([(i, dim) for i in range(num)]):
                shard = Shard(dim, sizes)
                yield Choice((shard,) * num, (shard,))
    yield from linear_choices(call, (tuple(range(num)),))


def stack_choices(call: Call) -> Iterator[Choice]:
    at, num = _cat_dim(call), len(call.inputs)
    yield call.replicated()
    for dim in range(call.inputs[0].ndim):
        for sizes in call.splits([(i, dim) for i in range(num)]):
            yield Choice((Shard(dim, sizes),) * num, (Shard(dim + (dim >= at), sizes),))
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
            for sizes in call.splits([(0, dim)]):
                yield Choice((Shard(dim, sizes),), (Shard(dim, sizes),) * num)
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


def unbind_choices(call: Call) -> Iterator[Choice]:
    """The dim that is removed must be whole."""
    num, at = len(call.outputs), call.argument("dim") % call.inputs[0].ndim
    yield call.replicated()
    for dim in range(call.inputs[0].ndim):
        if dim != at:
            for sizes in call.splits([(0, dim)]):
                yield Choice((Shard(dim, sizes),), (Shard(dim - (dim > at), sizes),) * num)
    yield from linear_choices(call, ((0,),))


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
    return aten.clone.default(grad)


#: The gradient of a slice of the whole dim.
_WHOLE_GRAD = LocalCall(_whole_grad)


def slice_grad_choices(call: Call) -> Iterator[Choice]:
    """The gradient of a slice of shards stays on the ranks that own the entries."""
    ndim, at = call.outputs[0].ndim, call.argument("dim") % call.outputs[0].ndim
    size, count = call.outputs[0].shape[at], call.inputs[0].shape[at]
    if surely_equal(size, count):
        for choice in link_choices(call, unchanged(call)):
            yield replace(choice, local=_WHOLE_GRAD)
        return
    yield call.replicated()
    for dim in range(ndim):
        if dim != at:
            for sizes in call.splits([(0, dim)]):
                yield Choice((Shard(dim, sizes),), (Shard(dim, sizes),))
    yield from linear_choices(call, ((0,),))
    cut = slice_cut(call, at, size, count)
    if cut is not None:
        shard_sizes = lengths(size, call.axis_size, None)
        source = shard_with(at, cut.lengths(shard_sizes), count, call.axis_size)
        local = LocalCall(OwnedSliceGrad(cut), per_rank=True)
        yield Choice((source,), (Shard(at),), local, alone=((0, at),))


def select_grad_choices(call: Call) -> Iterator[Choice]:
    at = call.argument("dim") % call.outputs[0].ndim
    yield call.replicated()
    for dim in range(call.inputs[0].ndim):
        for sizes in call.splits([(0, dim)]):
            yield Choice((Shard(dim, sizes),), (Shard(dim + (dim >= at), sizes),))
    yield from linear_choices(call, ((0,),))


RULES: Table = table(
    ((aten.cat.default,), Rule(cat_choices, "... [n], ... [m] -> ... [n+m]")),
    ((aten.stack.default,), Rule(stack_choices, "..., ... -> ... [2]")),
    (
        (aten.split.Tensor, aten.split_with_sizes.default),
        Rule(split_choices, "... n -> ... a, ... b"),
    ),
    ((aten.unbind.int,), Rule(unbind_choices, "... [n] -> ..., ...")),
    (
        (aten.slice_backward.default,),
        Rule(slice_grad_choices, "... m -> ... n", {"input_sizes": 0}),
    ),
    (
        (aten.select_backward.default,),
        Rule(select_grad_choices, "... -> ... [n]", {"input_sizes": 0}),
    ),
)
