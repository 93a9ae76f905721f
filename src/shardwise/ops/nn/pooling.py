"""Pooling, resizing, sampling and padding of planes: planes are whole, other dims may be sharded.

A plane is the last one, two or three dims of a tensor. The dims in front of it, batch and channels,
are the same in every operand and result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shardwise.core.placements import REPLICATE, SUM, Placement, Shard
from shardwise.dispatch.notation import Group, linear_choices
from shardwise.dispatch.rule import Call, Choice, LocalCall, Rule, Table, UnlessEmpty, table
from shardwise.ops.math.linalg import batched

aten = torch.ops.aten

FIRST: Sequence[Group] = ((0,),)


def planes(
    *ops: Any, dims: int, linear: Sequence[Group] = (), shapes: Mapping[str, int] | None = None
) -> tuple[tuple[Any, ...], Rule]:
    """An entry of a table: `ops` treat the last `dims` dims as a whole.

    `shapes` maps names of arguments that hold a global shape to the number of that output.
    """

    def choices(call: Call) -> Iterator[Choice]:
        yield call.replicated()
        front = call.inputs[0].ndim - dims
        local = LocalCall(UnlessEmpty(call.op, _positions(call.op, shapes)), per_rank=True)
        for dim in range(front):
            for sizes in call.splits([(i, dim) for i in range(len(call.inputs))]):
                shard = Shard(dim, sizes)
                yield Choice((shard,) * len(call.inputs), (shard,) * len(call.outputs), local)
        yield from linear_choices(call, linear)

    return ops, Rule(choices, "... " + "[p] " * dims + "-> ... " + "[q] " * dims)


def _positions(op: Any, shapes: Mapping[str, int] | None) -> tuple[tuple[int, int], ...]:
    if not shapes:
        return ()
    return tuple(
        (position, shapes[a.name])
        for position, a in enumerate(op._schema.arguments)
        if a.name in shapes
    )


# -- sampling at given positions -------------------------------------------------------------


def grid_sample_choices(call: Call) -> Iterator[Choice]:
    """Planes (n, c, *in) and positions (n, *out, k) -> (n, c, *out)."""
    yield call.replicated()
    local = LocalCall(UnlessEmpty(call.op), per_rank=True)
    for sizes in call.splits([(0, 0), (1, 0)]):
        yield Choice((Shard(0, sizes),) * 2, (Shard(0, sizes),), local)
    for sizes in call.splits([(0, 1)]):
        yield Choice((Shard(1, sizes), REPLICATE), (Shard(1, sizes),), local)
    for dim in range(1, call.inputs[1].ndim - 1):
        for sizes in call.splits([(1, dim)]):
            yield Choice((REPLICATE, Shard(dim, sizes)), (Shard(dim + 1, sizes),), local)
    yield from linear_choices(call, FIRST)


def grid_sample_grad_choices(call: Call) -> Iterator[Choice]:
    """The gradient, planes and positions -> the gradients of planes and positions."""
    asked = call.argument("output_mask")

    def kept(planes: Placement, places: Placement) -> tuple[Placement, ...]:
        # The gradient of the positions is always returned.
        return (planes, places) if asked[0] else (places,)

    yield call.replicated()
    local = LocalCall(UnlessEmpty(call.op), per_rank=True)
    for sizes in call.splits([(0, 0), (1, 0), (2, 0)]):
        shard = Shard(0, sizes)
        yield Choice((shard,) * 3, kept(shard, shard), local)
    for sizes in call.splits([(0, 1), (1, 1)]):
        shard = Shard(1, sizes)
        yield Choice((shard, shard, REPLICATE), kept(shard, SUM), local)
    for dim in range(1, call.inputs[2].ndim - 1):
        for sizes in call.splits([(0, dim + 1), (2, dim)]):
            inputs = (Shard(dim + 1, sizes), REPLICATE, Shard(dim, sizes))
            yield Choice(inputs, kept(SUM, Shard(dim, sizes)), local)
    yield from linear_choices(call, FIRST)


# -- fractional pooling ----------------------------------------------------------------------


def fractional_pool_choices(call: Call) -> Iterator[Choice]:
    """Planes and the random numbers of each plane: batch and channels may be sharded."""
    yield call.replicated()
    local = LocalCall(UnlessEmpty(call.op), per_rank=True)
    dims = len(call.argument("kernel_size"))
    batched = call.inputs[0].ndim == dims + 2
    for dim in (0, 1) if batched else (0,):
        for sizes in call.splits([(0, dim)]):
            # The random numbers always have a batch dim.
            samples = Shard(dim if batched else dim + 1, sizes)
            yield Choice((Shard(dim, sizes), samples), (Shard(dim, sizes),) * 2, local)


# -- im2col and col2im -----------------------------------------------------------------------


def columns_choices(call: Call) -> Iterator[Choice]:
    """`im2col`: each channel becomes consecutive rows of the result; `col2im` is the inverse."""
    yield call.replicated()
    batched = call.outputs[0].ndim == (3 if call.op is aten.im2col.default else 4)
    local = LocalCall(UnlessEmpty(call.op), per_rank=True)
    if batched:
        for sizes in call.splits([(0, 0)]):
            yield Choice((Shard(0, sizes),), (Shard(0, sizes),), local)
    at = 1 if batched else 0
    before, after = call.inputs[0].shape[at], call.outputs[0].shape[at]
    larger, smaller = max(before, after), min(before, after)
    if type(smaller) is int and smaller % call.axis_size == 0 and larger % smaller == 0:
        shard = Choice((Shard(at),), (Shard(at),), local, even=((0, at),))
        yield shard
    yield from linear_choices(call, FIRST)


# -- moving channels -------------------------------------------------------------------------


def shuffle_choices(call: Call) -> Iterator[Choice]:
    """Dims in front of channels and planes do not change."""
    yield call.replicated()
    local = LocalCall(UnlessEmpty(call.op), per_rank=True)
    for dim in range(call.inputs[0].ndim - 3):
        for sizes in call.splits([(0, dim)]):
            yield Choice((Shard(dim, sizes),), (Shard(dim, sizes),), local)
    channels = call.inputs[0].ndim - 3
    few = min(call.inputs[0].shape[channels], call.outputs[0].shape[channels])
    if type(few) is int and few % call.axis_size == 0:
        # A run of channels becomes one plane: shards are whole runs, on both sides.
        yield Choice((Shard(channels),), (Shard(channels),), local, even=((0, channels),))
    yield from linear_choices(call, FIRST)


def channel_shuffle_choices(call: Call) -> Iterator[Choice]:
    yield call.replicated()
    for dim in range(call.inputs[0].ndim):
        if dim != 1:
            for sizes in call.splits([(0, dim)]):
                yield Choice((Shard(dim, sizes),), (Shard(dim, sizes),))
    yield from linear_choices(call, FIRST)


def _resizing(dims: int, *names: str) -> list[tuple[tuple[Any, ...], Rule]]:
    """Resizing to a given size, and its gradient."""
    backward = [f"{name}_backward" for name in names]
    return [
        planes(*_named(*names), dims=dims, linear=FIRST),
        planes(*_named(*backward), dims=dims, linear=FIRST, shapes={"input_size": 0}),
    ]


def _own_grids(theta: torch.Tensor, size: Sequence[int], align_corners: bool) -> torch.Tensor:
    """The grids of this rank's affine maps, which may be none."""
    if not theta.shape[0]:
        return theta.new_empty((0, *size[2:], len(size) - 2))
    return aten.affine_grid_generator.default(theta, [theta.shape[0], *size[1:]], align_corners)


