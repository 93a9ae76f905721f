"""Running steps on local tensors: one kind at a time, all of them, or in two parts.

A collective has the same shape on all ranks of its group: uneven shards are padded to the longest
and unpadded afterwards. So ranks never disagree about sizes, eager or compiled. The exceptions are
a resplit and an exchange between explicit sizes: these are in the layouts and never symbolic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from shardwise._torch.dispatch import autocast_off, is_autocast
from shardwise.comm import collectives
from shardwise.comm.collectives import (
    doing_now,
    finished,
    is_lost,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_all_to_all_uneven,
    start_reduce_scatter,
    what_ranks_did,
)
from shardwise.core.layout import Layout
from shardwise.core.mesh import Coordinate
from shardwise.core.placements import NormPartial, Partial, Shard
from shardwise.core.sizes import Size, lengths, overlaps, shard_range, splits_evenly
from shardwise.errors import CollectiveError, LayoutError
from shardwise.redistribute.steps import Step, local_bytes, longest
from shardwise.simulation.ranks import counts_per_rank, each_rank, plays_all, rank_call

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
_FLOATS = {integer: floating for floating, integer in _INTEGERS.items()}


def ordered_integers(x: torch.Tensor, *, nan_last: bool) -> torch.Tensor:
    """Integers that compare like the floats; NaN is the largest if `nan_last`, else the smallest.

    >>> ordered_integers(torch.tensor([-1.0, 0.0, 0.5, torch.inf]), nan_last=True).diff() > 0
    tensor([True, True, True])
    """
    wide = x if x.dtype in _INTEGERS else x.float()
    integer = _INTEGERS[wide.dtype]
    bounds = torch.iinfo(integer)
    ordered = _flipped(wide.contiguous().view(integer))
    return torch.where(wide.isnan(), bounds.max if nan_last else bounds.min, ordered)


def floats_of(ordered: torch.Tensor) -> torch.Tensor:
    """The inverse of `ordered_integers`, in float32 at least.

    >>> x = torch.tensor([-1.0, -0.0, 3.5, torch.inf, torch.nan])
    >>> floats_of(ordered_integers(x, nan_last=False))
    tensor([-1.0000, -0.0000,  3.5000,     inf,     nan])
    """
    return _flipped(ordered).view(_FLOATS[ordered.dtype])


def _flipped(bits: torch.Tensor) -> torch.Tensor:
    """Flip all bits but the sign of negatives: floats store sign and magnitude, integers do not."""
    bounds = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (bounds.bits - 1)) & bounds.max)


Run = Callable[[torch.Tensor], torch.Tensor]


class Move(NamedTuple):
    """How a step runs: `start` ends with its collective, and `finish` waits for it.

    A step without communication has no `finish`.
    """

    start: Run
    finish: Run | None = None


def is_even(layout: Layout, axis: int) -> bool:
    """Whether all shards along `axis` have the same length."""
    shard = _shard(layout, axis)
    if shard.sizes is not None:
        return False
    size = layout.shape[shard.dim]
    for other in layout.axes_of(shard.dim):
        parts = layout.grid.shape[other]
        if _shard(layout, other).sizes is not None or not splits_evenly(size, parts):
            return False
        size = size // parts
    return True


def _all_gather(step: Step) -> Move:
    grid, axis, source = step.source.grid, step.axis, step.source
    dim, arrived = _dim(source, axis), _arrived(source.dtype)
    if is_even(source, axis):
        return _even_all_gather(step)
    length, outside = longest(source, axis), _outside(source, axis)

    def pad(_: Coordinate, t: torch.Tensor) -> torch.Tensor:
        # Dense on every rank: padded shards are, and the others must have their strides.
        return _pad(t, dim, length).unsqueeze(0).contiguous()

    def unpad(coordinate: Coordinate, t: torch.Tensor) -> torch.Tensor:
        return _cat_unpadded(t, dim, _lengths(source, axis, coordinate))

    return Move(
        lambda x: start_all_gather(each_rank(grid, pad, x, axes=()), grid, axis),
        lambda x: each_rank(grid, unpad, arrived(x), axes=outside),
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
    length, outside = longest(target, axis), _outside(target, axis)
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

    def unpad(coordinate: Coordinate, t: torch.Tensor) -> torch.Tensor:
        length = _lengths(target, axis, coordinate)[coordinate[axis]]
        return t.squeeze(0).narrow(dim, 0, length).contiguous()

    def start(x: torch.Tensor) -> torch.Tensor:
        stacked = send(each_rank(grid, stack, x, axes=outside))
        return start_reduce_scatter(stacked, reduce_op, grid, axis)

    return Move(start, lambda x: each_rank(grid, unpad, finish(x), axes=(*outside, axis)))


def _all_to_all(step: Step) -> Move:
    grid, axis, source, target = step.source.grid, step.axis, step.source, step.target
    dim_in, dim_out = _dim(source, axis), _dim(target, axis)
    if is_even(source, axis) and is_even(target, axis):
        return _even_all_to_all(step, dim_in, dim_out)
    if not source.symbolic and (_shard(source, axis).sizes or _shard(target, axis).sizes):
        return _exact_all_to_all(step, dim_in, dim_out)
    arrived = _arrived(source.dtype)
    length_in, length_out = longest(source, axis), longest(target, axis)
    outside = (*_outside(source, axis), *_outside(target, axis))

    def stack(coordinate: Coordinate, t: torch.Tensor) -> torch.Tensor:
        padded = _pad(t, dim_in, length_in)
        return _stack_padded(padded, dim_out, _lengths(target, axis, coordinate), length_out)

    def unpad(coordinate: Coordinate, t: torch.Tensor) -> torch.Tensor:
        joined = _cat_unpadded(t, dim_in, _lengths(source, axis, coordinate))
        length = _lengths(target, axis, coordinate)[coordinate[axis]]
        return joined.narrow(dim_out, 0, length).contiguous()

    return Move(
        lambda x: start_all_to_all(each_rank(grid, stack, x, axes=outside), grid, axis),
        lambda x: each_rank(grid, unpad, arrived(x), axes=(*outside, axis)),
    )


def _even_all_to_all(step: Step, dim_in: int, dim_out: int) -> Move:
    """One copy on each side, where the padded form needs one per shard."""
    grid, axis, arrived = step.source.grid, step.axis, _arrived(step.source.dtype)
    parts = grid.shape[axis]

    def split(_: Coordinate, t: torch.Tensor) -> torch.Tensor:
        sizes = t.shape
        apart = (*sizes[:dim_out], parts, sizes[dim_out] // parts, *sizes[dim_out + 1 :])
        return t.reshape(apart).movedim(dim_out, 0).contiguous()

    join = _joining(dim_in, _whole(step.source, axis))
    return Move(
        lambda x: start_all_to_all(each_rank(grid, split, x, axes=()), grid, axis),
        lambda x: each_rank(grid, join, arrived(x), axes=()),
    )


def _exact_all_to_all(step: Step, dim_in: int, dim_out: int) -> Move:
    """For sizes that a user gave, which may be far from equal: nothing is padded."""
    grid, axis, source, target = step.source.grid, step.axis, step.source, step.target

    def sent(mine: Coordinate) -> list[int]:
        return [math.prod(shape) for shape in blocks(mine, dim_out, target, source)]

    def received(mine: Coordinate) -> list[int]:
        return [math.prod(shape) for shape in blocks(mine, dim_in, source, target)]

    def blocks(mine: Coordinate, dim: int, cut: Layout, whole: Layout) -> list[list[int]]:
        """The shapes of this rank's shard of `whole`, cut along `dim` as in `cut`."""
        shape = list(whole.local_shape(mine))
        return [[*shape[:dim], n, *shape[dim + 1 :]] for n in _lengths(cut, axis, mine)]

    def pack(_: Coordinate, t: torch.Tensor) -> torch.Tensor:
        flat = t.movedim(dim_out, 0).reshape(-1, 1)  # the last dim may become bytes
        return collectives.as_bytes(flat) if source.dtype in collectives.MOVED_AS_BYTES else flat

    def unpack(mine: Coordinate, t: torch.Tensor) -> torch.Tensor:
        shapes = blocks(mine, dim_in, source, target)
        parts = t.squeeze(-1).split([math.prod(shape) for shape in shapes])
        arrived = []
        for part, shape in zip(parts, shapes, strict=True):
            outermost = shape.pop(dim_out)
            arrived.append(part.view(outermost, *shape).movedim(0, dim_out))
        return torch.cat(arrived, dim_in)

    arrived = _arrived(source.dtype)
    num_sent, num_received = counts_per_rank(grid, sent), counts_per_rank(grid, received)
    return Move(
        lambda x: start_all_to_all_uneven(
            each_rank(grid, pack, x, axes=()), num_sent, num_received, grid, axis
        ),
        lambda x: each_rank(grid, unpack, arrived(x)),
    )


