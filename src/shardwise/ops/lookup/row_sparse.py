"""RowSparse: the gradient of a table as the rows that have one.

It is to a DTensor what torch's sparse COO tensor is to a dense one, for what optimizers do with a
sparse gradient: coalesce it, read its indices and values, make another one like it, select the same
rows of a dense state, and add it to a parameter. It has the table's layout, and every rank holds
the rows that it owns: nothing of the table's size is materialised. Over axes that replicate the
table it may be Partial; it is then reduced when coalesced or added, by gathering rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardwise._torch.dispatch import make_wrapper
from shardwise.comm import collectives
from shardwise.comm.watch import because
from shardwise.core.layout import Layout, make_layout
from shardwise.core.mesh import Coordinate, Grid
from shardwise.core.placements import REPLICATE, SUM, Partial
from shardwise.core.sizes import unrecorded
from shardwise.core.untraced import UntracedFunction, untraced
from shardwise.dispatch.variants import UNSCALE
from shardwise.dtensor import fallback
from shardwise.dtensor.compile import FlatContext, context_of, part_names
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import LayoutError, UnsupportedError
from shardwise.lookup.ids import distinct, segment_sums, sharded_axes
from shardwise.lookup.optimizers import add_distinct_rows
from shardwise.ops.lookup.rules import SparseRows
from shardwise.simulation.ranks import (
    each_rank,
    from_parts,
    held_like,
    parts_of,
    per_rank,
    roster_of,
)
from shardwise.simulation.roster import Roster


@dataclass(frozen=True, slots=True)
class RowContext:
    """What a compiled graph knows of a RowSparse besides its plain tensors and the sizes."""

    #: Of the values.
    values: FlatContext
    #: Which rank holds which row numbers; None in a real process.
    roster: Roster | None
    coalesced: bool


aten = torch.ops.aten


class RowSparse(DTensor):
    """A DTensor of which only some rows are stored. `is_sparse` is true.

    `_local` holds one row of values for each of the local row numbers in `_rows`.
    """

    __slots__ = ("_coalesced", "_rows")
    _rows: torch.Tensor
    _coalesced: bool

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]
        return True

    @property
    def layout(self) -> torch.layout:  # type: ignore[override]
        return torch.sparse_coo

    def is_coalesced(self) -> bool:
        return self._coalesced

    def sparse_dim(self) -> int:
        return 1

    def dense_dim(self) -> int:
        return self.dim() - 1

    @untraced
    def _indices(self) -> HeldRows:
        return HeldRows.of(self._rows.unsqueeze(0), self)

    @untraced
    def _values(self) -> HeldRows:
        return HeldRows.of(self._local, self)

    indices, values = _indices, _values

    @untraced
    def new(self, *args: Any) -> RowSparse:  # type: ignore[override]
        """`new(indices, values, size)`: another one with the rows of `indices`."""
        if len(args) != 3 or not all(isinstance(a, HeldRows) for a in args[:2]):
            raise UnsupportedError(
                "new() of a row-sparse DTensor takes the indices and values of one, and its size."
            )
        return args[1].at(args[0])

    @untraced
    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """This rank's shard, as torch's sparse COO tensor."""

        def here(coordinate: Coordinate, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            size = self._layout.local_shape(coordinate)
            return torch.sparse_coo_tensor(rows.unsqueeze(0), values, size, check_invariants=False)

        reduced = self._reduce()
        return each_rank(self._layout.grid, here, reduced._rows, reduced._local)

    @untraced
    def to_dense(self, dtype: torch.dtype | None = None, *, masked_grad: Any = None) -> DTensor:
        """The same values as a dense DTensor, as large as the table.

        `masked_grad` is for torch's signature: a gradient has none.
        """
        recorded = torch.is_grad_enabled() and self.requires_grad
        dense: Any = _Dense.apply(self) if recorded else self._reduce().terms()
        return dense if dtype is None else dense.to(dtype)

    def terms(self) -> DTensor:
        """As `to_dense`, but Partial where this is."""
        dense = SparseRows(self._layout, self._rows, self._local).dense()
        return DTensor._wrap(dense, self._layout)

    @untraced
    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The whole tensor, dense, on every rank."""
        return self.to_dense().full_tensor()

    @untraced
    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """Dense, in other placements."""
        return self.to_dense().redistribute(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RowSparse({self._layout!r}, rows={self._rows!r}, values={self._local!r})"

    def _with(self, values: torch.Tensor) -> RowSparse:
        """The same rows, with other values."""
        return make(self._layout, self._rows, values, self._coalesced)

    def _reduce(self) -> RowSparse:
        """Replicated where it was Partial: all ranks of such an axis get all rows."""
        rows, values, layout = self._rows, self._local, self._layout
        partial = [(a, p) for a, p in enumerate(layout.placements) if isinstance(p, Partial)]
        if not partial:
            return self
        for axis, placement in partial:
            if layout.grid.shape[axis] > 1:
                with because("the rows of a gradient", implicit=True):
                    rows, values = gather_rows(rows, values, layout.grid, axis)
                scale = 1 / layout.grid.shape[axis] if placement.is_partial("avg") else 1
                values = values * scale if scale != 1 else values
        return make(layout.reduced(), rows, values)

    @untraced
    def coalesce(self) -> RowSparse:
        """Reduced, and each row once."""
        if self._coalesced:
            return self
        reduced = self._reduce()

        def here(_: Coordinate, rows: torch.Tensor, values: torch.Tensor) -> Any:
            different, order, starts = distinct(rows)
            return different, segment_sums(values, order, starts)

        rows, values = each_rank(self._layout.grid, here, reduced._rows, reduced._local, axes=())
        return make(reduced._layout, rows, values, coalesced=True)

    # -- torch.compile -----------------------------------------------------------------------

    @untraced
    def __tensor_flatten__(self) -> tuple[list[str], RowContext]:
        held, roster = roster_of(self._local), roster_of(self._rows)
        names = ["_rows", "_local"]
        if held is not None and roster is not None:
            names = part_names(roster.num_parts, RowSparse, "_rows", "_rows")
            names = names + part_names(held.num_parts, RowSparse)
        return names, RowContext(context_of(self._layout, held), roster, self._coalesced)

    @staticmethod
    @untraced
    def __tensor_unflatten__(  # type: ignore[override]
        inner: dict[str, torch.Tensor], context: RowContext, outer_size: Any, outer_stride: Any
    ) -> RowSparse:
        parts, roster = list(inner.values()), context.roster
        num = 1 if roster is None else roster.num_parts
        rows = from_parts(parts[:num], roster)
        values = from_parts(parts[num:], context.values.roster)
        layout = context.values.layout(outer_size, outer_stride)
        return make(layout, rows, values, context.coalesced)

    def _stable_hash_for_caching(self) -> str:
        rows = [tuple(map(str, p.shape)) for p in parts_of(self._rows)]
        return repr((super()._stable_hash_for_caching(), rows, self._coalesced))

    @classmethod
    @untraced
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        preferred: Layout | None = None,
    ) -> Any:
        handler = _HANDLERS.get(func)
        result = NotImplemented if handler is None else handler(*args, **(kwargs or {}))
        if result is NotImplemented:
            raise UnsupportedError(
                f"{func} does not have a sharding strategy registered for a row-sparse DTensor, "
                "the gradient of an embedding with sparse=True. Use to_dense(), or sparse=False."
            )
        return result


