"""Picking, writing and overwriting entries: by index, by mask, or through a view.

A dim that is not indexed may be sharded in all operands alike. Indices may be sharded if the tensor
is whole. If the indexed dim is sharded, a read gives zeros for entries of other ranks and the
results add up; a write keeps the entries that the rank owns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from shardwise.core.layout import shard_with
from shardwise.core.placements import REPLICATE, SUM, Placement, Shard
from shardwise.core.sizes import Size, equal, equal_shapes, lengths, statically_equal
from shardwise.dispatch.catalog import functional_twin
from shardwise.dispatch.rule import (
    Call,
    Choice,
    Group,
    LocalCall,
    Rule,
    Table,
    TensorMeta,
    linear_choices,
    sharded_together,
    table,
)
from shardwise.ops.math.pointwise import elementwise
from shardwise.ops.math.whole import gathered
from shardwise.ops.shape.owned_index import (
    AdvancedIndex,
    OwnedGather,
    OwnedIndex,
    OwnedIndexPut,
    OwnedWrite,
    fill_on_first,
    owned_masked_scatter,
    owned_put,
    owned_take,
)
from shardwise.ops.shape.views import DimSlice, slice_cut

aten = torch.ops.aten

#: Linear in the tensor and the source together, after the index.
_WITH_SOURCE: Sequence[Group] = ((0, 2),)


def _adds(meta: TensorMeta) -> bool:
    """Whether results with zeros for entries of other ranks add up: not for bools."""
    return meta.dtype is not torch.bool


# -- x[i, :, j] ------------------------------------------------------------------------------


def _indexed(call: Call) -> AdvancedIndex:
    indices = call.args[1]
    dims = tuple(d for d, index in enumerate(indices) if index is not None)
    return AdvancedIndex(dims, max(meta.ndim for meta in _index_metas(call)))


def _index_metas(call: Call) -> tuple[TensorMeta, ...]:
    return call.inputs[1 : 1 + sum(index is not None for index in call.args[1])]


def _along(metas: Sequence[TensorMeta], num_batch: int, batch: int) -> list[int | Placement]:
    """The dim of each index that is dim `batch` of the result; replicated where it is broadcast."""
    whole = max(m.shape[batch - num_batch] for m in metas if m.ndim >= num_batch - batch)
    return [_matching_dim(meta, batch - num_batch, whole) for meta in metas]


def _matching_dim(meta: TensorMeta, from_right: int, size: Size) -> int | Placement:
    """The dim of an operand, counted from the right; replicated where it is broadcast."""
    dim = meta.ndim + from_right
    return dim if dim >= 0 and equal(meta.shape[dim], size) else REPLICATE


def index_choices(call: Call) -> Iterator[Choice]:
    """The tensor, then the index tensors -> one entry per index."""
    indexed, metas = _indexed(call), _index_metas(call)
    whole = (REPLICATE,) * len(metas)
    yield call.replicated()
    for dim in range(call.inputs[0].ndim):
        if dim not in indexed.dims:
            yield from sharded_together(call, (dim, *whole), (indexed.result_dim(dim),))
    for batch in range(indexed.num_batch):
        dims = _along(metas, indexed.num_batch, batch)
        yield from sharded_together(call, (REPLICATE, *dims), (indexed.at + batch,))
    yield from linear_choices(call, ((0,),))
    if _adds(call.inputs[0]):
        local = LocalCall(OwnedIndex(indexed), per_rank=True)
        for dim in indexed.dims:
            yield from sharded_together(call, (dim, *whole), (SUM,), local)


def _is_mask(call: Call) -> bool:
    return any(meta.dtype in (torch.bool, torch.uint8) for meta in _index_metas(call))


def index_put_choices(call: Call) -> Iterator[Choice]:
    """The tensor, the index tensors, and the values, which are broadcast -> the tensor."""
    yield call.replicated()
    values = len(call.inputs) - 1
    yield from linear_choices(call, ((0, values),))
    if _is_mask(call):
        yield from _mask_put_choices(call)
        return
    indexed, metas = _indexed(call), _index_metas(call)
    whole = (REPLICATE,) * len(metas)
    ndim = call.inputs[0].ndim - len(indexed.dims) + indexed.num_batch
    for dim, size in enumerate(call.inputs[0].shape):
        if dim not in indexed.dims:
            at = _matching_dim(call.inputs[values], indexed.result_dim(dim) - ndim, size)
            yield from sharded_together(call, (dim, *whole, at), (dim,))
    if call.argument("accumulate"):
        # Each rank adds the values of its indices: the sums are terms of the result.
        for batch in range(indexed.num_batch):
            dims = _along(metas, indexed.num_batch, batch)
            size = next(m.shape[d] for m, d in zip(metas, dims, strict=True) if isinstance(d, int))
            at = _matching_dim(call.inputs[values], indexed.at + batch - ndim, size)
            yield from sharded_together(call, (SUM, *dims, at), (SUM,))
    local = LocalCall(OwnedIndexPut(indexed), per_rank=True)
    for dim in indexed.dims:
        yield from sharded_together(call, (dim, *whole, REPLICATE), (dim,), local)


def _mask_put_choices(call: Call) -> Iterator[Choice]:
    """One value for all entries of a mask: elementwise, like `masked_fill`."""
    metas = _index_metas(call)
    local = LocalCall(OwnedIndexPut(None), per_rank=True)
    if len(metas) != 1 or call.args[1][0] is None:
        return
    for dim in range(metas[0].ndim):
        yield from sharded_together(call, (dim, REPLICATE, REPLICATE), (dim,), local)
    if not all(equal(s, 1) for s in call.inputs[-1].shape):
        return
    # A local call of its own: on another axis, the one above would get a shard of the mask.
    local = LocalCall(functional_twin(call.op) or call.op)
    for dim in range(call.inputs[0].ndim):
        of_mask = dim if dim < metas[0].ndim else REPLICATE
        yield from sharded_together(call, (dim, of_mask, REPLICATE), (dim,), local)


# -- along one dim ---------------------------------------------------------------------------


def named_dim(call: Call) -> int:
    """The dim that the argument `dim` names, from the front."""
    ndim = call.inputs[0].ndim
    return call.argument("dim") % ndim if ndim else 0


def gather_choices(call: Call) -> Iterator[Choice]:
    """The tensor and an index of as many dims -> one entry per index."""
    yield call.replicated()
    yield from linear_choices(call, ((0,),))
    x, index = call.inputs
    if not x.ndim or not index.ndim:
        return
    at = named_dim(call)
    for dim in range(x.ndim):
        if dim == at:
            yield from sharded_together(call, (REPLICATE, dim), (dim,))
        elif equal(x.shape[dim], index.shape[dim]):
            yield from sharded_together(call, (dim, dim), (dim,))
    yield from _owned_read_choices(call, at)


def _owned_read_choices(call: Call, at: int) -> Iterator[Choice]:
    """The tensor is sharded along the indexed dim `at`."""
    if _adds(call.inputs[0]):
        local = LocalCall(OwnedGather(call.op, at), per_rank=True)
        yield from sharded_together(call, (at, REPLICATE), (SUM,), local)


def scatter_choices(
    call: Call, linear: Sequence[Group] = (), sums: bool = False
) -> Iterator[Choice]:
    """The tensor, an index, and perhaps a source -> the tensor. `sums`: sources are added."""
    yield call.replicated()
    yield from linear_choices(call, linear)
    x, num = call.inputs[0], len(call.inputs)
    if any(meta.ndim != x.ndim or not meta.ndim for meta in call.inputs):
        return
    at = named_dim(call)
    for dim in range(x.ndim):
        if dim != at and all(equal(meta.shape[dim], x.shape[dim]) for meta in call.inputs):
            yield from sharded_together(call, [dim] * num, (dim,))
    if sums and equal(call.inputs[1].shape[at], call.inputs[2].shape[at]):
        yield from sharded_together(call, (SUM, at, at), (SUM,))
    for dim in range(x.ndim):
        yield from _owned_write_choices(call, at, dim)


def _owned_write_choices(call: Call, at: int, shard_dim: int) -> Iterator[Choice]:
    """The tensor is sharded along `shard_dim`, which may be the indexed dim `at`."""
    local = LocalCall(OwnedWrite(functional_twin(call.op) or call.op, at), per_rank=True)
    others = (REPLICATE,) * (len(call.inputs) - 1)
    # Another axis would shard index and source differently from the tensor.
    alone = () if shard_dim == at else ((0, shard_dim),)
    yield from sharded_together(call, (shard_dim, *others), (shard_dim,), local, alone)


def scatter_reduce_choices(call: Call) -> Iterator[Choice]:
    sums = call.argument("reduce") == "sum" and call.argument("include_self")
    yield from scatter_choices(call, _WITH_SOURCE if sums else (), sums=sums)


def index_select_choices(call: Call) -> Iterator[Choice]:
    """The tensor and a list of rows -> those rows."""
    yield call.replicated()
    yield from linear_choices(call, ((0,),))
    x, index = call.inputs
    if not x.ndim or not index.ndim:
        return
    at = named_dim(call)
    for dim in range(x.ndim):
        if dim != at:
            yield from sharded_together(call, (dim, REPLICATE), (dim,))
    yield from sharded_together(call, (REPLICATE, 0), (at,))
    yield from _owned_read_choices(call, at)


def index_write_choices(
    call: Call, linear: Sequence[Group] = (), sums: bool = False
) -> Iterator[Choice]:
    """The tensor, a list of rows, and perhaps a source with a row each -> the tensor."""
    yield call.replicated()
    yield from linear_choices(call, linear)
    x, sources = call.inputs[0], [m for m in call.inputs[2:] if m.ndim]
    if not x.ndim or not call.inputs[1].ndim or any(m.ndim != x.ndim for m in sources):
        return
    at = named_dim(call)
    for dim in range(x.ndim):
        if dim != at:
            others = [dim if m.ndim else REPLICATE for m in call.inputs[2:]]
            yield from sharded_together(call, (dim, REPLICATE, *others), (dim,))
    if sums:
        yield from sharded_together(call, (SUM, 0, at), (SUM,))
    yield from _owned_write_choices(call, at, at)


def index_reduce_choices(call: Call) -> Iterator[Choice]:
    for choice in index_write_choices(call):
        yield replace(choice, local=choice.local or LocalCall(_index_reduce))


def _index_reduce(x: Any, dim: int, index: Any, source: Any, reduce: str, **options: Any) -> Any:
    """torch's op. Its product of narrow floats fails on slices of one entry: those get a second."""
    op = aten.index_reduce.default
    if reduce != "prod" or x.dim() < 2 or x.dtype.itemsize != 2 or x.numel() != x.shape[dim]:
        return op(x, dim, index, source, reduce, **options)
    x, source = (torch.stack([t, t], -1) for t in (x, source))
    return op(x, dim % (x.dim() - 1), index, source, reduce, **options)[..., 0].contiguous()