def _joining(dim: int, whole: Size) -> Callable[[Coordinate, torch.Tensor], torch.Tensor]:
    """Merges the first dim, equal shards, and `dim` into one dim of size `whole`.

    `whole` is given because a compiler would not recognise its symbol in a sum of shards.
    """

    def join(_: Coordinate, t: torch.Tensor) -> torch.Tensor:
        shape = list(t.shape[1:])
        shape[dim] = whole
        # A view where shards have length 1; the layout promises dense tensors.
        return t.movedim(0, dim).reshape(shape).contiguous()

    return join


def _whole(layout: Layout, axis: int) -> Size:
    """The size that the shards along `axis`, all equal, add up to."""
    return layout.outer_size(axis, _dim(layout, axis), (0,) * layout.grid.num_axes)


def _as_row(_: Coordinate, t: torch.Tensor) -> torch.Tensor:
    return t.unsqueeze(0)


def _resplit(step: Step) -> Move:
    """Each rank sends only what another rank owns in the new split.

    The only collective here with uneven sizes: with padding to the longest shard, moving a table
    from one rank to all would send it once per rank.
    """
    grid, axis, source, target = step.source.grid, step.axis, step.source, step.target
    dim, dtype = _dim(source, axis), source.dtype
    origin = (0,) * grid.num_axes  # no other axis shards this dim: all ranks have these lengths
    table = overlaps(_lengths(source, axis, origin), _lengths(target, axis, origin))
    num_sent = counts_per_rank(grid, lambda mine: table[mine[axis]])
    num_received = counts_per_rank(grid, lambda mine: [row[mine[axis]] for row in table])

    def rows(_: Coordinate, t: torch.Tensor) -> torch.Tensor:
        t = t.movedim(dim, 0).unsqueeze(-1).contiguous()  # the last dim may become bytes
        return collectives.as_bytes(t) if dtype in collectives.MOVED_AS_BYTES else t

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
    if send is _unchanged:  # the common case: one call less
        return Move(lambda x: start_all_reduce(x, reduce_op, grid, axis), finish)
    return Move(lambda x: start_all_reduce(send(x), reduce_op, grid, axis), finish)


