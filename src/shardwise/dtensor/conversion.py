"""Where local tensors become global ones: the layout they get, and whether they fit it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from shardwise.comm.agreement import gather
from shardwise.comm.watch import because, watch
from shardwise.core.layout import (
    Layout,
    Shape,
    contiguous_stride,
    dense_stride,
    make_layout,
    normalize,
)
from shardwise.core.mesh import Grid
from shardwise.core.placements import Placement, Shard
from shardwise.core.sizes import Size
from shardwise.core.untraced import UntracedFunction
from shardwise.core.world import world_caches
from shardwise.dispatch.strict import forbid_move
from shardwise.dispatch.wrapped import Wrapped
from shardwise.dtensor import autograd
from shardwise.dtensor.snapshots import current
from shardwise.errors import ArgumentError, LayoutError, UnsupportedError
from shardwise.redistribute.search import find_steps
from shardwise.simulation.parts import is_per_rank, one_part
from shardwise.simulation.ranks import one_for_all, rank_values


def local_layout(
    local: torch.Tensor,
    grid: Grid,
    placements: Sequence[Placement] | None,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
) -> Layout:
    """The layout of the global tensor whose parts look like `local`, which fit into it."""
    if shape is None and stride is None and placements is not None and not is_per_rank(local):
        # The common case, many times over: one dictionary lookup.
        key = (
            grid,
            (placements,) if isinstance(placements, Placement) else tuple(placements),
            local.shape,
            local.stride(),
            local.dtype,
        )
        try:
            found = _known.get(key)
        except TypeError:  # a symbolic size has no hash
            return _fitting_layout(local, grid, placements, shape, stride)
        if found is None:
            found = _fitting_layout(local, grid, placements, shape, stride)
            if len(_known) >= 4096:
                _known.clear()
            _known[key] = found
        return found
    return _fitting_layout(local, grid, placements, shape, stride)


_known: dict[Any, Layout] = {}
world_caches.append(_known.clear)


def _fitting_layout(
    local: torch.Tensor,
    grid: Grid,
    placements: Sequence[Placement] | None,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
) -> Layout:
    layout = _local_layout(local, grid, placements, shape, stride)
    if shape is not None or gives_sizes(placements):
        check_fits(local, layout)
    return layout


def _local_layout(
    local: torch.Tensor,
    grid: Grid,
    placements: Sequence[Placement] | None,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
) -> Layout:
    if shape is not None:
        whole: Shape = tuple(shape)
        normal = normalize(placements, whole, grid)
    else:
        # An uneven LocalTensor has no one shape: asking for it says so, and names the ranks. With
        # explicit sizes the first part will do, and all are checked against the sizes.
        first = one_part(local) if gives_sizes(placements) else local
        local_shape = tuple(first.shape)
        # Checks the number of placements and the dims; sizes are checked with the global shape.
        given = normalize(_without_sizes(placements), local_shape, grid)
        explicit = _explicit_sizes(placements, given)
        whole = _grown(local_shape, given, explicit, grid)
        normal = normalize(_with_sizes(given, explicit), whole, grid)
    dense = tuple(stride) if stride is not None else stride_like(local, whole)
    return make_layout(grid, normal, whole, dense, local.dtype)


def listed(placements: Any) -> list[Any]:
    if placements is None:
        return []
    return [placements] if isinstance(placements, Placement) else list(placements)


def gives_sizes(placements: Any) -> bool:
    """Whether a placement says how long each rank's piece is."""
    for placement in (placements,) if isinstance(placements, Placement) else placements or ():
        if isinstance(placement, Shard) and placement.sizes:
            return True
    return False


def _without_sizes(placements: Any) -> Any:
    if placements is None:
        return None
    return [Shard(p.dim) if isinstance(p, Shard) else p for p in listed(placements)]


def _explicit_sizes(placements: Any, given: Sequence[Placement]) -> list[tuple[int, ...] | None]:
    named = listed(placements) or list(given)
    return [p.sizes if isinstance(p, Shard) else None for p in named]


