"""Read and write entries of a sharded dim: each rank handles the entries that it owns."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from shardwise._torch.functions import assert_async
from shardwise.core.layout import Layout
from shardwise.core.mesh import Coordinate
from shardwise.lookup.ids import has_values

aten = torch.ops.aten

#: Of the ops that take `(self, dim, index)`: those that count negative indices from the end, and
#: those whose index is a list of rows.
_WRAPS = (aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
_LISTED = (
    *_WRAPS,
    aten.index_select.default,
    aten.index_add.default,
    aten.index_copy.default,
    aten.index_reduce.default,
)


def bad_index(index: torch.Tensor, size: Any, *, wraps: bool) -> int | None:
    """An index out of range, if there is one: shards would give zeros for it.

    Every rank sees the same values. On CUDA reading them would synchronise, so there it is an
    assertion on the device, as in torch's kernels. A traced graph has no values.
    """
    if type(index) is not torch.Tensor or index.is_meta or not index.numel():
        return None
    lowest = -size if wraps else 0
    if index.is_cuda:
        inside = ((index >= lowest) & (index < size)).all()
        assert_async(inside, f"index out of bounds for a dim of size {size}")
        return None
    low, high = map(int, torch.aminmax(index))
    return low if low < lowest else high if high >= size else None


def check_bounds(index: torch.Tensor, size: Any) -> None:
    """Raise for an index out of range, of ops that take negative indices."""
    wrong = bad_index(index, size, wraps=True)
    if wrong is not None:
        raise IndexError(f"index {wrong} is out of bounds for a dim of size {size}")


def check_rows(
    op: Any, layout: Layout, dim: int, index: torch.Tensor, rest: Sequence[Any], named: Any
) -> None:
    """Raise for an index out of range as on one device, of ops `(self, dim, index, *rest)`.

    The kind of error depends on the op and the number of dims, so the op itself raises it, on a
    small tensor that is the same on every rank.
    """
    size = layout.shape[dim]
    wrong = bad_index(index, size, wraps=op in _WRAPS)
    if wrong is None:
        return
    shape = [min(n, 2) for n in layout.shape]
    picked = [1 if d == dim else n for d, n in enumerate(shape)]
    shape[dim] = size
    listed = index.dim() != len(shape) or op in _LISTED
    given = [
        torch.zeros(picked if x.dim() else (), dtype=x.dtype) if isinstance(x, torch.Tensor) else x
        for x in rest
    ]
    asked = torch.full([1] if listed else picked, wrong, dtype=index.dtype)
    op(torch.zeros(shape, dtype=layout.dtype), dim, asked, *given, **named)
    if 0 not in shape:  # else nothing is read or written
        raise IndexError(f"index {wrong} is out of bounds for a dim of size {size}")


def owned_rows(
    layout: Layout, coordinate: Coordinate, dim: int, index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The local row of each index, and which ones other ranks own (their row is arbitrary)."""
    offset, shape = layout.box(coordinate)
    from_zero = torch.where(index < 0, index + layout.shape[dim], index)
    row = from_zero - offset[dim]
    return row, (row < 0) | (row >= shape[dim])


@dataclass(frozen=True, slots=True)
class OwnedGather:
    """`gather` or `index_select` along a sharded dim: zeros for entries of other ranks."""

    op: Any
    dim: int

    def __call__(
        self,
        coordinate: Any,
        layouts: Sequence[Any],
        x: torch.Tensor,
        dim: int,
        index: torch.Tensor,
        *rest: Any,
        **named: Any,
    ) -> torch.Tensor:
        check_rows(self.op, layouts[0], self.dim, index, rest, named)
        row, foreign = owned_rows(layouts[0], coordinate, self.dim, index)
        if x.shape[self.dim] == 0:
            return x.new_zeros(layouts[-1].local_shape(coordinate))
        found = self.op(x, dim, row.masked_fill(foreign, 0), *rest, **named)
        if index.dim() != x.dim():  # a list of rows: the mask has only this dim
            foreign = foreign.view(-1, *[1] * (x.dim() - self.dim - 1))
        return found.masked_fill(foreign, 0)


@dataclass(frozen=True, slots=True)
class OwnedWrite:
    """An op that writes rows of a sharded dim, as `(self, dim, index, ...)`.

    Entries of other ranks are written to a spare row behind the shard, which is then dropped.
    """

    op: Any
    dim: int

    def __call__(
        self,
        coordinate: Any,
        layouts: Sequence[Any],
        x: torch.Tensor,
        dim: int,
        index: torch.Tensor,
        *rest: Any,
        **named: Any,
    ) -> torch.Tensor:
        check_rows(self.op, layouts[0], self.dim, index, rest, named)
        if index.dim() == x.dim():
            index, *others = _aligned(coordinate, layouts, self.dim, (index, *rest))
            rest = tuple(others)
        row, foreign = owned_rows(layouts[0], coordinate, self.dim, index)
        length = x.shape[self.dim]
        spare = x.new_zeros((*x.shape[: self.dim], 1, *x.shape[self.dim + 1 :]))
        longer = torch.cat([x, spare], self.dim)
        written = self.op(longer, dim, row.masked_fill(foreign, length), *rest, **named)
        return written.narrow(self.dim, 0, length)


