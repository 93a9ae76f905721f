"""Layout: how a tensor is laid out over a mesh.

Note [Interned layouts]
Equal layouts are one object, so a cache key that holds layouts hashes and compares by identity.
Layouts with symbolic shapes (inside torch.compile) are not interned and never enter a cache.

Note [Snapshots]
A view whose input had to be redistributed is a copy, and a write to it would be lost. Its layout is
marked as a snapshot: ops that write refuse it, and ops that read it first check whether its base
has changed (Note [Snapshots follow] in dtensor.snapshots).
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core.box import Box
from shardwise.core.mesh import Coordinate, Grid
from shardwise.core.placements import REPLICATE, NormPartial, Partial, Placement, Shard, short
from shardwise.core.sizes import Size, lengths, recorded, settled, shard_range
from shardwise.errors import ArgumentError, LayoutError, UnsupportedError

Shape = tuple[Size, ...]


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class Layout:
    """Mesh, one placement per axis, the order of axes that share a dim, and the global tensor.

    `order` lists the axes from the outermost split to the innermost. It matters only among axes
    that shard the same dim, and is kept in a canonical form. Made by `make_layout`.
    """

    grid: Grid
    placements: tuple[Placement, ...]
    order: tuple[int, ...]
    shape: Shape
    stride: Shape
    dtype: torch.dtype
    symbolic: bool
    snapshot: bool
    #: The dims from the outermost in memory to the innermost; None when that is their own order.
    memory_order: tuple[int, ...] | None
    #: The expanded dims, along which one entry stands for all (`Tensor.expand`).
    expanded: tuple[int, ...]
    #: The strides that a wrapper is made with: torch takes less time without those of a dense
    #: row-major tensor.
    wrapper_stride: Shape | None
    #: The box of this process; filled on first use, never in a simulated world.
    here: Box | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def with_placements(
        self, placements: tuple[Placement, ...], order: tuple[int, ...] | None = None
    ) -> Layout:
        """The same tensor with other placements, which must fit it."""
        return make_layout(
            self.grid, placements, self.shape, self.stride, self.dtype, order or self.order
        )

    def reduced(self, axes: Container[int] | None = None) -> Layout:
        """The same layout, replicated where it is Partial, on these axes or on all."""
        placements = tuple(
            REPLICATE if isinstance(p, Partial) and (axes is None or axis in axes) else p
            for axis, p in enumerate(self.placements)
        )
        return self if placements == self.placements else self.with_placements(placements)

    def with_sizes(self, shape: Sequence[Size], stride: Sequence[Size]) -> Layout:
        """The same layout with other symbols for its sizes; itself where nothing changes."""
        if shape is self.shape and stride is self.stride:
            return self
        return make_layout(
            self.grid,
            self.placements,
            shape,
            stride,
            self.dtype,
            self.order,
            snapshot=self.snapshot,
        )

    @property
    def in_default_order(self) -> bool:
        """Whether the first of the axes that share a dim is the outermost, and so on."""
        return self.order == tuple(range(len(self.order)))

    def other_order(self) -> str:
        """The order as text after the placements; empty where it is the default."""
        return "" if self.in_default_order else f", order={self.order}"

    def axes_of(self, dim: int) -> tuple[int, ...]:
        """The axes that shard `dim`, outermost first."""
        return tuple(a for a in self.order if self.placements[a].is_shard(dim))

    def box(self, coordinate: Coordinate) -> Box:
        """The box that `coordinate` holds."""
        if coordinate != self.grid.coordinate:
            return self._box(coordinate)
        if self.here is None:
            self.here = self._box(coordinate)
        return self.here

    def _box(self, coordinate: Coordinate) -> Box:
        offset: list[Size] = [0] * self.ndim
        shape = list(self.shape)
        for axis in self.order:
            placement = self.placements[axis]
            # Not `type(...) is`, here and below: dynamo before 2.13 answers that with False.
            if isinstance(placement, Shard):
                dim = placement.dim
                start, shape[dim] = shard_range(
                    shape[dim], self.grid.shape[axis], coordinate[axis], placement.sizes
                )
                offset[dim] = offset[dim] + start
        if self.symbolic:
            return Box(tuple(recorded(offset)), tuple(recorded(shape)))
        return Box(tuple(offset), tuple(shape))

    def local_shape(self, coordinate: Coordinate) -> Shape:
        """The shape of the shard at `coordinate`."""
        return self.box(coordinate)[1]

    def outer_size(self, axis: int, dim: int, coordinate: Coordinate) -> Size:
        """The size of `dim` at `coordinate` after the axes outside `axis` have split it."""
        size = self.shape[dim]
        for other in self.order:
            if other == axis:
                break
            placement = self.placements[other]
            if isinstance(placement, Shard) and placement.dim == dim:
                size = shard_range(
                    size, self.grid.shape[other], coordinate[other], placement.sizes
                )[1]
        return size

    def __deepcopy__(self, memo: Any) -> Layout:
        return self  # one object per value

    def __repr__(self) -> str:
        shape = tuple(str(s) for s in self.shape) if self.symbolic else self.shape
        placed = f"{short(self.placements)}{self.other_order()}"
        return f"Layout({shape}, {self.dtype}, {placed} on {self.grid!r})"


_interned: weakref.WeakValueDictionary[Any, Layout] = weakref.WeakValueDictionary()


_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})


def make_layout(
    grid: Grid,
    placements: tuple[Placement, ...],
    shape: Sequence[Size],
    stride: Sequence[Size],
    dtype: torch.dtype,
    order: tuple[int, ...] | None = None,
    *,
    snapshot: bool = False,
) -> Layout:
    """The one layout with these values. `placements` must be normalised for `shape`."""
    shape, stride = tuple(shape), tuple(stride)
    symbolic = any(type(s) is not int for s in shape) or any(type(s) is not int for s in stride)
    if symbolic:
        shape, stride = tuple(map(settled, shape)), tuple(map(settled, stride))
        symbolic = any(type(s) is not int for s in (*shape, *stride))
    order = canonical_order(placements, order)
    key = None if symbolic else (grid, placements, order, shape, stride, dtype, snapshot)
    if key is not None and (found := _interned.get(key)) is not None:
        return found
    if dtype in _QUANTIZED:
        raise UnsupportedError(
            f"A DTensor of {dtype} does not exist: the scale and the zero point of a quantized "
            "tensor are not sent with its shards. Distribute x.int_repr() and keep both as "
            "numbers, or distribute x.dequantize()."
        )
    memory_order = None if symbolic else _memory_order(stride)
    expanded = tuple([d for d, s in enumerate(stride) if type(s) is int and s == 0])
    wrapper_stride = None if not symbolic and stride == contiguous_stride(shape) else stride
    layout = Layout(
        grid,
        placements,
        order,
        shape,
        stride,
        dtype,
        symbolic,
        snapshot,
        memory_order,
        expanded,
        wrapper_stride,
    )
    if key is not None:
        _interned[key] = layout
    return layout


def _memory_order(stride: Sequence[int]) -> tuple[int, ...] | None:
    own = tuple(range(len(stride)))
    # Expanded dims have no place in memory, so they do not come between those that have.
    order = tuple(sorted(own, key=lambda d: (stride[d] != 0, -stride[d])))
    return None if order == own else order


@functools.lru_cache(maxsize=4096)
def canonical_order(
    placements: tuple[Placement, ...], order: tuple[int, ...] | None
) -> tuple[int, ...]:
    """The order without meaningless differences: as close to 0, 1, 2 as possible.

    >>> canonical_order((Shard(0), Shard(0)), (1, 0))
    (1, 0)
    >>> canonical_order((Shard(0), Shard(1)), (1, 0))
    (0, 1)
    >>> canonical_order((Shard(0), Shard(1), Shard(0)), (2, 0, 1))
    (1, 2, 0)
    """
    left = list(range(len(placements)))
    if order is None:
        return tuple(left)
    # A topological sort: axes of one dim keep their order, and the smallest free axis comes next.
    result: list[int] = []
    while left:
        axis = next(a for a in left if _outermost_left(placements, order, left, a))
        left.remove(axis)
        result.append(axis)
    return tuple(result)


def _outermost_left(
    placements: tuple[Placement, ...], order: tuple[int, ...], left: Sequence[int], axis: int
) -> bool:
    """Whether no remaining axis splits the dim of `axis` outside it."""
    shard = placements[axis]
    if not isinstance(shard, Shard):
        return True
    return next(a for a in order if a in left and placements[a].is_shard(shard.dim)) == axis


def normalize(
    placements: Sequence[Placement] | Placement | None,
    shape: Sequence[Size],
    grid: Grid,
    order: tuple[int, ...] | None = None,
) -> tuple[Placement, ...]:
    """Placements as layouts keep them: checked, without negative dims or redundant sizes."""
    if placements is None:
        return (REPLICATE,) * grid.num_axes
    if isinstance(placements, Placement):
        placements = (placements,)
    given = tuple(placements)
    check_kinds(given)
    if len(given) != grid.num_axes:
        raise LayoutError(
            f"{len(given)} placements {short(given)} were given for a mesh of {grid.num_axes} "
            f"axes {grid.shape}: they must have the same length, one placement per axis."
        )
    if order is not None and sorted(order) != list(range(grid.num_axes)):
        raise LayoutError(f"order={order} must name each of the {grid.num_axes} axes once.")
    check_partials(given)
    in_range = tuple(
        with_dim_from_zero(p, shape, f" on axis {grid.axis_name(axis)!r}")
        for axis, p in enumerate(given)
    )
    axes = canonical_order(in_range, order)
    outermost = {p.dim: axis for axis in reversed(axes) if isinstance(p := in_range[axis], Shard)}
    checked = tuple(
        _with_checked_sizes(p, axis, shape, grid) if axis in outermost.values() else p
        for axis, p in enumerate(in_range)
    )
    _check_nested_sizes(checked, axes, shape, grid)
    return tuple(
        shard_with(p.dim, p.sizes, sum(p.sizes), grid.shape[axis])
        if isinstance(p, Shard) and p.sizes is not None and axis not in outermost.values()
        else p
        for axis, p in enumerate(checked)
    )


def differing_axes(layouts: Sequence[Layout]) -> tuple[int, ...]:
    """The axes along which ranks hold different values of one of the tensors."""
    axes = range(layouts[0].grid.num_axes) if layouts else ()
    return tuple(a for a in axes if any(not x.placements[a].is_replicate() for x in layouts))


def emptying_axes(layouts: Sequence[Layout]) -> tuple[int, ...]:
    """The axes along which some ranks hold no entry of one of the tensors, and others do.

    A kernel without entries may not look at its other operands, and does not refuse them.
    """
    return tuple(sorted({axis for layout in layouts for axis in _emptying_axes(layout)}))


def _emptying_axes(layout: Layout) -> Iterator[int]:
    if layout.symbolic or 0 in layout.shape:
        return
    for dim in range(layout.ndim):
        axes = layout.axes_of(dim)
        along = [range(n) if a in axes else (0,) for a, n in enumerate(layout.grid.shape)]
        if axes and any(not layout._box(place)[1][dim] for place in itertools.product(*along)):
            yield from axes


def check_partials(placements: Sequence[Placement]) -> None:
    """Raise unless all Partials of a tensor commute: a sum of maxima is not a maximum of sums."""
    if not partials_commute(placements):
        raise LayoutError(
            f"{short(placements)} has no unique value: it depends on which axis is reduced first. "
            "Reduce one of them before."
        )


def partials_commute(placements: Sequence[Placement]) -> bool:
    norms = {p for p in placements if isinstance(p, NormPartial)}
    ops = {p.reduce_op for p in placements if isinstance(p, Partial)}
    return len(norms) < 2 and (len(ops) < 2 or ops == {"sum", "avg"})


def check_kinds(placements: Sequence[Any]) -> None:
    for placement in placements:
        if not isinstance(placement, Placement):
            kind = type(placement)
            raise ArgumentError(
                f"Placements are shardwise's Shard, Replicate or Partial, found {placement!r} of "
                f"{kind.__module__}.{kind.__qualname__}."
            )


def with_dim_from_zero(placement: Placement, shape: Sequence[Size], where: str) -> Placement:
    """The placement without a negative dim; raises, with `where`, for one that is out of range."""
    if not isinstance(placement, Shard):
        return placement
    ndim, dim = len(shape), placement.dim
    if not -ndim <= dim < ndim:
        raise LayoutError(
            f"Shard({dim}){where} is out of range for a tensor of shape {tuple(shape)}, "
            + (f"with dims {-ndim} to {ndim - 1}." if ndim else "without dims; use Replicate().")
        )
    return placement if dim >= 0 else Shard(dim + ndim, placement.sizes)


def _with_checked_sizes(
    placement: Placement, axis: int, shape: Sequence[Size], grid: Grid
) -> Placement:
    if not isinstance(placement, Shard) or placement.sizes is None:
        return placement
    dim, sizes, parts = placement.dim, placement.sizes, grid.shape[axis]
    if len(sizes) != parts:
        raise LayoutError(
            f"{placement!r} gives {len(sizes)} sizes, but axis {grid.axis_name(axis)!r} has "
            f"{parts} coordinates."
        )
    if sum(sizes) != shape[dim]:
        raise LayoutError(
            f"The sizes of {placement!r} add up to {sum(sizes)}, but dim {dim} of the tensor has "
            f"size {shape[dim]}."
        )
    return shard_with(dim, sizes, shape[dim], parts)


def replicated_layout(grid: Grid, tensor: torch.Tensor) -> Layout:
    """The layout of a plain tensor that every rank of the mesh has."""
    whole = (REPLICATE,) * grid.num_axes
    return make_layout(grid, whole, tensor.shape, tensor.stride(), tensor.dtype)


def shard_with(dim: int, sizes: tuple[int, ...], size: Size, parts: int) -> Shard:
    """`Shard(dim)` with explicit sizes, or without when they are those of `torch.chunk`."""
    return Shard(dim) if sizes == lengths(size, parts, None) else Shard(dim, sizes)


def fits_shard(sizes: tuple[Size, ...], size: Size, parts: int) -> bool:
    """Whether a Shard can have these sizes: explicit ones cannot be symbols."""
    return all(type(n) is int for n in sizes) or sizes == lengths(size, parts, None)


def misfit(
    placements: Sequence[Placement],
    order: Sequence[int],
    shape: Sequence[Size],
    parts: Sequence[int],
) -> int | None:
    """An axis whose explicit sizes do not fit on every rank, inside an uneven split of its dim.

    >>> misfit((Shard(0, (1, 2)), Shard(0)), (1, 0), shape=(6,), parts=(2, 2))
    >>> misfit((Shard(0, (1, 2)), Shard(0)), (1, 0), shape=(5,), parts=(2, 2))
    0
    """
    left: dict[int, Size] = {}  # None where ranks differ
    for axis in order:
        placement = placements[axis]
        if not isinstance(placement, Shard):
            continue
        dim, sizes = placement.dim, placement.sizes
        size = left.get(dim, shape[dim])
        if sizes is None:
            left[dim] = None
            if isinstance(size, int) and size % parts[axis] == 0:
                left[dim] = size // parts[axis]
        elif (dim in left or type(size) is int) and (
            size != sum(sizes) or len(sizes) != parts[axis]
        ):
            return axis
        else:
            left[dim] = None
    return None


def _check_nested_sizes(
    placements: tuple[Placement, ...], order: tuple[int, ...], shape: Sequence[Size], grid: Grid
) -> None:
    axis = misfit(placements, order, shape, grid.shape)
    if axis is not None:
        placement: Any = placements[axis]
        raise LayoutError(
            f"{placement!r} on axis {grid.axis_name(axis)!r} is inside another split of dim "
            f"{placement.dim}, of size {shape[placement.dim]}: explicit sizes there have to add up "
            "to what each coordinate of the other split holds, the same on all of them."
        )


def contiguous_stride(shape: Sequence[Size]) -> Shape:
    """The strides of a dense row-major tensor.

    >>> contiguous_stride((2, 3, 4))
    (12, 4, 1)
    """
    stride: list[Size] = []
    step: Size = 1
    for size in reversed(shape):
        stride.append(step)
        step = step * (size if type(size) is not int or size > 1 else 1)
    return tuple(reversed(stride))


def dense_stride(shape: Sequence[Size], outermost_first: Sequence[int]) -> Shape:
    """The strides of a dense tensor whose dims have this order in memory.

    >>> dense_stride((2, 3, 4), (0, 2, 1))
    (12, 1, 3)
    """
    dense = contiguous_stride([shape[d] for d in outermost_first])
    return tuple(dense[outermost_first.index(d)] for d in range(len(shape)))


def shares_entries(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether several entries may share one memory location.

    >>> shares_entries((3, 2), (2, 1)), shares_entries((3, 2), (1, 1))
    (False, True)
    """
    reach = 0
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += step * (size - 1)
    return False