def _with_sizes(
    given: Sequence[Placement], explicit: Sequence[tuple[int, ...] | None]
) -> list[Placement]:
    return [
        Shard(p.dim, sizes) if isinstance(p, Shard) else p
        for p, sizes in zip(given, explicit, strict=True)
    ]


def _grown(
    local_shape: Shape,
    placements: Sequence[Placement],
    explicit: Sequence[tuple[int, ...] | None],
    grid: Grid,
) -> Shape:
    """The global shape when every rank holds a part of the same shape."""
    whole = list(local_shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            sizes = explicit[axis]
            grown = whole[placement.dim] * grid.shape[axis]
            whole[placement.dim] = sum(sizes) if sizes is not None else grown
    return tuple(whole)


def stride_like(local: torch.Tensor, shape: Sequence[Size]) -> Shape:
    """Dense strides for `shape` with the dims in the order in which `local` has them in memory."""
    if local.is_contiguous() or local.dim() < 2:
        return contiguous_stride(shape)
    local_stride = local.stride()
    outermost_first = sorted(range(local.dim()), key=lambda d: -local_stride[d])
    if local_stride != dense_stride(local.shape, outermost_first):
        return contiguous_stride(shape)  # a view with gaps or repeats has no order worth keeping
    return dense_stride(shape, outermost_first)


def check_plain_part(value: Any, asked: str) -> None:
    """Raise where `value` cannot be what a rank holds: no tensor, a DTensor, not strided."""
    if type(value) is torch.Tensor and value.layout is torch.strided:
        return
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(f"{asked} takes a tensor, found a {type(value).__name__}.")
    if isinstance(value, Wrapped):
        raise ArgumentError(
            f"{asked} takes a plain tensor, found {value._layout!r}: it is distributed already. "
            "Use it as it is, or redistribute() it; its part on this rank is to_local()."
        )
    if value.layout is not torch.strided:
        raise ArgumentError(
            f"{asked} takes a strided tensor, found one of layout {value.layout}: a shard of it "
            "has no one place in memory. Pass x.to_dense()."
        )


def check_fits(local: torch.Tensor, layout: Layout) -> None:
    """Every rank present holds a part of the shape that the layout gives it."""
    if layout.symbolic or any(type(s) is not int for s in torch.Tensor.size(local)):
        return
    for coordinate, part in rank_values(layout.grid, local):
        expected = layout.local_shape(coordinate)
        if tuple(part.shape) != expected:
            raise LayoutError(
                f"The local tensor at mesh coordinate {coordinate} has shape {tuple(part.shape)}, "
                f"but {layout!r} gives it {expected}. Give from_local(..., shape=...) the global "
                "shape, or other placements."
            )


def check_all_ranks(
    local: torch.Tensor,
    grid: Grid,
    placements: Sequence[Placement] | None,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
) -> None:
    """Compare shapes and dtypes over all ranks of the mesh, so that all of them raise.

    Nothing that one rank alone could see may be raised before the ranks have met.
    """
    rows = all_metas(local, grid, "from_local(run_check=True)")
    first = torch.empty(rows[0][1], dtype=rows[0][0], device="meta")
    found = dict(zip(grid.coordinates.values(), rows, strict=True))
    if shape is None and any(row != rows[0] for row in rows):
        unlike = {c: row for c, row in found.items() if row != rows[0]}
        raise LayoutError(
            f"The ranks hold other parts than rank {grid.ranks[0]}'s {rows[0]}: at mesh "
            f"coordinates {unlike}. Give from_local(..., shape=...) the global shape, or parts "
            "that are alike."
        )
    layout = _local_layout(first, grid, placements, shape, stride)
    for coordinate, (dtype, sizes) in found.items():
        expected = layout.local_shape(coordinate)
        if sizes != expected or dtype != layout.dtype:
            raise LayoutError(
                f"The ranks disagree: at mesh coordinate {coordinate} the local tensor is {dtype} "
                f"of shape {sizes}, but {layout!r} gives it {layout.dtype} of shape {expected}. "
                "Give from_local(..., shape=...) the global shape."
            )


def all_metas(
    local: torch.Tensor, grid: Grid, cause: str
) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """The dtype and shape of the local tensor on every rank of the mesh."""

    def describe(_: Any, part: torch.Tensor) -> list[int]:
        numbers = [_DTYPES.index(part.dtype), part.dim(), *part.shape]
        return numbers + [0] * (16 - len(numbers))

    rows = gather(grid, cause, describe, local).tolist()
    return [(_DTYPES[dtype], tuple(sizes[:ndim])) for dtype, ndim, *sizes in rows]


_DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)


