"""How each kind of step runs on local tensors.

A collective is called with the same shape on all ranks of its group: pieces of uneven length are
padded to the longest one and cut afterwards. Ranks then never disagree about sizes, in eager or
compiled. The one exception is a resplit, whose sizes are in the layouts and never symbolic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from shardwise.comm import collectives
from shardwise.comm.collectives import (
    finished,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_all_to_all_uneven,
    start_reduce_scatter,
)
from shardwise.core.layout import Layout
from shardwise.core.mesh import Coordinate
from shardwise.core.placements import NormPartial, Partial, Shard
from shardwise.core.sizes import Size, lengths, piece, shared, splits_evenly
from shardwise.errors import LayoutError
from shardwise.redistribute.steps import Step, longest
from shardwise.simulation.ranks import each_rank, each_ranks_counts, rank_call

# Floats as integers that compare like them, and back.

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
_FLOATS = {integer: floating for floating, integer in _INTEGERS.items()}


def ordered_integers(x: torch.Tensor, *, nan_last: bool) -> torch.Tensor:
    """Integers in the order of the floats; NaN is after all of them, or else before.

    >>> ordered_integers(torch.tensor([-1.0, 0.0, 0.5, torch.inf]), nan_last=True).diff() > 0
    tensor([True, True, True])
    """
    wide = x if x.dtype in _INTEGERS else x.float()
    integer = _INTEGERS[wide.dtype]
    bounds = torch.iinfo(integer)
    ordered = _flipped(wide.contiguous().view(integer))
    return torch.where(wide.isnan(), bounds.max if nan_last else bounds.min, ordered)


def floats_of(ordered: torch.Tensor) -> torch.Tensor:
    """What `ordered_integers` was given, in float32 at least.

    >>> x = torch.tensor([-1.0, -0.0, 3.5, torch.inf, torch.nan])
    >>> floats_of(ordered_integers(x, nan_last=False))
    tensor([-1.0000, -0.0000,  3.5000,     inf,     nan])
    """
    return _flipped(ordered).view(_FLOATS[ordered.dtype])


def _flipped(bits: torch.Tensor) -> torch.Tensor:
    """Floats are a sign and a magnitude, integers are not: all other bits of a negative turn."""
    bounds = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (bounds.bits - 1)) & bounds.max)


Run = Callable[[torch.Tensor], torch.Tensor]


class Move(NamedTuple):
    """How a step runs: `start` up to its collective, and `finish` from when that is awaited.

    A step that sends nothing has no `finish`.
    """

    start: Run
    finish: Run | None = None


def is_even(layout: Layout, axis: int) -> bool:
    """Whether every coordinate holds a piece of the same length along what `axis` shards."""
    shard = layout.placements[axis]
    assert isinstance(shard, Shard), "only a shard has pieces"
    if shard.sizes is not None:
        return False
    size = layout.shape[shard.dim]
    for other in layout.axes_of(shard.dim):
        placement, parts = layout.placements[other], layout.grid.shape[other]
        if placement.sizes is not None or not splits_evenly(size, parts):  # type: ignore[attr-defined]
            return False
        size = size // layout.grid.shape[other]
    return True


def _all_gather(step: Step) -> Move:
    grid, axis, source = step.source.grid, step.axis, step.source
    dim, arrived = _dim(source, axis), _arrived(source.dtype)
    if is_even(source, axis):
        return _even_all_gather(step)
    length, outside = longest(source, axis, dim), _outside(source, axis, dim)

    def pad(_: Coordinate, t: torch.Tensor) -> torch.Tensor:
        # Dense on every rank: a padded part is, and the others must look like it.
        return _pad(t, dim, length).unsqueeze(0).contiguous()

    def cut(coordinate: Coordinate, t: torch.Tensor) -> torch.Tensor:
        return _join_cut(t, dim, _lengths(source, axis, coordinate))

    return Move(
        lambda x: start_all_gather(each_rank(grid, pad, x, axes=()), grid, axis),
        lambda x: each_rank(grid, cut, arrived(x), axes=outside),
    )


def _even_all_gather(step: Step) -> Move:
    grid, axis, source = step.source.grid, step.axis, step.source
    dim, arrived = _dim(source, axis), _arrived(source.dtype)
    if source.symbolic:
        join = _joining(dim, _whole(source, axis))
        return Move(
            lambda x: start_all_gather(each_rank(grid, _as_row, x, axes=()), grid, axis),
            lambda x: each_rank(grid, join, arrived(x), axes=()),
        )
    if dim == 0:
        return Move(lambda x: start_all_gather(x, grid, axis), arrived)
    return Move(
        lambda x: start_all_gather(x.unsqueeze(0), grid, axis),
        lambda x: torch.cat(arrived(x).unbind(0), dim),
    )


def _reduce_scatter(step: Step) -> Move:
    grid, axis, target = step.source.grid, step.axis, step.target
    dim, parts = _dim(target, axis), grid.shape[axis]
    reduce_op = _reduce_op(step.source, axis)
    send, finish = _reduced_in(step.source.dtype, reduce_op)
    length, outside = longest(target, axis, dim), _outside(target, axis, dim)
    if is_even(target, axis):
        if dim == 0:
            return Move(lambda x: start_reduce_scatter(send(x), reduce_op, grid, axis), finish)
        return Move(
            lambda x: start_reduce_scatter(
                send(torch.cat(x.split_with_sizes([length] * parts, dim))), reduce_op, grid, axis
            ),
            finish,
        )

    def stack(coordinate: Coordinate, t: torch.Tensor) -> torch.Tensor:
        return _stack_padded(t, dim, _lengths(target, axis, coordinate), length)

    def cut(coordinate: Coordinate, t: torch.Tensor) -> torch.Tensor:
        length = _lengths(target, axis, coordinate)[coordinate[axis]]
        return t.squeeze(0).narrow(dim, 0, length).contiguous()

    def start(x: torch.Tensor) -> torch.Tensor:
        stacked = send(each_rank(grid, stack, x, axes=outside))
        return start_reduce_scatter(stacked, reduce_op, grid, axis)

    return Move(start, lambda x: each_rank(grid, cut, finish(x), axes=(*outside, axis)))


def _all_to_all(step: Step) -> Move:
    grid, axis, source, target = step.source.grid, step.axis, step.source, step.target
    dim_in, dim_out = _dim(source, axis), _dim(target, axis)
    if is_even(source, axis) and is_even(target, axis):
        return _even_all_to_all(step, dim_in, dim_out)
    arrived = _arrived(source.dtype)
    length_in, length_out = longest(source, axis, dim_in), longest(target, axis, dim_out)
    outside = (*_outside(source, axis, dim_in), *_outside(target, axis, dim_out))

    def stack(coordinate: Coordinate, t: torch.Tensor) -> torch.Tensor:
        padded = _pad(t, dim_in, length_in)
        return _stack_padded(padded, dim_out, _lengths(target, axis, coordinate), length_out)

    def cut(coordinate: Coordinate, t: torch.Tensor) -> torch.Tensor:
        joined = _join_cut(t, dim_in, _lengths(source, axis, coordinate))
        length = _lengths(target, axis, coordinate)[coordinate[axis]]
        return joined.narrow(dim_out, 0, length).contiguous()

    return Move(
        lambda x: start_all_to_all(each_rank(grid, stack, x, axes=outside), grid, axis),
        lambda x: each_rank(grid, cut, arrived(x), axes=(*outside, axis)),
    )


def _even_all_to_all(step: Step, dim_in: int, dim_out: int) -> Move:
    """One copy on each side, where the padded form takes one per piece."""
    grid, axis, arrived = step.source.grid, step.axis, _arrived(step.source.dtype)
    parts = grid.shape[axis]

    def split(_: Coordinate, t: torch.Tensor) -> torch.Tensor:
        sizes = t.shape
        apart = (*sizes[:dim_out], parts, sizes[dim_out] // parts, *sizes[dim_out + 1 :])
        return t.reshape(apart).movedim(dim_out, 0)

    join = _joining(dim_in, _whole(step.source, axis))
    return Move(
        lambda x: start_all_to_all(each_rank(grid, split, x, axes=()), grid, axis),
        lambda x: each_rank(grid, join, arrived(x), axes=()),
    )


def _joining(dim: int, whole: Size) -> Callable[[Coordinate, torch.Tensor], torch.Tensor]:
    """What makes one dim of `whole` entries out of the first, equal pieces, and `dim`.

    A compiler that has a symbol for the whole would not know it again in the sum of the pieces.
    """

    def join(_: Coordinate, t: torch.Tensor) -> torch.Tensor:
        shape = list(t.shape[1:])
        shape[dim] = whole
        # A view where pieces have length 1; the layout promises dense parts.
        return t.movedim(0, dim).reshape(shape).contiguous()

    return join


def _whole(layout: Layout, axis: int) -> Size:
    """What the pieces along `axis` make up, equal as they all are."""
    return layout.outer_size(axis, _dim(layout, axis), (0,) * layout.grid.num_axes)


def _as_row(_: Coordinate, t: torch.Tensor) -> torch.Tensor:
    return t.unsqueeze(0)


def _resplit(step: Step) -> Move:
    """Each rank sends what another one owns from now on, and no more.

    The only collective here whose pieces differ in length: padded to the longest, a table that
    moves from one rank to all would be sent as often as there are ranks.
    """
    grid, axis, source, target = step.source.grid, step.axis, step.source, step.target
    dim, dtype = _dim(source, axis), source.dtype
    origin = (0,) * grid.num_axes  # no other axis shards this dim, so the lengths are everyone's
    table = shared(_lengths(source, axis, origin), _lengths(target, axis, origin))
    num_sent = each_ranks_counts(grid, lambda mine: table[mine[axis]])
    num_received = each_ranks_counts(grid, lambda mine: [row[mine[axis]] for row in table])

    def rows(_: Coordinate, t: torch.Tensor) -> torch.Tensor:
        t = t.movedim(dim, 0).unsqueeze(-1).contiguous()  # the last dim may become bytes
        return collectives.as_bytes(t) if collectives.is_moved_as_bytes(dtype) else t

    def back(_: Coordinate, t: torch.Tensor) -> torch.Tensor:
        return t.squeeze(-1).movedim(0, dim).contiguous()

    arrived = _arrived(dtype)
    return Move(
        lambda x: start_all_to_all_uneven(
            each_rank(grid, rows, x, axes=()), num_sent, num_received, grid, axis
        ),
        lambda x: each_rank(grid, back, arrived(x), axes=()),
    )


def _all_reduce(step: Step) -> Move:
    grid, axis = step.source.grid, step.axis
    partial = step.source.placements[axis]
    if isinstance(partial, NormPartial):
        return _norm_of_norms(step, partial.norm_type)
    reduce_op = _reduce_op(step.source, axis)
    send, finish = _reduced_in(step.source.dtype, reduce_op)
    if send is _as_it_is:  # the common case: one call less
        return Move(lambda x: start_all_reduce(x, reduce_op, grid, axis), finish)
    return Move(lambda x: start_all_reduce(send(x), reduce_op, grid, axis), finish)


def _norm_of_norms(step: Step, norm_type: float) -> Move:
    grid, axis, dtype = step.source.grid, step.axis, step.source.dtype
    if norm_type == math.inf:
        send, finish = _reduced_in(dtype, "max")
        return Move(lambda x: start_all_reduce(send(x), "max", grid, axis), finish)
    # Powers of narrow floats overflow soon; one device computes norms in float32 as well.
    wide = dtype if dtype.itemsize >= 4 else torch.float32
    return Move(
        lambda x: start_all_reduce(_signed_power(x.to(wide), norm_type), "sum", grid, axis),
        lambda x: _signed_power(finished(x), 1 / norm_type).to(dtype),
    )


def _signed_power(x: torch.Tensor, exponent: float) -> torch.Tensor:
    """A norm is not negative, but what is written to one in place may be."""
    return torch.copysign(x.abs() ** exponent, x)


def _arrived(dtype: torch.dtype) -> Run:
    """What awaits a tensor of this dtype that was moved."""
    if not collectives.is_moved_as_bytes(dtype):
        return finished
    return lambda x: collectives.viewed(finished(x), dtype)


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def _reduced_in(dtype: torch.dtype, reduce_op: str) -> tuple[Run, Run]:
    """What is sent for a tensor of this dtype that is reduced, and what awaits the result.

    Backends do not agree about the maximum of a NaN and a number. Torch does: it is a NaN. So
    floats travel as integers that are ordered like them, with NaN at the end.
    """
    if reduce_op in ("max", "min") and dtype.is_floating_point:
        return (
            lambda x: ordered_integers(x, nan_last=reduce_op == "max"),
            lambda x: floats_of(finished(x)).to(dtype),
        )
    if not collectives.is_widened(dtype):
        return _as_it_is, finished
    return _as_it_is, lambda x: finished(x).to(dtype)


def _slice(step: Step) -> Move:
    axis, target = step.axis, step.target
    shard, grid = target.placements[axis], target.grid
    assert isinstance(shard, Shard), "a slice ends in a shard"
    dim, parts = shard.dim, grid.shape[axis]

    def place(coordinate: Coordinate) -> tuple[Size, Size]:
        size = target.outer_size(axis, dim, coordinate)
        return piece(size, parts, coordinate[axis], shard.sizes)

    # Dense, as the layout's strides say: some kernels read past the strides of a view. What is
    # expanded stays so; see in_memory_order.
    dense = torch.Tensor.contiguous if not target.expanded else lambda t: t

    def cut(coordinate: Coordinate) -> Callable[[torch.Tensor], torch.Tensor]:
        start, length = place(coordinate)
        return lambda x: dense(x.narrow(dim, start, length))

    return Move(rank_call(grid, cut, axes=(*_outside(target, axis, dim), axis)))


#: What a coordinate adds that must not change the reduction.
_NEUTRAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": torch.zeros_like,
    "product": torch.ones_like,
    "norm": torch.zeros_like,
}


def _to_partial(step: Step) -> Move:
    """Coordinate 0 keeps the value; the others hold what does not change it.

    An average, maximum or minimum of equal values is that value, so there all keep it.
    """
    partial = step.target.placements[step.axis]
    neutral = _NEUTRAL.get(_reduce_op(step.target, step.axis))
    if neutral is None or (isinstance(partial, NormPartial) and partial.norm_type == math.inf):
        return Move(lambda x: x)

    def keep(coordinate: Coordinate, t: torch.Tensor) -> torch.Tensor:
        return t if coordinate[step.axis] == 0 else neutral(t)

    return Move(lambda x: each_rank(step.source.grid, keep, x, axes=(step.axis,)))


PREPARE: dict[str, Callable[[Step], Move]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "all_reduce": _all_reduce,
    "resplit": _resplit,
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
    if partial.reduce_op in ("product", "max", "min") and layout.dtype.is_complex:
        raise LayoutError(
            f"{layout!r} is a {partial.reduce_op} of complex numbers, which no backend reduces. "
            "Use Partial('sum'), or gather the terms and reduce them yourself."
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
