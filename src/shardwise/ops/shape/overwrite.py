"""Copies of a tensor with some entries overwritten: those of a view, or of a mask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.core.layout import shard_with
from shardwise.core.placements import REPLICATE, SUM, Shard
from shardwise.core.sizes import equal_shapes, lengths, surely_equal
from shardwise.dispatch.notation import linear_choices
from shardwise.dispatch.rule import Call, Choice, LocalCall, Rule, Table, table
from shardwise.ops.math.pointwise import elementwise
from shardwise.ops.shape.indexing import named_dim
from shardwise.ops.shape.owned_index import fill_on_first, owned_masked_scatter
from shardwise.ops.shape.views import DimSlice, slice_cut

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class OwnedSelectScatter:
    """Writes one row of a sharded dim, on the rank that owns it."""

    dim: int

    def __call__(
        self,
        coordinate: Any,
        layouts: Sequence[Any],
        x: torch.Tensor,
        source: torch.Tensor,
        dim: int,
        index: int,
    ) -> torch.Tensor:
        offset = layouts[0].box(coordinate)[0][self.dim]
        row = index % layouts[0].shape[self.dim] - offset
        result = x.clone()
        if 0 <= row < x.shape[self.dim]:
            result.select(self.dim, row).copy_(source)
        return result


@dataclass(frozen=True, slots=True)
class OwnedSliceScatter:
    """Writes the entries of a slice that this rank owns."""

    cut: DimSlice

    def __call__(
        self,
        coordinate: Any,
        layouts: Sequence[Any],
        x: torch.Tensor,
        source: torch.Tensor,
        *_: Any,
    ) -> torch.Tensor:
        result = x.clone()
        self.cut.of(result, layouts[0].box(coordinate)[0][self.cut.dim]).copy_(source)
        return result


# -- writing a view back ---------------------------------------------------------------------


def select_scatter_choices(call: Call) -> Iterator[Choice]:
    at = named_dim(call)
    yield call.replicated()
    yield from linear_choices(call, ((0, 1),))
    for dim in range(call.inputs[0].ndim):
        if dim != at:
            inner = dim - (dim > at)
            for sizes in call.splits([(0, dim), (1, inner)]):
                cut = Shard(dim, sizes)
                yield Choice((cut, Shard(inner, sizes)), (cut,))
    local = LocalCall(OwnedSelectScatter(at), per_rank=True)
    for sizes in call.splits([(0, at)]):
        yield Choice((Shard(at, sizes), REPLICATE), (Shard(at, sizes),), local)


def slice_scatter_choices(call: Call) -> Iterator[Choice]:
    at, size = named_dim(call), call.inputs[0].shape[named_dim(call)]
    count = call.inputs[1].shape[at]
    if surely_equal(size, count):
        yield from _all_overwritten(call)
        return
    yield call.replicated()
    yield from linear_choices(call, ((0, 1),))
    for dim in range(call.inputs[0].ndim):
        if dim != at:
            for sizes in call.splits([(0, dim), (1, dim)]):
                cut = Shard(dim, sizes)
                yield Choice((cut, cut), (cut,))
    cut_out = slice_cut(call, at, size, count)
    if cut_out is not None:
        local = LocalCall(OwnedSliceScatter(cut_out), per_rank=True)
        for sizes in call.splits([(0, at)]):
            pieces = cut_out.lengths(lengths(size, call.axis_size, sizes))
            source = shard_with(at, pieces, count, call.axis_size)
            cut = Shard(at, sizes)
            yield Choice((cut, source), (cut,), local, alone=((0, at),))


def _all_overwritten(call: Call) -> Iterator[Choice]:
    """A slice that takes all there is, such as torch.compile makes of `:`."""
    local = LocalCall(_source_in_place)
    yield replace(call.replicated(), local=local)
    for choice in linear_choices(call, ((0, 1),)):
        yield replace(choice, local=local)
    for dim in range(call.inputs[0].ndim):
        for sizes in call.splits([(0, dim), (1, dim)]):
            cut = Shard(dim, sizes)
            yield Choice((cut, cut), (cut,), local)


def _source_in_place(x: torch.Tensor, source: torch.Tensor, *_: Any) -> torch.Tensor:
    """The source, in memory as the tensor that it overwrites."""
    return torch.empty_like(x).copy_(source)


def diagonal_scatter_choices(call: Call) -> Iterator[Choice]:
    ndim = call.inputs[0].ndim
    taken = {call.argument("dim1") % ndim, call.argument("dim2") % ndim}
    yield call.replicated()
    yield from linear_choices(call, ((0, 1),))
    for dim in range(ndim):
        if dim not in taken:
            inner = dim - sum(t < dim for t in taken)
            for sizes in call.splits([(0, dim), (1, inner)]):
                cut = Shard(dim, sizes)
                yield Choice((cut, Shard(inner, sizes)), (cut,))


# -- by mask ---------------------------------------------------------------------------------


def masked_scatter_choices(call: Call) -> Iterator[Choice]:
    """The tensor may be sharded; which entries of the source come next, only all of a mask says."""
    yield call.replicated()
    yield from linear_choices(call, ((0, 2),))
    local = LocalCall(owned_masked_scatter, per_rank=True)
    is_mask = call.inputs[1].dtype is torch.bool  # of any other, torch says what is wrong
    if is_mask and equal_shapes(call.inputs[0].shape, call.outputs[0].shape):
        for dim in range(call.inputs[0].ndim):
            for sizes in call.splits([(0, dim)]):
                cut = Shard(dim, sizes)
                yield Choice((cut, REPLICATE, REPLICATE), (cut,), local)


_masked_fill = elementwise().choices


def masked_fill_choices(call: Call) -> Iterator[Choice]:
    """Elementwise; and of a sum, one term takes the value and the others zero."""
    yield from _masked_fill(call)
    if equal_shapes(call.inputs[0].shape, call.outputs[0].shape):
        others = (REPLICATE,) * (len(call.inputs) - 1)
        yield Choice((SUM, *others), (SUM,), LocalCall(fill_on_first, per_rank=True))


def masked_scatter_grad_choices(call: Call) -> Iterator[Choice]:
    """The entries that the mask names, in order: only the whole mask has an order."""
    yield call.replicated()
    yield from linear_choices(call, ((0,),))


def _whole_choices(call: Call) -> Iterator[Choice]:
    """Memory is overwritten, of which each rank has its own: everything whole."""
    yield call.replicated()


RULES: Table = table(
    ((aten.select_scatter.default,), Rule(select_scatter_choices, "... n, ... -> ... n")),
    ((aten.slice_scatter.default,), Rule(slice_scatter_choices, "... n, ... m -> ... n")),
    ((aten.diagonal_scatter.default,), Rule(diagonal_scatter_choices, "... [n] [m], ... -> ...")),
    (
        (aten.masked_scatter_backward.default,),
        Rule(masked_scatter_grad_choices, "[...], [...] -> [n]"),
    ),
    ((aten.masked_scatter.default,), Rule(masked_scatter_choices, "..., [...], [n] -> ...")),
    (
        (aten.masked_fill.Scalar, aten.masked_fill.Tensor),
        Rule(masked_fill_choices, "..., ... -> ..."),
    ),
    ((aten.as_strided_scatter.default,), Rule(_whole_choices, "[...] -> [...]")),
)
