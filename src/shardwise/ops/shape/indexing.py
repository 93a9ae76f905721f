"""Picking, writing and overwriting entries: by index, by mask, or through a view.

A dim that is not indexed may be sharded in all operands alike. Indices may be sharded where the
tensor is whole. Where the indexed dim is sharded, a read gives zeros for entries of other ranks and
the results add up; a write keeps the entries that the rank owns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.core.layout import shard_with
from shardwise.core.placements import REPLICATE, SUM, Placement, Shard
from shardwise.core.sizes import Size, equal, equal_shapes, lengths, surely_equal
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
    table,
)
from shardwise.ops.math.pointwise import elementwise
from shardwise.ops.shape.owned_index import (
    Advanced,
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


def _adds(meta: TensorMeta) -> bool:
    """Whether results with zeros for entries of other ranks add up: not for bools."""
    return meta.dtype is not torch.bool


# -- x[i, :, j] ------------------------------------------------------------------------------


def _spot(call: Call) -> Advanced:
    indices = call.args[1]
    dims = tuple(d for d, index in enumerate(indices) if index is not None)
    return Advanced(dims, max(meta.ndim for meta in _index_metas(call)))


def _index_metas(call: Call) -> tuple[TensorMeta, ...]:
    return call.inputs[1 : 1 + sum(index is not None for index in call.args[1])]


def _along(metas: Sequence[TensorMeta], num_batch: int, batch: int) -> list[int | None]:
    """The dim of each index that is dim `batch` of the result; None where it is broadcast."""
    found: list[int | None] = []
    whole = max(m.shape[batch - num_batch] for m in metas if m.ndim >= num_batch - batch)
    for meta in metas:
        dim = meta.ndim - num_batch + batch
        found.append(dim if dim >= 0 and equal(meta.shape[dim], whole) else None)
    return found


def _placed(dims: Sequence[int | None], sizes: tuple[int, ...] | None) -> tuple[Placement, ...]:
    return tuple(REPLICATE if d is None else Shard(d, sizes) for d in dims)


def index_choices(call: Call) -> Iterator[Choice]:
    """The tensor, then the index tensors -> one entry per index."""
    spot, metas = _spot(call), _index_metas(call)
    whole = (REPLICATE,) * len(metas)
    yield call.replicated()
    for dim in range(call.inputs[0].ndim):
        if dim not in spot.dims:
            out = spot.result_dim(dim)
            for sizes in call.splits([(0, dim)]):
                yield Choice((Shard(dim, sizes), *whole), (Shard(out, sizes),))
    for batch in range(spot.num_batch):
        dims = _along(metas, spot.num_batch, batch)
        places = [(1 + i, d) for i, d in enumerate(dims) if d is not None]
        for sizes in call.splits(places):
            yield Choice((REPLICATE, *_placed(dims, sizes)), (Shard(spot.at + batch, sizes),))
    yield from linear_choices(call, ((0,),))
    if _adds(call.inputs[0]):
        local = LocalCall(OwnedIndex(spot), per_rank=True)
        for dim in spot.dims:
            for sizes in call.splits([(0, dim)]):
                yield Choice((Shard(dim, sizes), *whole), (SUM,), local)


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
    spot, metas = _spot(call), _index_metas(call)
    whole = (REPLICATE,) * len(metas)
    ndim = call.inputs[0].ndim - len(spot.dims) + spot.num_batch
    for dim in range(call.inputs[0].ndim):
        if dim not in spot.dims:
            at = _value_dim(
                call.inputs[values], spot.result_dim(dim), ndim, call.inputs[0].shape[dim]
            )
            places = [(0, dim)] + ([(values, at)] if at is not None else [])
            for sizes in call.splits(places):
                shard = Shard(dim, sizes)
                yield Choice((shard, *whole, *_placed([at], sizes)), (shard,))
    if call.argument("accumulate"):
        yield from _added_choices(call, spot, metas, values, ndim)
    local = LocalCall(OwnedIndexPut(spot), per_rank=True)
    for dim in spot.dims:
        for sizes in call.splits([(0, dim)]):
            shard = Shard(dim, sizes)
            yield Choice((shard, *whole, REPLICATE), (shard,), local)


def _value_dim(values: TensorMeta, out_dim: int, ndim: int, size: Size) -> int | None:
    """The dim of the values that matches dim `out_dim`; None where it is broadcast."""
    dim = out_dim - (ndim - values.ndim)
    return dim if dim >= 0 and equal(values.shape[dim], size) else None


def _added_choices(
    call: Call, spot: Advanced, metas: Sequence[TensorMeta], values: int, ndim: int
) -> Iterator[Choice]:
    """Each rank adds the values of its indices: the sums are terms of the result."""
    for batch in range(spot.num_batch):
        dims = _along(metas, spot.num_batch, batch)
        places = [(1 + i, d) for i, d in enumerate(dims) if d is not None]
        size = call.inputs[places[0][0]].shape[places[0][1]]
        at = _value_dim(call.inputs[values], spot.at + batch, ndim, size)
        places += [(values, at)] if at is not None else []
        for sizes in call.splits(places):
            yield Choice((SUM, *_placed(dims, sizes), *_placed([at], sizes)), (SUM,))


def _mask_put_choices(call: Call) -> Iterator[Choice]:
    """One value for all entries of a mask: elementwise, like `masked_fill`."""
    metas = _index_metas(call)
    local = LocalCall(OwnedIndexPut(None), per_rank=True)
    if len(metas) != 1 or call.args[1][0] is None:
        return
    for dim in range(metas[0].ndim):
        for sizes in call.splits([(0, dim)]):
            shard = Shard(dim, sizes)
            yield Choice((shard, REPLICATE, REPLICATE), (shard,), local)
    if not all(equal(s, 1) for s in call.inputs[-1].shape):
        return
    # A local call of its own: on another axis, the one above would get a shard of the mask.
    local = LocalCall(functional_twin(call.op) or call.op)
    for dim in range(call.inputs[0].ndim):
        inside = dim < metas[0].ndim
        for sizes in call.splits([(0, dim)] + ([(1, dim)] if inside else [])):
            shard = Shard(dim, sizes)
            yield Choice((shard, shard if inside else REPLICATE, REPLICATE), (shard,), local)


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
            for sizes in call.splits([(1, dim)]):
                yield Choice((REPLICATE, Shard(dim, sizes)), (Shard(dim, sizes),))
        elif equal(x.shape[dim], index.shape[dim]):
            for sizes in call.splits([(0, dim), (1, dim)]):
                yield Choice((Shard(dim, sizes),) * 2, (Shard(dim, sizes),))
    if _adds(x):
        local = LocalCall(OwnedGather(call.op, at), per_rank=True)
        for sizes in call.splits([(0, at)]):
            yield Choice((Shard(at, sizes), REPLICATE), (SUM,), local)


def scatter_choices(call: Call, linear: Sequence[Group], sums: bool) -> Iterator[Choice]:
    """The tensor, an index, and perhaps a source -> the tensor. `sums`: sources are added."""
    yield call.replicated()
    yield from linear_choices(call, linear)
    x, num = call.inputs[0], len(call.inputs)
    if any(meta.ndim != x.ndim or not meta.ndim for meta in call.inputs):
        return
    at = named_dim(call)
    for dim in range(x.ndim):
        if dim != at and all(equal(meta.shape[dim], x.shape[dim]) for meta in call.inputs):
            for sizes in call.splits([(i, dim) for i in range(num)]):
                yield Choice((Shard(dim, sizes),) * num, (Shard(dim, sizes),))
    if sums and equal(call.inputs[1].shape[at], call.inputs[2].shape[at]):
        for sizes in call.splits([(1, at), (2, at)]):
            shard = Shard(at, sizes)
            yield Choice((SUM, shard, shard), (SUM,))
    for dim in range(x.ndim):
        yield from _owned_write_choices(call, at, dim)


def _owned_write_choices(call: Call, at: int, shard_dim: int) -> Iterator[Choice]:
    """The tensor is sharded along `shard_dim`, which may be the indexed dim `at`."""
    local = LocalCall(OwnedWrite(functional_twin(call.op) or call.op, at), per_rank=True)
    others = (REPLICATE,) * (len(call.inputs) - 1)
    # Another axis would shard index and source differently from the tensor.
    alone = () if shard_dim == at else ((0, shard_dim),)
    for sizes in call.splits([(0, shard_dim)]):
        shard = Shard(shard_dim, sizes)
        yield Choice((shard, *others), (shard,), local, alone=alone)


def scatter_src_choices(call: Call) -> Iterator[Choice]:
    yield from scatter_choices(call, ((0, 2),), sums=False)


def scatter_value_choices(call: Call) -> Iterator[Choice]:
    yield from scatter_choices(call, (), sums=False)


def scatter_add_choices(call: Call) -> Iterator[Choice]:
    yield from scatter_choices(call, ((0, 2),), sums=True)


def scatter_reduce_choices(call: Call) -> Iterator[Choice]:
    sums = call.argument("reduce") == "sum" and call.argument("include_self")
    yield from scatter_choices(call, ((0, 2),) if sums else (), sums=sums)


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
            for sizes in call.splits([(0, dim)]):
                yield Choice((Shard(dim, sizes), REPLICATE), (Shard(dim, sizes),))
    for sizes in call.splits([(1, 0)]):
        yield Choice((REPLICATE, Shard(0, sizes)), (Shard(at, sizes),))
    if _adds(x):
        local = LocalCall(OwnedGather(call.op, at), per_rank=True)
        for sizes in call.splits([(0, at)]):
            yield Choice((Shard(at, sizes), REPLICATE), (SUM,), local)


def index_write_choices(call: Call, linear: Sequence[Group], sums: bool) -> Iterator[Choice]:
    """The tensor, a list of rows, and perhaps a source with a row each -> the tensor."""
    yield call.replicated()
    yield from linear_choices(call, linear)
    x, sources = call.inputs[0], [m for m in call.inputs[2:] if m.ndim]
    if not x.ndim or not call.inputs[1].ndim or any(m.ndim != x.ndim for m in sources):
        return
    at = named_dim(call)
    for dim in range(x.ndim):
        if dim != at:
            places = [(0, dim)] + [(2, dim)] * len(sources)
            for sizes in call.splits(places):
                shard = Shard(dim, sizes)
                others = tuple(shard if m.ndim else REPLICATE for m in call.inputs[2:])
                yield Choice((shard, REPLICATE, *others), (shard,))
    if sums:
        for sizes in call.splits([(1, 0), (2, at)]):
            yield Choice((SUM, Shard(0, sizes), Shard(at, sizes)), (SUM,))
    yield from _owned_write_choices(call, at, at)


def index_add_choices(call: Call) -> Iterator[Choice]:
    yield from index_write_choices(call, ((0, 2),), sums=True)


def index_copy_choices(call: Call) -> Iterator[Choice]:
    yield from index_write_choices(call, ((0, 2),), sums=False)


def index_fill_choices(call: Call) -> Iterator[Choice]:
    yield from index_write_choices(call, (), sums=False)


def index_reduce_choices(call: Call) -> Iterator[Choice]:
    for choice in index_fill_choices(call):
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
        for sizes in call.splits([(1, dim)]):
            yield Choice((REPLICATE, Shard(dim, sizes)), (Shard(dim, sizes),))
    yield from linear_choices(call, ((0,),))
    if _adds(call.inputs[0]):
        local = LocalCall(owned_take, per_rank=True)
        for dim in range(call.inputs[0].ndim):
            for sizes in call.splits([(0, dim)]):
                yield Choice((Shard(dim, sizes), REPLICATE), (SUM,), local)


def put_choices(call: Call) -> Iterator[Choice]:
    yield call.replicated()
    yield from linear_choices(call, ((0, 2),))
    x, index, source = call.inputs
    if call.argument("accumulate") and equal_shapes(index.shape, source.shape):
        for dim in range(index.ndim):
            for sizes in call.splits([(1, dim), (2, dim)]):
                shard = Shard(dim, sizes)
                yield Choice((SUM, shard, shard), (SUM,))
    local = LocalCall(owned_put, per_rank=True)
    for dim in range(x.ndim):
        for sizes in call.splits([(0, dim)]):
            shard = Shard(dim, sizes)
            yield Choice((shard, REPLICATE, REPLICATE), (shard,), local)


def whole_choices(call: Call) -> Iterator[Choice]:
    """Everything is replicated: each entry may depend on all of them, or on the memory order."""
    yield call.replicated()


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
    """The tensor may be sharded. The mask is whole: it says which entry of the source is next."""
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
    """The entries that the mask names, in order: the mask must be whole."""
    yield call.replicated()
    yield from linear_choices(call, ((0,),))


RULES: Table = table(
    ((aten.index.Tensor, aten._unsafe_index.Tensor), Rule(index_choices, "x[i, j] -> n ...")),
    (
        (aten.index_put.default, aten._unsafe_index_put.default),
        Rule(index_put_choices, "x[i, j] = ..."),
    ),
    ((aten.gather.default,), Rule(gather_choices, "... n, ... m -> ... m")),
    ((aten.scatter.src,), Rule(scatter_src_choices, "... n, ... m, ... m -> ... n")),
    (
        (aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce),
        Rule(scatter_value_choices, "... n, ... m -> ... n"),
    ),
    ((aten.scatter_add.default,), Rule(scatter_add_choices, "... n, ... m, ... m -> ... n")),
    ((aten.scatter_reduce.two,), Rule(scatter_reduce_choices, "... n, ... m, ... m -> ... n")),
    ((aten.index_select.default,), Rule(index_select_choices, "... n, m -> ... m")),
    ((aten.index_add.default,), Rule(index_add_choices, "... n, m, ... m -> ... n")),
    ((aten.index_copy.default,), Rule(index_copy_choices, "... n, m, ... m -> ... n")),
    (
        (aten.index_fill.int_Scalar, aten.index_fill.int_Tensor),
        Rule(index_fill_choices, "... n, m -> ... n"),
    ),
    ((aten.index_reduce.default,), Rule(index_reduce_choices, "... n, m, ... m -> ... n")),
    ((aten.take.default,), Rule(take_choices, "..., m -> m")),
    ((aten.put.default,), Rule(put_choices, "..., m, m -> ...")),
    ((aten.nonzero_static.default,), Rule(whole_choices, "[...] -> [...]")),
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
    ((aten.as_strided_scatter.default,), Rule(whole_choices, "[...] -> [...]")),
)
