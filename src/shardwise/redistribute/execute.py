"""Running steps on local tensors.

Every collective is called with the same shape on all ranks of its group: pieces of uneven length
are padded to the longest one and cut afterwards. Ranks then never disagree about sizes, in eager or
compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwise.comm import collectives
from shardwise.comm.ranks import each_rank
from shardwise.core.chunks import Size, lengths, piece
from shardwise.core.grid import Coordinate, Grid
from shardwise.core.layout import Layout
from shardwise.core.placements import Partial, Shard
from shardwise.errors import LayoutError
from shardwise.redistribute.steps import Step, longest


def execute(local: torch.Tensor, steps: Sequence[Step]) -> torch.Tensor:
    """The local tensor after `steps`. It may share memory with `local` when nothing was sent."""
    for step in steps:
        local = _RUN[step.kind](local, step)
    if steps and steps[-1].target.memory_order is not None:
        layout = steps[-1].target
        return each_rank(layout.grid, lambda _, t: in_memory_order(t, layout), local, axes=())
    return local


def in_memory_order(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The same tensor, dense, with its dims in memory as the layout's strides have them."""
    order = layout.memory_order
    if order is None:
        return x.contiguous()
    inverse = sorted(range(len(order)), key=lambda i: order[i])
    return x.permute(order).contiguous().permute(inverse)


def is_even(layout: Layout, axis: int) -> bool:
    """Whether every coordinate holds a piece of the same length along what `axis` shards."""
    shard = layout.placements[axis]
    assert isinstance(shard, Shard), "only a shard has pieces"
    if layout.symbolic or shard.sizes is not None:
        return False
    size = layout.shape[shard.dim]
    for other in layout.axes_of(shard.dim):
        placement = layout.placements[other]
        if placement.sizes is not None or size % layout.grid.shape[other]:  # type: ignore[attr-defined]
            return False
        size = size // layout.grid.shape[other]
    return True


def _all_gather(x: torch.Tensor, step: Step) -> torch.Tensor:
    grid, axis, source = step.source.grid, step.axis, step.source
    dim = _dim(source, axis)
    if is_even(source, axis):
        if dim == 0:
            return collectives.all_gather(x, grid, axis)
        return torch.cat(collectives.all_gather(x.unsqueeze(0), grid, axis).unbind(0), dim)
    length = longest(source, axis, dim)
    x = each_rank(grid, lambda _, t: _pad(t, dim, length).unsqueeze(0), x, axes=())
    gathered = collectives.all_gather(x, grid, axis)

    def cut(coordinate: Coordinate, t: torch.Tensor) -> torch.Tensor:
        return _join_cut(t, dim, _lengths(source, axis, coordinate))

    return each_rank(grid, cut, gathered, axes=_outside(source, axis, dim))


def _reduce_scatter(x: torch.Tensor, step: Step) -> torch.Tensor:
    grid, axis, target = step.source.grid, step.axis, step.target
    dim, parts = _dim(target, axis), grid.shape[axis]
    reduce_op = _reduce_op(step.source, axis)
    if is_even(target, axis):
        if dim != 0:
            x = torch.cat(x.chunk(parts, dim))
        return collectives.reduce_scatter(x, reduce_op, grid, axis)
    length = longest(target, axis, dim)

    def stack(coordinate: Coordinate, t: torch.Tensor) -> torch.Tensor:
        return _stack_padded(t, dim, _lengths(target, axis, coordinate), length)

    outside = _outside(target, axis, dim)
    scattered = collectives.reduce_scatter(
        each_rank(grid, stack, x, axes=outside), reduce_op, grid, axis
    )

    def cut(coordinate: Coordinate, t: torch.Tensor) -> torch.Tensor:
        return t.squeeze(0).narrow(dim, 0, _lengths(target, axis, coordinate)[coordinate[axis]])

    return each_rank(grid, cut, scattered, axes=(*outside, axis))


def _all_to_all(x: torch.Tensor, step: Step) -> torch.Tensor:
    grid, axis, source, target = step.source.grid, step.axis, step.source, step.target
    dim_in, dim_out = _dim(source, axis), _dim(target, axis)
    if is_even(source, axis) and is_even(target, axis):
        return _even_all_to_all(x, grid, axis, dim_in, dim_out)
    length_in, length_out = longest(source, axis, dim_in), longest(target, axis, dim_out)

    def stack(coordinate: Coordinate, t: torch.Tensor) -> torch.Tensor:
        padded = _pad(t, dim_in, length_in)
        return _stack_padded(padded, dim_out, _lengths(target, axis, coordinate), length_out)

    outside = (*_outside(source, axis, dim_in), *_outside(target, axis, dim_out))
    stacked = each_rank(grid, stack, x, axes=outside)
    received = collectives.all_to_all(stacked, grid, axis)

    def cut(coordinate: Coordinate, t: torch.Tensor) -> torch.Tensor:
        joined = _join_cut(t, dim_in, _lengths(source, axis, coordinate))
        return joined.narrow(dim_out, 0, _lengths(target, axis, coordinate)[coordinate[axis]])

    return each_rank(grid, cut, received, axes=(*outside, axis))