def _norm_of_norms(step: Step, norm_type: float) -> Move:
    grid, axis, dtype = step.source.grid, step.axis, step.source.dtype
    if norm_type == math.inf:
        send, finish = _reduced_in(dtype, "max")
        return Move(lambda x: start_all_reduce(send(x), "max", grid, axis), finish)
    # Powers of narrow floats overflow early; one device computes norms in float32 as well.
    wide = dtype if dtype.itemsize >= 4 else torch.float32
    return Move(
        lambda x: start_all_reduce(_signed_power(x.to(wide), norm_type), "sum", grid, axis),
        lambda x: _signed_power(finished(x), 1 / norm_type).to(dtype),
    )


def _signed_power(x: torch.Tensor, exponent: float) -> torch.Tensor:
    """A norm is not negative, but a value written in place may be."""
    return torch.copysign(x.abs() ** exponent, x)


def _arrived(dtype: torch.dtype) -> Run:
    """Waits for a tensor of this dtype that was sent."""
    if dtype not in collectives.MOVED_AS_BYTES:
        return finished
    return lambda x: collectives.viewed(finished(x), dtype)


def _unchanged(x: torch.Tensor) -> torch.Tensor:
    return x


def _reduced_in(dtype: torch.dtype, reduce_op: str) -> tuple[Run, Run]:
    """The conversion before a reduction of this dtype, and one that waits and converts back.

    In torch the maximum of a NaN and a number is NaN; backends differ. So floats are reduced as
    integers in the same order, with NaN at the end.
    """
    if reduce_op in ("max", "min") and dtype.is_floating_point:
        return (
            lambda x: ordered_integers(x, nan_last=reduce_op == "max"),
            lambda x: floats_of(finished(x)).to(dtype),
        )
    if dtype not in collectives.REDUCED_AS:
        return _unchanged, finished
    return _unchanged, lambda x: finished(x).to(dtype)


def _slice(step: Step) -> Move:
    axis, target, grid = step.axis, step.target, step.target.grid
    shard, parts = _shard(target, axis), grid.shape[axis]

    # Dense, as the layout's strides say: some kernels ignore the strides of a view. Expanded dims
    # stay expanded; see in_memory_order.
    dense = torch.Tensor.contiguous if not target.expanded else lambda t: t

    def narrow(coordinate: Coordinate) -> Callable[[torch.Tensor], torch.Tensor]:
        size = target.outer_size(axis, shard.dim, coordinate)
        start, length = shard_range(size, parts, coordinate[axis], shard.sizes)
        return lambda x: dense(x.narrow(shard.dim, start, length))

    return Move(rank_call(grid, narrow, axes=(*_outside(target, axis), axis)))