# -- in the flattened tensor -----------------------------------------------------------------


def take_choices(call: Call) -> Iterator[Choice]:
    yield call.replicated()
    for dim in range(call.inputs[1].ndim):
        yield from sharded_together(call, (REPLICATE, dim), (dim,))
    yield from linear_choices(call, ((0,),))
    if _adds(call.inputs[0]):
        local = LocalCall(owned_take, per_rank=True)
        for dim in range(call.inputs[0].ndim):
            yield from sharded_together(call, (dim, REPLICATE), (SUM,), local)


def put_choices(call: Call) -> Iterator[Choice]:
    yield call.replicated()
    yield from linear_choices(call, _WITH_SOURCE)
    x, index, source = call.inputs
    if call.argument("accumulate") and equal_shapes(index.shape, source.shape):
        for dim in range(index.ndim):
            yield from sharded_together(call, (SUM, dim, dim), (SUM,))
    local = LocalCall(owned_put, per_rank=True)
    for dim in range(x.ndim):
        yield from sharded_together(call, (dim, REPLICATE, REPLICATE), (dim,), local)


#: The inputs whose values the op may refuse; see `dispatch.local_call`.
REFUSED: dict[Any, slice] = {
    **dict.fromkeys(
        (
            aten.gather.default,
            aten.scatter.src,
            aten.scatter.value,
            aten.scatter.reduce,
            aten.scatter.value_reduce,
            aten.scatter_add.default,
            aten.scatter_reduce.two,
            aten.index_select.default,
            aten.index_add.default,
            aten.index_copy.default,
            aten.index_reduce.default,
            aten.index_fill.int_Scalar,
            aten.index_fill.int_Tensor,
            aten.take.default,
            aten.put.default,
        ),
        slice(1, 2),
    ),
    aten.index.Tensor: slice(1, None),
    aten.index_put.default: slice(1, -1),
}