def _affine_grid_choices(call: Call) -> Iterator[Choice]:
    """Each affine map has a grid of its own; their number is also in `size`."""
    yield call.replicated()
    yield from linear_choices(call, FIRST)
    local = LocalCall(_own_grids)
    for sizes in call.splits([(0, 0)]):
        yield Choice((Shard(0, sizes),), (Shard(0, sizes),), local)


def _named(*names: str) -> list[Any]:
    return [getattr(aten, name).default for name in names]


def _padding(dims: int, which: str = "") -> list[Any]:
    return _named(f"reflection_pad{dims}d{which}", f"replication_pad{dims}d{which}")


RULES: Table = table(
    (
        (aten.affine_grid_generator.default,),
        Rule(_affine_grid_choices, "n [a] [b] -> n [h] [w] [2]"),
    ),
    *(
        planes(
            *_named(f"avg_pool{n}d", f"avg_pool{n}d_backward"),
            *_named(f"_adaptive_avg_pool{n}d", f"_adaptive_avg_pool{n}d_backward"),
            *_named(f"max_pool{n}d_with_indices_backward", f"adaptive_max_pool{n}d_backward"),
            *_named(f"fractional_max_pool{n}d_backward", f"max_unpool{n}d"),
            dims=n,
            linear=FIRST,
        )
        for n in (2, 3)
    ),
    *(
        planes(*_named(f"max_pool{n}d_with_indices", f"adaptive_max_pool{n}d"), dims=n)
        for n in (2, 3)
    ),
    (
        (aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default),
        Rule(fractional_pool_choices, "n c [p] [q], n c [2] -> n c [r] [s]"),
    ),
    *_resizing(1, "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_linear1d"),
    *_resizing(
        2,
        "upsample_nearest2d",
        "_upsample_nearest_exact2d",
        "upsample_bilinear2d",
        "upsample_bicubic2d",
        "_upsample_bilinear2d_aa",
        "_upsample_bicubic2d_aa",
    ),
    *_resizing(3, "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_trilinear3d"),
    (
        (aten.grid_sampler_2d.default, aten.grid_sampler_3d.default),
        Rule(grid_sample_choices, "n c [p] [q], n a b [2] -> n c a b"),
    ),
    (
        (aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default),
        Rule(grid_sample_grad_choices, "n c a b, n c [p] [q], n a b [2] -> n c [p] [q], n a b [2]"),
    ),
    (
        (aten.im2col.default, aten.col2im.default),
        Rule(columns_choices, "n c [p] [q] -> n (c [k]) [l]"),
    ),
    (
        (aten.pixel_shuffle.default, aten.pixel_unshuffle.default),
        Rule(shuffle_choices, "... (c [k]) [p] [q] -> ... c [p] [q]"),
    ),
    (
        (aten.native_channel_shuffle.default,),
        Rule(channel_shuffle_choices, "n [c] ... -> n [c] ..."),
    ),
    # Padding that repeats or mirrors values, and its gradient.
    *(
        batched(*_padding(n), inputs=(n,), outputs=(n,), linear=((0,),), fails_on_empty=True)
        for n in (1, 2, 3)
    ),
    *(
        batched(
            *_padding(n, "_backward"),
            inputs=(n, n),
            outputs=(n,),
            linear=((0,),),
            fails_on_empty=True,
        )
        for n in (1, 2, 3)
    ),
)

#: The inputs whose values the op may refuse; see `dispatch.local_call`.
REFUSED: dict[Any, slice] = dict.fromkeys(
    (aten.max_unpool2d.default, aten.max_unpool3d.default), slice(1, 2)
)