def _even_all_to_all(
    x: torch.Tensor, grid: Grid, axis: int, dim_in: int, dim_out: int
) -> torch.Tensor:
    """One copy on each side, where the padded form takes one per piece."""
    parts = grid.shape[axis]

    def split(_: Coordinate, t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(dim_out, (parts, t.shape[dim_out] // parts)).movedim(dim_out, 0)

    def join(_: Coordinate, t: torch.Tensor) -> torch.Tensor:
        return t.movedim(0, dim_in).flatten(dim_in, dim_in + 1)

    received = collectives.all_to_all(each_rank(grid, split, x, axes=()), grid, axis)
    return each_rank(grid, join, received, axes=())


def _all_reduce(x: torch.Tensor, step: Step) -> torch.Tensor:
    reduce_op = _reduce_op(step.source, step.axis)
    return collectives.all_reduce(x, reduce_op, step.source.grid, step.axis)


def _slice(x: torch.Tensor, step: Step) -> torch.Tensor:
    axis, target = step.axis, step.target
    shard = target.placements[axis]
    assert isinstance(shard, Shard), "a slice ends in a shard"
    dim, parts = shard.dim, target.grid.shape[axis]

    def cut(coordinate: Coordinate, t: torch.Tensor) -> torch.Tensor:
        size = target.outer_size(axis, dim, coordinate)
        start, length = piece(size, parts, coordinate[axis], shard.sizes)
        # Dense, as the layout's strides say: some kernels read past the strides of a view.
        return t.narrow(dim, start, length).contiguous()

    return each_rank(target.grid, cut, x, axes=(*_outside(target, axis, dim), axis))


#: What a coordinate adds that must not change the reduction.
_NEUTRAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": torch.zeros_like,
    "product": torch.ones_like,
}


def _to_partial(x: torch.Tensor, step: Step) -> torch.Tensor:
    """Coordinate 0 keeps the value; the others hold what does not change it.

    An average, maximum or minimum of equal values is that value, so there all keep it.
    """
    neutral = _NEUTRAL.get(_reduce_op(step.target, step.axis))
    if neutral is None:
        return x

    def keep(coordinate: Coordinate, t: torch.Tensor) -> torch.Tensor:
        return t if coordinate[step.axis] == 0 else neutral(t)

    return each_rank(step.source.grid, keep, x, axes=(step.axis,))


_RUN = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "all_reduce": _all_reduce,
    "slice": _slice,
    "to_partial": _to_partial,
}


def _dim(layout: Layout, axis: int) -> int:
    shard = layout.placements[axis]
    assert isinstance(shard, Shard), "only a shard has a dim"
    return shard.dim


def _reduce_op(layout: Layout, axis: int) -> str:
    partial = layout.placements[axis]
    assert isinstance(partial, Partial), "only a partial has a reduction"
    if partial.reduce_op == "avg" and not (
        layout.dtype.is_floating_point or layout.dtype.is_complex
    ):
        raise LayoutError(
            f"{layout!r} is an average of integers, which has no integer value. Use Partial('sum') "
            "and divide, or convert the tensor to a floating dtype first."
        )
    return partial.reduce_op


def _outside(layout: Layout, axis: int, dim: int) -> tuple[int, ...]:
    """The other axes that shard `dim`: lengths along `axis` depend on a rank's place in them."""
    return tuple(a for a in layout.axes_of(dim) if a != axis)


def _lengths(layout: Layout, axis: int, coordinate: Coordinate) -> tuple[Size, ...]:
    """The length of each piece along `axis`, in the group of ranks that holds `coordinate`."""
    shard = layout.placements[axis]
    assert isinstance(shard, Shard), "only a shard has pieces"
    size = layout.outer_size(axis, shard.dim, coordinate)
    return lengths(size, layout.grid.shape[axis], shard.sizes)


def _pad(x: torch.Tensor, dim: int, length: Size) -> torch.Tensor:
    missing = length - x.shape[dim]
    if type(missing) is int and missing == 0:
        return x
    return torch.constant_pad_nd(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing])


def _stack_padded(
    x: torch.Tensor, dim: int, piece_lengths: Sequence[Size], length: Size
) -> torch.Tensor:
    """The pieces of `dim`, each padded to `length`, along a new first dim."""
    return torch.stack([_pad(p, dim, length) for p in x.split(list(piece_lengths), dim)])


def _join_cut(x: torch.Tensor, dim: int, piece_lengths: Sequence[Size]) -> torch.Tensor:
    """Undo `_stack_padded`: cut each of the stacked pieces to its length and join along `dim`."""
    pieces = zip(x.unbind(0), piece_lengths, strict=True)
    return torch.cat([p.narrow(dim, 0, length) for p, length in pieces], dim)