# -- entries of a view or of a mask overwritten --------------------------------------------------


def owned_select_scatter(
    coordinate: Any,
    layouts: Sequence[Any],
    x: torch.Tensor,
    source: torch.Tensor,
    dim: int,
    index: int,
) -> torch.Tensor:
    """Writes one row of a sharded dim, on the rank that owns it."""
    row = index % layouts[0].shape[dim] - layouts[0].box(coordinate)[0][dim]
    result = x.clone()
    if 0 <= row < x.shape[dim]:
        result.select(dim, row).copy_(source)
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
            yield from sharded_together(call, (dim, dim - (dim > at)), (dim,))
    local = LocalCall(owned_select_scatter, per_rank=True)
    yield from sharded_together(call, (at, REPLICATE), (at,), local)


def slice_scatter_choices(call: Call) -> Iterator[Choice]:
    at, size = named_dim(call), call.inputs[0].shape[named_dim(call)]
    count = call.inputs[1].shape[at]
    if statically_equal(size, count):
        yield from _all_overwritten(call)
        return
    yield call.replicated()
    yield from linear_choices(call, ((0, 1),))
    for dim in range(call.inputs[0].ndim):
        if dim != at:
            yield from sharded_together(call, (dim, dim), (dim,))
    written = slice_cut(call, at, size, count)
    if written is not None:
        local = LocalCall(OwnedSliceScatter(written), per_rank=True)
        for sizes in call.splits([(0, at)]):
            source_sizes = written.lengths(lengths(size, call.axis_size, sizes))
            source = shard_with(at, source_sizes, count, call.axis_size)
            target = Shard(at, sizes)
            yield Choice((target, source), (target,), local, alone=((0, at),))