#: The neutral element of a reduction.
_NEUTRAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": torch.zeros_like,
    "product": torch.ones_like,
    "norm": torch.zeros_like,
}


def _to_partial(step: Step) -> Move:
    """Coordinate 0 keeps the value; the others hold the neutral element.

    For an average, maximum or minimum all keep it, since that of equal values is the value.
    Simulated ranks that shared it get separate terms, since a write may give each rank another one.
    """
    partial = step.target.placements[step.axis]
    neutral = _NEUTRAL.get(_reduce_op(step.target, step.axis))
    if neutral is None or (isinstance(partial, NormPartial) and partial.norm_type == math.inf):
        if not plays_all(step.source.grid):
            return Move(lambda x: x)
        neutral = torch.clone

    def keep(coordinate: Coordinate) -> Run:
        return _unchanged if coordinate[step.axis] == 0 else neutral

    return Move(rank_call(step.source.grid, keep, axes=(step.axis,)))


PREPARE: dict[str, Callable[[Step], Move]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "all_reduce": _all_reduce,
    "resplit": _resplit,
    "slice": _slice,
    "to_partial": _to_partial,
}


def _shard(layout: Layout, axis: int) -> Shard:
    shard = layout.placements[axis]
    assert isinstance(shard, Shard), "only a Shard has a dim and lengths"
    return shard


def _dim(layout: Layout, axis: int) -> int:
    return _shard(layout, axis).dim


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


def _outside(layout: Layout, axis: int) -> tuple[int, ...]:
    """The other axes that shard the dim of `axis`: its lengths depend on the coordinate there."""
    return tuple(a for a in layout.axes_of(_dim(layout, axis)) if a != axis)


def _lengths(layout: Layout, axis: int, coordinate: Coordinate) -> tuple[Size, ...]:
    """The length of each shard along `axis`, in the group of ranks of `coordinate`."""
    shard = _shard(layout, axis)
    size = layout.outer_size(axis, shard.dim, coordinate)
    return lengths(size, layout.grid.shape[axis], shard.sizes)


def _pad(x: torch.Tensor, dim: int, length: Size) -> torch.Tensor:
    missing = length - x.shape[dim]
    if type(missing) is int and missing == 0:
        return x
    return torch.constant_pad_nd(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing])


def _stack_padded(
    x: torch.Tensor, dim: int, shard_lengths: Sequence[Size], length: Size
) -> torch.Tensor:
    """The shards along `dim`, each padded to `length`, stacked along a new first dim."""
    num_full = _num_full(x, shard_lengths, length)
    if num_full is None:
        return torch.stack([_pad(s, dim, length) for s in x.split(list(shard_lengths), dim)])
    shape = list(x.shape)
    shape[dim] = int(length)
    stacked = x.new_zeros((len(shard_lengths), *shape))
    for mine, theirs in _runs_of_shards(x, stacked, dim, shard_lengths, num_full):
        theirs.copy_(mine)
    return stacked


def _cat_unpadded(x: torch.Tensor, dim: int, shard_lengths: Sequence[Size]) -> torch.Tensor:
    """Undo `_stack_padded`: unpad each of the stacked shards and concatenate along `dim`."""
    num_full = _num_full(x, shard_lengths, x.shape[dim + 1])
    if num_full is None:
        shards = zip(x.unbind(0), shard_lengths, strict=True)
        return torch.cat([s.narrow(dim, 0, length) for s, length in shards], dim)
    shape = list(x.shape[1:])
    shape[dim] = sum(shard_lengths)
    joined = x.new_empty(shape)
    for mine, theirs in _runs_of_shards(joined, x, dim, shard_lengths, num_full):
        mine.copy_(theirs)
    return joined


def _num_full(x: torch.Tensor, shard_lengths: Sequence[Size], length: Size) -> int | None:
    """How many leading shards have the full `length`, if at most one other is not empty.

    That is the case without explicit sizes: two copies suffice, instead of one per rank. None for
    other sizes, and while a compiler traces.
    """
    if type(x) is not torch.Tensor or not length or type(length) is not int:
        return None
    num_full = shard_lengths.count(length)
    rest = shard_lengths[num_full + 1 :]
    return (
        num_full if shard_lengths[:num_full].count(length) == num_full and not any(rest) else None
    )