class _Dense(UntracedFunction):
    """A gradient from a double backward: it can be read, but not differentiated."""

    @staticmethod
    def forward(ctx: Any, sparse: RowSparse) -> DTensor:
        return sparse._reduce().terms()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        raise UnsupportedError(
            "A row-sparse gradient is not differentiated again. Use dense gradients: sparse=False."
        )


@untraced
def make(
    layout: Layout, rows: torch.Tensor, values: torch.Tensor, coalesced: bool = False
) -> RowSparse:
    if layout.symbolic:
        return unrecorded(_make, layout, rows, values, coalesced)
    return _make(layout, rows, values, coalesced)


def _make(layout: Layout, rows: torch.Tensor, values: torch.Tensor, coalesced: bool) -> RowSparse:
    out = make_wrapper(
        RowSparse, layout.shape, strides=layout.stride, dtype=values.dtype, device=values.device
    )
    out._local, out._rows, out._layout, out._coalesced = values, rows, layout, coalesced
    return out


def gather_rows(
    rows: torch.Tensor, values: torch.Tensor, grid: Grid, axis: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of all coordinates of the axis: padded to the longest, gathered, and trimmed."""
    own = each_rank(
        grid, lambda _, rows: torch.tensor([rows.shape[0]], device=rows.device), rows, axes=()
    )
    counts = collectives.all_gather(own, grid, axis)

    def pad(_: Coordinate, t: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        missing = int(counts.max()) - t.shape[0]
        return torch.cat([t, t.new_zeros((missing, *t.shape[1:]))]).unsqueeze(0)

    def join(_: Coordinate, t: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return torch.cat([part[:num] for part, num in zip(t, counts.tolist(), strict=True)])

    def gather(tensor: torch.Tensor) -> Any:
        padded = each_rank(grid, pad, tensor, counts, axes=())
        everywhere = collectives.all_gather(padded, grid, axis)
        return each_rank(grid, join, everywhere, counts, axes=())

    return gather(rows), gather(values)


# -- the indices and values ------------------------------------------------------------------


class HeldRows(torch.Tensor):
    """Indices or values of a RowSparse: each rank has its own number, and ops run on each.

    Its shape is that of one rank.
    """

    __slots__ = ("local", "origin")
    local: torch.Tensor
    #: What they are the indices or values of.
    origin: RowSparse

    @staticmethod
    @untraced
    def of(local: torch.Tensor, origin: RowSparse) -> HeldRows:
        out = make_wrapper(HeldRows, local.shape, dtype=local.dtype, device=local.device)
        out.local, out.origin = local, origin
        return out

    @untraced
    def at(self, indices: HeldRows) -> RowSparse:
        """These values at the rows of `indices`."""
        return make(self.origin._layout, indices.local[0], self.local, self.origin._coalesced)

    def numel(self) -> int:
        """The number on all ranks present: torch's optimizers skip a gradient without values."""
        return sum(part.numel() for part in parts_of(self.local))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"HeldRows({self.local!r})"

    @classmethod
    @untraced
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _MAKE_SPARSE:
            indices, values = (a for a in args if isinstance(a, HeldRows))
            return values.at(indices)
        if func is UNSCALE:
            return fallback.DECOMPOSITIONS[func](*args)
        out = func(*(a.local if isinstance(a, HeldRows) else a for a in args), **(kwargs or {}))
        if isinstance(args[0], HeldRows) and out is args[0].local:
            return args[0]
        origin = next(a.origin for a in args if isinstance(a, HeldRows))
        if func is aten.sum.default:  # each rank has some rows, or terms of them
            layout = origin._layout
            terms = tuple(REPLICATE if p.is_replicate() else SUM for p in layout.placements)
            return DTensor._wrap(out, make_layout(layout.grid, terms, (), (), out.dtype))
        return HeldRows.of(out, origin) if isinstance(out, torch.Tensor) else out


#: The ops of `torch.sparse_coo_tensor(indices, values, size)`.
_MAKE_SPARSE = {
    aten._sparse_coo_tensor_unsafe.default,
    aten._sparse_coo_tensor_with_dims_and_tensors.default,
    aten.sparse_coo_tensor.indices_size,
}


# -- ops on a sparse gradient ----------------------------------------------------------------


def _add(a: Any, b: Any, *, alpha: float = 1) -> Any:
    if isinstance(a, RowSparse) and isinstance(b, RowSparse):
        return _joined(a, b, alpha)
    if isinstance(a, RowSparse):
        a, b, alpha = (b * alpha if alpha != 1 else b), a, 1
    if not isinstance(a, DTensor):
        return NotImplemented
    alike = b.placements == a.placements and b._layout.order == a._layout.order
    if not alike or any(p.is_partial() for p in b.placements):
        return torch.add(a, b.terms(), alpha=alpha)
    return _add_(a.clone(), b, alpha=alpha)


def _add_(a: Any, b: Any, *, alpha: float = 1) -> Any:
    if isinstance(a, RowSparse):
        return _become(a, _joined(a, b, alpha)) if isinstance(b, RowSparse) else NotImplemented
    if not isinstance(a, DTensor):
        return NotImplemented
    if any(p.is_partial() for p in a.placements):  # terms, as large as the whole on every rank
        return torch.Tensor.add_(a, b.terms(), alpha=alpha)
    b = b._reduce()
    _check_alike(a, b)

    def here(_: Coordinate, target: Any, rows: Any, values: Any) -> torch.Tensor:
        values = values.to(target.dtype)
        if coalesced:
            return add_distinct_rows(target, rows, values, alpha)
        return target.index_add_(0, rows, values, alpha=alpha)

    target, coalesced = a._local, b._coalesced
    # One part for each part of the target: memory that ranks share is written once.
    rows, values = (held_like(each, roster_of(target)) for each in (b._rows, b._local))
    each_rank(a._layout.grid, here, target, rows, values, axes=sharded_axes(a._layout))
    return a


def _check_alike(a: DTensor, b: RowSparse) -> None:
    if a._layout.placements != b._layout.placements or a._layout.order != b._layout.order:
        raise LayoutError(
            f"A row-sparse tensor {b._layout!r} is added to {a._layout!r}: both must have the same "
            "placements. "
            f"Redistribute the dense one: x.redistribute(placements={list(b.placements)!r}"
            f"{b._layout.other_order()})."
        )


def _joined(a: RowSparse, b: RowSparse, alpha: float) -> RowSparse:
    if a._layout.placements != b._layout.placements:
        a, b = _as_terms(a, b._layout), _as_terms(b, a._layout)

    def join(_: Coordinate, *parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat(parts[:2]), torch.cat(parts[2:])

    added = b._local * alpha if alpha != 1 else b._local
    held = (a._rows, b._rows, a._local, added)
    rows, values = each_rank(a._layout.grid, join, *held, axes=())
    return make(a._layout, rows, values)


def _as_terms(x: RowSparse, other: Layout) -> RowSparse:
    """`x` as terms of a sum along the axes where it or `other` is Partial; nothing is sent."""
    layout, rows, values = x._layout, x._rows, x._local
    placements = list(layout.placements)
    for axis, (own, its) in enumerate(zip(placements, other.placements, strict=True)):
        if own.is_partial("avg"):
            values = values / layout.grid.shape[axis]
        elif its.is_partial() and not own.is_partial():
            rows, values = (_on_first(layout.grid, axis, each) for each in (rows, values))
        if own.is_partial() or its.is_partial():
            placements[axis] = SUM
    return make(layout.with_placements(tuple(placements)), rows, values)


def _on_first(grid: Grid, axis: int, held: torch.Tensor) -> Any:
    return each_rank(grid, lambda at, here: here[:0] if at[axis] else here, held, axes=(axis,))


def _times(x: Any, factor: Any) -> Any:
    """Times a number, or a tensor without dims."""
    if isinstance(factor, DTensor) and factor.dim() == 0:
        factor = factor.full_tensor()
    elif not isinstance(factor, (int, float)) and (
        type(factor) is not torch.Tensor or factor.dim()
    ):
        return NotImplemented
    return x._with(x._local * factor) if isinstance(x, RowSparse) else NotImplemented


def _divided(x: Any, divisor: Any) -> Any:
    return _times(x, 1 / divisor) if isinstance(divisor, (int, float)) else NotImplemented


def _emptied(x: Any) -> RowSparse:
    rows, values = (per_rank(lambda part: part[:0], each) for each in (x._rows, x._local))
    return make(x._layout, rows, values, x._coalesced)


def _become(x: RowSparse, found: Any) -> Any:
    """`x`, which now holds what was found."""
    if found is NotImplemented:
        return found
    x._layout, x._rows, x._local = found._layout, found._rows, found._local
    x._coalesced = found._coalesced
    return x


def _in_place(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *args: _become(x, fn(x, *args))


def _masked(dense: Any, like: Any) -> Any:
    """The rows of a dense tensor where a sparse one has rows."""
    if not isinstance(like, RowSparse) or type(dense) is not DTensor:
        return NotImplemented
    _check_alike(dense, like)
    return like._with(dense._local.index_select(0, like._rows))


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: _add,
    aten.add_.Tensor: _add_,
    aten.sub_.Tensor: lambda a, b, alpha=1: _add_(a, b, alpha=-alpha),
    aten.mul.Tensor: _times,
    aten.mul.Scalar: _times,
    aten.mul_.Tensor: _in_place(_times),
    aten.mul_.Scalar: _in_place(_times),
    aten.div.Tensor: _divided,
    aten.div.Scalar: _divided,
    aten.div_.Tensor: _in_place(_divided),
    aten.div_.Scalar: _in_place(_divided),
    aten.neg.default: lambda x: _times(x, -1),
    aten.zero_.default: _in_place(_emptied),
    aten.detach.default: lambda x: x._with(x._local),
    aten.alias.default: lambda x: x._with(x._local),
    aten.clone.default: lambda x, **_: x._with(x._local.clone()),
    aten.sparse_mask.default: _masked,
}