def _all_overwritten(call: Call) -> Iterator[Choice]:
    """A slice that takes the whole dim, such as torch.compile makes of `:`."""
    local = LocalCall(_source_in_place)
    yield replace(call.replicated(), local=local)
    for choice in linear_choices(call, ((0, 1),)):
        yield replace(choice, local=local)
    for dim in range(call.inputs[0].ndim):
        yield from sharded_together(call, (dim, dim), (dim,), local)


def _source_in_place(x: torch.Tensor, source: torch.Tensor, *_: Any) -> torch.Tensor:
    """The source, in the memory order of the tensor that it overwrites."""
    return torch.empty_like(x).copy_(source)


def diagonal_scatter_choices(call: Call) -> Iterator[Choice]:
    ndim = call.inputs[0].ndim
    taken = {call.argument("dim1") % ndim, call.argument("dim2") % ndim}
    yield call.replicated()
    yield from linear_choices(call, ((0, 1),))
    for dim in range(ndim):
        if dim not in taken:
            inner = dim - sum(t < dim for t in taken)
            yield from sharded_together(call, (dim, inner), (dim,))


# -- by mask ---------------------------------------------------------------------------------


def masked_scatter_choices(call: Call) -> Iterator[Choice]:
    """The tensor may be sharded. The mask is whole: it says which entry of the source is next."""
    yield call.replicated()
    yield from linear_choices(call, ((0, 2),))
    local = LocalCall(owned_masked_scatter, per_rank=True)
    is_mask = call.inputs[1].dtype is torch.bool  # of any other, torch says what is wrong
    if is_mask and equal_shapes(call.inputs[0].shape, call.outputs[0].shape):
        for dim in range(call.inputs[0].ndim):
            yield from sharded_together(call, (dim, REPLICATE, REPLICATE), (dim,), local)