def _runs_of_shards(
    joined: torch.Tensor,
    stacked: torch.Tensor,
    dim: int,
    shard_lengths: Sequence[Size],
    num_full: int,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of the same shards in both forms: all full ones, and the one that is shorter."""
    length = stacked.shape[dim + 1]
    full = joined.narrow(dim, 0, num_full * length).unflatten(dim, (num_full, length))
    yield full.movedim(dim, 0), stacked.narrow(0, 0, num_full)
    if num_full < len(shard_lengths) and shard_lengths[num_full]:
        short = shard_lengths[num_full]
        yield (
            joined.narrow(dim, num_full * length, short),
            stacked.select(0, num_full).narrow(dim, 0, short),
        )


def execute(local: torch.Tensor, steps: Sequence[Step]) -> torch.Tensor:
    """The local tensor after `steps`. It may share memory with `local` when nothing was sent."""
    return prepare(steps)(local)


def prepare(steps: Sequence[Step]) -> Run:
    """`execute` for these steps; all that depends only on the layouts is computed here, once.

    Autocast must not cast the concatenation around a collective (`_named`). The ops that slice and
    restride are not among those that it casts.
    """
    if not steps or steps[0].source.grid.outside:
        return _unchanged  # all that a rank outside the mesh does
    return _chain([*_runs(steps), *_restriding(steps)])


def prepare_async(steps: Sequence[Step]) -> tuple[Run, Run]:
    """`execute` in two: up to the start of the last collective, and the rest."""
    last = max(number for number, step in enumerate(steps) if step.communicates)
    move = PREPARE[steps[last].kind](steps[last])
    assert move.finish is not None, "a collective is awaited"
    start = [*_runs(steps[:last]), _named(steps[last], move.start)]
    finish = [_named(steps[last], move.finish), *_runs(steps[last + 1 :]), *_restriding(steps)]
    return _chain(start), _chain(finish)


def _runs(steps: Sequence[Step]) -> list[Run]:
    runs = []
    for step in steps:
        start, finish = PREPARE[step.kind](step)
        runs.append(start if finish is None else _named(step, start, finish))
    return runs


def _restriding(steps: Sequence[Step]) -> list[Run]:
    """The function that brings the last result into the memory order of its layout."""
    if not steps:
        return []
    target = steps[-1].target
    return [_reorder(target)] if target.memory_order or target.expanded else []


def _chain(runs: Sequence[Run]) -> Run:
    if len(runs) == 1:
        return runs[0]

    def run(local: torch.Tensor) -> torch.Tensor:
        for each in runs:
            local = each(local)
        return local

    return run


def _named(step: Step, start: Run, finish: Run | None = None) -> Run:
    """`start`, then `finish`, without autocast; a failure of the backend names the step."""

    def run(x: torch.Tensor) -> torch.Tensor:
        try:
            if is_autocast():
                with autocast_off():
                    return start(x) if finish is None else finish(start(x))
            return start(x) if finish is None else finish(start(x))
        except RuntimeError as error:
            if is_lost(error):
                raise CollectiveError(_failure(step, error)) from error
            raise

    return run


def _failure(step: Step, error: Exception) -> str:
    source = step.source
    they_did = what_ranks_did(doing_now(f"{step} of {source!r}"))
    return (
        f"{step} of {source!r}, about {int(local_bytes(source)):,} bytes per rank, failed on rank "
        f"{source.grid.world.rank}: {error} {they_did} If this rank has run out of memory, it was "
        "the first to fail; if it timed out, another one was, and its error says why. The ranks "
        "are out of step: end all processes, and start again from a checkpoint."
    )


def _reorder(layout: Layout) -> Run:
    def reorder(_: Coordinate, t: torch.Tensor) -> torch.Tensor:
        return in_memory_order(t, layout)

    return lambda x: each_rank(layout.grid, reorder, x, axes=())


def copied(local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A copy in which the expanded dims of the layout stay expanded."""
    copy = local.clone()
    return _reorder(layout)(copy) if layout.expanded and not layout.grid.outside else copy


def in_memory_order(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The same tensor, dense, with its dims in the memory order of the layout.

    Expanded dims of the layout are expanded: an op that derives its result's strides from its
    input's must see the same on every rank as on one device.
    """
    order = layout.memory_order
    shape = x.shape if layout.expanded else ()
    for dim in layout.expanded:
        if type(shape[dim]) is int and shape[dim] > 1:
            x = x.narrow(dim, 0, 1)
    if order is None:
        x = x.contiguous()
    else:
        inverse = sorted(range(len(order)), key=lambda i: order[i])
        x = x.permute(order).contiguous().permute(inverse)
    return x.expand(shape) if layout.expanded else x