def _aligned(
    coordinate: Coordinate, layouts: Sequence[Layout], dim: int, others: Sequence[Any]
) -> list[Any]:
    """Index and source, narrowed to the box of this rank's shard in all dims but `dim`."""
    (start, shape), (index_start, _) = layouts[0].box(coordinate), layouts[1].box(coordinate)
    aligned = []
    for other in others:
        if isinstance(other, torch.Tensor) and other.dim() == len(shape):
            for d in range(other.dim()):
                if d != dim and layouts[0].shape[d] != shape[d]:
                    first = min(max(start[d] - index_start[d], 0), other.shape[d])
                    other = other.narrow(d, first, min(shape[d], other.shape[d] - first))
        aligned.append(other)
    return aligned


# -- several index tensors at once -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AdvancedIndex:
    """`x[i, :, j]`: which dims are indexed, and the position of the index dims in the result."""

    dims: tuple[int, ...]
    num_batch: int

    @property
    def at(self) -> int:
        """The first dim of the result that comes from the indices."""
        first, last = self.dims[0], self.dims[-1]
        return first if last - first + 1 == len(self.dims) else 0

    def result_dim(self, dim: int) -> int:
        """The number of a dim that is not indexed in the result."""
        before = dim - sum(d < dim for d in self.dims)
        return before if before < self.at else before + self.num_batch