# Redistribution in another dtype: what travels is cast before it leaves, on the way back too.


class CastParts(UntracedFunction):
    """Each rank's part in another dtype: also the terms of a Partial, before they are added."""

    @staticmethod
    def forward(ctx: Any, x: Any, dtype: torch.dtype) -> Any:
        ctx.dtype = x.dtype
        layout = autograd.with_dtype(autograd.own_entries(x._layout), dtype)
        return type(x)._wrap(current(x).to(dtype), layout)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _cast(grad, ctx.dtype), None


class CastAndMove(UntracedFunction):
    """One node, since autograd casts what passes between two to the dtype of the tensor there."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, target: Layout, dtype: torch.dtype, back: torch.dtype, async_op: bool
    ) -> Any:
        ctx.layout, ctx.back, ctx.async_op = x._layout, back, async_op
        cast = _cast(x, dtype)
        moved = autograd.redistribute(cast, autograd.relaid(target, cast._layout), async_op)
        return moved.clone() if moved is x else moved

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        cast = _cast(grad, ctx.back)
        target = autograd.relaid(autograd.gradient_layout(ctx.layout), cast._layout)
        moved = autograd.redistribute(cast, target, ctx.async_op)
        return _cast(moved, ctx.layout.dtype), None, None, None, None


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return x if x.dtype == dtype else CastParts.apply(x, dtype)


def redistribute_as(
    x: Any,
    target: Layout,
    forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
    async_op: bool,
) -> Any:
    """`x` in the placements of `target` and in `forward_dtype`; its gradient in `x`'s own dtype."""
    for name, dtype in (("forward_dtype", forward_dtype), ("backward_dtype", backward_dtype)):
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ArgumentError(f"{name} is a torch.dtype or None, found {dtype!r}.")
    own = x.dtype
    return CastAndMove.apply(x, target, forward_dtype or own, backward_dtype or own, async_op)


# Reading a DTensor into Python or numpy: all ranks get the whole, as with `item()` a number.


def whole_values(x: Any, asked: str) -> torch.Tensor:
    """The whole tensor as a plain one, outside autograd; in strict mode only where it lies so."""
    target = autograd.whole_layout(x._layout)
    if watch.strict and x._layout is not target:
        forbid_move(f"DTensor.{asked}", 0, find_steps(x._layout, target), target)
    with because(f"DTensor.{asked}", implicit=True):
        return one_for_all(autograd.redistribute(x.detach(), target)._local)


def as_numpy(x: Any, force: bool) -> Any:
    if x.requires_grad and not force:
        return torch.empty(0, requires_grad=True).numpy()  # torch says what is wrong
    # A copy also where the tensor is replicated: ranks that wrote to their own would differ.
    return whole_values(x, "numpy").resolve_conj().resolve_neg().clone().numpy(force=force)


def refuse_memory(asked: str) -> NoReturn:
    """What would read or write memory at an address: a DTensor has none of its own."""
    raise UnsupportedError(
        f"DTensor.{asked} has no meaning: the memory is that of the local tensors. Call it on "
        "x.to_local() or on x.full_tensor()."
    )