_masked_fill = elementwise().choices


def masked_fill_choices(call: Call) -> Iterator[Choice]:
    """Elementwise; and of a sum, one term takes the value and the others zero."""
    yield from _masked_fill(call)
    if equal_shapes(call.inputs[0].shape, call.outputs[0].shape):
        others = (REPLICATE,) * (len(call.inputs) - 1)
        yield Choice((SUM, *others), (SUM,), LocalCall(fill_on_first, per_rank=True))


RULES: Table = table(
    ((aten.index.Tensor, aten._unsafe_index.Tensor), Rule(index_choices, "x[i, j] -> n ...")),
    (
        (aten.index_put.default, aten._unsafe_index_put.default),
        Rule(index_put_choices, "x[i, j] = ..."),
    ),
    ((aten.gather.default,), Rule(gather_choices, "... n, ... m -> ... m")),
    (
        (aten.scatter.src,),
        Rule(partial(scatter_choices, linear=_WITH_SOURCE), "... n, ... m, ... m -> ... n"),
    ),
    (
        (aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce),
        Rule(scatter_choices, "... n, ... m -> ... n"),
    ),
    (
        (aten.scatter_add.default,),
        Rule(
            partial(scatter_choices, linear=_WITH_SOURCE, sums=True), "... n, ... m, ... m -> ... n"
        ),
    ),
    ((aten.scatter_reduce.two,), Rule(scatter_reduce_choices, "... n, ... m, ... m -> ... n")),
    ((aten.index_select.default,), Rule(index_select_choices, "... n, m -> ... m")),
    (
        (aten.index_add.default,),
        Rule(
            partial(index_write_choices, linear=_WITH_SOURCE, sums=True), "... n, m, ... m -> ... n"
        ),
    ),
    (
        (aten.index_copy.default,),
        Rule(partial(index_write_choices, linear=_WITH_SOURCE), "... n, m, ... m -> ... n"),
    ),
    (
        (aten.index_fill.int_Scalar, aten.index_fill.int_Tensor),
        Rule(index_write_choices, "... n, m -> ... n"),
    ),
    ((aten.index_reduce.default,), Rule(index_reduce_choices, "... n, m, ... m -> ... n")),
    ((aten.take.default,), Rule(take_choices, "..., m -> m")),
    ((aten.put.default,), Rule(put_choices, "..., m, m -> ...")),
    # Each entry may depend on all of them, or on the memory order.
    gathered(aten.nonzero_static.default, aten.as_strided_scatter.default),
    ((aten.select_scatter.default,), Rule(select_scatter_choices, "... n, ... -> ... n")),
    ((aten.slice_scatter.default,), Rule(slice_scatter_choices, "... n, ... m -> ... n")),
    ((aten.diagonal_scatter.default,), Rule(diagonal_scatter_choices, "... [n] [m], ... -> ...")),
    # The entries that the mask names, in order: the mask must be whole.
    gathered(aten.masked_scatter_backward.default, linear=((0,),)),
    ((aten.masked_scatter.default,), Rule(masked_scatter_choices, "..., [...], [n] -> ...")),
    (
        (aten.masked_fill.Scalar, aten.masked_fill.Tensor),
        Rule(masked_fill_choices, "..., ... -> ..."),
    ),
)