def _owned_indices(
    layout: Layout, coordinate: Coordinate, indexed: AdvancedIndex, indices: Sequence[Any]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Local rows for each index, all of one shape, and which entries other ranks own."""
    rows, foreign = [], None
    for dim, index in zip(indexed.dims, (i for i in indices if i is not None), strict=True):
        check_bounds(index, layout.shape[dim])
        row, elsewhere = owned_rows(layout, coordinate, dim, index)
        rows.append(row)
        foreign = elsewhere if foreign is None else foreign | elsewhere
    assert foreign is not None, "an index without tensors is a view"
    return list(torch.broadcast_tensors(*rows)), foreign


@dataclass(frozen=True, slots=True)
class OwnedIndex:
    """`x[indices]` of a shard: zeros for entries of other ranks."""

    indexed: AdvancedIndex

    def __call__(
        self, coordinate: Any, layouts: Sequence[Any], x: torch.Tensor, indices: Sequence[Any]
    ) -> torch.Tensor:
        rows, foreign = _owned_indices(layouts[0], coordinate, self.indexed, indices)
        if not x.numel():
            return x.new_zeros(layouts[-1].local_shape(coordinate))
        safe = iter([row.masked_fill(foreign, 0) for row in rows])
        found = aten.index.Tensor(x, [None if i is None else next(safe) for i in indices])
        behind = found.dim() - self.indexed.at - foreign.dim()
        return found.masked_fill(foreign.view(*foreign.shape, *[1] * behind), 0)


def _size_stays_inside(mask: torch.Tensor) -> Any:
    """A context in which the number of a mask's true entries may stay out of the result's shape.

    That number is an unbacked symbol, which the traced graph must track but shape inference need
    not.
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # slow to import

    fake_mode = getattr(mask, "fake_mode", None)
    if fake_mode is None or get_proxy_mode() is not None:
        return contextlib.nullcontext()
    return fake_mode.shape_env.ignore_fresh_unbacked_symbols()


def _without_masks(indices: Sequence[Any]) -> list[Any]:
    """The indices with each mask replaced by the indices of its true entries."""
    found: list[Any] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            with contextlib.nullcontext() if has_values(index) else _size_stays_inside(index):
                found += index.nonzero().unbind(1)
        else:
            found.append(index)
    return found


@dataclass(frozen=True, slots=True)
class OwnedIndexPut:
    """`x[indices] = values` on a shard: writes the entries that the rank owns.

    Without a `indexed` there are masks among the indices, and it is computed from their values.
    """

    indexed: AdvancedIndex | None

    def __call__(
        self,
        coordinate: Any,
        layouts: Sequence[Any],
        x: torch.Tensor,
        indices: Sequence[Any],
        values: torch.Tensor,
        accumulate: bool = False,
        *_: Any,
    ) -> torch.Tensor:
        indexed = self.indexed
        if indexed is None:
            indices = _without_masks(indices)
            indexed = AdvancedIndex(tuple(d for d, i in enumerate(indices) if i is not None), 1)
        rows, foreign = _owned_indices(layouts[0], coordinate, indexed, indices)
        if not has_values(x):
            return _put_padded(indexed, x, rows, foreign, indices, values, accumulate)
        kept = ~foreign.expand_as(rows[0])
        at, num = indexed.at, kept.dim()
        untouched = [n for d, n in enumerate(x.shape) if d not in indexed.dims]
        spread = values.expand(*untouched[:at], *kept.shape, *untouched[at:])
        front = list(range(num))
        chosen = spread.movedim([at + d for d in front], front)[kept].movedim(0, at)
        mine = iter([row[kept] for row in rows])
        here = [None if i is None else next(mine) for i in indices]
        return aten.index_put.default(x, here, chosen, accumulate)


def _put_padded(
    indexed: AdvancedIndex,
    x: torch.Tensor,
    rows: Sequence[torch.Tensor],
    foreign: torch.Tensor,
    indices: Sequence[Any],
    values: torch.Tensor,
    accumulate: bool,
) -> torch.Tensor:
    """For traced graphs: entries of other ranks go to padding, so no size is data-dependent.

    It writes more than eager code, which selects the owned entries.
    """
    behind = [size for d in reversed(range(x.dim())) for size in (0, int(d in indexed.dims))]
    places = iter(
        [row.masked_fill(foreign, x.shape[d]) for d, row in zip(indexed.dims, rows, strict=True)]
    )
    there = [None if i is None else next(places) for i in indices]
    written = aten.index_put.default(F.pad(x, behind), there, values, accumulate)
    for dim in indexed.dims:
        written = written.narrow(dim, 0, x.shape[dim])
    return written


# -- positions in the flattened tensor -------------------------------------------------------


def _flat_rows(
    layout: Layout, coordinate: Coordinate, index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions in the flattened shard, and which ones other ranks own."""
    numel = math.prod(layout.shape)
    check_bounds(index, numel)
    rest = torch.where(index < 0, index + numel, index)
    offset, shape = layout.box(coordinate)
    local, foreign, step = torch.zeros_like(rest), torch.zeros_like(rest, dtype=torch.bool), 1
    for dim in reversed(range(len(shape))):
        row = rest % layout.shape[dim] - offset[dim]
        rest = rest // layout.shape[dim]
        foreign = foreign | (row < 0) | (row >= shape[dim])
        local = local + row * step
        step *= shape[dim]
    return local, foreign


def owned_take(
    coordinate: Coordinate, layouts: Sequence[Layout], x: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    """`take` from a shard: zeros for entries of other ranks."""
    place, foreign = _flat_rows(layouts[0], coordinate, index)
    if not x.numel():
        return x.new_zeros(index.shape)
    return aten.take.default(x, place.masked_fill(foreign, 0)).masked_fill(foreign, 0)


def owned_put(
    coordinate: Coordinate,
    layouts: Sequence[Layout],
    x: torch.Tensor,
    index: torch.Tensor,
    source: torch.Tensor,
    accumulate: bool = False,
) -> torch.Tensor:
    """`put` into a shard: entries of other ranks go to a spare entry."""
    place, foreign = _flat_rows(layouts[0], coordinate, index)
    longer = torch.cat([x.reshape(-1), x.new_zeros(1)])
    at = place.masked_fill(foreign, x.numel())
    return aten.put.default(longer, at, source, accumulate)[:-1].view(x.shape)


# -- by mask ---------------------------------------------------------------------------------


def owned_masked_scatter(
    coordinate: Coordinate,
    layouts: Sequence[Layout],
    x: torch.Tensor,
    mask: torch.Tensor,
    source: torch.Tensor,
) -> torch.Tensor:
    """Each true entry of the mask takes the next entry of the source; the mask is whole."""
    whole = layouts[0].shape
    mask = mask.expand(whole)
    if has_values(mask) and mask.is_cpu and int(mask.sum()) > source.numel():
        raise RuntimeError(
            f"masked_scatter: the mask has {int(mask.sum())} true entries, but the source has "
            f"only {source.numel()} entries."
        )
    place = (mask.reshape(-1).cumsum(0) - 1).view(whole)
    for dim, (start, length) in enumerate(zip(*layouts[0].box(coordinate), strict=True)):
        mask, place = mask.narrow(dim, start, length), place.narrow(dim, start, length)
    # False entries read a spare one in front, so that the source may be empty. At the end, a source
    # that is too short would read it.
    longer = torch.cat([source.new_zeros(1), source.reshape(-1)])
    return torch.where(mask, aten.take.default(longer, (place + 1).masked_fill(~mask, 0)), x)


def fill_on_first(
    coordinate: Coordinate,
    layouts: Sequence[Layout],
    x: torch.Tensor,
    mask: torch.Tensor,
    value: Any,
) -> torch.Tensor:
    """Fill terms of a sum: on the first rank with the value, on others with zeros."""
    terms = [a for a, p in enumerate(layouts[0].placements) if p.is_partial()]
    first = all(coordinate[axis] == 0 for axis in terms)
    return torch.masked_fill(x, mask, value if first else 0)
